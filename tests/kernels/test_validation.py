"""What PAGEFAULT_VALIDATE=1 finds in the values of device tensors."""

import pytest
import torch

from pagefault.kernels.chunked_prefill import (
    chunking,
    create_chunked_cache_kv_indices_paged,
    get_chunks_paged,
)
from pagefault.kernels.decode_input_prep import fused_decode_input_prep
from pagefault.kernels.out_cache_loc import (
    compute_out_cache_loc,
    compute_out_cache_loc_uniform,
)
from pagefault.kernels.req_to_page import update_req_to_page

LARGE_PAGE = 2**31 - 1


@pytest.fixture(autouse=True)
def validate(monkeypatch):
    monkeypatch.setenv("PAGEFAULT_VALIDATE", "1")


@pytest.fixture
def make(device):
    """Return a function that makes an int64 vector on the device."""
    return lambda values: torch.tensor(values, dtype=torch.int64, device=device)


@pytest.fixture
def table(device):
    cells = [[1, 2, 3], [4, LARGE_PAGE, 6], [7, 8, -1]]
    return torch.tensor(cells, dtype=torch.int32, device=device)


def output(numel, device):
    return torch.full((numel,), -77, dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    ("rows", "page_ids", "counts", "starts", "message"),
    [
        ([1, 3, -1], [5], [1, 0, 0], [0, 0, 0], r"req_pool_indices\[1\] is 3, .* 0 \.\.\. 2"),
        ([1, -1], [5], [1, 0], [0, 0], r"req_pool_indices\[1\] is -1"),
        ([1, 2], [5], [1, -4], [0, 0], r"new_occupied_pages_num\[1\] is -4"),
        ([1, 2], [5], [1, 0], [0, -1], r"pages_copy_starts\[1\] is -1"),
        ([1, 2], [5, 6], [1, 2**62], [0, 0], r"pages_num\[1\] is 4611686018427387904 after a sum"),
        ([1, 2], [5, 6], [1, 0], [0, 0], "new_occupied_pages has 2 elements, but must have 1"),
    ],
    ids=["row_past_the_pool", "row_negative", "count", "start", "sum_past", "sum_short"],
)
def test_update_req_to_page(table, device, make, rows, page_ids, counts, starts, message):
    before = table.tolist()
    ids = torch.tensor(page_ids, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=message):
        update_req_to_page(table, make(rows), ids, make(counts), make(starts))
    assert table.tolist() == before


@pytest.mark.parametrize(
    ("rows", "lens", "starts", "message"),
    [
        ([1, 3], [1, 0], [0, 0], r"req_pool_indices\[1\] is 3"),
        ([1, 2], [-2, 0], [0, 0], r"input_lengths\[0\] is -2"),
        ([1, 2], [1, 0], [0, -9], r"cache_start\[1\] is -9"),
        ([1, 2], [4, 2], [0, 0], r"input_lengths\[1\] is 2 after a sum of 4, .* <= 5"),
        ([2, 1], [1, 3], [0, 6], r"out_cache_loc\[3\] is 17179869176, but must be <= 2147483647"),
    ],
    ids=["row", "length", "start", "sum", "slot"],
)
def test_compute_out_cache_loc(table, device, make, rows, lens, starts, message):
    out_cache_loc = output(5, device)
    with pytest.raises(ValueError, match=message):
        compute_out_cache_loc(out_cache_loc, make(rows), make(lens), make(starts), table, 8)
    assert out_cache_loc.tolist() == [-77] * 5


@pytest.mark.parametrize(
    ("rows", "starts", "message"),
    [
        ([-3, 2], [0, 0], r"req_pool_indices\[0\] is -3"),
        ([1, 2], [-1, -9], r"cache_start\[0\] is -1"),
        ([1, 2], [7, 0], r"out_cache_loc\[1\] is 17179869176"),
    ],
    ids=["row", "start", "slot"],
)
def test_compute_out_cache_loc_uniform(table, device, make, rows, starts, message):
    out_cache_loc = output(4, device)
    with pytest.raises(ValueError, match=message):
        compute_out_cache_loc_uniform(out_cache_loc, make(rows), 2, make(starts), table, 8)
    assert out_cache_loc.tolist() == [-77] * 4


@pytest.mark.parametrize(
    ("rows", "cache_lens", "message"),
    [
        ([0, 9], [0, 0, 0], r"req_pool_indices\[1\] is 9"),
        ([0, 1], [0, 0, -1], r"valid_cache_lengths\[2\] is -1"),
        ([0, 1], [0, 7, 0], r"out_cache_loc\[3\] is 17179869176"),
        ([0, 2], [0, 0, 2**31 - 2], r"seq_lens_out\[1\] is 2147483648"),
        ([0, 2], [0, 0, 2**31], r"seq_lens_out\[1\] is 2147483650"),
    ],
    ids=["row", "cache_length", "slot", "sequence_length", "position"],
)
def test_fused_decode_input_prep(table, device, make, rows, cache_lens, message):
    outputs = [output(4, device), output(4, device), output(2, device)]
    with pytest.raises(ValueError, match=message):
        fused_decode_input_prep(*outputs, make(rows), make(cache_lens), 2, table, 8)
    assert torch.cat(outputs).tolist() == [-77] * 10


@pytest.mark.parametrize(
    ("prefix_lens", "message"),
    [
        ([4, -1], r"prefix_lens\[1\] is -1"),
        ([2**33, 0], r"ends\[1\]\[0\] is 4294967294, but must be <= 2147483647"),
        ([2**31 - 1, 2**31 - 1], r"cum_seq_lens\[0\]\[2\] is 4294967294"),
    ],
    ids=["negative", "end", "running_sum"],
)
def test_chunking(make, prefix_lens, message):
    with pytest.raises(ValueError, match=message):
        chunking(make(prefix_lens), 2, 2, 2**31 - 1)


@pytest.mark.parametrize(
    ("rows", "starts", "lens", "offsets", "message"),
    [
        ([0, 3], [0, 0], [1, 1], [0, 1, 2], r"req_pool_indices\[1\] is 3"),
        ([0, 1], [-1, 0], [1, 1], [0, 1, 2], r"chunk_starts\[0\] is -1"),
        ([0, 1], [0, 0], [1, -1], [0, 1, 2], r"chunk_seq_lens\[1\] is -1"),
        ([0, 1], [0, 0], [0, 1], [-1, 0, 2], r"chunk_cum_seq_lens\[0\] is -1"),
        ([0, 1], [0, 0], [2, 1], [0, 1, 2], r"cum_seq_lens\[0\] is 0 and .*\[0\] 2, .* <= 1"),
        ([0, 1], [0, 0], [1, 4], [0, 1, 9], r"cum_seq_lens\[1\] is 1 and .*\[1\] 4, .* <= 4"),
        ([0, 1], [0, 8], [1, 1], [0, 1, 2], r"chunk_kv_indices\[1\] is 17179869176"),
    ],
    ids=["row", "start", "length", "offset", "overlap", "past_the_end", "slot"],
)
def test_create_kv_indices(table, device, make, rows, starts, lens, offsets, message):
    kv_indices = output(4, device)
    with pytest.raises(ValueError, match=message):
        create_chunked_cache_kv_indices_paged(
            table, make(rows), make(starts), make(lens), make(offsets), kv_indices, 8
        )
    assert kv_indices.tolist() == [-77] * 4


@pytest.mark.parametrize(
    ("prefix_lens", "prefix_lens_cpu", "rows", "message"),
    [
        ([3, 5], [3, 4], [0, 2], r"prefix_lens\[1\] is 5, but must be 4"),
        ([3, 4], [3, 4], [0, 3], r"req_pool_indices\[1\] is 3"),
        ([3, 9], [3, 9], [0, 1], r"prefix_slots\[11\] is 17179869176"),
    ],
    ids=["prefixes_differ", "row", "slot"],
)
def test_get_chunks_paged(table, make, prefix_lens, prefix_lens_cpu, rows, message):
    with pytest.raises(ValueError, match=message):
        get_chunks_paged(make(prefix_lens), torch.tensor(prefix_lens_cpu), table, make(rows), 8, 8)


def test_good_values_pass(table, device, make):
    out_cache_loc = torch.full((8,), -77, dtype=torch.int64, device=device)
    compute_out_cache_loc(out_cache_loc, make([1, 2]), make([3, 2]), make([6, 15]), table, 8)
    large = LARGE_PAGE * 8
    assert out_cache_loc.tolist() == [38, 39, large, 71, 0, -77, -77, -77]


@pytest.mark.parametrize("setting", ["0", "", "true"])
def test_any_other_setting_looks_at_no_values(table, device, make, monkeypatch, setting):
    monkeypatch.setenv("PAGEFAULT_VALIDATE", setting)
    out_cache_loc = output(5, device)
    compute_out_cache_loc(out_cache_loc, make([9, 2]), make([-1, 1]), make([0, 2]), table, 8)
    assert out_cache_loc.tolist() == [58, -77, -77, -77, -77]
