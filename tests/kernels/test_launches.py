"""Every shape that a launch may have gives the same values, whatever the batch."""

import pytest
import torch

from pagefault.kernels import launches
from pagefault.kernels.chunked_prefill import (
    create_chunked_cache_kv_indices_paged,
    get_chunks_paged,
)
from pagefault.kernels.launches import (
    LARGE_OUTPUT,
    RAGGED_SHAPES,
    UNIFORM_SHAPES,
    ragged_grid,
    ragged_shape,
    uniform_shape,
)
from pagefault.kernels.out_cache_loc import compute_out_cache_loc, compute_out_cache_loc_uniform
from pagefault.kernels.req_to_page import update_req_to_page
from pagefault.kernels.uniform_batch import count_lane_bits, count_uniform_programs, has_own_tiles

UNTOUCHED = -77
PAGE_SIZE = 3
MAX_PAGES = 90

BATCHES = {
    "nothing": [0, 0],
    "one_token_each": [1] * 70,
    "around_short": [3, 4, 5, 31, 32, 33, 0, 7, 8, 9],
    "one_long": [0, 0, 6000, 0],
    "long_among_short": [1] * 40 + [5000] + [2] * 41,
    "many_owners_in_a_tile": [5 + i % 60 for i in range(130)],
    "more_than_a_window": [idx % 4 for idx in range(300)] + [3000] + [9] * 30,
    "ends_at_tiles": [512, 512, 1024, 4096, 1, 511, 4096],
}


@pytest.fixture(params=RAGGED_SHAPES, ids=lambda name: name.replace(", ", "_").replace(" ", "_"))
def shape(request, monkeypatch):
    """Give every launch over a ragged batch one shape, and three programs for its tiles."""
    shape = RAGGED_SHAPES[request.param]
    shape = shape._replace(max_tile_programs=3)
    monkeypatch.setattr(launches, "RAGGED_SHAPES", dict.fromkeys(RAGGED_SHAPES, shape))
    return shape


@pytest.fixture(params=BATCHES)
def lens(request, shape):
    lens = BATCHES[request.param]
    if shape.has_one_window and len(lens) > shape.window_size:
        pytest.skip("no batch of so many requests is launched in this shape")
    return lens


class Inputs:
    """A batch on a device, and its slots."""

    def __init__(self, lens, device):
        batch_size = len(lens)
        page_ids = torch.arange(1, (batch_size + 1) * MAX_PAGES + 1, dtype=torch.int32)
        table = page_ids.view(batch_size + 1, MAX_PAGES)
        table[:, 7] = -1
        self.table = table.to(device)
        self.rows = torch.arange(batch_size, 0, -1, device=device)
        self.starts = torch.arange(batch_size, dtype=torch.int32, device=device) % 11
        self.lens = torch.tensor(lens, dtype=torch.int32, device=device)
        self.slots = []
        for req_idx, length in enumerate(lens):
            positions = torch.arange(length) + req_idx % 11
            page_idx = positions // PAGE_SIZE
            ids = table[batch_size - req_idx][page_idx.clamp(max=MAX_PAGES - 1)].long()
            has_page = (page_idx < MAX_PAGES) & (ids >= 0)
            slots = torch.where(has_page, ids * PAGE_SIZE + positions % PAGE_SIZE, 0)
            self.slots += slots.tolist()


def untouched(numel, device):
    return torch.full((numel,), UNTOUCHED, dtype=torch.int32, device=device)


def test_ragged_slots_in_every_shape(device, shape, lens):
    inputs = Inputs(lens, device)
    out = untouched(sum(lens) + 5000, device)
    batch = inputs.rows, inputs.lens, inputs.starts, inputs.table
    compute_out_cache_loc(out, *batch, PAGE_SIZE)
    assert out.tolist() == inputs.slots + [UNTOUCHED] * 5000


def test_slots_at_offsets_in_every_shape(device, shape, lens):
    inputs = Inputs(lens, device)
    gap = 3
    offsets = [sum(lens[:idx]) + gap * idx for idx in range(len(lens) + 1)]
    out = untouched(offsets[-1] + 9, device)
    create_chunked_cache_kv_indices_paged(
        inputs.table,
        inputs.rows,
        inputs.starts,
        inputs.lens,
        torch.tensor(offsets, device=device),
        out,
        PAGE_SIZE,
    )
    expected = [UNTOUCHED] * out.numel()
    slots = iter(inputs.slots)
    for offset, length in zip(offsets, lens):
        expected[offset : offset + length] = [next(slots) for _ in range(length)]
    assert out.tolist() == expected


def test_page_ids_in_every_shape(device, shape, lens):
    if shape.is_by_request:
        pytest.skip("the page table is never updated in this shape")
    inputs = Inputs(lens, device)
    table = untouched((len(lens) + 1) * 6020, device).view(len(lens) + 1, 6020)
    page_ids = torch.arange(sum(lens), dtype=torch.int32, device=device)
    update_req_to_page(table, inputs.rows, page_ids, inputs.lens, inputs.starts)
    expected = torch.full(table.shape, UNTOUCHED, dtype=torch.int32)
    first = 0
    for req_idx, length in enumerate(lens):
        start = req_idx % 11
        row = expected[len(lens) - req_idx]
        row[start : start + length] = torch.arange(first, first + length)
        first += length
    assert torch.equal(table.cpu(), expected)


def test_chunks_in_every_shape(device, shape):
    lens = [200, 0, 90, 3, 144]
    inputs = Inputs(lens, device)
    inputs.starts.zero_()
    out = untouched(sum(lens), device)
    batch = inputs.rows, inputs.lens, inputs.starts, inputs.table
    compute_out_cache_loc(out, *batch, PAGE_SIZE)
    of_reqs = [part.tolist() for part in out.split(lens)]
    capacity = 5 * 66
    _, kv_indices_list, _ = get_chunks_paged(
        inputs.lens, inputs.lens.cpu(), inputs.table, inputs.rows, PAGE_SIZE, capacity
    )
    expected = [
        [slot for slots in of_reqs for slot in slots[start : start + 66]]
        for start in range(0, 200, 66)
    ]
    assert [part.tolist() for part in kv_indices_list] == expected


@pytest.mark.parametrize("length", [1, 5, 128, 129, 300, 3000])
@pytest.mark.parametrize("name", UNIFORM_SHAPES)
def test_uniform_slots_in_every_shape(device, name, length, monkeypatch):
    shape = UNIFORM_SHAPES[name]
    monkeypatch.setattr(launches, "UNIFORM_SHAPES", dict.fromkeys(UNIFORM_SHAPES, shape))
    inputs = Inputs([length] * 3, device)
    out = untouched(3 * length + 9, device)
    batch = inputs.rows, length, inputs.starts, inputs.table
    compute_out_cache_loc_uniform(out, *batch, PAGE_SIZE)
    assert out.tolist() == inputs.slots + [UNTOUCHED] * 9


def test_a_large_output_of_one_length_has_larger_tiles():
    assert uniform_shape(0) is uniform_shape(LARGE_OUTPUT - 1) is UNIFORM_SHAPES["any"]
    assert uniform_shape(LARGE_OUTPUT) is uniform_shape(2**40) is UNIFORM_SHAPES["large output"]


@pytest.mark.parametrize(
    "num_elements", [0, 1, 2**16, 2**17, 2**18 - 1, 2**18, 2**19, 2**31], ids=str
)
@pytest.mark.parametrize("batch_size", [1, 64, 65, 256, 257, 1024, 1025, 100_000], ids=str)
def test_one_window_holds_the_whole_batch(batch_size, num_elements):
    shape = ragged_shape(batch_size, num_elements)
    assert not shape.has_one_window or batch_size <= shape.window_size


def test_no_program_is_for_tiles_where_all_requests_are_short():
    shape = RAGGED_SHAPES["some"]
    num_groups = -(-100 // shape.group_size)
    assert ragged_grid(100, 400, shape.short_len, shape) == (num_groups, 1)
    assert ragged_grid(100, 400, shape.short_len + 1, shape) == (num_groups + 1, 1)
    assert ragged_grid(1, 2**40, 2**40, shape) == (1 + shape.max_tile_programs, 1)


def test_each_tile_has_a_program_where_requests_have_equally_many_elements():
    shape = RAGGED_SHAPES["few, long"]
    tile_size = shape.tile_size
    assert ragged_grid(3, 3 * tile_size, 3 * tile_size, shape) == (1, 3)
    assert ragged_grid(3, 3 * tile_size + 3, 3 * tile_size + 3, shape) == (2, 3)
    assert ragged_grid(3, 9 * tile_size, 2 * tile_size + 1, shape) == (3, 3)
    assert ragged_grid(3, 2**40, 2**40, shape) == (shape.max_tile_programs // 3, 3)
    assert ragged_grid(1000, 2**40, 2**40, shape) == (1, 1000)
    assert ragged_grid(1000, 1, 1, shape) == (1, 1000)


def test_lanes_of_a_request_are_a_power_of_two():
    assert [count_lane_bits(length) for length in (0, 1, 2, 3, 4, 5)] == [0, 0, 1, 2, 2, 3]
    assert [has_own_tiles(length, 8) for length in (0, 4, 5, 8, 9)] == [0, 0, 1, 1, 1]
    programs = [count_uniform_programs(3, length, tile_size=8) for length in (0, 1, 3, 5, 8, 9)]
    assert programs == [1, 1, 2, 3, 3, 6]
