"""Where the time of a case goes: drawing, oracle, memory, launches, comparison, addresses.

    python benchmarks/bench_engine.py [--device cuda] [--family NAME] [--cases N]

The same strategy is drawn and thrown away in the same run, so that the cost of drawing can be
told from the rest; machines are shared and noisy, so compare within one run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pagefault.case import Case
from pagefault.device import device_name, prepare, resolve_device, versions
from pagefault.family import Family, families
from pagefault.journal import Journal
from pagefault.stream import draw_cases

WARM_UP_CASES = 300
ROUNDS = 5
MOST_COST_OF_ADDRESSES = 1.3

MEMORIES = {"cpu": ("arena",), "cuda": ("arena", "mixed", "guard", "net")}


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
    journalling: list[float] = []
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
            journalling.append(parts["journal"] / total)
            row = [f"{parts[column]:.0f}" for column in columns]
            table.add_row(name, memory, *row, f"{everything_else:.0f}", f"{1e6 / total:.0f}")
    console.print(table)
    if resolved == "cpu":
        print(_cost_of_addresses(family or list(families()), num_cases))
    share = statistics.mean(journalling)
    print(
        f"journalling: {100 * share:.1f} % of a case's time, {100 * max(journalling):.1f} % at most"
    )
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
    strategy = family.strategy(_domain(family, checker, device))

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
        clock["journal"] = _seconds_of_journalling(family, drawn)
        for part, seconds in clock.items():
            rounds[part].append(seconds)
    parts = {part: statistics.median(seconds) / num_cases * 1e6 for part, seconds in rounds.items()}
    measured = ("oracle", "place", "calls", "read back", "compare")
    parts["other"] = parts["check"] - sum(parts[part] for part in measured)
    return parts


def _seconds_of_journalling(family: Family, cases: list[Case]) -> float:
    """Return the time that it takes to note cases, which a run does before each launch."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal")
        started = time.perf_counter()
        for case in cases:
            journal.note(family.name, case)
            journal.clear()
        return time.perf_counter() - started


def _cost_of_addresses(names: list[str], num_cases: int) -> str:
    """Return a line: how much longer the interpreter takes where every address is checked.

    The same cases run with and without, by turns, so that both see the same machine.
    """
    import torch

    from pagefault.checker import Checker
    from pagefault.target import load_target

    torch.set_num_threads(1)
    drawn: list[tuple[Family, Case]] = []
    checker = Checker(load_target("ours"), "cpu")
    for name in names:
        family = families()[name]
        draw_cases(
            family.strategy(_domain(family, checker, "cpu")), num_cases, 1, _into(drawn, family)
        )
    ratios = []
    for _ in range(ROUNDS):
        seconds = {True: 0.0, False: 0.0}
        for i, (family, case) in enumerate(drawn):
            for with_addresses in (True, False) if i % 2 else (False, True):
                seconds[with_addresses] += _seconds_of_calls(checker, family, case, with_addresses)
        ratios.append(seconds[True] / seconds[False])
    ratio = statistics.median(ratios)
    verdict = "within" if ratio <= MOST_COST_OF_ADDRESSES else "OVER"
    return (
        f"address oracle: {ratio:.2f} times the interpreter's time without it "
        f"({min(ratios):.2f} … {max(ratios):.2f} in {ROUNDS} rounds of {len(drawn)} cases), "
        f"{verdict} the limit of {MOST_COST_OF_ADDRESSES}"
    )


def _into(drawn: list[tuple[Family, Case]], family: Family) -> Callable[[Case], None]:
    return lambda case: drawn.append((family, case))


def _seconds_of_calls(checker: Any, family: Family, case: Case, with_addresses: bool) -> float:
    """Return the CPU time of a case's calls, each with what the address oracle adds to it."""
    watch, call = checker._watch, checker._watched_call
    clock: dict[str, float] = defaultdict(float)
    checker._watch = watch if with_addresses else None
    checker._watched_call = _timed(call, clock, "calls", time.thread_time)
    try:
        checker.check(family, case)
    finally:
        checker._watch, checker._watched_call = watch, call
    return clock["calls"]


def _domain(family: Family, checker: Any, device: str) -> Any:
    """Return a domain of few compiled variants on a GPU: this measures runs, not compilation.

    Wide tables, which a run on a GPU has in few of its rounds, are left out there.
    """
    import dataclasses

    domain = checker.domain(family)
    if device == "cpu":
        return domain
    return dataclasses.replace(
        domain,
        page_sizes=(16, 4, 7, 64),
        dtype_choices=(0, 0, 1, 6),
    ).excluding("wide table")


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


def _timed(
    function: Callable[..., Any],
    clock: dict[str, float],
    part: str,
    now: Callable[[], float] = time.perf_counter,
) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = now()
        try:
            return function(*args, **kwargs)
        finally:
            clock[part] += now() - started

    return timed


if __name__ == "__main__":
    typer.run(main)
