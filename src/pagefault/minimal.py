"""The smallest case that still shows a finding, by trying every single simplification.

Hypothesis shrinks what a strategy draws; this works on the case itself, so that it knows what a
request, a page size or a placement is. It stays with the finding's signature all the way.

Smaller means, in this order: fewer requests; fewer new tokens or pages; a smaller table; a smaller
page size; smaller numbers; a plainer layout; requests in ascending order.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .case import (
    DTYPE_RANGES,
    MOST_FILLED_ELEMENTS,
    Case,
    CaseError,
    PageTable,
    Placement,
    runs_left_out,
    with_row_stride,
)
from .family import Changes, Family
from .side_case import AnyCase, SideCase, legal_part
from .verdict import Verdict

C = TypeVar("C", bound=AnyCase)

# In a batch of more requests their order is left as it is.
MOST_SWAPPED = 8


@dataclass(frozen=True)
class Budget:
    """How long to go on.

    Attributes:
        seconds: Wall time.
        num_checks: Cases tried.
        limit: What limits the seconds, for reports; "the budget of 60 s" if nothing is said.
    """

    seconds: float = 60.0
    num_checks: int = 5000
    limit: str = ""


@dataclass(frozen=True)
class Minimal(Generic[C]):
    """A case that shows a finding, and how small it is known to be.

    Attributes:
        case: The smallest case found.
        verdict: What is wrong with it.
        num_checks: Cases tried.
        exhausted: The budget that ran out, or "" where no single step makes the case smaller.
    """

    case: C
    verdict: Verdict
    num_checks: int
    exhausted: str = ""

    def __str__(self) -> str:
        if self.exhausted:
            return f"not known to be minimal: {self.exhausted} ran out"
        return f"minimal: no single step makes it smaller ({self.num_checks} cases tried)"


def minimise(
    family: Family,
    case: C,
    verdict: Verdict,
    check: Callable[[C], Verdict],
    budget: Budget = Budget(),
) -> Minimal[C]:
    """Return the smallest case that single steps lead to, with the same signature.

    Args:
        family: The case's family.
        case: A case that fails.
        verdict: What is wrong with it.
        check: Returns what is wrong with a case.
        budget: How long to go on.
    """
    signature = verdict.signature
    tried = {case}
    deadline = time.monotonic() + budget.seconds
    num_checks = 0
    num_steps = 0
    # Behind a step that has worked, others of its sort are likely to work; but now and then a
    # larger one may have become possible.
    place: int | None = 0
    while place is not None:
        rank = _rank_of(family, case)
        steps = _simplifications_from(place, family, case)
        place = None
        for place_of_candidate, candidate in steps:
            if candidate in tried or not _rank_of(family, candidate) < rank:
                continue
            if time.monotonic() > deadline:
                limit = budget.limit or f"the budget of {budget.seconds:g} s"
                return Minimal(case, verdict, num_checks, limit)
            if num_checks >= budget.num_checks:
                return Minimal(
                    case, verdict, num_checks, f"the budget of {budget.num_checks} cases"
                )
            tried.add(candidate)
            num_checks += 1
            try:
                answer = check(candidate)
            except CaseError:
                continue  # Outside the domain, as only the oracle's answer could show.
            if not answer.passed and answer.signature == signature:
                case, verdict = candidate, answer
                num_steps += 1
                place = place_of_candidate if num_steps & (num_steps - 1) else 0
                break
    return Minimal(case, verdict, num_checks)


def size_of(family: Family, case: AnyCase) -> tuple[int, ...]:
    """Return how large a case is; of two cases the one with the lesser tuple is smaller."""
    if isinstance(case, SideCase):
        return (*size_of(family, case.case), *case.size)
    cells = page_size = edits = numbers = 0
    for field in dataclasses.fields(case):
        value = getattr(case, field.name)
        if isinstance(value, PageTable):
            cells += value.num_cells + value.num_rows + value.max_pages
            edits += len(value.edits)
            numbers += sum(map(_magnitude, (page_id for _, _, page_id in value.edits)))
        elif field.name == "page_size":
            page_size = value
        elif field.name != "layout":
            numbers += _sum_of(value)
    plainness = sum(
        _odd_dtype(case, name, placement)
        + 4 * ((placement.offset > 0) + (placement.pitch > 0) + (placement.spare > 0))
        for name, placement in case.layout
    )
    extent = sum(p.offset + p.pitch + p.spare for _, p in case.layout)
    return (
        case.num_requests,
        family.size(case),
        cells,
        page_size,
        edits,
        numbers,
        plainness,
        extent,
    )


def _rank_of(family: Family, case: AnyCase) -> tuple[tuple[int, ...], list[Any]]:
    """Return what a minimal case has the least of: its size, then its requests in their order."""
    legal = legal_part(case)
    return size_of(family, case), [getattr(legal, name) for name in legal.per_request_fields()]


def _odd_dtype(case: Case, name: str, placement: Placement) -> int:
    return 2 if placement.dtype != case.PLAIN[name].dtype else 0


def _magnitude(value: int) -> int:
    return 2 * abs(value) + (value < 0)


def _sum_of(value: Any) -> int:
    if isinstance(value, tuple):
        return sum(1 + _sum_of(item) for item in value)
    return _magnitude(value)


def _simplifications_from(first: int, family: Family, case: C) -> Iterator[tuple[int, C]]:
    """Yield all simplifications and their places, from one place on and then those before it."""

    def steps() -> Iterator[tuple[int, Any]]:
        if isinstance(case, SideCase):
            return enumerate(case.simpler(family))
        return enumerate(simplifications(family, legal_part(case)))

    yield from itertools.islice(steps(), first, None)
    yield from itertools.islice(steps(), first)


def simplifications(family: Family, case: Case) -> Iterator[Case]:
    """Yield legal cases that one step makes simpler, the largest steps first."""
    steps = (
        map(case.keeping, runs_left_out(case.num_requests)),
        family.simpler(case),
        _smaller_numbers(case),
        _simpler_tables(case),
        _plainer_layout(case),
        map(case.keeping, _swaps(case.num_requests)),
    )
    for changes in itertools.chain(*steps):
        try:
            yield case.replace(**changes)
        except CaseError:
            continue


def _swaps(num_requests: int) -> Iterator[list[int]]:
    """Yield orders of a small batch in which two neighbours have changed places."""
    if num_requests <= MOST_SWAPPED:
        for first in range(num_requests - 1):
            order = list(range(num_requests))
            order[first : first + 2] = first + 1, first
            yield order


def _smaller_numbers(case: Case) -> Iterator[Changes]:
    """Yield changes to one number, or to one item of a tuple, or to its length."""
    fixed_length = set(case.per_request_fields())
    for field in dataclasses.fields(case):
        value = getattr(case, field.name)
        if field.name == "layout" or isinstance(value, PageTable):
            continue
        for simpler in _simpler_values(value, may_shorten=field.name not in fixed_length):
            yield {field.name: simpler}


def _simpler_values(value: Any, may_shorten: bool) -> Iterator[Any]:
    if not isinstance(value, tuple):
        yield from _closer_to_zero(value)
        return
    if len(value) > 1 and isinstance(value[0], int) and any(value):
        lowest = min(value)
        if lowest > 0:
            yield tuple(item - lowest for item in value)
            yield tuple(item - 1 for item in value)
        zeroed = len(value)
        while zeroed > 1:
            for first in range(0, len(value), zeroed):
                kept = value[first + zeroed :]
                yield value[:first] + (0,) * (len(value) - first - len(kept)) + kept
            zeroed //= 2
    if may_shorten:
        dropped = len(value)
        while dropped:
            for first in range(0, len(value), dropped):
                yield value[:first] + value[first + dropped :]
            dropped //= 2
    for i, item in enumerate(value):
        for simpler in _simpler_values(item, may_shorten=True):
            yield (*value[:i], simpler, *value[i + 1 :])


def _closer_to_zero(value: int) -> Iterator[int]:
    """Yield 0, the number without its sign, then steps towards 0 by powers of 2, largest first."""
    if not value:
        return
    yield 0
    sign = 1 if value > 0 else -1
    if sign < 0:
        yield -value
    for exponent in reversed(range((abs(value) - 1).bit_length())):
        yield value - sign * 2**exponent


def _simpler_tables(case: Case) -> Iterator[Changes]:
    """Yield changes to a table's last rows and columns, and to its edits."""
    for field in dataclasses.fields(case):
        table = getattr(case, field.name)
        if not isinstance(table, PageTable):
            continue
        for num_rows in _closer_to_zero(table.num_rows):
            yield {field.name: table.resized(num_rows, table.max_pages)}
        for max_pages in _closer_to_zero(table.max_pages):
            narrower = table.resized(table.num_rows, max_pages)
            yield {field.name: narrower}
            if case.span_of(field.name) > MOST_FILLED_ELEMENTS:
                # A gap where the dropped columns were, so that no row moves.
                row_stride = table.max_pages + case.placement(field.name).pitch
                layout = with_row_stride(case, field.name, max_pages, row_stride)
                yield {field.name: narrower, "layout": layout}
        if table.edits:
            yield {field.name: dataclasses.replace(table, edits=())}
        for i, (row, column, page_id) in enumerate(table.edits):
            others = table.edits[:i] + table.edits[i + 1 :]
            yield {field.name: dataclasses.replace(table, edits=others)}
            for simpler in _closer_to_zero(page_id):
                if simpler in DTYPE_RANGES["int32"]:
                    edits = (*others, (row, column, simpler))
                    yield {field.name: dataclasses.replace(table, edits=edits)}


def _plainer_layout(case: Case) -> Iterator[Changes]:
    """Yield changes to production's layout, then of one tensor, then of one choice of it."""
    if case.layout:
        yield {"layout": ()}
    for i, (name, placement) in enumerate(case.layout):
        others = case.layout[:i] + case.layout[i + 1 :]
        yield {"layout": others}
        plain = case.PLAIN[name]
        for attribute in ("offset", "pitch", "spare"):
            for value in _closer_to_zero(getattr(placement, attribute)):
                changed: dict[str, Any] = {attribute: value}
                simpler = dataclasses.replace(placement, **changed)
                yield {"layout": (*others, (name, simpler))}
        if placement.dtype != plain.dtype:
            simpler = dataclasses.replace(placement, dtype=plain.dtype)
            yield {"layout": (*others, (name, simpler))}
