"""The slot of one position, worked out by hand."""

import pytest

from pagefault.oracle.slots import slot_of_position

ROW = [5, 3]

# Pages of 4: page 5 has the slots 20 … 23, page 3 has 12 … 15, and position 8 is past the row.
PAGES_OF_4 = {
    "first position": (0, 20),  # 5 * 4 + 0
    "page boundary -1": (3, 23),  # 5 * 4 + 3
    "page boundary +0": (4, 12),  # 3 * 4 + 0
    "page boundary +1": (5, 13),  # 3 * 4 + 1
    "row end -1": (7, 15),  # 3 * 4 + 3
    "row end +0": (8, 0),
    "row end +1": (9, 0),
    "far past the row": (2**40, 0),
    "negative": (-1, 0),  # Not column -1, which Python would take for the last one.
    "negative by a page": (-4, 0),
}
# Pages of 1: a slot is a page id.
PAGES_OF_1 = {
    "first position": (0, 5),
    "last position": (1, 3),
    "row end +0": (2, 0),
}
# Pages of 3: page 5 has the slots 15 … 17, page 3 has 9 … 11.
PAGES_OF_3 = {
    "page boundary -1": (2, 17),  # 5 * 3 + 2
    "page boundary +0": (3, 9),  # 3 * 3 + 0
    "row end -1": (5, 11),  # 3 * 3 + 2
    "row end +0": (6, 0),
}


@pytest.mark.parametrize(
    ("page_size", "position", "slot"),
    [
        pytest.param(page_size, position, slot, id=f"pages of {page_size}: {name}")
        for page_size, table in ((4, PAGES_OF_4), (1, PAGES_OF_1), (3, PAGES_OF_3))
        for name, (position, slot) in table.items()
    ],
)
def test_a_position_has_the_slot_worked_out_by_hand(page_size, position, slot):
    assert slot_of_position(position, ROW, page_size) == slot


def test_a_row_without_columns_diverts_every_position():
    assert [slot_of_position(position, [], 4) for position in (0, 1, 5)] == [0, 0, 0]


def test_slots_are_not_cut_to_32_bits():
    # (2**31 - 1) * 2**31 + (2**31 - 1) = (2**31 - 1) * (2**31 + 1) = 2**62 - 1
    assert slot_of_position(2**31 - 1, [2**31 - 1], 2**31) == 2**62 - 1


# A row of a hole, the dummy page and page 6, in pages of 2, and positions 1, 3, 5 and 6: the
# second token of each page, and the first past the row.
@pytest.mark.parametrize(
    ("holes", "overflow_slot", "slots"),
    [
        pytest.param("divert", 0, [0, 1, 13, 0], id="divert"),  # 0 * 2 + 1, 6 * 2 + 1
        pytest.param("divert", -1, [-1, 1, 13, -1], id="divert to -1"),
        pytest.param("divert page 0 too", 0, [0, 0, 13, 0], id="divert page 0 too"),
        pytest.param("divert page 0 too", -1, [-1, -1, 13, -1], id="divert page 0 too, to -1"),
        pytest.param("multiply", 0, [-1, 1, 13, 0], id="multiply"),  # -1 * 2 + 1
        pytest.param("multiply", 99, [-1, 1, 13, 99], id="multiply, overflow to 99"),
    ],
)
def test_dialects_differ_in_holes_page_0_and_overflow_alone(holes, overflow_slot, slots):
    found = [
        slot_of_position(position, [-1, 0, 6], 2, overflow_slot, holes) for position in (1, 3, 5, 6)
    ]
    assert found == slots


def test_where_holes_are_absent_the_dummy_page_is_multiplied():
    assert slot_of_position(1, [0], 2, holes="absent") == 1
