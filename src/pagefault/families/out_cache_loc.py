"""The families of `compute_out_cache_loc` and its uniform form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..family import Argument, Changes, Dialect, Expected, Explanation, Family, Tensor, number
from ..oracle import out_cache_loc as oracle
from ..strategies.out_cache_loc import (
    OutCacheLocCase,
    UniformOutCacheLocCase,
    out_cache_loc_cases,
    uniform_out_cache_loc_cases,
)
from .any_bytes import expect_out_cache_loc
from .slots import (
    COMMON_SLOT_EDGES,
    SLOT_EDGES,
    Range,
    all_layout_edges,
    explain_slot,
    layout_edges,
    simpler_corner,
    simpler_lengths,
    simpler_pages,
    simpler_rows,
    slot_edges,
    smaller,
)

AnyCase = OutCacheLocCase | UniformOutCacheLocCase


def _ranges(case: AnyCase) -> list[Range]:
    if isinstance(case, OutCacheLocCase):
        lengths: Sequence[int] = case.input_lengths
    else:
        lengths = [case.uniform_input_length] * case.num_requests
    return [*map(Range, case.req_pool_indices, case.cache_start, lengths)]


def _num_tokens(case: AnyCase) -> int:
    return sum(token_range.length for token_range in _ranges(case))


def _arguments(case: AnyCase) -> list[Argument]:
    batch_size = case.num_requests
    table = case.req_to_pages
    lengths: Argument
    if isinstance(case, OutCacheLocCase):
        lengths = Tensor("input_lengths", (batch_size,), case.input_lengths)
    else:
        lengths = number("uniform_input_length", case.uniform_input_length)
    return [
        Tensor("out_cache_loc", (_num_tokens(case),), None),
        Tensor("req_pool_indices", (batch_size,), case.req_pool_indices),
        lengths,
        Tensor("cache_start", (batch_size,), case.cache_start),
        Tensor("req_to_pages", (table.num_rows, table.max_pages), table),
        number("page_size", case.page_size),
    ]


def _expect(case: AnyCase, dialect: Dialect) -> Expected:
    function = (
        oracle.compute_out_cache_loc
        if isinstance(case, OutCacheLocCase)
        else oracle.compute_out_cache_loc_uniform
    )
    slots = function(
        case.req_pool_indices,
        case.input_lengths if isinstance(case, OutCacheLocCase) else case.uniform_input_length,  # type: ignore[arg-type]
        case.cache_start,
        case.req_to_pages.rows,
        case.page_size,
        overflow_slot=dialect.overflow_slot,
        holes=dialect.holes,
    )
    return Expected(
        {"out_cache_loc": slots}, rows={"req_to_pages": frozenset(case.req_pool_indices)}
    )


def _edges(case: AnyCase) -> frozenset[str]:
    edges = slot_edges(_ranges(case), case.req_to_pages, case.page_size)
    return frozenset(edges | layout_edges(case))


def _explain(case: AnyCase, where: str, index: int, found: int) -> Explanation:
    return explain_slot(
        _ranges(case), "req_to_pages", case.req_to_pages, case.page_size, index, found
    )


def _simpler(case: AnyCase) -> Iterator[Changes]:
    yield from simpler_rows(case, "req_pool_indices", "req_to_pages")
    yield from simpler_pages(case, "cache_start", "req_to_pages")
    yield from simpler_corner(case, "req_pool_indices", "cache_start", "req_to_pages")
    if isinstance(case, OutCacheLocCase):
        yield from simpler_lengths(case, "cache_start", "input_lengths")
        return
    for fewer in smaller(case.uniform_input_length, 0):
        dropped = case.uniform_input_length - fewer
        starts = tuple(start + dropped for start in case.cache_start)
        yield {"uniform_input_length": fewer}
        yield {"uniform_input_length": fewer, "cache_start": starts}


FAMILIES = [
    Family(
        name="compute_out_cache_loc",
        parameters=(
            "out_cache_loc",
            "req_pool_indices",
            "input_lengths",
            "cache_start",
            "req_to_pages",
            "page_size",
        ),
        case_type=OutCacheLocCase,
        cases=out_cache_loc_cases,
        arguments=_arguments,
        expect=_expect,
        edges=_edges,
        size=_num_tokens,
        all_edges=SLOT_EDGES
        | all_layout_edges(OutCacheLocCase.PLAIN, "req_to_pages", ["out_cache_loc"]),
        must_reach=COMMON_SLOT_EDGES | {"pitched table", "offset", "spare output"},
        explain=_explain,
        expect_any_bytes=expect_out_cache_loc,
        capturable=True,
        simpler=_simpler,
    ),
    Family(
        name="compute_out_cache_loc_uniform",
        parameters=(
            "out_cache_loc",
            "req_pool_indices",
            "uniform_input_length",
            "cache_start",
            "req_to_pages",
            "page_size",
        ),
        case_type=UniformOutCacheLocCase,
        cases=uniform_out_cache_loc_cases,
        arguments=_arguments,
        expect=_expect,
        edges=_edges,
        size=_num_tokens,
        all_edges=SLOT_EDGES
        | all_layout_edges(UniformOutCacheLocCase.PLAIN, "req_to_pages", ["out_cache_loc"]),
        must_reach=COMMON_SLOT_EDGES | {"pitched table", "offset", "spare output"},
        explain=_explain,
        expect_any_bytes=expect_out_cache_loc,
        capturable=True,
        simpler=_simpler,
    ),
]
