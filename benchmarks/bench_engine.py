"""Where the time of a case goes: drawing, oracle, memory, launches, comparison.

    python benchmarks/bench_engine.py [--device cuda] [--family NAME] [--cases N]

The same strategy is drawn and thrown away in the same run, so that the cost of drawing can be
told from the rest; machines are shared and noisy, so compare within one run.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pagefault.case import Case
from pagefault.device import device_name, prepare, resolve_device, versions
from pagefault.family import Family, families
from pagefault.stream import draw_cases

WARM_UP_CASES = 300
ROUNDS = 5

MEMORIES = {"cpu": ("arena",), "cuda": ("arena", "mixed", "guard")}


def main(
    device: str = "auto",
    family: Annotated[list[str] | None, typer.Option()] = None,
    cases: int = 0,
) -> None:
    """Print the parts of a case's time, and cases a second, for each family."""
    resolved = resolve_device(device)
    prepare(resolved)
    from pagefault.checker import Checker
    from pagefault.target import load_target

    console = Console(width=150)
    console.print(" · ".join(f"{name} {version}" for name, version in versions().items()))
    console.print(f"device: {device_name(resolved)}; medians of {ROUNDS} rounds, µs a case")
    num_cases = cases or (400 if resolved == "cuda" else 40)
    table = Table(box=None, pad_edge=False)
    columns = ["draw", "oracle", "place", "calls", "read back", "compare", "edges", "other"]
    for heading in ["family", "memory", *columns, "all but drawing", "cases a second"]:
        is_name = heading in ("family", "memory")
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    totals: dict[str, float] = defaultdict(float)
    for name in family or list(families()):
        for memory in MEMORIES[resolved]:
            checker = Checker(load_target("ours"), resolved, memory)
            parts = _measure(families()[name], checker, num_cases, resolved)
            everything_else = parts["check"] + parts["edges"]
            total = parts["draw"] + everything_else
            totals[memory] += total
            row = [f"{parts[column]:.0f}" for column in columns]
            table.add_row(name, memory, *row, f"{everything_else:.0f}", f"{1e6 / total:.0f}")
    console.print(table)
    first, *others = MEMORIES[resolved]
    for memory in others:
        console.print(f"rate in {memory} memory: {totals[first] / totals[memory]:.2f} of {first}")


def _measure(family: Family, checker: Any, num_cases: int, device: str) -> dict[str, float]:
    """Return the median µs a case of each part."""
    clock: dict[str, float] = defaultdict(float)
    timed_family = _timed_family(family, clock)
    for memory in checker._memories:
        _time_method(memory, "place", clock, "place")
        _time_method(memory, "read_back", clock, "read back")
    _time_method(checker, "_call", clock, "calls")
    _time_class_method(clock)
    strategy = family.strategy(_domain(checker, device))

    def check(case: Case) -> None:
        started = time.perf_counter()
        family.edges(case)
        clock["edges"] += time.perf_counter() - started
        started = time.perf_counter()
        verdict = checker.check(timed_family, case)
        clock["check"] += time.perf_counter() - started
        assert verdict.passed, verdict.text()

    if device == "cuda":
        draw_cases(strategy, WARM_UP_CASES, 0, check)
    draw_cases(strategy, num_cases, 1, check)
    rounds: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        drawn: list[Case] = []
        started = time.perf_counter()
        draw_cases(strategy, num_cases, 1, drawn.append)
        rounds["draw"].append(time.perf_counter() - started)
        clock.clear()
        for case in drawn:
            check(case)
        for part, seconds in clock.items():
            rounds[part].append(seconds)
    parts = {part: statistics.median(seconds) / num_cases * 1e6 for part, seconds in rounds.items()}
    measured = ("oracle", "place", "calls", "read back", "compare")
    parts["other"] = parts["check"] - sum(parts[part] for part in measured)
    return parts


def _domain(checker: Any, device: str) -> Any:
    """Return a domain of few compiled variants on a GPU: this measures runs, not compilation."""
    import dataclasses

    domain = checker.target.domain
    if device == "cpu":
        return domain
    return dataclasses.replace(domain, page_sizes=(16, 4, 7, 64), dtype_choices=(0, 0, 1, 6))


def _timed_family(family: Family, clock: dict[str, float]) -> Family:
    import dataclasses

    return dataclasses.replace(family, expect=_timed(family.expect, clock, "oracle"))


def _time_method(owner: Any, name: str, clock: dict[str, float], part: str) -> None:
    setattr(owner, name, _timed(getattr(owner, name), clock, part))


_verdict: Any = None


def _time_class_method(clock: dict[str, float]) -> None:
    global _verdict
    from pagefault.comparison import Comparison

    _verdict = _verdict or Comparison.verdict
    setattr(Comparison, "verdict", _timed(_verdict, clock, "compare"))  # noqa: B010


def _timed(function: Callable[..., Any], clock: dict[str, float], part: str) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            clock[part] += time.perf_counter() - started

    return timed


if __name__ == "__main__":
    typer.run(main)
