"""Values of update_req_to_page and update_block_table."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pagefault.kernels import req_to_page as module
from pagefault.kernels.req_to_page import update_block_table, update_req_to_page

INT64_MAX = 2**63 - 1


def numbered_table(num_rows, max_pages, device, pitch=0):
    """Return a table of distinct negative cells, and the memory that it lies in."""
    cells = -torch.arange(1, num_rows * (max_pages + pitch) + 1, dtype=torch.int32)
    memory = cells.view(num_rows, max_pages + pitch).to(device)
    return memory[:, :max_pages], memory


def written(memory, writes):
    """Return the memory as lists, with the page ids of each (row, column, ids) in place."""
    rows = memory.tolist()
    for row, column, page_ids in writes:
        rows[row][column : column + len(page_ids)] = page_ids
    return rows


def update(device, table, req_pool_indices, page_ids, counts, starts, dtype=torch.int64):
    update_req_to_page(
        table,
        torch.tensor(req_pool_indices, dtype=dtype, device=device),
        torch.tensor(page_ids, dtype=torch.int32, device=device),
        torch.tensor(counts, dtype=dtype, device=device),
        torch.tensor(starts, dtype=dtype, device=device),
    )


def step(req_pool_indices, begins, page_ids, request_ids=None, sizes=None):
    return SimpleNamespace(
        request_ids=request_ids or [f"r{i}" for i in range(len(begins))],
        request_pool_indices=req_pool_indices,
        sizes=[len(ids) for ids in page_ids] if sizes is None else sizes,
        begins=begins,
        new_occupied_pages=page_ids,
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("pitch", [0, 3], ids=["dense", "pitched"])
def test_ids_go_to_their_rows_and_nowhere_else(device, dtype, pitch):
    table, memory = numbered_table(5, 6, device, pitch)
    expected = written(memory, [(3, 1, [10, -1]), (1, 0, [12]), (4, 5, [13])])
    update(device, table, [3, 2, 1, 4], [10, -1, 12, 13], [2, 0, 1, 1], [1, 3, 0, 5], dtype)
    assert memory.tolist() == expected


def test_id_past_the_width_is_dropped(device):
    table, memory = numbered_table(4, 3, device, pitch=2)
    expected = written(memory, [(1, 2, [10]), (3, 0, [14])])
    update(device, table, [1, 2, 3], [10, 11, 12, 13, 14], [2, 2, 1], [2, 3, 0])
    assert memory.tolist() == expected


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([1000, 3], id="one_long_request"),
        pytest.param([1] * 700, id="one_page_each"),
        pytest.param([0] * 1030 + [300] + [0] * 65 + [7], id="many_empty_requests_first"),
    ],
)
def test_totals_over_several_tiles(device, counts):
    table, memory = numbered_table(len(counts) + 1, 1010, device)
    page_ids = list(range(5000, 5000 + sum(counts)))
    writes = []
    for req_idx, count in enumerate(counts):
        first = sum(counts[:req_idx])
        writes.append((req_idx + 1, req_idx % 9, page_ids[first : first + count]))
    expected = written(memory, writes)
    rows = range(1, len(counts) + 1)
    update(device, table, list(rows), page_ids, counts, [i % 9 for i in range(len(counts))])
    assert memory.tolist() == expected


@pytest.mark.parametrize("row", [-1, 5, 2**40, -(2**63), INT64_MAX], ids=str)
def test_ids_of_a_row_outside_the_pool_are_consumed(device, row):
    table, memory = numbered_table(5, 4, device)
    expected = written(memory, [(2, 0, [12])])
    update(device, table, [row, 2], [10, 11, 12], [2, 1], [0, 0])
    assert memory.tolist() == expected


def test_negative_columns_are_dropped_one_by_one(device):
    table, memory = numbered_table(5, 4, device)
    expected = written(memory, [(1, 0, [11])])
    update(device, table, [1, 2, 3], [10, 11, 12, 13], [2, 1, 1], [-1, -(2**63), INT64_MAX])
    assert memory.tolist() == expected


def test_start_that_wraps_writes_nothing(device):
    table, memory = numbered_table(3, 4, device)
    expected = memory.tolist()
    update(device, table, [1], list(range(300)), [300], [INT64_MAX - 2])
    assert memory.tolist() == expected


def test_counts_past_the_ids_read_only_the_ids(device):
    table, memory = numbered_table(4, 400, device)
    expected = written(memory, [(2, 1, list(range(300)))])
    update(device, table, [1, 2, 3], list(range(300)), [-9, INT64_MAX, INT64_MAX], [0, 1, 0])
    assert memory.tolist() == expected


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)], ids=str)
def test_table_without_cells_is_left_alone(device, shape):
    table = torch.zeros(shape, dtype=torch.int32, device=device)
    update(device, table, [0], [1, 2], [2], [0])


def test_nothing_to_write(device):
    table, memory = numbered_table(3, 4, device)
    expected = memory.tolist()
    update(device, table, [], [], [], [])
    update(device, table, [1], [], [0], [0])
    assert memory.tolist() == expected


@pytest.mark.parametrize("device_form", ["str", "torch.device"])
def test_block_table_of_one_step(device, device_form):
    table, memory = numbered_table(5, 4, device, pitch=1)
    expected = written(memory, [(4, 1, [7, -1]), (1, 3, [8])])
    wanted = str(device) if device_form == "str" else device
    update_block_table(step([4, 2, 1], [1, 0, 3], [[7, -1], [], [8]]), wanted, table)
    assert memory.tolist() == expected


def test_block_table_takes_numpy_integers(device):
    table, memory = numbered_table(3, 2, device)
    expected = written(memory, [(2, 1, [7])])
    far = np.int32(2**31 - 1)
    forward_op = step(
        np.array([2, 1]), [np.int32(1), far], [np.array([7], dtype=np.int32), [np.int64(9)]]
    )
    update_block_table(forward_op, device, table)
    assert memory.tolist() == expected


def test_block_table_takes_any_sequences(device):
    table, memory = numbered_table(4, 3, device)
    expected = written(memory, [(2, 1, [7, -(2**31)]), (3, 0, [2**31 - 1])])
    forward_op = step((2, 3, 1), range(1, -2, -1), ([7, -(2**31)], (2**31 - 1,), []))
    forward_op.begins = (1, 0, 0)
    update_block_table(forward_op, device, table)
    assert memory.tolist() == expected


def test_clamped_request_is_logged_and_disturbs_no_other(device, caplog):
    table, memory = numbered_table(6, 4, device)
    expected = written(memory, [(1, 3, [10]), (3, 0, [30, 31]), (5, 3, [50])])
    forward_op = step(
        [1, 2, 3, 4, 5],
        [3, 9, 0, 9, 3],
        [[10, 11], [20], [30, 31], [], [50]],
        request_ids=["a", ("b", 2), 33, "d", "e"],
    )
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        update_block_table(forward_op, device, table)
    assert memory.tolist() == expected
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    first, second = (record.getMessage() for record in caplog.records)
    assert "request a:" in first
    assert "begin 3 and size 2 are past max_pages 4" in first
    assert "request ('b', 2):" in second
    assert "begin 9 and size 1 are past max_pages 4" in second


@pytest.mark.parametrize(
    "forward_op",
    [
        pytest.param(step([], [], []), id="no_requests"),
        pytest.param(step([1, 2], [0, 9], [[], []]), id="no_ids"),
        pytest.param(step([1], [4], [[9]]), id="all_clamped"),
    ],
)
def test_nothing_left_launches_nothing(device, forward_op, monkeypatch):
    table, memory = numbered_table(3, 4, device)
    expected = memory.tolist()
    for name in ("update_req_to_page_kernel", "update_from_packed_kernel"):
        monkeypatch.setattr(module, name, None)
    update_block_table(forward_op, device, table)
    assert memory.tolist() == expected


def test_block_table_on_a_cpu_where_nothing_interprets(monkeypatch):
    table, memory = numbered_table(6, 4, torch.device("cpu"), pitch=1)
    expected = written(memory, [(1, 3, [10]), (3, 0, [30, 31]), (5, 3, [50])])
    monkeypatch.setattr(module, "can_launch", lambda kernel, tensor: False)
    forward_op = step([1, 2, 3, 5], [3, 0, 0, 3], [[10, 11], [], [30, 31], [50]])
    update_block_table(forward_op, "cpu", table)
    assert memory.tolist() == expected


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"request_pool_indices": [1]}, ValueError, "request_pool_indices has 1"),
        ({"request_ids": ["a", "b", "c"]}, ValueError, "request_pool_indices has 2"),
        ({"sizes": [2, 1, 0]}, ValueError, "sizes has 3"),
        ({"begins": []}, ValueError, "begins has 0"),
        ({"new_occupied_pages": [[5, 6]]}, ValueError, "new_occupied_pages has 1"),
        ({"request_pool_indices": [1, 3]}, ValueError, r"indices\[1\] is 3, .* 0 \.\.\. 2"),
        ({"request_pool_indices": [-1, 2]}, ValueError, r"indices\[0\] is -1"),
        ({"request_pool_indices": [1, True]}, TypeError, r"indices\[1\] is True"),
        ({"begins": [0, -4]}, ValueError, r"begins\[1\] is -4"),
        ({"begins": [0, 2**31]}, ValueError, r"begins\[1\] is 2147483648"),
        ({"begins": [0.0, 1]}, TypeError, r"begins\[0\] is 0\.0"),
        ({"sizes": [2, 2]}, ValueError, r"sizes\[1\] is 2, but must be 1"),
        ({"sizes": [2, -1]}, ValueError, r"sizes\[1\] is -1"),
        ({"sizes": [2, True]}, TypeError, r"sizes\[1\] is True"),
        ({"new_occupied_pages": [[5, 6], [2**31]]}, ValueError, r"pages\[1\]\[0\] is 2147483648"),
        ({"new_occupied_pages": [[5, -(2**31) - 1], [7]]}, ValueError, r"pages\[0\]\[1\] is -214"),
        ({"new_occupied_pages": [[5, 6], [False]]}, TypeError, r"pages\[1\]\[0\] is False"),
        ({"new_occupied_pages": [[5, "6"], [7]]}, TypeError, r"pages\[0\]\[1\] is '6'"),
        ({"new_occupied_pages": [[5, 6.0], [7]]}, TypeError, r"pages\[0\]\[1\] is 6\.0"),
        ({"new_occupied_pages": [[5, [6]], [7]]}, TypeError, r"pages\[0\]\[1\] is \[6\]"),
        ({"new_occupied_pages": [[5, 6], [None]]}, TypeError, r"pages\[1\]\[0\] is None"),
        ({"new_occupied_pages": [[5, 6], torch.tensor([7])]}, TypeError, r"\[1\]\[0\] is tensor"),
        # As many lists and numbers as there should be, and one of them inside another.
        ({"new_occupied_pages": [5, [[6]]], "sizes": [1, 1]}, TypeError, r"pages\[0\] is 5"),
        (
            {"request_pool_indices": [[1], 2], "new_occupied_pages": [[5], 6], "sizes": [1, 1]},
            TypeError,
            r"request_pool_indices\[0\] is \[1\]",
        ),
        ({"request_pool_indices": [1, [2]]}, TypeError, r"indices\[1\] is \[2\]"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_bad_step_is_refused_and_writes_nothing(device, change, error, message):
    table, memory = numbered_table(3, 4, device)
    expected = memory.tolist()
    forward_op = step([1, 2], [0, 1], [[5, 6], [7]])
    vars(forward_op).update(change)
    with pytest.raises(error, match=message):
        update_block_table(forward_op, device, table)
    assert memory.tolist() == expected


def test_vectors_of_a_step_may_be_arrays(device):
    table, memory = numbered_table(4, 4, device)
    expected = written(memory, [(3, 0, [5, 6]), (1, 1, [7])])
    sizes = np.array([2, 1])
    update_block_table(
        step(np.array([3, 1]), np.array([0, 1]), [[5, 6], [7]], None, sizes), device, table
    )
    assert memory.tolist() == expected
    with pytest.raises(ValueError, match=r"begins\[0\] is -1"):
        update_block_table(step([1], [-1], [[]], None, np.array([0])), device, table)


@pytest.mark.parametrize(
    ("wanted", "error"),
    [("meta", ValueError), ("cuda:7", ValueError), ("no device", ValueError), (0, TypeError)],
    ids=["meta", "absent", "unknown", "int"],
)
@pytest.mark.parametrize("batch_size", [0, 1], ids=["empty_step", "one_request"])
def test_other_device_than_the_tables_is_refused(device, wanted, error, batch_size):
    table, _ = numbered_table(3, 4, device)
    forward_op = step([1] * batch_size, [0] * batch_size, [[5]] * batch_size)
    with pytest.raises(error, match="device is"):
        update_block_table(forward_op, wanted, table)
