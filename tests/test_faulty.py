"""Planted faults: each has to be found, named, and shrunk to the case worked out here by hand.

`faulty/` has a folder for each function, with a correct version and copies of it that have one
fault each. A case is small if it has few requests, then few new tokens or pages, then few cells
in the table, then small pages, few edits, small numbers, and a plain layout.
"""

import difflib
import json
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pagefault.checker import Checker
from pagefault.conformance import session
from pagefault.family import Domain, case_from_json, family_named
from pagefault.minimal import minimise, size_of
from pagefault.stream import derived_seed, draw_cases
from pagefault.target import load_target

pytestmark = pytest.mark.skipif(
    session.device == "cuda", reason="what the address oracle says is part of what is expected"
)

FAULTY = Path(__file__).parent / "faulty"
BUGS = Path(__file__).parent.parent / "bugs"

# The interpreter takes a millisecond for a program, and these kernels have one for each request.
QUICK = Domain(without=frozenset(["more than 64 requests"]))

MOST_CASES = 1000
NUM_SEEDS = 10
# A campaign of a minute on two cores finds what one process finds in that time.
MOST_SECONDS = 60.0

# A table without columns: every position overflows.
NO_COLUMNS = {"num_rows": 1, "max_pages": 0}
NO_ROWS = {"num_rows": 0, "max_pages": 0}


@dataclass(frozen=True)
class Planted:
    """A planted fault, and what has to come of it.

    Attributes:
        function: The folder.
        fault: The file.
        kind: The finding's kind.
        role: The finding's role.
        headline: What the report starts with.
        fields: The smallest case, as JSON has it.
        or_else: Headline and fields of another case of the same size, where there is one.
    """

    function: str
    fault: str
    kind: str
    role: str
    headline: str
    fields: dict[str, Any]
    or_else: tuple[str, dict[str, Any]] | None = None

    def __str__(self) -> str:
        return f"{self.function}-{self.fault}"


def in_words_of(
    function,
    *,
    rows=(0,),
    starts=(0,),
    lengths=(1,),
    table=NO_COLUMNS,
    page_size=1,
    layout=(),
    **more,
):
    """Return the fields of a batch of token ranges for one of the four slot functions.

    Args:
        function: Whose fields.
        rows: Row of each request.
        starts: First position of each request.
        lengths: Tokens of each request.
        table: The page table.
        page_size: Tokens per page.
        layout: Placements by role: out, starts, table.
        more: Other fields.
    """
    out, starts_name, lengths_name, table_name = {
        "compute_out_cache_loc": ("out_cache_loc", "cache_start", "input_lengths", "req_to_pages"),
        "compute_out_cache_loc_uniform": (
            *("out_cache_loc", "cache_start", "uniform_input_length", "req_to_pages"),
        ),
        "fused_decode_input_prep": (
            *("out_cache_loc", "valid_cache_lengths", "uniform_input_length", "req_to_pages"),
        ),
        "create_chunked_cache_kv_indices_paged": (
            *("chunk_kv_indices", "chunk_starts", "chunk_seq_lens", "req_to_page"),
        ),
    }[function]
    fields = {
        "req_pool_indices": list(rows),
        starts_name: list(starts),
        lengths_name: list(lengths),
        table_name: table,
        "page_size": page_size,
    }
    if lengths_name == "uniform_input_length":
        fields[lengths_name] = lengths[0] if lengths else 0
    if function == "fused_decode_input_prep":
        num_rows = table["num_rows"] if isinstance(table, dict) else len(table)
        by_row = dict(zip(rows, starts))
        fields[starts_name] = [by_row.get(row, 0) for row in range(num_rows)]
    if function == "create_chunked_cache_kv_indices_paged":
        fields |= {"gaps": [0] * len(rows), "tail": 0}
    fields |= more
    if layout:
        names = {"out": out, "starts": starts_name, "table": table_name}
        fields["layout"] = {names[role]: placement for role, placement in layout.items()}
    return fields


SLOT_FUNCTIONS = {
    "compute_out_cache_loc": ("out_cache_loc", "req_to_pages"),
    "compute_out_cache_loc_uniform": ("out_cache_loc", "req_to_pages"),
    "fused_decode_input_prep": ("out_cache_loc", "req_to_pages"),
    "create_chunked_cache_kv_indices_paged": ("chunk_kv_indices", "req_to_page"),
}


def slot_faults(function):
    """Yield the faults that every slot function can have."""
    out, table = SLOT_FUNCTIONS[function]

    def planted(fault, kind, role, headline, **batch):
        if kind in ("value", "stale"):
            role = f"{out}: {role}"
        return Planted(function, fault, kind, role, headline, in_words_of(function, **batch))

    # One column, which the first position behind it is looked up in; without it, there would be
    # no page id to be wrong with.
    yield planted(
        *("overflow_clamped", "value", "overflow token", f"{out}[0] = 3, but should be 0"),
        starts=[1],
        table=[[3]],
    )
    # Two rows, because row 0 begins at the same place with any stride, and a gap between them.
    yield planted(
        *("row_stride_from_width", "address", f"read of {table}"),
        f"read of {table}[0][1], which is no element of it",
        rows=[1],
        table=[[3], [10]],
        layout={"table": {"pitch": 1}},
    )
    # In a table without columns the first position is past its row already.
    yield planted(
        *("column_unchecked", "address", f"read of {table}"),
        f"read of {table}[0][0], which is no element of it",
    )
    # One token, because nothing is written where there is none.
    yield planted(
        *("one_past_the_end", "address", f"write of {out}"),
        f"write of {out}[1], which is no element of it",
    )
    # With pages of 1 a slot is a page id, which fits; 2**30 * 2 is the first that doesn't.
    yield planted(
        *("slots_in_32_bits", "value", "token"),
        f"{out}[0] = -2147483648, but should be 2147483648",
        table=[[2**30]],
        page_size=2,
        layout={"out": {"dtype": "int64"}},
    )
    # A hole is read, so there is a cell; -1 is nearest to 0.
    yield planted(
        *("hole_multiplied", "value", "hole token", f"{out}[0] = -1, but should be 0"),
        table=[[-1]],
    )
    # Slot 0 is right for the first position of page 0 in any case; the second needs a page of 2.
    yield planted(
        *("dummy_page_diverted", "value", "dummy page token", f"{out}[0] = 0, but should be 1"),
        starts=[1],
        table=[[0]],
        page_size=2,
    )
    # Rounding changes no multiple of the page size, and with pages of 1 there are no others.
    yield planted(
        *("page_rounded_up", "value", "token", f"{out}[0] = 0, but should be 7"),
        starts=[1],
        table=[[3]],
        page_size=2,
    )
    yield planted(
        *("last_page_is_overflow", "value", "token", f"{out}[0] = 0, but should be 3"),
        table=[[3]],
    )
    # No request is needed, and so no row: only an output that is longer than it has to be.
    yield planted(
        *("output_zeroed", "outside", out, f"{out}[0] = 0, but should still be -7"),
        rows=[],
        starts=[],
        lengths=[],
        table=NO_ROWS,
        layout={"out": {"spare": 1}},
    )
    # Page id 3 on top of either poison; a slot 0 would look as if nothing had been written.
    yield planted(
        *("added_to_the_output", "stale", "token"),
        f"{out}[0] = -4 or 14, by what lay in memory, but should be 3",
        table=[[3]],
    )
    # The second tile begins at token 128, and has position 0 again, which has a page.
    yield planted(
        *("tile_offset_missing", "value", "overflow token"),
        f"{out}[128] = 3, but should be 0",
        lengths=[129],
        table=[[3]],
    )
    if function != "fused_decode_input_prep":
        # Row 1, because request 0 finds row 0 by luck.
        yield planted(
            *("pool_index_ignored", "row", f"read of {table}"),
            f"read of {table}[0][0], a row that belongs to no request of the call",
            rows=[1],
            table=[[3], [10]],
        )
        # Position 2**31 turns negative and is diverted, as it has to be in a row that short;
        # 2**32 turns into 0, which has a page.
        for fault in ("positions_in_32_bits", "start_truncated"):
            yield planted(
                *(fault, "value", "overflow token", f"{out}[0] = 3, but should be 0"),
                starts=[2**32],
                table=[[3]],
                layout={"starts": {"dtype": "int64"}},
            )
        starts = "chunk_starts" if out == "chunk_kv_indices" else "cache_start"
        yield Planted(
            *(function, "starts_advanced", "input changed", starts),
            f"{starts}[0] = 1, but should still be 0",
            in_words_of(function),
        )


def faults_of_one_slot_function():
    """Yield the faults that only one of the slot functions can have."""
    # The request without tokens comes first, or nothing would be behind it to shift.
    function = "compute_out_cache_loc"
    yield Planted(
        *(function, "empty_request_counted", "address", "write of out_cache_loc"),
        "write of out_cache_loc[1], which is no element of it",
        in_words_of(function, rows=[0, 0], starts=[0, 0], lengths=[0, 1]),
    )
    # The page of position 0 has to be there, or its slot would be right.
    yield Planted(
        *(function, "overflow_at_position_0", "value", "out_cache_loc: overflow token"),
        "out_cache_loc[0] = 3, but should be 0",
        in_words_of(function, starts=[1], table=[[3]]),
    )
    # No token is needed: the sum is loaded all the same.
    yield Planted(
        *(function, "before_the_first_request", "address", "read of ends_ptr"),
        "read of ends_ptr[-1], which is no element of it",
        in_words_of(function, lengths=[0]),
    )
    # Behind the request there is nothing.
    for either in (function, "create_chunked_cache_kv_indices_paged"):
        out, _ = SLOT_FUNCTIONS[either]
        yield Planted(
            *(either, "empty_request_written", "address", f"write of {out}"),
            f"write of {out}[0], which is no element of it",
            in_words_of(either, lengths=[0]),
        )
    # Without a gap the offsets are the sums of the lengths.
    function = "create_chunked_cache_kv_indices_paged"
    yield Planted(
        *(function, "offsets_recomputed", "outside", "chunk_kv_indices"),
        "chunk_kv_indices[0] = 0, but should still be -7",
        in_words_of(function, gaps=[1]),
    )
    function = "fused_decode_input_prep"
    # Without tokens too a sequence has a length. It has to differ from row 0's; which of the two
    # is the longer one makes no difference.
    yield Planted(
        *(function, "lengths_by_batch_position", "value", "seq_lens_out: length"),
        "seq_lens_out[0] = 0, but should be 1",
        in_words_of(
            function,
            rows=[1],
            starts=[1],
            lengths=[0],
            table={"num_rows": 2, "max_pages": 0},
        ),
        (
            "seq_lens_out[0] = 1, but should be 0",
            in_words_of(
                function,
                rows=[1],
                starts=[0],
                lengths=[0],
                table={"num_rows": 2, "max_pages": 0},
                valid_cache_lengths=[1, 0],
            ),
        ),
    )
    yield Planted(
        *(function, "no_tokens_no_launch", "unwritten", "seq_lens_out: length"),
        "seq_lens_out[0] was not written, but should be 0",
        in_words_of(function, lengths=[0]),
    )
    yield Planted(
        *(function, "seq_lens_past_the_end", "address", "write of seq_lens_out"),
        "write of seq_lens_out[1], which is no element of it",
        in_words_of(function, lengths=[0]),
    )
    yield Planted(
        *(function, "positions_past_the_end", "address", "write of positions"),
        "write of positions[1], which is no element of it",
        in_words_of(function),
    )
    # The first position that 32 bits can't hold, and everything that has to hold it is wide.
    wide = {"dtype": "int64"}
    yield Planted(
        *(function, "positions_in_32_bits", "value", "positions: position"),
        "positions[0] = -2147483648, but should be 2147483648",
        in_words_of(function, starts=[2**31])
        | {"layout": {"positions": wide, "seq_lens_out": wide, "valid_cache_lengths": wide}},
    )
    # In a table without columns the first position is one past the row.
    yield Planted(
        *(function, "column_past_the_row", "address", "read of req_to_pages"),
        "read of req_to_pages[0][0], which is no element of it",
        in_words_of(function),
    )
    yield Planted(
        *(function, "lengths_advanced", "input changed", "valid_cache_lengths"),
        "valid_cache_lengths[0] = 1, but should still be 0",
        in_words_of(function),
    )


def pages(rows=(0,), begins=(0,), ids=((0,),), table=NO_COLUMNS, **more):
    """Return the fields of a batch of new pages."""
    return {
        "req_pool_indices": list(rows),
        "begins": list(begins),
        "new_occupied_pages": [list(page_ids) for page_ids in ids],
        "req_to_page": table,
        **more,
    }


PITCHED = {"req_to_page": {"pitch": 1}}


def faults_of_update_req_to_page():
    def planted(fault, kind, role, headline, or_else=None, **batch):
        fields = pages(**batch)
        return Planted("update_req_to_page", fault, kind, role, headline, fields, or_else)

    # In a table without columns the first page is past its row already.
    yield planted(
        *("column_unchecked", "address", "write of req_to_page"),
        "write of req_to_page[0][0], which is no element of it",
    )
    # There has to be a next row, with a cell.
    yield planted(
        *("spills_into_the_next_row", "outside", "req_to_page"),
        "req_to_page[1][0] = 0, but should still be 10",
        begins=[1],
        table=[[3], [10]],
    )
    # Without columns the last one is the one before the first.
    yield planted(
        *("column_clamped", "address", "write of req_to_page"),
        "write of req_to_page[0][-1], which is no element of it",
    )
    yield planted(
        *("row_stride_from_width", "address", "write of req_to_page"),
        "write of req_to_page[0][1], which is no element of it",
        rows=[1],
        table=[[3], [10]],
        layout=PITCHED,
    )
    yield planted(
        *("pool_index_ignored", "outside", "req_to_page"),
        "req_to_page[0][0] = 0, but should still be 3",
        rows=[1],
        table=[[3], [10]],
    )
    # Page 128 of the request is the first of the second tile, and goes over page 0.
    yield planted(
        *("tile_offset_missing", "value", "req_to_page: new page"),
        "req_to_page[0][0] = 1, but should be 0",
        ids=[[0] * 128 + [1]],
        table=[[3]],
    )
    # Column 2**31 turns negative, and is dropped, as it has to be; 2**32 turns into 0.
    yield planted(
        *("columns_in_32_bits", "outside", "req_to_page"),
        "req_to_page[0][0] = 0, but should still be 3",
        begins=[2**32],
        table=[[3]],
        layout={"pages_copy_starts": {"dtype": "int64"}},
    )
    # The ids are read one too far, also where no column takes them.
    yield planted(
        *("empty_request_counted", "address", "read of new_occupied_pages"),
        "read of new_occupied_pages[1], which is no element of it",
        rows=[0, 0],
        begins=[0, 0],
        ids=[[], [0]],
    )
    yield planted(
        *("before_the_first_request", "address", "read of ends_ptr"),
        "read of ends_ptr[-1], which is no element of it",
        ids=[[0]],
    )
    yield planted(
        *("filled_cells_kept", "value", "req_to_page: new page"),
        "req_to_page[0][0] = 3, but should be 0",
        table=[[3]],
    )
    # The first request's page is past the row, and the second one takes its id.
    yield planted(
        *("offsets_not_computed", "value", "req_to_page: new page"),
        "req_to_page[0][0] = 0, but should be 1",
        rows=[0, 0],
        begins=[1, 0],
        ids=[[0], [1]],
        table=[[3]],
        or_else=(
            "req_to_page[0][0] = 1, but should be 0",
            pages(rows=[0, 0], begins=[1, 0], ids=[[1], [0]], table=[[3]]),
        ),
    )
    yield planted(
        *("starts_advanced", "input changed", "pages_copy_starts"),
        "pages_copy_starts[0] = 1, but should still be 0",
    )


def faults_of_update_block_table():
    def planted(fault, kind, role, headline, sizes=(1,), or_else=None, **batch):
        fields = pages(**batch, sizes=list(sizes))
        return Planted("update_block_table", fault, kind, role, headline, fields, or_else)

    # The first request has a page that is dropped, and the second gets it. Which of the two ids
    # is not 0 makes no difference.
    two = {"rows": [0, 0], "begins": [1, 0], "table": [[3]], "sizes": [1, 1]}
    yield planted(
        *("ids_not_clamped", "value", "req_to_page: new page"),
        "req_to_page[0][0] = 0, but should be 1",
        **{**two, "ids": [[0], [1]]},
        or_else=("req_to_page[0][0] = 1, but should be 0", pages(**two, ids=[[1], [0]])),
    )
    # Without columns any page is clamped away.
    yield planted("no_warning", "log", "count", "0 warnings logged, but should be 1")
    yield planted(
        "overflow_refused", "raised", "ValueError", "update_block_table raised ValueError"
    )
    yield planted(
        *("filled_cells_kept", "value", "req_to_page: new page"),
        "req_to_page[0][0] = 3, but should be 0",
        table=[[3]],
    )
    yield planted("request_not_named", "log", "words", "a warning does not say request-0")
    refused = "update_block_table returned, but should raise ValueError"
    yield planted("size_unchecked", "not refused", "ValueError", refused, ids=[[]])
    yield planted(
        *("list_length_unchecked", "not refused", "ValueError", refused),
        short_list=1,
        ids=[[]],
        sizes=[0],
    )
    yield planted(
        *("begin_unchecked", "not refused", "ValueError", refused),
        begins=[-1],
        ids=[[]],
        sizes=[0],
    )
    yield planted(
        *("row_stride_from_width", "address", "write of req_to_page"),
        "write of req_to_page[0][1], which is no element of it",
        rows=[1],
        table=[[3], [10]],
        layout=PITCHED,
    )


def faults_of_chunking():
    def planted(fault, kind, role, headline, prefix_lens, num_chunks, batch_size, chunk_len):
        fields = {
            "prefix_lens": prefix_lens,
            "num_chunks": num_chunks,
            "batch_size": batch_size,
            "chunk_len": chunk_len,
        }
        return Planted("chunking", fault, kind, role, headline, fields)

    # A prefix of 0 ends before any chunk does.
    yield planted(
        *("ends_past_the_prefix", "value", "chunks.ends: ends"),
        "chunks.ends[0][0] = 1, but should be 0",
        *([0], 1, 1, 1),
    )
    # The shape is wrong even where there is nothing in it.
    yield planted(
        *("no_leading_0", "returned", "chunks.cum_seq_lens"),
        "chunking: chunks.cum_seq_lens is int32 [0, 0] on cpu, but should be int32 [0, 1] on cpu",
        *([], 0, 0, 1),
    )
    # The first of two chunks has a token, which the second one has to forget.
    yield planted(
        *("sums_run_on", "value", "chunks.cum_seq_lens: cum_seq_lens"),
        "chunks.cum_seq_lens[1][1] = 1, but should be 0",
        *([1], 2, 1, 1),
    )
    # The end of the second chunk, 2 * 2**30, is the first that does not fit.
    yield planted(
        *("ends_in_32_bits", "value", "chunks.ends: ends"),
        "chunks.ends[1][0] = -2147483648, but should be 0",
        *([0], 2, 1, 2**30),
    )
    # One prefix is more than none.
    yield planted(
        *("batch_size_unchecked", "not refused", "ValueError"),
        "chunking returned, but should raise ValueError",
        *([0], 0, 0, 1),
    )


def faults_of_whole_prefixes():
    def planted(function, fault, kind, role, headline, prefix_lens, capacity, **more):
        swapped = more.pop("or_swapped", False)
        fields = {
            "req_pool_indices": [0] * len(prefix_lens),
            "prefix_lens": prefix_lens,
            "req_to_page": [[3]],
            "page_size": 1,
            "chunk_capacity": capacity,
            **more,
        }
        other = (headline, {**fields, "prefix_lens": prefix_lens[::-1]}) if swapped else None
        return Planted(function, fault, kind, role, headline, fields, other)

    # One request can have all of the capacity; of two, one gets 3 // 2 = 1 and not 2, so that a
    # prefix of 2 takes two chunks and not one. It may be either's. One page holds the prefix.
    function = "get_chunks_paged"
    yield planted(
        *(function, "chunk_len_rounded_up", "returned", "result"),
        f"{function}: returned something without kv_indices_list[1]",
        *([0, 2], 3),
        page_size=2,
        or_swapped=True,
    )
    # A prefix of 1 ends with the first chunk, and one of 2 has a second; either may come first.
    yield planted(
        *(function, "short_prefix_repeated", "returned", "kv_indices_list"),
        f"{function}: kv_indices_list[1] is int32 [2] on cpu, but should be int32 [1] on cpu",
        *([1, 2], 2),
        page_size=2,
        or_swapped=True,
    )
    # A chunk is needed, and so a prefix of a token beside the one of none.
    yield planted(
        *(function, "empty_prefix_below_zero", "value", "chunks.ends: ends"),
        "chunks.ends[0][0] = -1, but should be 0",
        *([0, 1], 2),
        or_swapped=True,
    )
    # One token in a chunk of two.
    yield planted(
        *(function, "last_chunk_left_out", "returned", "result"),
        f"{function}: returned something without kv_indices_list[0]",
        *([1], 2),
    )
    yield planted(
        *(function, "long_prefix_unchecked", "not refused", "ValueError"),
        f"{function} returned, but should raise ValueError",
        *([1], 1),
        req_to_page=NO_COLUMNS,
    )
    function = "build_chunked_prefill_metadata_arrays"
    # The longest is not the first.
    yield planted(
        *(function, "max_of_the_first_request", "value", "max_len_per_chunk: max_len_per_chunk"),
        "max_len_per_chunk[0] = 0, but should be 1",
        *([0, 1], 2),
    )
    yield planted(
        *(function, "no_prefix_refused", "raised", "AssertionError"),
        f"{function} raised AssertionError",
        *([], 1),
        req_to_page=NO_ROWS,
    )
    # A prefix of 1 ends with the first chunk, and one of 2 has a second; either may come first.
    yield planted(
        *(function, "short_prefix_repeated", "address", "write of kv_indices_ptr"),
        "write of kv_indices_ptr[1], which is no element of it",
        *([1, 2], 2),
        page_size=2,
        or_swapped=True,
    )
    # Two chunks of one token, in one page.
    yield planted(
        *(function, "start_of_chunk_missing", "value", "kv_indices_list: token"),
        "kv_indices_list[1][0] = 6, but should be 7",
        *([2], 1),
        page_size=2,
    )
    # A prefix lies inside its row, and one page of 129 is the smallest table that holds it:
    # 3 * 129 = 387 is slot 0 of the page, 387 + 128 = 515 the last one.
    yield planted(
        *(function, "tile_offset_missing", "value", "kv_indices_list: token"),
        "kv_indices_list[0][128] = 387, but should be 515",
        *([129], 129),
        page_size=129,
    )
    yield planted(
        *(function, "row_stride_from_width", "address", "read of req_to_page"),
        "read of req_to_page[0][1], which is no element of it",
        *([1], 1),
        req_pool_indices=[1],
        req_to_page=[[3], [10]],
        layout=PITCHED,
    )


PLANTED = [
    *(planted for function in SLOT_FUNCTIONS for planted in slot_faults(function)),
    *faults_of_one_slot_function(),
    *faults_of_update_req_to_page(),
    *faults_of_update_block_table(),
    *faults_of_chunking(),
    *faults_of_whole_prefixes(),
]
FUNCTIONS = sorted({planted.function for planted in PLANTED})


class _Stop(BaseException):
    """Ends a stream of cases; not an Exception, which Hypothesis would look into."""


def first_finding(checker, family, seed, wanted, domain=QUICK):
    """Return the first case that has a finding, with its verdict.

    Args:
        checker: Of the target.
        family: Whose cases.
        seed: Of the stream of cases.
        wanted: The finding's kind and role.
        domain: What is drawn.

    Returns:
        A list of the case and its verdict, empty if there is none; the verdicts of all cases that
        failed; how many cases there were.
    """
    found = []
    failed = []
    num_cases = 0

    def use(case):
        nonlocal num_cases
        num_cases += 1
        verdict = checker.check(family, case)
        if not verdict.passed:
            failed.append(verdict)
            if verdict.signature[1:] == wanted:
                found.append((case, verdict))
                raise _Stop

    with suppress(_Stop):
        draw_cases(family.strategy(domain), MOST_CASES, seed, use)
    return found, failed, num_cases


@cache
def checker_of(function, fault):
    return Checker(load_target(str(FAULTY / function / f"{fault}.py")), "cpu")


@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_a_planted_fault_is_found_and_shrinks_to_the_smallest_case(planted, record_property):
    family = family_named(planted.function)
    checker = checker_of(planted.function, planted.fault)
    seed = derived_seed("planted", planted)
    found, failed, num_cases = first_finding(checker, family, seed, (planted.kind, planted.role))
    assert found, f"not in {MOST_CASES} cases; but {sorted({v.signature for v in failed})}"

    minimal = minimise(family, *found[0], lambda case: checker.check(family, case))
    record_property("cases until found", num_cases)
    record_property("cases until minimal", minimal.num_checks)
    assert minimal.exhausted == ""
    smallest = [(planted.headline, planted.fields), *([planted.or_else] if planted.or_else else [])]
    found = (minimal.verdict.findings[0].headline, minimal.case)
    assert found in [(line, family.case_type.from_fields(fields)) for line, fields in smallest]


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_other_seeds_end_in_the_same_minimal_case(planted):
    family = family_named(planted.function)
    checker = checker_of(planted.function, planted.fault)
    minimal_cases = Counter()
    for number in range(NUM_SEEDS):
        seed = derived_seed("planted", planted, number)
        found, _, _ = first_finding(checker, family, seed, (planted.kind, planted.role))
        if found:
            minimal = minimise(family, *found[0], lambda case: checker.check(family, case))
            minimal_cases[minimal.case] += 1
    ((_, most),) = minimal_cases.most_common(1)
    assert most >= 0.9 * NUM_SEEDS, minimal_cases


def of_reports():
    """Return (report, planted fault, cases of the report) of each kernel that a report names."""
    by_file = {f"{planted.function}/{planted.fault}": planted for planted in PLANTED}
    named = []
    for path in sorted(BUGS.glob("*.json")):
        bug = json.loads(path.read_text())
        for kernel in bug["faulty"]:
            planted = by_file[kernel]
            fields = [item["case"] for item in bug["cases"]]
            cases = [case for case in fields if case["family"] == planted.function]
            named.append(pytest.param(planted, cases, id=f"{path.stem}-{planted}"))
    return named


@pytest.mark.slow
@pytest.mark.parametrize(("planted", "reported"), of_reports())
def test_the_fault_of_a_report_is_found_from_every_seed_and_its_case_is_no_larger(
    planted, reported, record_property
):
    family = family_named(planted.function)
    checker = checker_of(planted.function, planted.fault)
    sizes = [size_of(family, case_from_json(json.dumps(case))[1]) for case in reported]
    wanted = (planted.kind, planted.role)
    for number in range(NUM_SEEDS):
        started = time.monotonic()
        seed = derived_seed("reported", planted, number)
        found, failed, _ = first_finding(checker, family, seed, wanted, checker.domain(family))
        assert found, f"seed {number}: {sorted({v.signature for v in failed})}"
        minimal = minimise(family, *found[0], lambda case: checker.check(family, case))
        seconds = time.monotonic() - started
        record_property(f"seconds of seed {number}", round(seconds, 1))
        assert minimal.exhausted == ""
        assert size_of(family, minimal.case) <= min(sizes)
        assert seconds < MOST_SECONDS


def test_every_file_is_a_planted_fault_of_this_list():
    listed = {(planted.function, planted.fault) for planted in PLANTED}
    files = {(path.parent.name, path.stem) for path in FAULTY.glob("*/*.py")}
    assert files - listed == {(function, "correct") for function in FUNCTIONS}
    assert listed <= files


@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_a_planted_fault_is_one_change_to_the_correct_file(planted):
    folder = FAULTY / planted.function
    correct, faulty = (
        (folder / f"{name}.py").read_text().splitlines()[1:] for name in ("correct", planted.fault)
    )
    changes = [
        opcode
        for opcode in difflib.SequenceMatcher(None, correct, faulty, autojunk=False).get_opcodes()
        if opcode[0] != "equal"
    ]
    assert len(changes) == 1
    _, first, end, first_faulty, end_faulty = changes[0]
    assert max(end - first, end_faulty - first_faulty) <= 5


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_the_faults_are_planted_in_is_correct(function):
    family = family_named(function)
    checker = checker_of(function, "correct")
    verdicts = []
    draw_cases(
        family.strategy(QUICK), 60, 1, lambda case: verdicts.append(checker.check(family, case))
    )
    assert len(verdicts) == 60
    assert [verdict.text() for verdict in verdicts if not verdict.passed] == []
