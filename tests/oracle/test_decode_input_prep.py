"""The inputs of a decode step, worked out by hand."""

import pytest

from pagefault.oracle.decode_input_prep import fused_decode_input_prep

TABLE = [[3, 5], [7, 9], [20, -1]]


@pytest.mark.parametrize(
    ("rows", "cached", "length", "slots", "positions", "seq_lens"),
    [
        # Request 0 is row 1, which has 3 cached tokens: 7 * 4 + 3 | 9 * 4 + 0
        pytest.param([1], [0, 3, 0], 2, [31, 36], [3, 4], [5], id="length of the row, not of i"),
        # Position 7 is the row's last: 9 * 4 + 3
        pytest.param([1], [0, 7, 0], 1, [39], [7], [8], id="up to the row end"),
        # Positions go on where slots are diverted.
        pytest.param([1], [0, 7, 0], 3, [39, 0, 0], [7, 8, 9], [10], id="across the row end"),
        pytest.param([1], [0, 8, 0], 1, [0], [8], [9], id="from the row end on"),
        pytest.param([1], [0, 9, 0], 1, [0], [9], [10], id="from one past the row end on"),
        pytest.param([1, 0], [6, 3, 0], 0, [], [], [3, 6], id="no tokens, but lengths"),
        pytest.param([], [6, 3, 0], 2, [], [], [], id="no requests"),
        # 20 * 4 + 3 | hole || 3 * 4 + 0, 3 * 4 + 1
        pytest.param([2, 0], [0, 9, 3], 2, [83, 0, 12, 13], [3, 4, 0, 1], [5, 2], id="hole"),
        # Both start at the row's length, and neither at the other's end: 9 * 4 + 1
        pytest.param([1, 1], [0, 5, 0], 1, [37, 37], [5, 5], [6, 6], id="two of one row"),
        # Position 2**31 - 1 is the last that fits 32 bits.
        pytest.param(
            *([1], [0, 2**31 - 1, 0], 2, [0, 0], [2**31 - 1, 2**31], [2**31 + 1]),
            id="past 32 bits",
        ),
    ],
)
def test_a_decode_step_is_what_was_worked_out_by_hand(
    rows, cached, length, slots, positions, seq_lens
):
    found = fused_decode_input_prep(rows, cached, length, TABLE, page_size=4)
    assert found == (slots, positions, seq_lens)


@pytest.mark.parametrize(
    ("page_size", "slots"),
    [
        pytest.param(1, [9, 0, 0], id="pages of 1"),  # Position 1 is page id 9; row end at 2.
        pytest.param(3, [22, 23, 27], id="pages of 3"),  # 7 * 3 + 1, 7 * 3 + 2 | 9 * 3 + 0
    ],
)
def test_pages_may_have_any_size(page_size, slots):
    found = fused_decode_input_prep([1], [0, 1, 0], 3, TABLE, page_size)
    assert found == (slots, [1, 2, 3], [4])


@pytest.mark.parametrize(
    ("dialect", "slots"),
    [
        pytest.param({"overflow_slot": -1}, [83, -1, 39, -1], id="overflow to -1"),
        # -1 * 4 + 0
        pytest.param({"holes": "multiply"}, [83, -4, 39, 0], id="holes multiplied"),
    ],
)
def test_a_dialect_changes_slots_alone(dialect, slots):
    found = fused_decode_input_prep([2, 1], [0, 7, 3], 2, TABLE, 4, **dialect)
    assert found == (slots, [3, 4, 7, 8], [5, 9])
