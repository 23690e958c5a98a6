"""Which cells are drawn, and what is said of them."""

import pytest

from pagefault.family import Dialect, Domain, case_from_json, families, family_named
from pagefault.grids import MOST_COLUMNS, MOST_ROWS, grids_of
from pagefault.places import places_in
from pagefault.stream import draw_cases

PLAIN = Dialect()


def drawn(text, verdict="", dialect=PLAIN):
    family, case = case_from_json(text)
    return {grid.name: grid for grid in grids_of(family, case, places_in(verdict), dialect)}


def cells(grid):
    return {
        (row, column): cell
        for row, row_cells in grid.rows
        if row is not None
        for column, cell in zip(grid.columns, row_cells)
        if cell is not None
    }


def test_a_wrong_slot_is_drawn_with_the_cell_that_it_came_from(found):
    shown = drawn(found("clamped").case, found("clamped").verdict)
    assert list(shown) == ["req_to_pages", "out_cache_loc"]
    table, slots = cells(shown["req_to_pages"]), cells(shown["out_cache_loc"])
    assert {cell: marked.marks for cell, marked in table.items()} == {
        (0, 0): ("read",),
        (0, 1): (),
        (1, 0): (),
        (1, 1): ("read", "source"),
    }
    assert [slots[0, i].text for i in range(3)] == ["24", "0", "3"]
    assert slots[0, 1].found == "24"
    assert slots[0, 1].marks == ("written", "wrong")


def test_a_read_outside_is_drawn_beside_the_table(found):
    shown = drawn(found("wrong stride").case, found("wrong stride").verdict)
    outside = cells(shown["req_to_page"])[0, 1]
    assert outside.marks == ("outside", "wrong")
    assert outside.access == "read"
    assert cells(shown["req_to_page"])[1, 0].marks == ("read",)


def test_what_is_returned_is_drawn_by_its_path(found):
    shown = drawn(found("wrong stride").case, found("wrong stride").verdict)
    returned = cells(shown["kv_indices_list[0]"])[0, 0]
    assert returned.marks == ("written", "wrong")
    assert returned.text == "10"


def test_a_table_that_is_written_holds_what_it_should_hold():
    case = """{"schema": 1, "family": "update_req_to_page", "req_pool_indices": [1],
     "begins": [1], "new_occupied_pages": [[9]], "req_to_page": [[3, 10], [17, 24]]}"""
    table = cells(drawn(case)["req_to_page"])
    assert table[1, 1].marks == ("written",)
    assert table[1, 1].text == "9"
    assert table[0, 0].text == "3"


def test_the_dialect_decides_what_cells_hold(found):
    clamped = found("clamped")
    shown = drawn(clamped.case, "out_cache_loc[0] = 1, but should be 24", Dialect(-1))
    assert cells(shown["out_cache_loc"])[0, 1].text == "-1"


def test_an_element_past_the_end_has_its_place_there(found):
    said = "out_cache_loc: element 1 past its end = 9, but should still be -7"
    slots = cells(drawn(found("clamped").case, said)["out_cache_loc"])
    assert slots[0, 4].marks == ("outside", "wrong")
    assert slots[0, 4].text == "-7"


WIDE = """{"schema": 1, "family": "compute_out_cache_loc", "req_pool_indices": [5, 900000],
 "input_lengths": [300, 1], "cache_start": [400, 7], "page_size": 1,
 "req_to_pages": {"num_rows": 1000000, "max_pages": 100000}}"""


def test_of_a_large_table_the_cells_around_what_matters_are_drawn():
    said = "out_cache_loc[250] = 1, but should be 2\n  1 is page id 0 at offset 1: "
    shown = drawn(WIDE, said + "req_to_pages[5][651], one column to the right")
    table = shown["req_to_pages"]
    columns = [column for column in table.columns if column is not None]
    rows = [row for row, _ in table.rows if row is not None]
    assert len(columns) == MOST_COLUMNS
    assert {650, 651, 652} <= set(columns)
    assert len(rows) <= MOST_ROWS
    assert {5, 900000} <= set(rows)
    assert table.columns[0] is None
    assert table.columns[-1] is None
    assert table.left_out > 280
    assert 250 in shown["out_cache_loc"].columns


def test_a_table_without_columns_is_not_drawn():
    case = """{"schema": 1, "family": "compute_out_cache_loc", "req_pool_indices": [0],
     "input_lengths": [1], "cache_start": [0], "page_size": 1,
     "req_to_pages": {"num_rows": 1, "max_pages": 0}}"""
    assert drawn(case) == {}


def test_a_place_in_no_tensor_of_the_call_is_left_out(found):
    assert list(drawn(found("clamped").case, "scratch[9] = 1, but should be 2")) == ["req_to_pages"]


def test_a_grid_as_text_marks_what_is_wrong(found):
    shown = drawn(found("clamped").case, found("clamped").verdict)
    assert shown["out_cache_loc"].text() == "     0         1    2\n  24 w  24≠0 w !  3 w"
    assert shown["req_to_pages"].text() == (
        "         0      1\nrow 0  3 r     10\nrow 1   17  24 rs"
    )


@pytest.mark.parametrize("name", families())
def test_every_family_can_be_drawn(name):
    family = family_named(name)
    drawn_names = set()

    def draw(case):
        drawn_names.update(grid.name for grid in grids_of(family, case, [], PLAIN))

    draw_cases(family.strategy(Domain()), 20, 1, draw)
    assert drawn_names == set(family.case_type.tables())
