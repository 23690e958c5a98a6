"""The family of `fused_decode_input_prep`."""

from __future__ import annotations

from collections.abc import Iterator

from ..family import Argument, Changes, Dialect, Expected, Explanation, Family, Tensor, number
from ..oracle import decode_input_prep as oracle
from ..strategies.decode_input_prep import FusedDecodeCase, fused_decode_cases
from .any_bytes import expect_fused_decode
from .slots import (
    COMMON_SLOT_EDGES,
    SLOT_EDGES,
    Range,
    all_layout_edges,
    explain_slot,
    layout_edges,
    locate,
    simpler_corner,
    simpler_pages,
    simpler_rows,
    slot_edges,
    smaller,
)

OUTPUTS = ("out_cache_loc", "positions", "seq_lens_out")


def _ranges(case: FusedDecodeCase) -> list[Range]:
    length = case.uniform_input_length
    return [Range(row, case.valid_cache_lengths[row], length) for row in case.req_pool_indices]


def _num_tokens(case: FusedDecodeCase) -> int:
    return case.num_requests * case.uniform_input_length


def _arguments(case: FusedDecodeCase) -> list[Argument]:
    table = case.req_to_pages
    num_tokens = _num_tokens(case)
    return [
        Tensor("out_cache_loc", (num_tokens,), None),
        Tensor("positions", (num_tokens,), None),
        Tensor("seq_lens_out", (case.num_requests,), None),
        Tensor("req_pool_indices", (case.num_requests,), case.req_pool_indices),
        Tensor("valid_cache_lengths", (table.num_rows,), case.valid_cache_lengths),
        number("uniform_input_length", case.uniform_input_length),
        Tensor("req_to_pages", (table.num_rows, table.max_pages), table),
        number("page_size", case.page_size),
    ]


def _expect(case: FusedDecodeCase, dialect: Dialect) -> Expected:
    outputs = oracle.fused_decode_input_prep(
        case.req_pool_indices,
        case.valid_cache_lengths,
        case.uniform_input_length,
        case.req_to_pages.rows,
        case.page_size,
        overflow_slot=dialect.overflow_slot,
        holes=dialect.holes,
    )
    return Expected(outputs._asdict(), rows={"req_to_pages": frozenset(case.req_pool_indices)})


def _edges(case: FusedDecodeCase) -> frozenset[str]:
    edges = slot_edges(_ranges(case), case.req_to_pages, case.page_size)
    if not case.uniform_input_length:
        edges.add("length 0")
    return frozenset(edges | layout_edges(case))


def _explain(case: FusedDecodeCase, where: str, index: int, found: int) -> Explanation:
    ranges = _ranges(case)
    if where == "out_cache_loc":
        return explain_slot(ranges, "req_to_pages", case.req_to_pages, case.page_size, index, found)
    if where == "seq_lens_out":
        req_idx, tokens = index, ""
    else:
        req_idx, k = locate(ranges, index)
        tokens = f", token {k} of {case.uniform_input_length}"
    row = case.req_pool_indices[req_idx]
    start = case.valid_cache_lengths[row]
    return Explanation(
        "length" if where == "seq_lens_out" else "position",
        (f"request {req_idx} (pool row {row}){tokens}: {start} tokens in the cache",),
    )


def _simpler(case: FusedDecodeCase) -> Iterator[Changes]:
    yield from simpler_rows(case, "req_pool_indices", "req_to_pages", "valid_cache_lengths")
    yield from simpler_pages(case, "valid_cache_lengths", "req_to_pages")
    starts = "valid_cache_lengths"
    yield from simpler_corner(case, "req_pool_indices", starts, "req_to_pages", starts)
    for fewer in smaller(case.uniform_input_length, 0):
        dropped = case.uniform_input_length - fewer
        lengths = tuple(length + dropped for length in case.valid_cache_lengths)
        yield {"uniform_input_length": fewer}
        yield {"uniform_input_length": fewer, "valid_cache_lengths": lengths}


FAMILIES = [
    Family(
        name="fused_decode_input_prep",
        parameters=(
            *OUTPUTS,
            "req_pool_indices",
            "valid_cache_lengths",
            "uniform_input_length",
            "req_to_pages",
            "page_size",
        ),
        case_type=FusedDecodeCase,
        cases=fused_decode_cases,
        arguments=_arguments,
        expect=_expect,
        edges=_edges,
        size=_num_tokens,
        all_edges=SLOT_EDGES
        | {"length 0"}
        | all_layout_edges(FusedDecodeCase.PLAIN, "req_to_pages", OUTPUTS),
        must_reach=COMMON_SLOT_EDGES | {"length 0", "pitched table", "offset", "spare output"},
        explain=_explain,
        expect_any_bytes=expect_fused_decode,
        capturable=True,
        simpler=_simpler,
    )
]
