"""How fast the kernels are: device time in a CUDA graph, and wall time.

    python benchmarks/bench_kernels.py [--only TEXT] [--markdown FILE] [--plot FILE] [--sweep]

Everything is measured in one run, beside an empty kernel, a version of the same contract in torch
alone, and the kernels of other engines that `make peers` has fetched: a figure depends on the
card's state. Each shape is verified before it is timed. `--sweep` tries other launch shapes, and
`--verify-only` times nothing and needs no GPU.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from pagefault.device import DeviceError, device_name, prepare, resolve_device, versions

PAGE_SIZE = 64
CACHED_TOKENS = 1000
EMPTY_KERNEL_US = 0.6
"""What an empty kernel took on the card for which the limits were set."""

LAUNCHES_PER_GRAPH = 40
REPLAYS = 25
WALL_CALLS = 200
ROUNDS = 3
"""How often everything is measured; a host is slow for seconds at times."""
MAX_ORACLE_TOKENS = 20_000
COPIED_BYTES = 2**28

Call = Callable[[], Any]


@dataclass
class Work:
    """One shape of one function, ready to be called.

    Attributes:
        name: As the table of limits has it.
        ours: Calls our function.
        torch_only: Does the same with torch.
        answer: Returns what the last call has written or returned, as tensors.
        oracle: Returns what it must be, as lists; None where that would take too long.
        num_bytes: What has to be read and written at least.
        must_reach_us: The limit, in µs.
        aim_us: What it should be, in µs.
        is_wall: Whether the limit is for the wall time until the call returns.
        is_capturable: Whether the function can be captured in a CUDA graph.
        batch_size: Requests.
        peers: Calls of other engines, by name.
    """

    name: str
    ours: Call
    torch_only: Call
    answer: Callable[[], list[torch.Tensor]]
    oracle: Callable[[], list[list[int]]] | None
    num_bytes: int
    must_reach_us: float | None = None
    aim_us: float | None = None
    is_wall: bool = False
    is_capturable: bool = True
    batch_size: int = 0
    peers: dict[str, Call] = field(default_factory=dict)


@dataclass
class Times:
    """Medians of one call, in µs; None where that can't be measured.

    Attributes:
        device: In a CUDA graph, divided by its launches.
        returned: Wall time until the call returns.
        done: Wall time until its work is done.
    """

    device: float | None
    returned: float
    done: float

    def quieter(self, other: Times) -> Times:
        """Return the smaller of each figure and that of another round."""
        device = self.device
        if device is not None and other.device is not None:
            device = min(device, other.device)
        return Times(device, min(self.returned, other.returned), min(self.done, other.done))


# Inputs


@dataclass
class Batch:
    """The tensors of a ragged batch, production's dtypes."""

    lens: list[int]
    starts: list[int]
    rows: list[int]
    table: torch.Tensor  # [batch_size + 1, max_pages] int32

    @classmethod
    def of(cls, lens: Sequence[int], device: str, cached: int = CACHED_TOKENS) -> Batch:
        """Return a batch of lengths; rows and page ids are shuffled, always in the same way."""
        batch_size = len(lens)
        generator = torch.Generator().manual_seed(batch_size)
        starts = [cached + idx % PAGE_SIZE if cached else 0 for idx in range(batch_size)]
        max_pages = 1 + max(map(sum, zip(starts, lens))) // PAGE_SIZE
        num_cells = (batch_size + 1) * max_pages
        page_ids = torch.arange(num_cells, dtype=torch.int32) % 1_000_003 + 1
        table = page_ids[torch.randperm(num_cells, generator=generator)]
        rows = (torch.randperm(batch_size, generator=generator) + 1).tolist()
        return cls(list(lens), starts, rows, table.view(-1, max_pages).to(device))

    @property
    def num_tokens(self) -> int:
        return sum(self.lens)

    def tensor(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.table.device)

    def zeros(self, numel: int) -> torch.Tensor:
        return torch.zeros(numel, dtype=torch.int32, device=self.table.device)

    def num_page_bytes(self) -> int:
        """Return the bytes of the page ids that the new tokens need."""
        pages = [
            (start + length - 1) // PAGE_SIZE - start // PAGE_SIZE + 1
            for start, length in zip(self.starts, self.lens)
            if length
        ]
        return 4 * sum(pages)

    def in_batch_order(self) -> torch.Tensor:
        return self.table[self.tensor(self.rows)].contiguous()


# The contracts in torch alone. They may know on the host how many tokens there are.


def torch_slots(
    table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Return the slot of every position, diverted; int32."""
    max_pages = table.shape[1]
    page_idx = positions // page_size
    page_ids = table[rows, page_idx.clamp(max=max_pages - 1)]
    slots = page_ids * page_size + positions % page_size
    return torch.where((page_idx < max_pages) & (page_ids >= 0), slots, 0).int()


def torch_ragged(
    out: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    starts: torch.Tensor,
    table: torch.Tensor,
    num_tokens: int,
) -> None:
    """Write the slots of a ragged batch."""
    req_idx = torch.repeat_interleave(lens, output_size=num_tokens)
    shift = starts - (lens.cumsum(0) - lens)
    positions = torch.arange(num_tokens, device=out.device) + shift[req_idx]
    out[:num_tokens] = torch_slots(table, rows[req_idx], positions, PAGE_SIZE)


def torch_uniform(
    out: torch.Tensor, rows: torch.Tensor, length: int, starts: torch.Tensor, table: torch.Tensor
) -> None:
    """Write the slots of requests of one length."""
    positions = starts[:, None] + torch.arange(length, device=out.device)
    out[: positions.numel()] = torch_slots(table, rows[:, None], positions, PAGE_SIZE).flatten()


def torch_update(
    table: torch.Tensor,
    rows: torch.Tensor,
    page_ids: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
) -> None:
    """Write page ids into the table; all have a column."""
    num_page_ids = page_ids.numel()
    req_idx = torch.repeat_interleave(counts, output_size=num_page_ids)
    shift = starts - (counts.cumsum(0) - counts)
    columns = torch.arange(num_page_ids, device=table.device) + shift[req_idx]
    table[rows[req_idx], columns] = page_ids


def torch_block_table(forward_op: Any, table: torch.Tensor) -> None:
    """Write the pages of a step into the table."""
    device = table.device
    flat = list(itertools.chain.from_iterable(forward_op.new_occupied_pages))
    torch_update(
        table,
        torch.tensor(forward_op.request_pool_indices).to(device),
        torch.tensor(flat, dtype=torch.int32).to(device),
        torch.tensor(forward_op.sizes).to(device),
        torch.tensor(forward_op.begins).to(device),
    )


def torch_chunking(
    prefix_lens: torch.Tensor, num_chunks: int, chunk_len: int
) -> list[torch.Tensor]:
    """Return starts, ends, lengths and running sums of the chunks; int32."""
    starts = torch.arange(num_chunks, device=prefix_lens.device)[:, None] * chunk_len
    starts = starts.expand(-1, prefix_lens.numel()).contiguous()
    ends = torch.minimum(prefix_lens, starts + chunk_len)
    lens = (ends - starts).clamp(min=0)
    sums = torch.nn.functional.pad(lens.cumsum(1), (1, 0))
    return [starts.int(), ends.int(), lens.int(), sums.int()]


def torch_metadata(
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    chunk_capacity: int,
) -> Any:
    """Return what `build_chunked_prefill_metadata_arrays` does."""
    chunk_len = chunk_capacity // prefix_lens.numel()
    num_chunks = -(-int(prefix_lens_cpu.max()) // chunk_len)
    _, _, lens_cpu, sums_cpu = torch_chunking(prefix_lens_cpu, num_chunks, chunk_len)
    starts, _, lens, sums = torch_chunking(prefix_lens, num_chunks, chunk_len)
    slots = []
    for chunk_idx, num_tokens in enumerate(sums_cpu[:, -1].tolist()):
        slots.append(torch.empty(num_tokens, dtype=torch.int32, device=table.device))
        chunk = slots[-1], rows, lens[chunk_idx], starts[chunk_idx], table, num_tokens
        torch_ragged(*chunk)
    return num_chunks, slots, lens, sums, lens_cpu.amax(1).tolist()


# The works


def ragged(name: str, lens: Sequence[int], device: str, spare: int = 1, **limits: Any) -> Work:
    """Return `compute_out_cache_loc`; the output is `spare` times as long as it needs to be."""
    from pagefault.kernels.out_cache_loc import compute_out_cache_loc
    from pagefault.oracle.out_cache_loc import compute_out_cache_loc as oracle

    batch = Batch.of(lens, device)
    rows, starts = batch.tensor(batch.rows, torch.int64), batch.tensor(batch.starts)
    lens_tensor, num_tokens = batch.tensor(lens), batch.num_tokens
    out = batch.zeros(num_tokens * spare)

    def expected() -> list[list[int]]:
        table = batch.table.tolist()
        slots = oracle(batch.rows, batch.lens, batch.starts, table, PAGE_SIZE)
        return [slots + [0] * (out.numel() - num_tokens)]

    work = Work(
        name,
        lambda: compute_out_cache_loc(out, rows, lens_tensor, starts, batch.table, PAGE_SIZE),
        lambda: torch_ragged(out, rows, lens_tensor, starts, batch.table, num_tokens),
        lambda: [out],
        expected if num_tokens <= MAX_ORACLE_TOKENS else None,
        4 * num_tokens + 16 * len(lens) + batch.num_page_bytes(),
        batch_size=len(lens),
        **limits,
    )
    peer = load_tokenspeed()
    if peer is not None and spare == 1:
        in_order = batch.in_batch_order()
        work.peers["tokenspeed, and a cumsum"] = lambda: peer.ragged(
            out, lens_tensor, starts, in_order
        )
    return work


def uniform(name: str, batch_size: int, length: int, device: str, **limits: Any) -> Work:
    """Return `compute_out_cache_loc_uniform`."""
    from pagefault.kernels.out_cache_loc import compute_out_cache_loc_uniform
    from pagefault.oracle.out_cache_loc import compute_out_cache_loc_uniform as oracle

    batch = Batch.of([length] * batch_size, device)
    rows, starts = batch.tensor(batch.rows, torch.int64), batch.tensor(batch.starts)
    out = batch.zeros(batch.num_tokens)

    def expected() -> list[list[int]]:
        table = batch.table.tolist()
        return [oracle(batch.rows, length, batch.starts, table, PAGE_SIZE)]

    work = Work(
        name,
        lambda: compute_out_cache_loc_uniform(out, rows, length, starts, batch.table, PAGE_SIZE),
        lambda: torch_uniform(out, rows, length, starts, batch.table),
        lambda: [out],
        expected if batch.num_tokens <= MAX_ORACLE_TOKENS else None,
        4 * batch.num_tokens + 12 * batch_size + batch.num_page_bytes(),
        batch_size=batch_size,
        **limits,
    )
    peer = load_tokenspeed()
    if peer is not None:
        in_order = batch.in_batch_order()
        work.peers["tokenspeed"] = lambda: peer.uniform(out, length, starts, in_order)
    return work


def fused(name: str, batch_size: int, length: int, device: str, **limits: Any) -> Work:
    """Return `fused_decode_input_prep`."""
    from pagefault.kernels.decode_input_prep import fused_decode_input_prep
    from pagefault.oracle.decode_input_prep import fused_decode_input_prep as oracle

    batch = Batch.of([length] * batch_size, device)
    rows = batch.tensor(batch.rows, torch.int64)
    cached = [0] * (batch_size + 1)
    for row, start in zip(batch.rows, batch.starts):
        cached[row] = start
    cache_lens = batch.tensor(cached)
    out, positions = batch.zeros(batch.num_tokens), batch.zeros(batch.num_tokens)
    seq_lens = batch.zeros(batch_size)

    def torch_only() -> None:
        starts = cache_lens[rows]
        seq_lens.copy_(starts + length)
        positions.copy_((starts[:, None] + torch.arange(length, device=out.device)).flatten())
        torch_uniform(out, rows, length, starts, batch.table)

    work = Work(
        name,
        lambda: fused_decode_input_prep(
            out, positions, seq_lens, rows, cache_lens, length, batch.table, PAGE_SIZE
        ),
        torch_only,
        lambda: [out, positions, seq_lens],
        lambda: [*oracle(batch.rows, cached, length, batch.table.tolist(), PAGE_SIZE)],
        8 * batch.num_tokens + 16 * batch_size + batch.num_page_bytes(),
        batch_size=batch_size,
        **limits,
    )
    peer = load_tokenspeed()
    if peer is not None:
        in_order, starts = batch.in_batch_order(), batch.tensor(batch.starts)
        work.peers["tokenspeed, no slots"] = lambda: peer.positions(
            positions, seq_lens, rows, cache_lens, length
        )

        def two_launches() -> None:
            peer.positions(positions, seq_lens, rows, cache_lens, length)
            peer.uniform(out, length, starts, in_order)

        work.peers["tokenspeed, two launches"] = two_launches
    return work


def update(name: str, batch_size: int, num_pages: int, device: str, **limits: Any) -> Work:
    """Return `update_req_to_page`, with equally many pages for each request."""
    from pagefault.kernels.req_to_page import update_req_to_page
    from pagefault.oracle.req_to_page import update_req_to_page as oracle

    step = Step.of(batch_size, num_pages, device)
    rows, starts = step.tensor(step.rows, torch.int64), step.tensor(step.begins)
    counts, page_ids = step.tensor([num_pages] * batch_size), step.tensor(step.flat)
    work = Work(
        name,
        lambda: update_req_to_page(step.table, rows, page_ids, counts, starts),
        lambda: torch_update(step.table, rows, page_ids, counts, starts),
        lambda: [step.table],
        lambda: step.as_one_row(
            oracle(step.old, step.rows, step.flat, [num_pages] * batch_size, step.begins)
        ),
        8 * len(step.flat) + 16 * batch_size,
        batch_size=batch_size,
        **limits,
    )
    peer = load_sglang("write_req_to_token_pool_triton")
    if callable(peer):
        ends = starts + num_pages
        work.peers["sglang"] = lambda: peer(
            (batch_size,),
            req_to_token_ptr=step.table,
            req_pool_indices=rows,
            pre_lens=starts,
            seq_lens=ends,
            extend_lens=counts,
            out_cache_loc=page_ids,
            req_to_token_ptr_stride=step.table.stride(0),
        )
    return work


def block_table(name: str, batch_size: int, num_pages: int, device: str, **limits: Any) -> Work:
    """Return `update_block_table`, with equally many pages for each request."""
    from pagefault.kernels.req_to_page import update_block_table
    from pagefault.oracle.req_to_page import update_block_table as oracle

    step = Step.of(batch_size, num_pages, device)
    forward_op = SimpleNamespace(
        request_ids=[f"request-{idx}" for idx in range(batch_size)],
        request_pool_indices=step.rows,
        sizes=[num_pages] * batch_size,
        begins=step.begins,
        new_occupied_pages=step.page_ids,
    )
    return Work(
        name,
        lambda: update_block_table(forward_op, device, step.table),
        lambda: torch_block_table(forward_op, step.table),
        lambda: [step.table],
        lambda: step.as_one_row(oracle(step.old, step.rows, step.begins, step.page_ids)),
        12 * len(step.flat) + 24 * batch_size,
        batch_size=batch_size,
        is_wall=True,
        is_capturable=False,
        **limits,
    )


@dataclass
class Step:
    """New pages of a scheduler step, and the table they go to."""

    rows: list[int]
    begins: list[int]
    page_ids: list[list[int]]
    old: list[list[int]]
    table: torch.Tensor

    @classmethod
    def of(cls, batch_size: int, num_pages: int, device: str) -> Step:
        generator = torch.Generator().manual_seed(batch_size)
        rows = (torch.randperm(batch_size, generator=generator) + 1).tolist()
        begins = [idx % 17 for idx in range(batch_size)]
        page_ids = torch.randperm(batch_size * num_pages, generator=generator) + 1000
        table = torch.zeros((batch_size + 1, num_pages + 20), dtype=torch.int32)
        return cls(
            rows,
            begins,
            page_ids.view(batch_size, num_pages).tolist(),
            table.tolist(),
            table.to(device),
        )

    @property
    def flat(self) -> list[int]:
        return [page_id for page_ids in self.page_ids for page_id in page_ids]

    def tensor(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.table.device)

    @staticmethod
    def as_one_row(table: list[list[int]]) -> list[list[int]]:
        return [[page_id for row in table for page_id in row]]


def chunking(name: str, prefix_lens: Sequence[int], num_chunks: int, device: str) -> Work:
    """Return `chunking`."""
    from pagefault.kernels.chunked_prefill import chunking as ours
    from pagefault.oracle.chunked_prefill import chunking as oracle

    batch_size, chunk_len = len(prefix_lens), -(-max(prefix_lens) // num_chunks)
    tensor = torch.tensor(prefix_lens, dtype=torch.int32, device=device)
    last: list[torch.Tensor] = []

    def keep(chunks: Sequence[torch.Tensor]) -> None:
        last[:] = chunks

    return Work(
        name,
        lambda: keep(ours(tensor, num_chunks, batch_size, chunk_len)),
        lambda: keep(torch_chunking(tensor, num_chunks, chunk_len)),
        lambda: last,
        lambda: [
            list(itertools.chain.from_iterable(part))
            for part in oracle(prefix_lens, num_chunks, batch_size, chunk_len)
        ],
        4 * batch_size + 16 * batch_size * num_chunks,
        batch_size=batch_size,
    )


def chunk_slots(name: str, lens: Sequence[int], device: str) -> Work:
    """Return `create_chunked_cache_kv_indices_paged`."""
    from pagefault.kernels.chunked_prefill import create_chunked_cache_kv_indices_paged
    from pagefault.oracle.out_cache_loc import compute_out_cache_loc as oracle

    batch = Batch.of(lens, device)
    rows, starts = batch.tensor(batch.rows, torch.int64), batch.tensor(batch.starts)
    lens_tensor, num_tokens = batch.tensor(lens), batch.num_tokens
    offsets = batch.tensor([0, *itertools.accumulate(lens)])
    out = batch.zeros(num_tokens)

    def expected() -> list[list[int]]:
        table = batch.table.tolist()
        return [oracle(batch.rows, batch.lens, batch.starts, table, PAGE_SIZE)]

    work = Work(
        name,
        lambda: create_chunked_cache_kv_indices_paged(
            batch.table, rows, starts, lens_tensor, offsets, out, PAGE_SIZE
        ),
        lambda: torch_ragged(out, rows, lens_tensor, starts, batch.table, num_tokens),
        lambda: [out],
        expected if num_tokens <= MAX_ORACLE_TOKENS else None,
        4 * num_tokens + 20 * len(lens) + batch.num_page_bytes(),
        batch_size=len(lens),
    )
    peer = load_tokenspeed()
    if peer is not None:
        in_order = batch.in_batch_order()
        work.peers["tokenspeed"] = lambda: peer.chunk(in_order, starts, lens_tensor, offsets, out)
    sglang = load_sglang("create_chunked_prefix_cache_kv_indices")
    if callable(sglang):
        tokens = torch.zeros((len(lens) + 1, max(lens) + 2000), dtype=torch.int32, device=device)
        work.peers["sglang, pages of 1"] = lambda: sglang(
            (len(lens),),
            req_to_token_ptr=tokens,
            req_pool_indices_ptr=rows,
            chunk_start_idx_ptr=starts,
            chunk_seq_lens_ptr=lens_tensor,
            chunk_cu_seq_lens_ptr=offsets,
            chunk_kv_indices_ptr=out,
            req_to_token_ptr_stride=tokens.stride(0),
        )
    return work


def metadata(name: str, lens: Sequence[int], num_chunks: int, device: str, **limits: Any) -> Work:
    """Return `build_chunked_prefill_metadata_arrays`, all tokens in num_chunks chunks."""
    from pagefault.kernels.chunked_prefill import build_chunked_prefill_metadata_arrays
    from pagefault.oracle.chunked_prefill import build_chunked_prefill_metadata_arrays as oracle

    batch = Batch.of(lens, device, cached=0)
    capacity = len(lens) * -(-max(lens) // num_chunks)
    rows = batch.tensor(batch.rows, torch.int64)
    prefix_lens, prefix_lens_cpu = batch.tensor(lens), torch.tensor(lens, dtype=torch.int32)
    last: list[Any] = []

    def keep(found: Any) -> None:
        last[:] = [found]

    def answer() -> list[torch.Tensor]:
        count, slots, lens_in_chunk, sums, longest = last[0]
        assert count == len(slots) == len(longest)
        return [torch.cat(slots), lens_in_chunk, sums]

    def expected() -> list[list[int]]:
        found = oracle(lens, batch.table.tolist(), batch.rows, PAGE_SIZE, capacity)
        flat = itertools.chain.from_iterable
        return [list(flat(part)) for part in found[1:4]]

    work = Work(
        name,
        lambda: keep(
            build_chunked_prefill_metadata_arrays(
                prefix_lens, prefix_lens_cpu, batch.table, rows, PAGE_SIZE, capacity
            )
        ),
        lambda: keep(torch_metadata(prefix_lens, prefix_lens_cpu, batch.table, rows, capacity)),
        answer,
        expected if batch.num_tokens <= MAX_ORACLE_TOKENS else None,
        4 * batch.num_tokens + 16 * len(lens) * num_chunks + batch.num_page_bytes(),
        batch_size=len(lens),
        is_wall=True,
        is_capturable=False,
        **limits,
    )
    peer = load_tokenspeed()
    if peer is not None:
        in_order = batch.in_batch_order()
        work.peers["tokenspeed"] = lambda: peer.metadata(
            prefix_lens, prefix_lens_cpu, in_order, capacity
        )
    return work


def mixed_lens(batch_size: int, longest: int) -> list[int]:
    """Return lengths from 1 to `longest`, always the same."""
    return [1 + idx * 2_654_435_761 % 2**32 * longest // 2**32 for idx in range(batch_size)]


def makers(device: str, part: int = 1) -> dict[str, Callable[[], Work]]:
    """Return what makes each work, by name.

    Args:
        device: "cuda" or "cpu".
        part: Lengths are divided by this: what the oracle can follow in a moment.
    """

    def cut(length: int) -> int:
        return -(-length // part)

    makers: dict[str, Callable[[], Work]] = {}

    def add(make: Callable[..., Work], name: str, *shape: Any, **limits: Any) -> None:
        makers[name] = lambda: make(name, *shape, device=device, **limits)

    def limit(must_reach_us: float, aim_us: float) -> dict[str, float]:
        return {"must_reach_us": must_reach_us, "aim_us": aim_us}

    in_the_middle = [1] * 128 + [cut(1_048_576)] + [1] * 127
    add(ragged, "ragged, 256 × 1 token", [1] * 256, **limit(1.8, 1.3))
    add(ragged, "ragged, 64 × 2,048", [cut(2048)] * 64, **limit(2.1, 1.6))
    add(ragged, "ragged, 4 × 32,768", [cut(32_768)] * 4, **limit(2.0, 1.5))
    add(ragged, "ragged, 1 × 131,072", [cut(131_072)], **limit(2.0, 1.5))
    add(ragged, "ragged, 8 × 131,072", [cut(131_072)] * 8, **limit(3.2, 2.4))
    add(ragged, "ragged, 4,096 × 1", [1] * 4096, **limit(3.5, 2.5))
    add(
        ragged,
        "ragged, 255 × 1 and one of 1,048,576 in the middle",
        in_the_middle,
        **limit(4.5, 3.0),
    )
    add(
        ragged,
        "ragged, 256 × 1 into an output 1,000 times too long",
        [1] * 256,
        spare=1000,
        **limit(2.0, 1.5),
    )
    add(ragged, "ragged, 8 × 1", [1] * 8)
    add(ragged, "ragged, 256 × 4", [4] * 256)
    add(ragged, "ragged, 256 × 8", [8] * 256)
    add(ragged, "ragged, 8,192 × 1", [1] * 8192)
    add(ragged, "ragged, 64 of 1 to 4,096", mixed_lens(64, cut(4096)))
    add(ragged, "ragged, 256 × 512", [cut(512)] * 256)
    add(ragged, "ragged, 256 of 1 to 2,048", mixed_lens(256, cut(2048)))
    add(ragged, "ragged, 1,024 of 1 to 2,048", mixed_lens(1024, cut(2048)))
    add(uniform, "uniform, 256 × 1", 256, 1)
    add(uniform, "uniform, 256 × 4", 256, 4)
    add(uniform, "uniform, 8 × 131,072", 8, cut(131_072))
    add(fused, "fused decode, 256 × 1", 256, 1)
    add(fused, "fused decode, 256 × 4", 256, 4, **limit(1.7, 1.3))
    add(update, "page table update, 256 × 1 page", 256, 1)
    add(update, "page table update, 8 × 2,048 pages", 8, cut(2048))
    add(chunking, "chunking, 8 × 131,072 in 8 chunks", [cut(131_072)] * 8, 8)
    add(chunk_slots, "chunk slots, 8 × 16,384", [cut(16_384)] * 8)
    add(chunk_slots, "chunk slots, 256 × 512", [cut(512)] * 256)
    add(chunk_slots, "chunk slots, 1,024 × 512", [cut(512)] * 1024)
    add(
        metadata,
        "chunk metadata, 8 × 131,072 in 8 chunks (wall)",
        [cut(131_072)] * 8,
        8,
        **limit(110, 60),
    )
    add(
        metadata,
        "chunk metadata, 64 of 1 to 8,192 in 4 chunks (wall)",
        mixed_lens(64, cut(8192)),
        4,
    )
    add(block_table, "block-table update, 256 × 1 page (wall)", 256, 1, **limit(80, 50))
    add(
        block_table,
        "block-table update, 8 × 2,048 pages (wall)",
        8,
        cut(2048),
        **limit(550, 400),
    )
    return makers


# Peers


class Tokenspeed:
    """The kernels of tokenspeed's release, launched with nothing around them."""

    def __init__(self, target: ModuleType) -> None:
        self._target: Any = target

    def ragged(
        self, out: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor, table: torch.Tensor
    ) -> None:
        self._target._slots.compute_out_cache_loc_kernel[(len(lens),)](
            lens,
            starts,
            table,
            torch.cumsum(lens, dim=0),
            out,
            0,
            page_size=PAGE_SIZE,
            max_pages=table.shape[1],
            BLOCK_SIZE=self._target.TILE_SIZE,
        )

    def uniform(
        self, out: torch.Tensor, length: int, starts: torch.Tensor, table: torch.Tensor
    ) -> None:
        self._target._slots.compute_out_cache_loc_uniform(out, length, starts, table, PAGE_SIZE)

    def positions(self, *arguments: Any) -> None:
        self._target._slots.fused_decode_input_prep(*arguments)

    def chunk(
        self,
        table: torch.Tensor,
        starts: torch.Tensor,
        lens: torch.Tensor,
        offsets: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        kernel = self._target._chunks.create_chunked_cache_kv_indices_paged
        kernel[(len(lens),)](table, starts, lens, offsets, out, table.shape[1], PAGE_SIZE)

    def metadata(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        table: torch.Tensor,
        capacity: int,
    ) -> Any:
        self._target._set_chunk_capacity(capacity)
        build = self._target._chunks.build_chunked_prefill_metadata_arrays
        return build(prefix_lens, prefix_lens_cpu, table, PAGE_SIZE)


_peers: dict[str, Any] = {}


def load_tokenspeed() -> Tokenspeed | None:
    """Return tokenspeed's kernels, or None; `_peers` has what is the matter."""
    if "tokenspeed" not in _peers:
        try:
            from pagefault.targets import tokenspeed
        except ImportError as error:
            _peers["tokenspeed"] = str(error)
        else:
            _peers["tokenspeed"] = Tokenspeed(tokenspeed)
    peer = _peers["tokenspeed"]
    return peer if isinstance(peer, Tokenspeed) else None


def load_sglang(function: str) -> Callable[..., None] | None:
    """Return a launcher of a kernel of sglang's, or None; `_peers` has what is the matter.

    Args:
        function: The kernel's name, wherever in `.peers/sglang` it is defined.
    """
    name = f"sglang's {function}"
    if name not in _peers:
        _peers[name] = "no file in .peers/sglang defines it; `make peers` may not fetch it"
        for path in sorted(Path(".peers/sglang").rglob("*.py")):
            if f"def {function}(" in path.read_text(encoding="utf-8"):
                _peers[name] = _load_by_path(path, function)
                break
    peer = _peers[name]
    return peer if callable(peer) else None


def _load_by_path(path: Path, function: str) -> Callable[..., None] | str:
    spec = importlib.util.spec_from_file_location(f"pagefault_peer_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        return f"{path} can't be loaded by path: {error}"
    kernel = getattr(module, function)

    def launch(grid: tuple[int, ...], **arguments: Any) -> None:
        kernel[grid](*(arguments[name] for name in kernel.arg_names))

    return launch


# Measuring


def verify(work: Work, small: Work) -> None:
    """Raise AssertionError if our function or the one in torch gives anything but the oracle's.

    Where the oracle would take too long, both are held to it on a small shape, and to each other
    on the large one.
    """
    for candidate in (work, small):
        if candidate.oracle is None:
            continue
        expected = candidate.oracle()
        for who, call in (("ours", candidate.ours), ("torch", candidate.torch_only)):
            found = _answer_of(candidate, call)
            assert [part.tolist() for part in found] == expected, f"{work.name}: {who} is wrong"
    assert small.oracle is not None, f"{work.name}: even the small shape has too many tokens"
    ours, others = _answer_of(work, work.ours), _answer_of(work, work.torch_only)
    assert all(map(torch.equal, ours, others)), f"{work.name}: ours and torch differ"


def _answer_of(work: Work, call: Call) -> list[torch.Tensor]:
    if call is work.ours or call is work.torch_only:
        with _cleared(work):
            call()
    return [part.clone().flatten() for part in work.answer()]


@contextmanager
def _cleared(work: Work) -> Iterator[None]:
    """Fill what the last call has written, so that this one has to write it."""
    try:
        parts = work.answer()
    except IndexError:
        parts = []
    for part in parts:
        part.fill_(0)
    yield


def time_in_graph(call: Call) -> float:
    """Return the µs of one call in a graph of many; the median over replays."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES_PER_GRAPH):
            call()
    graph.replay()
    new_event: Any = torch.cuda.Event
    events = [
        (new_event(enable_timing=True), new_event(enable_timing=True)) for _ in range(REPLAYS)
    ]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times_ms: list[float] = [start.elapsed_time(end) for start, end in events]
    return statistics.median(times_ms) * 1e3 / LAUNCHES_PER_GRAPH


def time_wall(call: Call) -> tuple[float, float]:
    """Return the µs until a call returns, and until its work is done; medians."""
    returned, done = [], []
    for idx in range(WALL_CALLS + 10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        returned_at = time.perf_counter()
        torch.cuda.synchronize()
        done_at = time.perf_counter()
        if idx >= 10:
            returned.append((returned_at - started) * 1e6)
            done.append((done_at - started) * 1e6)
    return statistics.median(returned), statistics.median(done)


def measure(call: Call, is_capturable: bool) -> Times:
    """Return the times of a call."""
    returned, done = time_wall(call)
    device = None
    if is_capturable:
        try:
            device = time_in_graph(call)
        except RuntimeError as error:
            logging.getLogger(__name__).warning("not captured: %s", str(error).splitlines()[0])
            torch.cuda.synchronize()
    return Times(device, returned, done)


def empty_kernel_call() -> Call:
    """Return a launch of a Triton kernel that does nothing."""
    import triton

    @triton.jit  # type: ignore[untyped-decorator]
    def empty_kernel() -> None:
        pass

    return lambda: empty_kernel[(1,)]()


def copy_bandwidth() -> float:
    """Return bytes read and written in a microsecond by a copy of a large tensor."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / time_in_graph(lambda: target.copy_(source))


# Reports


@dataclass
class Row:
    """The figures of one work."""

    work: Work
    ours: Times
    torch_only: Times
    peers: dict[str, Times]

    @classmethod
    def of(cls, work: Work) -> Row:
        """Measure a work."""
        peers = {name: measure(call, work.is_capturable) for name, call in work.peers.items()}
        ours = measure(work.ours, work.is_capturable)
        return cls(work, ours, measure(work.torch_only, work.is_capturable), peers)

    def quieter(self, other: Row) -> Row:
        """Return the smaller of each figure and that of another round."""
        peers = {name: times.quieter(other.peers[name]) for name, times in self.peers.items()}
        ours, torch_only = self.ours.quieter(other.ours), self.torch_only.quieter(other.torch_only)
        return Row(self.work, ours, torch_only, peers)

    def limited_us(self) -> float:
        """Return the figure that the limit is for."""
        if self.work.is_wall or self.ours.device is None:
            return self.ours.returned
        return self.ours.device


HEADINGS = [
    *("work", "device", "wall", "done", "torch: device", "torch: wall"),
    *("peer: device / wall", "of copy speed", "must reach", "aim"),
]


def cells_of(row: Row, empty_us: float, bandwidth: float) -> list[str]:
    """Return a row of the table; limits of device time are scaled by the empty kernel."""
    scale = 1.0 if row.work.is_wall else empty_us / EMPTY_KERNEL_US
    must_reach, aim = (
        "" if limit is None else f"{limit * scale:.3g}"
        for limit in (row.work.must_reach_us, row.work.aim_us)
    )
    if must_reach and row.limited_us() > float(must_reach):
        must_reach += " missed"
    speed = ""
    if row.ours.device is not None:
        speed = f"{row.work.num_bytes / row.ours.device / bandwidth:.0%}"
    peers = "; ".join(
        f"{name} {_us(times.device)} / {_us(times.returned)}" for name, times in row.peers.items()
    )
    return [
        row.work.name,
        _us(row.ours.device),
        _us(row.ours.returned),
        _us(row.ours.done),
        _us(row.torch_only.device),
        _us(row.torch_only.returned),
        peers,
        speed,
        must_reach,
        aim,
    ]


def _us(time_us: float | None) -> str:
    if time_us is None:
        return "–"
    return f"{time_us:.2f}" if time_us < 20 else f"{time_us:,.0f}"


def describe(empty: Times, bandwidth: float) -> list[str]:
    """Return lines that say what was measured on what."""
    missing = [f"{name}: {why}" for name, why in _peers.items() if isinstance(why, str)]
    return [
        " · ".join(f"{name} {version}" for name, version in versions().items()),
        f"Device: {device_name('cuda')}.",
        f"An empty Triton kernel: {_us(empty.device)} µs in a graph, {_us(empty.returned)} µs "
        f"wall; limits of device time are scaled by it ({EMPTY_KERNEL_US} µs where they were set).",
        f"A copy of {COPIED_BYTES // 2**20} MiB reads and writes {bandwidth / 1e6:.2f} TB/s; "
        "of copy speed: the bytes that have to be read and written at least, against that.",
        f"Each figure is the smallest of the medians of {ROUNDS} rounds, in µs. Device: in a CUDA "
        "graph. Wall: until the call returns. Done: until its work is. int32 output, page size "
        f"{PAGE_SIZE}, tables in shuffled order.",
        *missing,
    ]


def write_markdown(path: Path, lines: list[str], table: list[list[str]], plot: Path | None) -> None:
    """Write the generated page."""
    text = ["# How fast the kernels are", ""]
    text += ["Generated by `make bench-kernels`; do not edit.", ""]
    text += itertools.chain.from_iterable((line, "") for line in lines)
    if plot is not None:
        text += [f"![Device time of the kernels]({plot.name})", ""]
    text += ["| " + " | ".join(HEADINGS) + " |", "| --- |" + " ---: |" * (len(HEADINGS) - 1)]
    text += ["| " + " | ".join(row) + " |" for row in table]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")


def draw_plot(path: Path, rows: list[Row], empty: Times) -> None:
    """Draw the figures that have limits, or device times, one bar each beside torch's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row.ours.device is not None]
    places = range(len(shown))
    figure, axes = pyplot.subplots(figsize=(10, 0.34 * len(shown) + 1.5))
    axes.barh(
        [place + 0.2 for place in places],
        [row.ours.device or 0 for row in shown],
        height=0.4,
        label="ours",
    )
    axes.barh(
        [place - 0.2 for place in places],
        [row.torch_only.device or 0 for row in shown],
        height=0.4,
        label="torch alone",
    )
    for place, row in enumerate(shown):
        if row.work.must_reach_us is not None:
            axes.plot(row.work.must_reach_us, place + 0.2, "k|", markersize=12)
    axes.axvline(empty.device or EMPTY_KERNEL_US, linestyle=":", color="grey", label="empty kernel")
    axes.set_yticks(list(places), [row.work.name for row in shown])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("device time, µs; a mark is the limit")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


# Sweeping


def ragged_candidates() -> list[Any]:
    """Return launch shapes to try for ragged batches."""
    from pagefault.kernels.launches import RaggedShape

    tiles = [(512, 1), (512, 2), (512, 4), (1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8)]
    mosts = (256, 512, 1024)
    by_request = [
        RaggedShape(True, False, window, True, 32, 4, *tile, most)
        for window in (32, 64, 256, 1024)
        for tile in tiles
        for most in mosts
    ]
    whole = [
        RaggedShape(False, looks_first, 256, True, *group, *tile, 640)
        for looks_first in (True, False)
        for group in ((8, 4), (16, 4), (32, 4))
        for tile in tiles
    ]
    walked = [
        RaggedShape(False, True, window, False, *group, *tile, 640)
        for window in (256, 1024, 2048)
        for group in ((32, 4), (64, 4), (128, 4))
        for tile in ((1024, 4), (1024, 8), (2048, 4), (4096, 8))
    ]
    return [*by_request, *whole, *walked]


def uniform_candidates() -> list[Any]:
    """Return launch shapes to try for requests of one length."""
    from pagefault.kernels.launches import UniformShape

    sizes = [(64, 2), (128, 1), (128, 2), (128, 4), (256, 1), (256, 2), (256, 4), (256, 8)]
    return [UniformShape(*size) for size in [*sizes, (1024, 4), (2048, 4), (2048, 8), (4096, 8)]]


@contextmanager
def launched_in(shape: Any) -> Iterator[None]:
    """Make every launch have this shape."""
    from pagefault.kernels import launches

    is_ragged = isinstance(shape, launches.RaggedShape)
    shapes: Any = launches.RAGGED_SHAPES if is_ragged else launches.UNIFORM_SHAPES
    before = dict(shapes)
    shapes.update(dict.fromkeys(shapes, shape))
    try:
        yield
    finally:
        shapes.update(before)


def sweep(console: Console, works: list[Work]) -> None:
    """Print the device times of each work in the best shapes, and in the one it has."""
    for work in works:
        if not work.is_capturable or work.name.startswith("chunking"):
            continue
        is_uniform = work.name.startswith(("uniform", "fused"))
        found = [(time_in_graph(work.ours), "as it is")]
        for shape in uniform_candidates() if is_uniform else ragged_candidates():
            if getattr(shape, "has_one_window", False) and work.batch_size > shape.window_size:
                continue
            is_update = work.name.startswith("page table")
            if is_update and (shape.is_by_request or shape.tile_size > 1024):
                continue
            with launched_in(shape):
                found.append((time_in_graph(work.ours), str(tuple(shape))))
        as_it_is, *_ = found
        console.print(f"{work.name}: {as_it_is[0]:.2f} as it is")
        for time_us, label in sorted(found)[:8]:
            console.print(f"    {time_us:6.2f}  {label}")


# The command


def verified_works(chosen: dict[str, Callable[[], Work]]) -> list[Work]:
    """Return the works, of which each is right."""
    small = makers("cuda", part=64)
    works = []
    for name, make in chosen.items():
        works.append(make())
        verify(works[-1], small[name]())
    return works


def run_works(
    console: Console, chosen: dict[str, Callable[[], Work]]
) -> tuple[Times, list[Row], list[Work]]:
    """Return the figures of an empty kernel and of the works, the smallest of all rounds."""
    # Once before anything else has run, where it is fastest.
    empty = measure(empty_kernel_call(), is_capturable=True)
    works = verified_works(chosen)
    rows: list[Row] = []
    for number in range(ROUNDS):
        for idx, work in enumerate(works):
            row = Row.of(work)
            if number == 0:
                rows.append(row)
                figure = "wall" if work.is_wall else "device"
                console.print(f"  {work.name}: {row.limited_us():.2f} µs {figure}", highlight=False)
            else:
                rows[idx] = rows[idx].quieter(row)
        empty = empty.quieter(measure(empty_kernel_call(), is_capturable=True))
    return empty, rows, works


def verify_only(console: Console, device: str, only: str) -> None:
    """Verify every work, and time nothing."""
    small = makers(device, part=64)
    # The interpreter takes milliseconds for a program.
    for name, make in (small if device == "cpu" else makers(device)).items():
        if only in name:
            verify(make(), small[name]())
            console.print(f"  {name}: right", highlight=False)


def main(
    only: Annotated[str, typer.Option(help="Works whose name has this in it.")] = "",
    markdown: Annotated[Path | None, typer.Option(help="Write a page of the results.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results.")] = None,
    is_verify_only: Annotated[
        bool, typer.Option("--verify-only", help="Time nothing; needs no GPU.")
    ] = False,
    is_sweep: Annotated[bool, typer.Option("--sweep", hidden=True)] = False,
) -> None:
    """Measure the kernels on a GPU."""
    console = Console(width=200, soft_wrap=True)
    try:
        device = resolve_device("auto" if is_verify_only else "cuda")
    except DeviceError:
        console.print("bench_kernels needs a GPU; without one there is --verify-only")
        raise typer.Exit(2) from None
    prepare(device)
    if is_verify_only:
        verify_only(console, device, only)
        return
    chosen = {name: make for name, make in makers(device).items() if only in name}
    if not chosen:
        console.print(f"no work has {only!r} in its name")
        raise typer.Exit(2)
    empty, rows, works = run_works(console, chosen)
    bandwidth = copy_bandwidth()
    if is_sweep:
        sweep(console, works)
    empty_us = empty.device or EMPTY_KERNEL_US
    table = [cells_of(row, empty_us, bandwidth) for row in rows]
    name = "empty Triton kernel, for scale"
    figures = [_us(empty.device), _us(empty.returned), _us(empty.done)]
    table.append([name, *figures, *[""] * (len(HEADINGS) - 4)])
    lines = describe(empty, bandwidth)
    for line in lines:
        console.print(line, highlight=False)
    shown = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        shown.add_column(heading, justify="left" if heading == "work" else "right")
    for cells in table:
        shown.add_row(*cells)
    console.print(shown)
    if plot is not None:
        draw_plot(plot, rows, empty)
    if markdown is not None:
        write_markdown(markdown, lines, table, plot)


if __name__ == "__main__":
    typer.run(main)
