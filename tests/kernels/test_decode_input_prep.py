"""Values of fused_decode_input_prep."""

import pytest
import torch

from pagefault.kernels.decode_input_prep import fused_decode_input_prep

UNTOUCHED = -77
INT64_MAX = 2**63 - 1


def prepare(device, table, req_pool_indices, cache_lens, length, page_size, dtype=torch.int64):
    """Return out_cache_loc, positions and seq_lens_out, each with 5 elements to spare."""
    num_tokens = length * len(req_pool_indices)
    out_cache_loc, positions = torch.full(
        (2, num_tokens + 5), UNTOUCHED, dtype=dtype, device=device
    )
    seq_lens_out = torch.full((len(req_pool_indices) + 5,), UNTOUCHED, dtype=dtype, device=device)
    fused_decode_input_prep(
        out_cache_loc,
        positions,
        seq_lens_out,
        torch.tensor(req_pool_indices, dtype=torch.int64, device=device),
        torch.tensor(cache_lens, dtype=torch.int64, device=device),
        length,
        table,
        page_size,
    )
    outputs = [out.tolist() for out in (out_cache_loc, positions, seq_lens_out)]
    assert all(out[-5:] == [UNTOUCHED] * 5 for out in outputs)
    return [out[:-5] for out in outputs]


def test_a_batch_worked_out_by_hand(device):
    table = torch.tensor([[0, 0], [9, -1], [7, 3]], dtype=torch.int32, device=device)
    found = prepare(device, table, [2, 1], [50, 2, 5], length=2, page_size=3)
    assert found == [[11, 0, 29, 0], [5, 6, 2, 3], [7, 4]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("batch_size", "length"), [(600, 1), (300, 0), (70, 5), (2, 400)], ids=str)
def test_every_size_of_step(device, batch_size, length, page_size, dtype):
    table = (torch.arange(9 * 30, dtype=torch.int32) * 3 + 5).view(9, 30).to(device)
    cache_lens = [(i * 37) % 50 for i in range(9)]
    req_pool_indices = [i * 5 % 9 for i in range(batch_size)]
    positions = [cache_lens[row] + k for row in req_pool_indices for k in range(length)]
    rows = [row for row in req_pool_indices for _ in range(length)]
    cells = table.tolist()
    slots = [
        cells[row][position // page_size] * page_size + position % page_size
        if position < 30 * page_size
        else 0
        for row, position in zip(rows, positions)
    ]
    seq_lens = [cache_lens[row] + length for row in req_pool_indices]
    found = prepare(device, table, req_pool_indices, cache_lens, length, page_size, dtype)
    assert found == [slots, positions, seq_lens]


def test_start_of_a_request_outside_the_pool_counts_as_0(device):
    table = torch.full((3, 4), 6, dtype=torch.int32, device=device)
    bad = [-1, 3, 2**40, -(2**63), INT64_MAX]
    found = prepare(device, table, bad, [1, 1, 1], length=2, page_size=4)
    assert found == [[0] * 10, [0, 1] * 5, [2] * 5]


def test_negative_position_is_written_and_gives_the_dummy_slot(device):
    table = torch.full((3, 4), 6, dtype=torch.int32, device=device)
    found = prepare(device, table, [1, 2], [0, -1, -(2**63)], length=2, page_size=4)
    assert found == [[0, 24, 0, 0], [-1, 0, -(2**63), -(2**63) + 1], [1, -(2**63) + 2]]


@pytest.mark.parametrize("shape", [(3, 0), (0, 4)], ids=str)
def test_table_without_cells_gives_dummy_slots(device, shape):
    table = torch.zeros(shape, dtype=torch.int32, device=device)
    found = prepare(device, table, [0, 0], [7] * shape[0], length=1, page_size=4)
    start = 7 if shape[0] else 0
    assert found == [[0, 0], [start, start], [start + 1, start + 1]]


def test_empty_batch_writes_nothing(device):
    table = torch.zeros((3, 2), dtype=torch.int32, device=device)
    assert prepare(device, table, [], [0, 0, 0], length=3, page_size=4) == [[], [], []]
