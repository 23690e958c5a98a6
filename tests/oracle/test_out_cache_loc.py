"""Slots of new tokens, worked out by hand."""

import pytest

from pagefault.oracle.out_cache_loc import compute_out_cache_loc, compute_out_cache_loc_uniform

# Row 0 is the padding row; ids are so far apart that no slot belongs to two pages.
TABLE = [[3, 5], [7, 9], [20, -1], [0, 11]]


@pytest.mark.parametrize(
    ("rows", "lengths", "starts", "page_size", "slots"),
    [
        # 7 * 4 + 2, 7 * 4 + 3 | 9 * 4 + 0
        pytest.param([1], [3], [2], 4, [30, 31, 36], id="across a page boundary"),
        # 9 * 4 + 3 | past the row, twice
        pytest.param([1], [3], [7], 4, [39, 0, 0], id="across the row end"),
        pytest.param([1], [1], [7], 4, [39], id="up to the row end"),
        pytest.param([1], [2], [8], 4, [0, 0], id="from the row end on"),
        pytest.param([1], [2], [9], 4, [0, 0], id="from one past the row end on"),
        # Row 0 is looked up like any other: 3 * 4 + 0
        pytest.param([0], [1], [0], 4, [12], id="padding row"),
        # 20 * 4 + 3 | hole, twice
        pytest.param([2], [3], [3], 4, [83, 0, 0], id="into a hole"),
        # 0 * 4 + 2, 0 * 4 + 3 | 11 * 4 + 0
        pytest.param([3], [3], [2], 4, [2, 3, 44], id="from the dummy page on"),
        pytest.param([1, 0], [2, 2], [0, 0], 1, [7, 9, 3, 5], id="pages of 1"),
        # 9 * 3 + 2 | past the row || 3 * 3 + 2 | 5 * 3 + 0
        pytest.param([1, 0], [2, 2], [5, 2], 3, [29, 0, 11, 15], id="pages of 3"),
        pytest.param([1, 0], [0, 1], [3, 4], 4, [20], id="first request has no tokens"),
        pytest.param([1, 0, 2], [1, 0, 1], [0, 9, 0], 4, [28, 80], id="middle has no tokens"),
        pytest.param([1, 0], [1, 0], [4, 0], 4, [36], id="last request has no tokens"),
        pytest.param([1, 0], [0, 0], [4, 0], 4, [], id="no tokens"),
        pytest.param([], [], [], 4, [], id="no requests"),
        # 9 * 4 + 0, 9 * 4 + 1 | 7 * 4 + 0
        pytest.param([1, 1], [2, 1], [4, 0], 4, [36, 37, 28], id="two requests of one row"),
        # One request's overflow says nothing of the next one's: 5 * 4 + 1
        pytest.param([1, 0], [1, 1], [8, 5], 4, [0, 21], id="overflow, then none"),
    ],
)
def test_new_tokens_have_the_slots_worked_out_by_hand(rows, lengths, starts, page_size, slots):
    assert compute_out_cache_loc(rows, lengths, starts, TABLE, page_size) == slots


@pytest.mark.parametrize(
    ("rows", "length", "starts", "slots"),
    [
        # 7 * 4 + 3 | 9 * 4 + 0 || 5 * 4 + 3 | past the row
        pytest.param([1, 0], 2, [3, 7], [31, 36, 23, 0], id="two tokens each"),
        pytest.param([1, 0], 1, [8, 0], [0, 12], id="overflow, then none"),
        pytest.param([1, 0], 0, [3, 7], [], id="no tokens"),
        pytest.param([], 3, [], [], id="no requests"),
    ],
)
def test_a_uniform_batch_has_the_slots_worked_out_by_hand(rows, length, starts, slots):
    assert compute_out_cache_loc_uniform(rows, length, starts, TABLE, page_size=4) == slots


# Row 2 at positions 3 and 4, row 3 at 2, row 1 at 8: page 20, a hole, page 0, overflow.
@pytest.mark.parametrize(
    ("dialect", "slots"),
    [
        pytest.param({}, [83, 0, 2, 0], id="ours"),
        pytest.param({"overflow_slot": -1}, [83, -1, 2, -1], id="overflow to -1"),
        # -1 * 4 + 0
        pytest.param({"holes": "multiply"}, [83, -4, 2, 0], id="holes multiplied"),
        pytest.param({"holes": "divert page 0 too"}, [83, 0, 0, 0], id="page 0 diverted"),
        pytest.param(
            {"holes": "divert page 0 too", "overflow_slot": -1},
            [83, -1, -1, -1],
            id="page 0 diverted to -1",
        ),
    ],
)
def test_a_dialect_reaches_both_forms(dialect, slots):
    assert compute_out_cache_loc([2, 3, 1], [2, 1, 1], [3, 2, 8], TABLE, 4, **dialect) == slots
    rows, starts = [2, 2, 3, 1], [3, 4, 2, 8]
    assert compute_out_cache_loc_uniform(rows, 1, starts, TABLE, 4, **dialect) == slots


def test_a_table_without_columns_diverts_every_token():
    assert compute_out_cache_loc([1, 0], [1, 2], [0, 5], [[], []], page_size=4) == [0, 0, 0]


def test_lists_of_different_length_are_no_batch():
    with pytest.raises(ValueError):
        compute_out_cache_loc([1, 0], [1], [0, 5], TABLE, page_size=4)
