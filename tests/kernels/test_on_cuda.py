"""What can only be seen on a GPU: streams, devices, graphs, compiled variants, large memory."""

import os
import warnings
from types import SimpleNamespace

import pytest
import torch

from pagefault.kernels import chunked_prefill, decode_input_prep, out_cache_loc, req_to_page

HAS_CUDA = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
pytestmark = pytest.mark.skipif(not HAS_CUDA, reason="needs a GPU, with Triton compiling")

SLEEP_CYCLES = 200_000_000


def vector(values, device, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=device)


def table_of(tag, num_rows, max_pages, device):
    tags = torch.arange(num_rows * max_pages, dtype=torch.int32) + tag
    return tags.view(num_rows, max_pages).to(device)


def step(req_pool_indices, begins, page_ids):
    return SimpleNamespace(
        request_ids=list(range(len(begins))),
        request_pool_indices=req_pool_indices,
        sizes=[len(ids) for ids in page_ids],
        begins=begins,
        new_occupied_pages=page_ids,
    )


class Launches:
    """The capturable functions, each with its tensors, an input to change, and its answer."""

    @staticmethod
    def update_req_to_page(device):
        table = torch.zeros((4, 5), dtype=torch.int32, device=device)
        counts = vector([2, 1], device)
        arguments = (vector([1, 3], device), vector([7, 8, 9], device, torch.int32))
        starts = vector([0, 2], device)

        def call():
            req_to_page.update_req_to_page(table, *arguments, counts, starts)

        expected = [[0] * 5, [7, 0, 0, 0, 0], [0] * 5, [0, 0, 8, 9, 0]]
        return call, table, counts, [1, 2], expected

    @staticmethod
    def compute_out_cache_loc(device):
        out, lens = vector([0, 0, 0], device), vector([2, 1], device)
        table, rows = table_of(10, 4, 5, device), vector([1, 3], device)
        starts = vector([3, 6], device)

        def call():
            out_cache_loc.compute_out_cache_loc(out, rows, lens, starts, table, 4)

        return call, out, lens, [1, 2], [63, 106, 107]

    @staticmethod
    def compute_out_cache_loc_uniform(device):
        out, starts = vector([0, 0], device), vector([0, 0], device)
        table, rows = table_of(10, 4, 5, device), vector([1, 3], device)

        def call():
            out_cache_loc.compute_out_cache_loc_uniform(out, rows, 1, starts, table, 4)

        return call, out, starts, [3, 6], [63, 106]

    @staticmethod
    def fused_decode_input_prep(device):
        out, rows = torch.zeros((3, 2), dtype=torch.int64, device=device), vector([0, 0], device)
        table, cache_lens = table_of(10, 4, 5, device), vector([0, 3, 0, 6], device)

        def call():
            decode_input_prep.fused_decode_input_prep(*out, rows, cache_lens, 1, table, 4)

        return call, out, rows, [1, 3], [[63, 106], [3, 6], [4, 7]]

    @staticmethod
    def chunking(device):
        prefix_lens = vector([0, 0], device)
        out = torch.zeros((2, 3), dtype=torch.int32, device=device)

        def call():
            out.copy_(chunked_prefill.chunking(prefix_lens, 2, 2, 3).cum_seq_lens)

        return call, out, prefix_lens, [5, 2], [[0, 3, 5], [0, 2, 2]]

    @staticmethod
    def create_chunked_cache_kv_indices_paged(device):
        out, starts = vector([0, 0, 0], device), vector([0, 0], device)
        table, rows = table_of(10, 4, 5, device), vector([1, 3], device)
        lens, offsets = vector([1, 2], device), vector([0, 1, 3], device)

        def call():
            chunked_prefill.create_chunked_cache_kv_indices_paged(
                table, rows, starts, lens, offsets, out, 4
            )

        return call, out, starts, [3, 6], [63, 106, 107]


CAPTURABLE = [name for name in vars(Launches) if not name.startswith("_")]


@pytest.mark.parametrize("validate", ["0", "1"], ids=["plain", "validating"])
@pytest.mark.parametrize("name", CAPTURABLE)
def test_replay_after_a_change_in_place_gives_the_new_answer(name, validate, monkeypatch):
    call, out, changed, new_value, expected = getattr(Launches, name)(torch.device("cuda", 0))
    call()
    monkeypatch.setenv("PAGEFAULT_VALIDATE", validate)
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.cuda.graph(graph):
            call()
    out.zero_()
    changed.copy_(torch.tensor(new_value))
    graph.replay()
    assert out.tolist() == expected


def test_validation_warns_once_while_a_stream_is_captured(monkeypatch):
    from pagefault.kernels import checks

    call = Launches.compute_out_cache_loc(torch.device("cuda", 0))[0]
    call()
    monkeypatch.setenv("PAGEFAULT_VALIDATE", "1")
    monkeypatch.setattr(checks, "_has_warned_of_capture", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
            call()
    messages = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    assert messages == ["PAGEFAULT_VALIDATE=1 checks nothing while a stream is being captured"]


@pytest.mark.parametrize("name", CAPTURABLE)
def test_launch_is_on_the_current_stream(name):
    call, out, changed, new_value, expected = getattr(Launches, name)(torch.device("cuda", 0))
    call()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    value = torch.tensor(new_value).pin_memory()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        out.zero_()
        changed.copy_(value, non_blocking=True)
        call()
        assert not stream.query()
    stream.synchronize()
    assert out.tolist() == expected


@pytest.mark.skipif(not HAS_CUDA or torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", CAPTURABLE)
def test_launch_is_on_the_device_of_the_tensors_and_its_stream(name):
    other = torch.device("cuda", 1)
    call, out, changed, new_value, expected = getattr(Launches, name)(other)
    with torch.cuda.device(0):
        call()
        stream = torch.cuda.Stream(other)
        stream.wait_stream(torch.cuda.current_stream(other))
        value = torch.tensor(new_value).pin_memory()
        previous = torch.cuda.current_stream(other)
        with torch.cuda.device(1):
            torch.cuda.set_stream(stream)
        try:
            assert torch.cuda.current_device() == 0
            with torch.cuda.device(1):
                torch.cuda._sleep(SLEEP_CYCLES)
            out.zero_()
            changed.copy_(value, non_blocking=True)
            call()
            assert torch.cuda.current_device() == 0
            stream.synchronize()
        finally:
            with torch.cuda.device(1):
                torch.cuda.set_stream(previous)
        assert out.tolist() == expected


@pytest.mark.skipif(not HAS_CUDA or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_block_table_on_a_device_that_is_not_current():
    table = torch.zeros((3, 4), dtype=torch.int32, device="cuda:1")
    with torch.cuda.device(0):
        req_to_page.update_block_table(step([2], [1], [[7, 8]]), "cuda:1", table)
        with pytest.raises(ValueError, match="device is cuda:0, but must be cuda:1"):
            req_to_page.update_block_table(step([2], [1], [[7, 8]]), "cuda", table)
    with torch.cuda.device(1):
        req_to_page.update_block_table(step([1], [3], [[9]]), "cuda", table)
    assert table.tolist() == [[0] * 4, [0, 0, 0, 9], [0, 7, 8, 0]]


def test_pending_copy_of_a_step_survives_the_next_step():
    table = torch.zeros((9, 4000), dtype=torch.int32, device="cuda")
    req_to_page.update_block_table(step([0], [0], [[1]]), "cuda", table)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        for row in range(1, 9):
            ids = list(range(row * 10_000, row * 10_000 + 4000))
            req_to_page.update_block_table(step([row], [0], [ids]), "cuda", table)
        assert not stream.query()
    stream.synchronize()
    firsts = torch.arange(1, 9, dtype=torch.int32)[:, None] * 10_000
    assert torch.equal(table[1:].cpu(), firsts + torch.arange(4000, dtype=torch.int32))


def test_pending_copy_of_chunk_ends_survives_the_next_call():
    table, rows = table_of(10, 3, 100, "cuda"), vector([1, 2], "cuda")
    build = chunked_prefill.build_chunked_prefill_metadata_arrays
    batches = [torch.tensor([40 + idx, 90 - 3 * idx]) for idx in range(8)]
    arguments = [(lens.cuda(), lens, table, rows, 4, 20) for lens in batches]
    expected = [[part.tolist() for part in build(*some)[1]] for some in arguments]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        found = [build(*some)[1] for some in arguments]
        assert not stream.query()
    stream.synchronize()
    assert [[part.tolist() for part in slots] for slots in found] == expected


def test_nothing_waits_for_the_device():
    table = table_of(10, 5, 40, "cuda")
    prefix_lens_cpu = torch.tensor([30, 7])
    prefix_lens, rows = prefix_lens_cpu.cuda(), vector([1, 4], "cuda")
    build = chunked_prefill.build_chunked_prefill_metadata_arrays
    build(prefix_lens, prefix_lens_cpu, table, rows, 4, 16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(SLEEP_CYCLES)
        build(prefix_lens, prefix_lens_cpu, table, rows, 4, 16)
        req_to_page.update_block_table(step([2], [1], [[7, 8]]), "cuda", table)
        for name in ("compute_out_cache_loc", "fused_decode_input_prep"):
            torch.cuda.set_sync_debug_mode("default")
            call = getattr(Launches, name)("cuda")[0]
            torch.cuda.set_sync_debug_mode("error")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def count_variants(kernel):
    """Return how many variants of the kernel this process has compiled."""
    return sum(len(caches[0]) for caches in kernel.device_caches.values())


SWEEP = [
    (batch_size, length, max_pages, pitch, num_offset)
    for num_offset, (batch_size, length) in enumerate(
        [(1, 1), (2, 16), (3, 5), (16, 1), (17, 32), (64, 8), (100, 0), (1024, 3)]
    )
    for max_pages, pitch in [(1, 0), (5, 0), (16, 0), (16, 16), (33, 2)]
]
KERNELS = [
    req_to_page.update_req_to_page_kernel,
    out_cache_loc.compute_out_cache_loc_kernel,
    out_cache_loc.compute_out_cache_loc_uniform_kernel,
    decode_input_prep.fused_decode_input_prep_kernel,
    chunked_prefill.chunking_kernel,
    chunked_prefill.create_chunked_cache_kv_indices_paged_kernel,
    chunked_prefill.get_chunks_paged_kernel,
    req_to_page.update_from_packed_kernel,
]


def test_a_sweep_of_all_sizes_and_alignments_compiles_few_variants():
    page_size = 11
    before = [count_variants(kernel) for kernel in KERNELS]
    for batch_size, length, max_pages, pitch, num_offset in SWEEP:

        def zeros(numel, dtype=torch.int32, num_offset=num_offset):
            return torch.zeros(numel + num_offset, dtype=dtype, device="cuda")[num_offset:]

        num_rows = batch_size + 1
        width = max_pages + pitch
        table = zeros(num_rows * width).view(num_rows, width)[:, :max_pages]
        rows = zeros(batch_size, torch.int64)
        rows += torch.arange(batch_size, device="cuda")
        lens, starts = zeros(batch_size) + length, zeros(batch_size)
        num_tokens = batch_size * length
        out, positions = zeros(num_tokens), zeros(num_tokens)
        chunks = chunked_prefill.chunking(lens, 1 + length, batch_size, max(length, 1))
        req_to_page.update_req_to_page(table, rows, out, lens, starts)
        out_cache_loc.compute_out_cache_loc(out, rows, lens, starts, table, page_size)
        out_cache_loc.compute_out_cache_loc_uniform(out, rows, length, starts, table, page_size)
        decode_input_prep.fused_decode_input_prep(
            out, positions, zeros(batch_size), rows, zeros(num_rows), length, table, page_size
        )
        chunked_prefill.create_chunked_cache_kv_indices_paged(
            table, rows, starts, lens, chunks.cum_seq_lens[0], out, page_size
        )
        prefix_lens = zeros(batch_size) + min(length, max_pages * page_size)
        chunked_prefill.build_chunked_prefill_metadata_arrays(
            prefix_lens, prefix_lens.cpu(), table, rows, page_size, 2 * batch_size
        )
        page_ids = [[row] for row in range(batch_size)]
        req_to_page.update_block_table(
            step(list(range(batch_size)), [0] * batch_size, page_ids), "cuda", table
        )
    compiled = [count_variants(kernel) - old for kernel, old in zip(KERNELS, before)]
    assert all(0 <= count <= 8 for count in compiled), compiled
    assert max(compiled) >= 1


@pytest.mark.skipif(
    not HAS_CUDA or torch.cuda.mem_get_info()[0] < 40 * 2**30, reason="needs 40 GiB of memory"
)
@pytest.mark.parametrize(("num_rows", "row_stride"), [(4, 2**30), (2, 2**31 + 5)], ids=str)
def test_table_of_more_cells_than_32_bits_can_count(num_rows, row_stride):
    numel = (num_rows - 1) * row_stride + 3
    memory = torch.empty(numel, dtype=torch.int32, device="cuda")
    table = memory.as_strided((num_rows, 3), (row_stride, 1))
    row = num_rows - 1
    req_to_page.update_block_table(step([0, row], [0, 0], [[1, 2, 3], [4, 5, 6]]), "cuda", table)
    assert table[[0, row]].tolist() == [[1, 2, 3], [4, 5, 6]]
    out = torch.zeros(4, dtype=torch.int32, device="cuda")
    rows, starts, lens = vector([row, 0], "cuda"), vector([2, 1], "cuda"), vector([3, 1], "cuda")
    out_cache_loc.compute_out_cache_loc(out, rows, lens, starts, table, 2)
    assert out.tolist() == [10, 11, 12, 3]
