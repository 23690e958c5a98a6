"""Values of the functions that cut prefixes into chunks."""

import pytest
import torch

from pagefault.kernels import chunked_prefill as module
from pagefault.kernels.chunked_prefill import (
    build_chunked_prefill_metadata_arrays,
    chunking,
    create_chunked_cache_kv_indices_paged,
    get_chunks_paged,
)

UNTOUCHED = -77
INT64_MAX = 2**63 - 1


@pytest.fixture(params=["kernel", "torch"])
def way(request, device, monkeypatch):
    """Make chunking run its kernel, or what stands in where Triton can't run."""
    if request.param == "torch":
        monkeypatch.setattr(module, "can_launch", lambda kernel, tensor: False)
    return request.param


def chunks_of(prefix_lens, num_chunks, chunk_len):
    starts, ends, lens, cum_seq_lens = [], [], [], []
    for chunk_idx in range(num_chunks):
        start = chunk_idx * chunk_len
        starts.append([start for _ in prefix_lens])
        ends.append([min(prefix_len, start + chunk_len) for prefix_len in prefix_lens])
        lens.append([max(0, end - start) for end in ends[-1]])
        cum_seq_lens.append([sum(lens[-1][:i]) for i in range(len(prefix_lens) + 1)])
    return [starts, ends, lens, cum_seq_lens]


def as_lists(chunks):
    assert all(tensor.dtype is torch.int32 for tensor in chunks)
    return [tensor.tolist() for tensor in chunks]


def tagged_table(num_rows, max_pages, device):
    tags = torch.arange(num_rows * max_pages, dtype=torch.int32) * 3 + 5
    return tags.view(num_rows, max_pages).to(device)


def slot_of(table, row, position, page_size):
    page_idx, offset = divmod(position, page_size)
    page_id = int(table[row, page_idx]) if page_idx < table.shape[1] else -1
    return page_id * page_size + offset if page_id >= 0 else 0


def test_chunks_worked_out_by_hand(device, way):
    chunks = chunking(torch.tensor([5, 0, 3], device=device), 2, 3, 3)
    assert as_lists(chunks) == [
        [[0, 0, 0], [3, 3, 3]],
        [[3, 0, 3], [5, 0, 3]],
        [[3, 0, 3], [2, 0, 0]],
        [[0, 3, 3, 6], [0, 2, 2, 2]],
    ]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(
    ("batch_size", "num_chunks", "chunk_len"),
    [(600, 3, 7), (1, 9, 1), (65, 1, 40), (5, 2, 1000), (257, 2, 2**30)],
    ids=str,
)
def test_chunks_of_any_batch(device, way, batch_size, num_chunks, chunk_len, dtype):
    prefix_lens = [i * 17 % 40 for i in range(batch_size)]
    tensor = torch.tensor(prefix_lens, dtype=dtype, device=device)
    chunks = chunking(tensor, num_chunks, batch_size, chunk_len)
    assert as_lists(chunks) == chunks_of(prefix_lens, num_chunks, chunk_len)
    assert all(part.is_contiguous() and part.device == tensor.device for part in chunks)


@pytest.mark.parametrize(("batch_size", "num_chunks"), [(0, 0), (0, 3), (4, 0)], ids=str)
def test_no_requests_or_no_chunks(device, way, batch_size, num_chunks):
    chunks = chunking(
        torch.zeros(batch_size, dtype=torch.int64, device=device), num_chunks, batch_size, 5
    )
    assert [list(part.shape) for part in chunks] == [[num_chunks, batch_size]] * 3 + [
        [num_chunks, batch_size + 1]
    ]
    assert not chunks.cum_seq_lens.any()


def test_last_start_is_the_largest_int32(device, way):
    prefix_lens = torch.tensor([2**31 - 1, 3], device=device)
    starts, ends, lens, cum_seq_lens = as_lists(chunking(prefix_lens, 2, 2, 2**31 - 1))
    assert starts[1] == [2**31 - 1] * 2
    assert (ends[1], lens[1], cum_seq_lens[1]) == ([2**31 - 1, 3], [0, 0], [0, 0, 0])


def test_start_past_int32_is_refused_if_a_cell_would_hold_it(device, way):
    with pytest.raises(ValueError, match="last start is 2147483648"):
        chunking(torch.tensor([1], device=device), 2**16 + 1, 1, 2**15)
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    assert chunking(empty, 3, 0, 2**31 - 1).starts.shape == (3, 0)


def test_negative_prefix_counts_as_0(device, way):
    chunks = chunking(torch.tensor([-5, -(2**63), 4], device=device), 1, 3, 3)
    assert as_lists(chunks) == chunks_of([0, 0, 4], 1, 3)


def create(device, table, req_pool_indices, starts, lens, offsets, page_size, numel):
    """Return what lies in an output of numel elements, and check what lies around it."""
    memory = torch.full((numel + 20,), UNTOUCHED, dtype=torch.int32, device=device)
    create_chunked_cache_kv_indices_paged(
        table,
        torch.tensor(req_pool_indices, dtype=torch.int64, device=device),
        torch.tensor(starts, dtype=torch.int64, device=device),
        torch.tensor(lens, dtype=torch.int64, device=device),
        torch.tensor(offsets, dtype=torch.int64, device=device),
        memory[10 : 10 + numel],
        page_size,
    )
    found = memory.tolist()
    assert found[:10] == found[-10:] == [UNTOUCHED] * 10
    return found[10:-10]


@pytest.mark.parametrize("page_size", [1, 3, 7, 16])
@pytest.mark.parametrize("gap", [0, 2], ids=["dense", "gaps"])
@pytest.mark.parametrize(
    "lens",
    [[3, 0, 12, 5], [700, 30], [i % 5 for i in range(200)]],
    ids=["few", "long", "many"],
)
def test_slots_lie_at_their_offsets(device, page_size, gap, lens):
    table = tagged_table(7, 50, device)
    offsets = [sum(lens[:i]) + gap * i for i in range(len(lens) + 1)]
    rows = [i * 3 % 7 for i in range(len(lens))]
    starts = [i % 23 for i in range(len(lens))]
    expected = [UNTOUCHED] * (offsets[-1] + 4)
    cells = table.cpu()
    for row, start, num_tokens, offset in zip(rows, starts, lens, offsets):
        for k in range(num_tokens):
            expected[offset + k] = slot_of(cells, row, start + k, page_size)
    found = create(device, table, rows, starts, lens, offsets, page_size, len(expected))
    assert found == expected


def test_holes_and_overflow_give_the_dummy_slot(device):
    table = torch.tensor([[9, 9], [4, -1]], dtype=torch.int32, device=device)
    assert create(device, table, [1], [1], [4], [0, 4], 2, 4) == [9, 0, 0, 0]


@pytest.mark.parametrize(
    ("lens", "offsets", "expected"),
    [
        pytest.param([-1, -(2**63)], [0, 1, 3], [None] * 4, id="negative_lengths"),
        pytest.param([1, INT64_MAX], [0, 2, 2], [6, None, 12, 13], id="past_the_end"),
        pytest.param([2, 1], [4, INT64_MAX, 0], [None] * 4, id="offsets_behind_the_end"),
        pytest.param([5, 0], [-3, 3, 3], [9, None, None, None], id="offset_before_the_start"),
        pytest.param([INT64_MAX, 0], [-(2**63), 4, 4], [None] * 4, id="offset_far_before_it"),
    ],
)
def test_any_offsets_stay_inside_the_output(device, lens, offsets, expected):
    table = torch.tensor([[0], [1], [2]], dtype=torch.int32, device=device)
    found = create(device, table, [1, 2], [0, 0], lens, offsets, 6, numel=4)
    assert found == [UNTOUCHED if slot is None else slot for slot in expected]


def test_where_ranges_overlap_either_is_right(device):
    table = torch.tensor([[0], [1], [2]], dtype=torch.int32, device=device)
    first, *both, last = create(device, table, [1, 2], [0, 0], [3, 2], [0, 1, 3], 6, numel=4)
    assert (first, last) == (6, UNTOUCHED)
    assert all(slot in either for slot, either in zip(both, [(7, 12), (8, 13)], strict=True))


def test_offsets_that_do_not_ascend_stay_inside_the_output(device):
    table = torch.arange(1, 901, dtype=torch.int32, device=device)[:, None]
    rows = [i * 7 % 900 for i in range(500)]
    offsets = [(i * 7919 % 1000 - 300) * 2 ** (i % 50) for i in range(501)]
    found = create(device, table, rows, [0] * 500, [INT64_MAX] * 500, offsets, 2**20, 700)
    assert max(found) < 2**31
    assert min(found) in (0, UNTOUCHED)


@pytest.mark.parametrize("row", [-1, 3, 2**40, -(2**63)], ids=str)
def test_pool_index_out_of_range_gives_dummy_slots(device, row):
    table = torch.full((3, 4), 7, dtype=torch.int32, device=device)
    assert create(device, table, [row], [0], [3], [0, 3], 4, 3) == [0, 0, 0]


@pytest.mark.parametrize("start", [-3, -(2**63), INT64_MAX], ids=str)
def test_start_out_of_range_gives_dummy_slots(device, start):
    table = torch.full((3, 4), 7, dtype=torch.int32, device=device)
    assert create(device, table, [1], [start], [3], [0, 3], 4, 3) == [0, 0, 0]


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(
    ("prefix_lens", "chunk_capacity"),
    [([40, 0, 17], 24), ([5], 1), ([30] * 70, 140), ([48, 48], 2**31 - 1)],
    ids=["ragged", "one_token_a_chunk", "many", "all_in_one_chunk"],
)
def test_chunks_of_a_prefix_are_its_slots_in_order(device, prefix_lens, chunk_capacity, page_size):
    table = tagged_table(9, 48, device)
    rows = [(i + 1) * 5 % 9 for i in range(len(prefix_lens))]
    chunks, kv_indices_list, chunks_cpu = get_chunks_paged(
        torch.tensor(prefix_lens, dtype=torch.int32, device=device),
        torch.tensor(prefix_lens),
        table,
        torch.tensor(rows, device=device),
        page_size,
        chunk_capacity,
    )
    chunk_len = chunk_capacity // len(prefix_lens)
    num_chunks = -(-max(prefix_lens) // chunk_len)
    assert as_lists(chunks) == as_lists(chunks_cpu) == chunks_of(prefix_lens, num_chunks, chunk_len)
    assert chunks_cpu.starts.device.type == "cpu"
    slots = [[] for _ in prefix_lens]
    for kv_indices, cum_seq_lens in zip(kv_indices_list, chunks_cpu.cum_seq_lens.tolist()):
        assert kv_indices.dtype is torch.int32
        assert kv_indices.numel() == cum_seq_lens[-1]
        for req_idx in range(len(prefix_lens)):
            first, end = cum_seq_lens[req_idx : req_idx + 2]
            slots[req_idx] += kv_indices.tolist()[first:end]
    cells = table.cpu()
    assert slots == [
        [slot_of(cells, row, position, page_size) for position in range(prefix_len)]
        for row, prefix_len in zip(rows, prefix_lens)
    ]


@pytest.mark.parametrize("prefix_lens", [[], [0, 0]], ids=["no_requests", "no_prefix"])
def test_nothing_to_chunk(device, prefix_lens):
    batch_size = len(prefix_lens)
    tensor = torch.tensor(prefix_lens, dtype=torch.int32, device=device)
    table = tagged_table(3, 4, device)
    found = build_chunked_prefill_metadata_arrays(tensor, tensor.cpu(), table, tensor, 4, 8)
    num_chunks, kv_indices_list, len_in_chunk, cum_seq_lens, max_len_per_chunk = found
    assert (num_chunks, kv_indices_list, max_len_per_chunk) == (0, [], [])
    assert len_in_chunk.shape == (0, batch_size)
    assert cum_seq_lens.shape == (0, batch_size + 1)


def test_metadata_arrays(device):
    table = tagged_table(3, 4, device)
    prefix_lens = torch.tensor([2, 5], device=device)
    found = build_chunked_prefill_metadata_arrays(
        prefix_lens, prefix_lens.cpu(), table, torch.tensor([2, 1], device=device), 4, 6
    )
    num_chunks, kv_indices_list, len_in_chunk, cum_seq_lens, max_len_per_chunk = found
    assert num_chunks == 2
    assert len_in_chunk.tolist() == [[2, 3], [0, 2]]
    assert cum_seq_lens.tolist() == [[0, 2, 5], [0, 0, 2]]
    assert max_len_per_chunk == [3, 2]
    # Page 0 of row 2 is 29, pages 0 and 1 of row 1 are 17 and 20.
    assert [kv.tolist() for kv in kv_indices_list] == [[116, 117, 68, 69, 70], [71, 80]]


@pytest.mark.parametrize(
    ("prefix_lens", "chunk_capacity", "message"),
    [
        ([1, 1], 0, "chunk_capacity is 0"),
        ([0, 0], 1, "chunk_capacity is 1, but must be >= 2"),
        ([3, -1], 8, r"prefix_lens_cpu\[1\] is -1, but must be in 0 \.\.\. 12"),
        ([13, 2], 8, r"prefix_lens_cpu\[0\] is 13, but must be in 0 \.\.\. 12"),
    ],
    ids=["capacity_0", "batch_past_capacity", "negative_prefix", "prefix_past_the_table"],
)
@pytest.mark.parametrize("function", [get_chunks_paged, build_chunked_prefill_metadata_arrays])
def test_bad_prefixes_are_refused(device, function, prefix_lens, chunk_capacity, message):
    tensor = torch.tensor(prefix_lens, device=device)
    with pytest.raises(ValueError, match=message):
        function(tensor, tensor.cpu(), tagged_table(2, 4, device), tensor, 3, chunk_capacity)


def test_prefix_that_no_int32_holds_is_refused(device):
    tensor = torch.tensor([2**31], device=device)
    table = tagged_table(2, 4, device)
    with pytest.raises(ValueError, match="is 2147483648, but must be in 0"):
        get_chunks_paged(tensor, tensor.cpu(), table, tensor, 2**31 - 1, 2**31 - 1)
