"""Cells that are read out of a verdict's text."""

import pytest

from pagefault.places import KernelLine, Place, kernel_line_in, places_in

SAID = {
    "slots[5] = 50, but should be 66": Place("slots", (5,), found="50", should="66"),
    "table[1][0] = 0, but should still be -7": Place("table", (1, 0), found="0", should="-7"),
    "out[0] was not written, but should be 3": Place("out", (0,), found="not written", should="3"),
    "out[2] = -7 or 11, by what lay in memory, but should be 4": Place(
        "out", (2,), found="-7 or 11", should="4"
    ),
    "num_chunks = 3, but should be 2": Place("num_chunks", (), found="3", should="2"),
    "out: element 3 past its end = 9, but should still be -7": Place(
        "out", (), ": element 3 past its end", "9", "-7"
    ),
    "read of table[0][-1], which is no element of it": Place("table", (0, -1), access="read"),
    "write of table[1][0], a row that belongs to no request of the call": Place(
        "table", (1, 0), access="write"
    ),
    "  10 is page id 10 at offset 0: table[1][0], row 1, not row 2": Place(
        "table", (1, 0), is_source=True
    ),
}
SILENT = (
    "compute_out_cache_loc: the process died: SIGSEGV",
    "compute_out_cache_loc had not returned after 3 s",
    "compute_out_cache_loc raised ValueError, but should raise TypeError",
    "  request 0 (pool row 1), token 0 of 1: position 1 = page index 0, offset 1, page id 10",
    "  3 of 9 elements differ; guards intact; inputs intact",
)


@pytest.mark.parametrize(("line", "place"), SAID.items(), ids=range(len(SAID)))
def test_a_line_names_a_cell(line, place):
    assert places_in(line) == [place]


@pytest.mark.parametrize("line", SILENT, ids=range(len(SILENT)))
def test_a_line_names_no_cell(line):
    assert places_in(line) == []


@pytest.mark.parametrize(
    ("fault", "cells"),
    [
        ("clamped", ["out_cache_loc[1]", "req_to_pages[1][1]"]),
        ("one too many", ["out_cache_loc[3]", "out_cache_loc[2]", "out_cache_loc[2]"]),
        ("spill", ["req_to_page[1][0]", "req_to_page[1][0]"]),
        ("wrong stride", ["req_to_page[0][1]", "kv_indices_list[0][0]"]),
    ],
)
def test_cells_are_found_in_what_the_engine_says(found, fault, cells):
    assert [str(place) for place in places_in(found(fault).verdict)] == cells


def test_the_line_of_the_kernel_is_found(found):
    named = kernel_line_in(found("wrong stride").verdict)
    assert isinstance(named, KernelLine)
    assert (named.file, named.kernel) == ("row_stride_from_width.py", "write_slots_kernel")


def test_a_verdict_on_values_names_no_line(found):
    assert kernel_line_in(found("clamped").verdict) is None
