"""Page tables after an update, worked out by hand."""

import pytest

from pagefault.oracle.req_to_page import (
    ClampedRequest,
    PageWrite,
    clamped_requests,
    page_writes,
    update_block_table,
    update_req_to_page,
)

TABLE = [[3, 4, 5], [6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize(
    ("rows", "begins", "page_ids", "table"),
    [
        pytest.param([1], [0], [[50]], [[3, 4, 5], [50, 7, 8], [9, 10, 11]], id="first column"),
        pytest.param([1], [2], [[50]], [[3, 4, 5], [6, 7, 50], [9, 10, 11]], id="last column"),
        pytest.param([1], [3], [[50]], TABLE, id="row end +0"),
        pytest.param([1], [4], [[50]], TABLE, id="row end +1"),
        # 51 would be [1][3], which is no cell, and not [2][0].
        pytest.param(
            [1], [2], [[50, 51]], [[3, 4, 5], [6, 7, 50], [9, 10, 11]], id="across the row end"
        ),
        pytest.param(
            [1], [0], [[50, 51, 52]], [[3, 4, 5], [50, 51, 52], [9, 10, 11]], id="whole row"
        ),
        pytest.param(
            [1], [0], [[50, 51, 52, 53]], [[3, 4, 5], [50, 51, 52], [9, 10, 11]], id="row and more"
        ),
        # What the first request can't keep is still its own.
        pytest.param(
            *([2, 0], [2, 0], [[50, 51], [52]]),
            [[52, 4, 5], [6, 7, 8], [9, 10, 50]],
            id="first request clamped",
        ),
        pytest.param(
            *([2, 0], [1, 1], [[], [50]]),
            [[3, 50, 5], [6, 7, 8], [9, 10, 11]],
            id="first request has no pages",
        ),
        pytest.param(
            *([2, 1, 0], [0, 0, 0], [[50], [], [51]]),
            [[51, 4, 5], [6, 7, 8], [50, 10, 11]],
            id="middle request has no pages",
        ),
        pytest.param(
            *([2, 0], [0, 0], [[50], []]),
            [[3, 4, 5], [6, 7, 8], [50, 10, 11]],
            id="last request has no pages",
        ),
        pytest.param([1, 2], [0, 0], [[], []], TABLE, id="no pages"),
        pytest.param([], [], [], TABLE, id="no requests"),
        pytest.param(
            *([1, 1], [2, 0], [[50], [51]]),
            [[3, 4, 5], [51, 7, 50], [9, 10, 11]],
            id="two requests of one row",
        ),
        # Holes and the dummy page are stored as they are.
        pytest.param([1], [1], [[-1, 0]], [[3, 4, 5], [6, -1, 0], [9, 10, 11]], id="hole"),
        pytest.param([0], [0], [[50]], [[50, 4, 5], [6, 7, 8], [9, 10, 11]], id="padding row"),
    ],
)
def test_a_table_holds_the_pages_worked_out_by_hand(rows, begins, page_ids, table):
    flat = [page_id for ids in page_ids for page_id in ids]
    counts = [len(ids) for ids in page_ids]
    assert update_req_to_page(TABLE, rows, flat, counts, begins) == table
    assert update_block_table(TABLE, rows, begins, page_ids) == table


def test_the_table_that_was_given_keeps_its_values():
    table = [[3, 4]]
    update_req_to_page(table, [0], [9], [1], [0])
    assert table == [[3, 4]]


@pytest.mark.parametrize("table", [[], [[], []]], ids=["no rows", "no columns"])
def test_an_empty_table_stays_empty(table):
    rows = [0] * len(table[:1])
    assert update_req_to_page(table, rows, [9] * len(rows), [1] * len(rows), [0] * len(rows)) == (
        table
    )


def test_the_cells_that_may_be_written_are_those_of_pages_that_fit():
    # Request 0 owns 50, 51 and keeps 50; request 1 owns nothing; request 2 owns 52.
    assert page_writes(3, [2, 0, 1], [50, 51, 52], [2, 0, 1], [2, 0, 1]) == [
        PageWrite(2, 2, 50),
        PageWrite(1, 1, 52),
    ]


@pytest.mark.parametrize(
    ("size", "begin", "is_clamped"),
    [
        pytest.param(1, 2, False, id="last column"),  # 2 + 1 = 3
        pytest.param(1, 3, True, id="row end"),  # 3 + 1 > 3
        pytest.param(3, 0, False, id="whole row"),
        pytest.param(4, 0, True, id="row and more"),
        pytest.param(0, 3, False, id="no pages at the row end"),
        pytest.param(0, 9, False, id="no pages past the row end"),
    ],
)
def test_a_request_is_clamped_where_its_pages_run_past_the_row(size, begin, is_clamped):
    clamped = [ClampedRequest("r", begin, size, 3)] if is_clamped else []
    assert clamped_requests(3, ["r"], [size], [begin]) == clamped


def test_clamped_requests_come_in_batch_order():
    assert clamped_requests(2, ["a", "b", "c"], [1, 2, 3], [2, 0, 0]) == [
        ClampedRequest("a", 2, 1, 2),
        ClampedRequest("c", 0, 3, 2),
    ]
