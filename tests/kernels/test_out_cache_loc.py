"""Values of compute_out_cache_loc and compute_out_cache_loc_uniform."""

import pytest
import torch

from pagefault.kernels.out_cache_loc import (
    compute_out_cache_loc,
    compute_out_cache_loc_uniform,
)

UNTOUCHED = -77
INT64_MAX = 2**63 - 1
DTYPES = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])


def tagged_table(num_rows, max_pages, device):
    """Return a table in which every cell has another page id, none of them 0."""
    tags = torch.arange(num_rows * max_pages, dtype=torch.int32) * 3 + 5
    return tags.view(num_rows, max_pages).to(device)


def slots_of(table, req_pool_indices, lens, starts, page_size):
    rows = table.tolist()
    slots = []
    for row, num_new, start in zip(req_pool_indices, lens, starts):
        for position in range(start, start + num_new):
            page_idx, offset = divmod(position, page_size)
            page_id = rows[row][page_idx] if page_idx < table.shape[1] else -1
            slots.append(page_id * page_size + offset if page_id >= 0 else 0)
    return slots


def compute(device, table, req_pool_indices, lens, starts, page_size, numel, dtype=torch.int64):
    """Return what lies in an output of numel elements, and check what lies around it."""
    memory = torch.full((numel + 20,), UNTOUCHED, dtype=dtype, device=device)
    compute_out_cache_loc(
        memory[10 : 10 + numel],
        torch.tensor(req_pool_indices, dtype=torch.int64, device=device),
        torch.tensor(lens, dtype=torch.int64, device=device),
        torch.tensor(starts, dtype=torch.int64, device=device),
        table,
        page_size,
    )
    found = memory.tolist()
    assert found[:10] == found[-10:] == [UNTOUCHED] * 10
    return found[10:-10]


@pytest.mark.parametrize("page_size", [1, 3, 7, 16])
def test_slots_follow_one_request_after_another(device, page_size):
    table = tagged_table(6, 40, device)
    batch = [3, 1, 5, 3], [5, 0, 17, 2], [4, 9, 0, 20]
    expected = slots_of(table, *batch, page_size)
    assert compute(device, table, *batch, page_size, numel=24) == expected


def test_a_batch_worked_out_by_hand(device):
    table = torch.tensor([[0, 0], [9, -1], [7, 3]], dtype=torch.int32, device=device)
    found = compute(device, table, [2, 1], [5, 3], [2, 1], page_size=3, numel=9)
    #    page 7 | page 3    | overflow  | page 9 | hole
    assert found == [23, 9, 10, 11, 0, 28, 29, 0, UNTOUCHED]


@pytest.mark.parametrize(
    "lens",
    [
        pytest.param([700, 1, 900], id="long_requests"),
        pytest.param([1] * 600, id="decode"),
        pytest.param([0] * 1100 + [300] + [0] * 70 + [5], id="many_empty_requests_first"),
        pytest.param([256, 256, 0, 256], id="requests_as_long_as_a_tile"),
        pytest.param([i % 7 for i in range(1500)], id="more_requests_than_are_skipped_at_once"),
    ],
)
def test_totals_over_several_tiles(device, lens):
    table = tagged_table(9, 70, device)
    req_pool_indices = [i * 5 % 9 for i in range(len(lens))]
    starts = [i * 11 % 90 for i in range(len(lens))]
    expected = slots_of(table, req_pool_indices, lens, starts, 16)
    found = compute(device, table, req_pool_indices, lens, starts, 16, numel=sum(lens) + 300)
    assert found == expected + [UNTOUCHED] * 300


@DTYPES
def test_every_vector_has_its_own_dtype(device, dtype):
    other = torch.int32 if dtype is torch.int64 else torch.int64
    table = tagged_table(4, 8, device)
    out_cache_loc = torch.zeros(5, dtype=dtype, device=device)
    compute_out_cache_loc(
        out_cache_loc,
        torch.tensor([3, 1], dtype=other, device=device),
        torch.tensor([3, 2], dtype=dtype, device=device),
        torch.tensor([6, 0], dtype=other, device=device),
        table,
        4,
    )
    assert out_cache_loc.tolist() == slots_of(table, [3, 1], [3, 2], [6, 0], 4)


def test_gap_between_rows_is_never_looked_up(device):
    wide = torch.full((4, 11), 1000, dtype=torch.int32, device=device)
    table = wide[:, 2:7]
    table.copy_(tagged_table(4, 5, device))
    batch = [1, 3], [12, 6], [0, 7]
    found = compute(device, table, *batch, 2, numel=18)
    assert found == slots_of(table, *batch, 2)


def test_table_of_one_column_may_have_any_stride(device):
    table = torch.arange(40, dtype=torch.int32, device=device).view(4, 10)[:, 4:5]
    batch = [1, 3], [3, 2], [1, 0]
    found = compute(device, table.T.clone().T, *batch, 3, numel=5)
    assert found == compute(device, table, *batch, 3, numel=5) == [43, 44, 0, 102, 103]


@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (0, 0)], ids=str)
def test_table_without_cells_gives_dummy_slots(device, shape):
    table = torch.zeros(shape, dtype=torch.int32, device=device)
    assert compute(device, table, [0, 0], [2, 1], [0, 5], 4, numel=3) == [0, 0, 0]


def test_slot_past_32_bits_is_not_wrapped(device):
    table = torch.tensor([[0], [2**31 - 1]], dtype=torch.int32, device=device)
    page_size = 2**31 - 1
    found = compute(device, table, [1], [2], [page_size - 2], page_size, numel=2)
    assert found == [(2**31 - 1) * page_size + offset for offset in (2**31 - 3, 2**31 - 2)]


def test_empty_batch_writes_nothing(device):
    table = tagged_table(2, 2, device)
    assert compute(device, table, [], [], [], 4, numel=3) == [UNTOUCHED] * 3
    assert compute(device, table, [1], [3], [0], 4, numel=0) == []


@pytest.mark.parametrize(
    ("lens", "owned"),
    [
        pytest.param([INT64_MAX, INT64_MAX], [0] * 300, id="sum_past_64_bits"),
        pytest.param([-5, 4, -(2**63)], [1] * 4, id="negative_counts_as_0"),
        pytest.param([290, 2**40], [0] * 290 + [1] * 10, id="longer_than_the_output"),
    ],
)
def test_any_lengths_stay_inside_the_output(device, lens, owned):
    table = tagged_table(4, 200, device)
    starts = [0, 100, 200][: len(lens)]
    places = [owned[:k].count(owned[k]) for k in range(len(owned))]
    expected = [slots_of(table, [i + 1], [1], [starts[i] + k], 2)[0] for i, k in zip(owned, places)]
    req_pool_indices = [1, 2, 3][: len(lens)]
    found = compute(device, table, req_pool_indices, lens, starts, 2, numel=300)
    assert found == expected + [UNTOUCHED] * (300 - len(owned))


@pytest.mark.parametrize("row", [-1, 4, 2**40, -(2**63), INT64_MAX], ids=str)
def test_pool_index_out_of_range_gives_dummy_slots(device, row):
    table = tagged_table(4, 5, device)
    found = compute(device, table, [row, 2], [2, 2], [0, 0], 4, numel=4)
    assert found == [0, 0, *slots_of(table, [2], [2], [0], 4)]


@pytest.mark.parametrize("start", [-1, -(2**63), INT64_MAX, INT64_MAX - 1], ids=str)
def test_start_out_of_range_gives_dummy_slots(device, start):
    table = tagged_table(4, 5, device)
    found = compute(device, table, [3, 2], [1, 2], [start, 0], 4, numel=3)
    assert found == [0, *slots_of(table, [2], [2], [0], 4)]


def test_start_that_wraps_gives_dummy_slots(device):
    table = tagged_table(4, 5, device)
    assert compute(device, table, [3], [300], [INT64_MAX - 3], 4, numel=300) == [0] * 300


@pytest.mark.parametrize(
    ("length", "batch_size"),
    [(0, 3), (1, 600), (4, 70), (700, 2), (3, 0)],
    ids=["length_0", "decode", "speculative", "several_tiles", "batch_0"],
)
@DTYPES
def test_uniform_length(device, length, batch_size, dtype):
    table = tagged_table(9, 60, device)
    req_pool_indices = [i * 5 % 9 for i in range(batch_size)]
    starts = [i * 11 % 400 for i in range(batch_size)]
    num_tokens = length * batch_size
    out_cache_loc = torch.full((num_tokens + 7,), UNTOUCHED, dtype=dtype, device=device)
    compute_out_cache_loc_uniform(
        out_cache_loc,
        torch.tensor(req_pool_indices, dtype=dtype, device=device),
        length,
        torch.tensor(starts, dtype=torch.int32, device=device),
        table,
        7,
    )
    expected = slots_of(table, req_pool_indices, [length] * batch_size, starts, 7)
    assert out_cache_loc.tolist() == expected + [UNTOUCHED] * 7


def test_uniform_form_survives_any_values(device):
    table = tagged_table(4, 5, device)
    out_cache_loc = torch.full((10,), UNTOUCHED, dtype=torch.int32, device=device)
    compute_out_cache_loc_uniform(
        out_cache_loc,
        torch.tensor([-1, 4, INT64_MAX, 1, 1], device=device),
        2,
        torch.tensor([0, 0, 0, -2, INT64_MAX], device=device),
        table,
        4,
    )
    assert out_cache_loc.tolist() == [0] * 10
