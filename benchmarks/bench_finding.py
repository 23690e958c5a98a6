"""How soon faults are found: the strategies against two other ways to draw cases.

    python benchmarks/bench_finding.py [--only TEXT] [--seeds N] [--cases N] [--markdown FILE]

Each planted fault of tests/faulty/ is looked for in cases drawn in three ways, in the interpreter:

- strategies: as `pagefault fuzz` draws them, and with all of its checks.
- uniform: the same fields, each drawn evenly from the range that it has in the strategies' cases,
  with the same checks.
- plain: what a test written by hand would draw, pages of 16 or 64 tokens and up to 4 requests of
  up to 100 tokens in a table with room for them, and values alone are compared.

A fault that a way has not found counts with all the cases that it had. Case is the smallest one
that shows the fault, shrunk from the first that the strategies found.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console

from pagefault.case import Case, CaseError, PageTable, Placement
from pagefault.device import prepare, versions
from pagefault.family import Domain, Family, family_named
from pagefault.stream import derived_seed

FAULTY = Path(__file__).parents[1] / "tests" / "faulty"
WAYS = ("strategies", "uniform", "plain")
# In the interpreter a program takes a millisecond, and the planted kernels have one a request.
DOMAIN = Domain(without=frozenset(["more than 64 requests", "wide table", "long rows"]))
NUM_SAMPLES = 2000
MAX_REQUESTS, MAX_TOKENS = 64, 800
LENGTHS = frozenset(["input_lengths", "chunk_seq_lens", "prefix_lens"])
VALUES = frozenset(["value", "stale", "raised", "process died"])
SHRINK_SECONDS = 30.0

Draw = Callable[[Random], Case]


# Uniform


@dataclass
class Ranges:
    """The least and the largest value that each number of a family's cases has.

    Attributes:
        case_type: The family's.
        of: By field; of tensors by name and what of their placement it is.
    """

    case_type: type[Case]
    of: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @classmethod
    def seen(cls, family: Family) -> Ranges:
        """Return those of many cases of the strategy."""
        from pagefault.stream import draw_cases

        ranges = cls(family.case_type)

        def see(case: Case) -> None:
            # A call that is to be refused may have more.
            if case.num_requests <= MAX_REQUESTS:
                ranges._widen(case)

        draw_cases(family.strategy(DOMAIN), NUM_SAMPLES, 1, see)
        return ranges

    def _see(self, name: str, *values: int) -> None:
        low, high = self.of.get(name, (values[0], values[0]))
        self.of[name] = min(low, *values), max(high, *values)

    def _widen(self, case: Case) -> None:
        self._see("requests", case.num_requests)
        for field in dataclasses.fields(case):
            value = getattr(case, field.name)
            if isinstance(value, int):
                self._see(field.name, value)
            elif isinstance(value, PageTable):
                self._see("rows", value.num_rows)
                self._see("pages", value.max_pages)
                self._see("edits", len(value.edits))
                for _, _, page_id in value.edits:
                    self._see("page id", page_id)
            elif field.name != "layout":
                for entry in value:
                    if isinstance(entry, tuple):
                        self._see(f"{field.name}: entries", len(entry))
                    for number in entry if isinstance(entry, tuple) else (entry,):
                        self._see(field.name, number)
        for name in case.PLAIN:
            at = case.placement(name)
            self._see(f"{name}: is int64", at.dtype == "int64")
            for what in ("offset", "pitch", "spare"):
                self._see(f"{name}: {what}", getattr(at, what))

    def draw(self, random: Random) -> Case:
        """Return a legal case, each number drawn evenly from its range."""
        while True:
            try:
                return self._draw(random)
            except CaseError:
                continue

    def _number(self, random: Random, name: str) -> int:
        return random.randint(*self.of.get(name, (0, 0)))

    def _draw(self, random: Random) -> Case:
        batch_size, num_rows = self._number(random, "requests"), self._number(random, "rows")
        fields: dict[str, Any] = {}
        hints = get_type_hints(self.case_type)
        for field in dataclasses.fields(self.case_type):
            name = field.name
            if name == "layout":
                fields[name] = self._layout(random)
            elif hints[name] is int:
                fields[name] = self._number(random, name)
            elif hints[name] is PageTable:
                fields[name] = self._table(random, num_rows)
            else:
                per_request = name in self.case_type.per_request_fields()
                entries = batch_size if per_request else num_rows
                is_nested = f"{name}: entries" in self.of
                fields[name] = (
                    self._lists(random, name, entries)
                    if is_nested
                    else tuple(self._entry(random, name, num_rows) for _ in range(entries))
                )
        if "batch_size" in fields:
            fields["batch_size"] = batch_size
        for name in LENGTHS & fields.keys():
            if name != "prefix_lens" or "req_to_page" in fields:
                fields[name] = cut_to_budget(fields[name])
        if batch_size and "uniform_input_length" in fields:
            fields["uniform_input_length"] = min(
                fields["uniform_input_length"], MAX_TOKENS // batch_size
            )
        return self.case_type(**fields)

    def _lists(self, random: Random, name: str, num_lists: int) -> tuple[tuple[int, ...], ...]:
        sizes = [self._number(random, f"{name}: entries") for _ in range(num_lists)]
        return tuple(
            tuple(self._number(random, name) for _ in range(size)) for size in cut_to_budget(sizes)
        )

    def _entry(self, random: Random, name: str, num_rows: int) -> int:
        if name == "req_pool_indices":
            return random.randrange(num_rows) if num_rows else 0
        return self._number(random, name)

    def _table(self, random: Random, num_rows: int) -> PageTable:
        max_pages = self._number(random, "pages")
        edits = {}
        if num_rows and max_pages:
            for _ in range(self._number(random, "edits")):
                cell = random.randrange(num_rows), random.randrange(max_pages)
                edits[cell] = self._number(random, "page id")
        return PageTable(
            num_rows,
            max_pages,
            tuple((row, column, page_id) for (row, column), page_id in edits.items()),
        )

    def _layout(self, random: Random) -> tuple[tuple[str, Placement], ...]:
        return tuple((name, self._placement(random, name)) for name in self.case_type.PLAIN)

    def _placement(self, random: Random, name: str) -> Placement:
        is_int64 = self._number(random, f"{name}: is int64")
        offset, pitch, spare = (
            self._number(random, f"{name}: {what}") for what in ("offset", "pitch", "spare")
        )
        return Placement("int64" if is_int64 else "int32", offset, pitch, spare)


def cut_to_budget(wanted: Sequence[int]) -> tuple[int, ...]:
    """Return lengths of which those are 0 for which no tokens are left."""
    left = MAX_TOKENS
    kept = []
    for length in wanted:
        kept.append(min(length, left))
        left -= kept[-1]
    return tuple(kept)


# Plain


def plain_case(family: Family, random: Random) -> Case:
    """Return a case as a test written by hand would have it."""
    page_size = random.choice([16, 64])
    batch_size = random.randint(1, 4)
    lengths = [random.randint(1, 100) for _ in range(batch_size)]
    starts = [random.randint(0, 100) for _ in range(batch_size)]
    rows = random.sample(range(1, batch_size + 1), batch_size)
    table = PageTable(batch_size + 1, -(-200 // page_size))
    page_ids = tuple(
        tuple(random.randint(1, 1000) for _ in range(-(-length // page_size))) for length in lengths
    )
    values: dict[str, Any] = {
        "req_pool_indices": tuple(rows),
        "page_size": page_size,
        "req_to_pages": table,
        "req_to_page": table,
        "input_lengths": tuple(lengths),
        "chunk_seq_lens": tuple(lengths),
        "prefix_lens": tuple(lengths),
        "uniform_input_length": lengths[0],
        "cache_start": tuple(starts),
        "chunk_starts": tuple(starts),
        "valid_cache_lengths": (0, *(starts[rows.index(row)] for row in sorted(rows))),
        "gaps": (0,) * batch_size,
        "tail": 0,
        "num_chunks": -(-max(lengths) // page_size),
        "batch_size": batch_size,
        "chunk_len": page_size,
        "chunk_capacity": page_size * batch_size,
        "begins": tuple(start // page_size for start in starts),
        "new_occupied_pages": page_ids,
        "sizes": tuple(map(len, page_ids)),
    }
    names = [field.name for field in dataclasses.fields(family.case_type) if field.name != "layout"]
    return family.case_type(**{name: values[name] for name in names})


# The search


@dataclass(frozen=True)
class Found:
    """What became of the search for a fault, one way, from one seed.

    Attributes:
        num_cases: Until it was found, or all.
        seconds: Checking included.
        is_found: Whether it was.
        case: The first case that shows it.
    """

    num_cases: int
    seconds: float
    is_found: bool
    case: Case | None = None


def drawer(family: Family, way: str) -> Draw:
    """Return what draws cases of a family in one way."""
    from pagefault.strategies.edges import sampler_of

    if way == "plain":
        return lambda random: plain_case(family, random)
    if way == "uniform":
        return Ranges.seen(family).draw
    sample = sampler_of(family.strategy(DOMAIN))
    assert sample is not None

    def draw(random: Random) -> Case:
        while True:
            case = sample(random)
            if case is not None:
                return case

    return draw


def search(checker: Any, family: Family, draw: Draw, way: str, seed: int, most: int) -> Found:
    """Look for a fault."""
    random = Random(seed)
    started = time.perf_counter()
    for number in range(1, most + 1):
        case = draw(random)
        verdict = checker.check(family, case)
        kinds = {finding.kind for finding in verdict.findings}
        if kinds & VALUES if way == "plain" else kinds:
            return Found(number, time.perf_counter() - started, True, case)
    return Found(most, time.perf_counter() - started, False)


def look_for(path: Path, num_seeds: int, most: int) -> tuple[Path, dict[str, list[Found]], str]:
    """Return what came of all ways and seeds, and the smallest case."""
    from pagefault.checker import Checker
    from pagefault.minimal import Budget, minimise
    from pagefault.target import load_target

    family = family_named(path.parent.name)
    checker = Checker(load_target(str(path)), "cpu")
    found = {}
    for way in WAYS:
        draw = drawer(family, way)
        seeds = [derived_seed("finding", path.stem, way, number) for number in range(num_seeds)]
        found[way] = [search(checker, family, draw, way, seed, most) for seed in seeds]
    first = next((each.case for each in found["strategies"] if each.case is not None), None)
    if first is None:
        return path, found, ""
    verdict = checker.check_thoroughly(family, first)
    if verdict.passed:
        return path, found, ""

    def check(case: Case) -> Any:
        return checker.check_thoroughly(family, case)

    minimal = minimise(family, first, verdict, check, Budget(seconds=SHRINK_SECONDS))
    num_requests = minimal.case.num_requests
    return path, found, f"{num_requests} request{'s' * (num_requests != 1)}"


def _look_for(arguments: tuple[Path, int, int]) -> tuple[Path, dict[str, list[Found]], str]:
    return look_for(*arguments)


# The table


def median_of(searches: list[Found]) -> float:
    """Return the median of the cases of searches for one fault in one way."""
    return statistics.median(each.num_cases for each in searches)


def cells_of(results: list[tuple[Path, dict[str, list[Found]], str]]) -> list[list[str]]:
    """Return the rows of the table, the last of which are about all faults."""
    rows = []
    medians: dict[str, list[float]] = {way: [] for way in WAYS}
    missed = dict.fromkeys(WAYS, 0)
    for path, found, size in sorted(results):
        row = [f"{path.parent.name}: {path.stem.replace('_', ' ')}"]
        for way in WAYS:
            median = median_of(found[way])
            seconds = statistics.median(each.seconds for each in found[way])
            share = sum(each.is_found for each in found[way]) / len(found[way])
            medians[way].append(median)
            missed[way] += share <= 0.5
            row.append(f"{median:g}" if share > 0.5 else f"not in {median:g}")
            row.append(f"{seconds:.2f}")
        rows.append([*row, size])
    ours = statistics.fmean(medians["strategies"])
    for heading, summarise in (("mean", statistics.fmean), ("median", statistics.median)):
        cells = [f"{summarise(medians[way]):.4g}" for way in WAYS]
        rows.append(
            [f"all, {heading} of the medians", *(c for cell in cells for c in (cell, "")), ""]
        )
    ratios = [f"{statistics.fmean(medians[way]) / ours:.3g} times" for way in WAYS]
    rows.append(["all, mean against the strategies'", *(c for r in ratios for c in (r, "")), ""])
    rows.append(["faults missed", *(c for way in WAYS for c in (str(missed[way]), "")), ""])
    return rows


def main(
    only: Annotated[str, typer.Option(help="Faults with this in their path.")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Searches for each fault.")] = 10,
    cases: Annotated[int, typer.Option(min=1, help="Cases of a search at most.")] = 300,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    markdown: Annotated[Path | None, typer.Option(help="Write the page here.")] = None,
) -> None:
    """Compare how soon faults are found."""
    prepare("cpu")
    console = Console(width=200)
    paths = [path for path in sorted(FAULTY.glob("*/*.py")) if path.stem != "correct"]
    paths = [path for path in paths if only in str(path.relative_to(FAULTY))]
    if not paths:
        console.print(f"no fault has {only!r} in its path")
        raise typer.Exit(2)
    context = multiprocessing.get_context("fork")
    results = []
    started = time.perf_counter()
    with context.Pool(workers, maxtasksperchild=1) as pool:
        for result in pool.imap_unordered(_look_for, [(path, seeds, cases) for path in paths]):
            results.append(result)
            name = result[0].relative_to(FAULTY)
            done = f"{len(results)} of {len(paths)}, {time.perf_counter() - started:.0f} s"
            medians = ", ".join(f"{way} {median_of(result[1][way]):g}" for way in WAYS)
            console.print(f"{done}: {name}: {medians} cases", highlight=False)
    headings = ["fault", *(h for way in WAYS for h in (f"{way}: cases", "s")), "case"]
    lines = ["| " + " | ".join(headings) + " |", "| --- |" + " ---: |" * (len(headings) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in cells_of(results)]
    about = " · ".join(f"{name} {version}" for name, version in versions().items())
    intro = [
        "# How soon faults are found",
        "Generated by `make bench-finding`; do not edit.",
        f"{about}; the interpreter. Medians of {seeds} seeds; {cases} cases at most.",
        *(__doc__ or "").split("\n\n")[2:],
    ]
    text = "\n\n".join(intro).strip() + "\n\n" + "\n".join(lines) + "\n"
    console.print(text, markup=False, highlight=False)
    if markdown is not None:
        markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
