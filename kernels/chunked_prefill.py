"""Prefill against a long prefix, one chunk of the prefix at a time."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from .checks import (
    INT32_MAX,
    check_index_vector,
    check_launchable,
    check_number,
    check_output_vector,
    check_page_table,
    is_validating,
    list_tokens,
    validate_equal,
    validate_fits,
    validate_not_negative,
    validate_pool_indices,
    validate_slots,
)
from .launches import (
    CHUNKING_WINDOW_SIZE,
    can_launch,
    on_device_of,
    ragged_grid,
    ragged_shape,
)
from .ragged_slots import write_slots


class Chunks(NamedTuple):
    """Where every chunk of every prefix lies, all int32.

    Attributes:
        starts: [num_chunks, batch_size], position of the chunk's first token.
        ends: [num_chunks, batch_size], position behind its last; below the start where the
            prefix ends before the chunk.
        len_in_chunk: [num_chunks, batch_size], tokens.
        cum_seq_lens: [num_chunks, batch_size + 1], running sum of len_in_chunk from 0.
    """

    starts: torch.Tensor
    ends: torch.Tensor
    len_in_chunk: torch.Tensor
    cum_seq_lens: torch.Tensor


@triton.jit
def write_chunks(
    prefix_lens_ptr,
    chunks_ptr,
    chunk_idx,
    num_chunks,
    batch_size,
    chunk_len,
    window_size: tl.constexpr,
):
    """Write the starts, ends, lengths and running sums of one chunk of every request.

    The four outputs lie one behind the other from chunks_ptr on, in the order of `Chunks`.

    Args:
        prefix_lens_ptr: [batch_size], any values.
        chunks_ptr: [3 * num_chunks * batch_size + num_chunks * (batch_size + 1)], written; int32.
        chunk_idx: int64 scalar.
        num_chunks: Scalar.
        batch_size: Scalar.
        chunk_len: Scalar, tokens.
        window_size: Requests looked at, at a time.
    """
    num_cells = num_chunks.to(tl.int64) * batch_size
    row_ptr = chunks_ptr + chunk_idx * batch_size
    cum_row_ptr = chunks_ptr + 3 * num_cells + chunk_idx * (batch_size + 1)
    start = chunk_idx * chunk_len
    total = tl.full((), 0, tl.int64)
    walked = 0
    tl.store(cum_row_ptr, total.to(tl.int32))
    while walked < batch_size:
        req_idx = walked + tl.arange(0, window_size)
        is_request = req_idx < batch_size
        prefix_len = tl.load(prefix_lens_ptr + req_idx, mask=is_request)
        end = tl.minimum(tl.maximum(prefix_len, 0), start + chunk_len)
        # Lanes behind the last request are behind it in the sum, too.
        len_in_chunk = tl.maximum(end - start, 0)
        cum_seq_len = total + tl.cumsum(len_in_chunk, 0)
        tl.store(row_ptr + req_idx, start.to(tl.int32), mask=is_request)
        tl.store(row_ptr + num_cells + req_idx, end.to(tl.int32), mask=is_request)
        tl.store(row_ptr + 2 * num_cells + req_idx, len_in_chunk.to(tl.int32), mask=is_request)
        tl.store(cum_row_ptr + 1 + req_idx, cum_seq_len.to(tl.int32), mask=is_request)
        total += tl.sum(len_in_chunk, axis=0)
        walked += window_size


@triton.jit(
    do_not_specialize=["num_chunks", "batch_size", "chunk_len"],
    do_not_specialize_on_alignment=["prefix_lens_ptr", "chunks_ptr"],
)
def chunking_kernel(
    prefix_lens_ptr,
    chunks_ptr,
    num_chunks,
    batch_size,
    chunk_len,
    window_size: tl.constexpr,
):
    """Write one chunk of every request."""
    write_chunks(
        prefix_lens_ptr,
        chunks_ptr,
        tl.program_id(0).to(tl.int64),
        num_chunks,
        batch_size,
        chunk_len,
        window_size,
    )


@triton.jit(
    do_not_specialize=["batch_size", "num_elements", "row_stride", "num_rows", "max_pages"],
    do_not_specialize_on_alignment=[
        "req_to_page_ptr",
        "req_pool_indices_ptr",
        "chunk_starts_ptr",
        "chunk_seq_lens_ptr",
        "chunk_cum_seq_lens_ptr",
        "chunk_kv_indices_ptr",
    ],
)
def create_chunked_cache_kv_indices_paged_kernel(
    req_to_page_ptr,
    req_pool_indices_ptr,
    chunk_starts_ptr,
    chunk_seq_lens_ptr,
    chunk_cum_seq_lens_ptr,
    chunk_kv_indices_ptr,
    batch_size,
    num_elements,
    row_stride,
    num_rows,
    max_pages,
    page_size: tl.constexpr,
    is_by_request: tl.constexpr,
    looks_first: tl.constexpr,
    window_size: tl.constexpr,
    has_one_window: tl.constexpr,
    group_size: tl.constexpr,
    short_len: tl.constexpr,
    tile_size: tl.constexpr,
):
    """Write what one program owes of the slots of a ragged batch."""
    write_slots(
        chunk_kv_indices_ptr,
        num_elements,
        req_pool_indices_ptr,
        chunk_seq_lens_ptr,
        chunk_starts_ptr,
        chunk_cum_seq_lens_ptr,
        batch_size,
        0,
        num_elements,
        req_to_page_ptr,
        row_stride,
        num_rows,
        max_pages,
        tl.program_id(0),
        tl.num_programs(0),
        tl.program_id(1),
        page_size,
        is_by_request,
        looks_first,
        window_size,
        has_one_window,
        group_size,
        short_len,
        tile_size,
    )


@triton.jit(
    do_not_specialize=[
        "num_chunks",
        "batch_size",
        "chunk_len",
        "row_stride",
        "num_rows",
        "max_pages",
    ],
    do_not_specialize_on_alignment=[
        "prefix_lens_ptr",
        "out_ptr",
        "chunk_ends_ptr",
        "req_to_page_ptr",
        "req_pool_indices_ptr",
    ],
)
def get_chunks_paged_kernel(
    prefix_lens_ptr,
    out_ptr,
    chunk_ends_ptr,
    req_to_page_ptr,
    req_pool_indices_ptr,
    num_chunks,
    batch_size,
    chunk_len,
    row_stride,
    num_rows,
    max_pages,
    page_size: tl.constexpr,
    is_by_request: tl.constexpr,
    looks_first: tl.constexpr,
    window_size: tl.constexpr,
    has_one_window: tl.constexpr,
    group_size: tl.constexpr,
    short_len: tl.constexpr,
    tile_size: tl.constexpr,
):
    """Write one chunk of every request, or what one program owes of the slots of a chunk.

    From out_ptr on lie the chunks as `write_chunks` has them, and behind them the slots, chunk by
    chunk. Those of chunk c are the slots chunk_ends_ptr[c] ... chunk_ends_ptr[c + 1] - 1 of all.
    """
    chunk_idx = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    req_idx = tl.program_id(2)
    if program == 0:
        if req_idx == 0:
            write_chunks(
                prefix_lens_ptr,
                out_ptr,
                chunk_idx,
                num_chunks,
                batch_size,
                chunk_len,
                window_size,
            )
    else:
        begin = tl.load(chunk_ends_ptr + chunk_idx)
        end = tl.load(chunk_ends_ptr + chunk_idx + 1)
        size_of_chunks = num_chunks * (4 * batch_size.to(tl.int64) + 1)
        write_slots(
            out_ptr + (size_of_chunks + begin),
            (end - begin).to(tl.int32),
            req_pool_indices_ptr,
            prefix_lens_ptr,
            None,
            None,
            batch_size,
            chunk_idx * chunk_len,
            chunk_len,
            req_to_page_ptr,
            row_stride,
            num_rows,
            max_pages,
            program - 1,
            tl.num_programs(1) - 1,
            req_idx,
            page_size,
            is_by_request,
            looks_first,
            window_size,
            has_one_window,
            group_size,
            short_len,
            tile_size,
        )


def chunking(prefix_lens: torch.Tensor, num_chunks: int, batch_size: int, chunk_len: int) -> Chunks:
    """Return where the first num_chunks chunks of every prefix lie.

    Args:
        prefix_lens: [batch_size], tokens; int32 or int64.
        num_chunks: How many; they need not cover the prefixes.
        batch_size: The number of prefixes.
        chunk_len: Tokens per chunk and request, at least 1.

    Returns:
        Chunks on the device of prefix_lens, views of one allocation.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: A shape, stride or number is none of these, or a start does not fit int32.
    """
    batch_size = check_number("batch_size", batch_size)
    if not isinstance(prefix_lens, torch.Tensor):
        raise TypeError(f"prefix_lens is {type(prefix_lens).__name__}, but must be a tensor")
    prefix_lens = check_index_vector("prefix_lens", prefix_lens, prefix_lens.device, batch_size)
    num_chunks = check_number("num_chunks", num_chunks)
    chunk_len = check_number("chunk_len", chunk_len, minimum=1)
    if batch_size > 0:
        _check_starts_fit(num_chunks, chunk_len)
    if is_validating(prefix_lens):
        validate_not_negative("prefix_lens", prefix_lens)
        _, ends, _, cum_seq_lens = _compute_chunks(prefix_lens, num_chunks, chunk_len)
        validate_fits("ends", ends, torch.int32)
        validate_fits("cum_seq_lens", cum_seq_lens, torch.int32)
    return _chunk(prefix_lens, num_chunks, chunk_len)


def create_chunked_cache_kv_indices_paged(
    req_to_page: torch.Tensor,
    req_pool_indices: torch.Tensor,
    chunk_starts: torch.Tensor,
    chunk_seq_lens: torch.Tensor,
    chunk_cum_seq_lens: torch.Tensor,
    chunk_kv_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Write the slots of one chunk of every request, each request's from its offset on.

    Overflow and holes give slot 0. Cells that no request's offset and length name keep their
    value.

    Args:
        req_to_page: [req_pool_size + 1, max_pages], page id per page index; int32.
        req_pool_indices: [batch_size], row of req_to_page; int32 or int64.
        chunk_starts: [batch_size], position of the chunk's first token; int32 or int64.
        chunk_seq_lens: [batch_size], tokens in the chunk; int32 or int64.
        chunk_cum_seq_lens: [batch_size + 1], offset of each request in chunk_kv_indices;
            int32 or int64.
        chunk_kv_indices: Slot per token, written; int32 or int64.
        page_size: Tokens per page.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: A shape, stride, device or number is none of these.
    """
    req_to_page = check_page_table("req_to_page", req_to_page)
    device = req_to_page.device
    req_pool_indices = check_index_vector("req_pool_indices", req_pool_indices, device)
    batch_size = req_pool_indices.numel()
    chunk_starts = check_index_vector("chunk_starts", chunk_starts, device, batch_size)
    chunk_seq_lens = check_index_vector("chunk_seq_lens", chunk_seq_lens, device, batch_size)
    chunk_cum_seq_lens = check_index_vector(
        "chunk_cum_seq_lens", chunk_cum_seq_lens, device, batch_size + 1
    )
    chunk_kv_indices = check_output_vector("chunk_kv_indices", chunk_kv_indices, device)
    page_size = check_number("page_size", page_size, minimum=1)
    if is_validating(req_to_page):
        validate_pool_indices("req_pool_indices", req_pool_indices, req_to_page.shape[0])
        validate_not_negative("chunk_starts", chunk_starts)
        validate_not_negative("chunk_seq_lens", chunk_seq_lens)
        validate_not_negative("chunk_cum_seq_lens", chunk_cum_seq_lens)
        _validate_offsets(chunk_seq_lens, chunk_cum_seq_lens, chunk_kv_indices.numel())
        rows, positions = list_tokens(req_pool_indices, chunk_starts, chunk_seq_lens)
        _, cells = list_tokens(req_pool_indices, chunk_cum_seq_lens[:-1], chunk_seq_lens)
        row_of_cell = torch.zeros(chunk_kv_indices.numel(), dtype=torch.int64, device=device)
        row_of_cell[cells] = rows
        position_of_cell = torch.full_like(row_of_cell, -1)
        position_of_cell[cells] = positions
        validate_slots(
            "chunk_kv_indices",
            chunk_kv_indices.dtype,
            req_to_page,
            row_of_cell,
            position_of_cell,
            page_size,
        )
    _launch_create_kv_indices(
        req_to_page,
        req_pool_indices,
        chunk_starts,
        chunk_seq_lens,
        chunk_cum_seq_lens,
        chunk_kv_indices,
        page_size,
    )


def get_chunks_paged(
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    req_to_page: torch.Tensor,
    req_pool_indices: torch.Tensor,
    page_size: int,
    chunk_capacity: int,
) -> tuple[Chunks, list[torch.Tensor], Chunks]:
    """Return the chunks that cover all prefixes, and the slots of each chunk.

    Nothing waits for the device: what the host has to know comes from prefix_lens_cpu.

    Args:
        prefix_lens: [batch_size], tokens; int32 or int64.
        prefix_lens_cpu: [batch_size], the same on the CPU; int32 or int64.
        req_to_page: [req_pool_size + 1, max_pages], page id per page index; int32.
        req_pool_indices: [batch_size], row of req_to_page; int32 or int64.
        page_size: Tokens per page.
        chunk_capacity: Tokens that a chunk may have in all requests together.

    Returns:
        chunks: On the device of prefix_lens.
        kv_indices_list: One int32 tensor per chunk, as long as chunks_cpu.cum_seq_lens[c][-1];
            views of one allocation.
        chunks_cpu: The same as chunks, made from prefix_lens_cpu.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: A shape, stride, device or number is none of these, the batch is larger
            than chunk_capacity, or a prefix is negative or longer than the table holds.
    """
    max_prefix_len, chunk_len, page_size = _check_prefixes(
        prefix_lens, prefix_lens_cpu, req_to_page, req_pool_indices, page_size, chunk_capacity
    )
    num_chunks = -(-max_prefix_len // chunk_len)
    chunks, kv_indices_list = _get_chunks(
        prefix_lens,
        prefix_lens_cpu,
        req_to_page,
        req_pool_indices,
        page_size,
        num_chunks,
        chunk_len,
    )
    chunks_cpu = _chunk_with_torch(prefix_lens_cpu, num_chunks, chunk_len)
    return chunks, kv_indices_list, chunks_cpu


def build_chunked_prefill_metadata_arrays(
    extend_prefix_lens: torch.Tensor,
    extend_prefix_lens_cpu: torch.Tensor,
    req_to_page: torch.Tensor,
    req_pool_indices: torch.Tensor,
    page_size: int,
    chunk_capacity: int,
) -> tuple[int, list[torch.Tensor], torch.Tensor, torch.Tensor, list[int]]:
    """Return what an MLA backend feeds to its attention calls, chunk by chunk.

    Args:
        extend_prefix_lens: [batch_size], tokens; int32 or int64.
        extend_prefix_lens_cpu: [batch_size], the same on the CPU; int32 or int64.
        req_to_page: [req_pool_size + 1, max_pages], page id per page index; int32.
        req_pool_indices: [batch_size], row of req_to_page; int32 or int64.
        page_size: Tokens per page.
        chunk_capacity: Tokens that a chunk may have in all requests together.

    Returns:
        num_chunks: How many cover all prefixes.
        kv_indices_list: The slots of each chunk; int32.
        len_in_chunk: [num_chunks, batch_size], tokens; int32.
        cum_seq_lens: [num_chunks, batch_size + 1], running sum of len_in_chunk; int32.
        max_len_per_chunk: The largest len_in_chunk of each chunk.

    Raises:
        TypeError: As `get_chunks_paged`.
        ValueError: As `get_chunks_paged`.
    """
    max_prefix_len, chunk_len, page_size = _check_prefixes(
        extend_prefix_lens,
        extend_prefix_lens_cpu,
        req_to_page,
        req_pool_indices,
        page_size,
        chunk_capacity,
    )
    num_chunks = -(-max_prefix_len // chunk_len)
    chunks, kv_indices_list = _get_chunks(
        extend_prefix_lens,
        extend_prefix_lens_cpu,
        req_to_page,
        req_pool_indices,
        page_size,
        num_chunks,
        chunk_len,
    )
    # The longest request has the longest part of every chunk.
    starts = range(0, max_prefix_len, chunk_len)
    max_len_per_chunk = [min(max_prefix_len - start, chunk_len) for start in starts]
    return (
        num_chunks,
        kv_indices_list,
        chunks.len_in_chunk,
        chunks.cum_seq_lens,
        max_len_per_chunk,
    )


def _check_prefixes(
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    req_to_page: torch.Tensor,
    req_pool_indices: torch.Tensor,
    page_size: int,
    chunk_capacity: int,
) -> tuple[int, int, int]:
    """Return the longest prefix, the length of a chunk and page_size, if all is in order."""
    req_to_page = check_page_table("req_to_page", req_to_page)
    device = req_to_page.device
    num_rows, max_pages = req_to_page.shape
    req_pool_indices = check_index_vector("req_pool_indices", req_pool_indices, device)
    batch_size = req_pool_indices.numel()
    prefix_lens = check_index_vector("prefix_lens", prefix_lens, device, batch_size)
    prefix_lens_cpu = check_index_vector(
        "prefix_lens_cpu", prefix_lens_cpu, torch.device("cpu"), batch_size
    )
    page_size = check_number("page_size", page_size, minimum=1)
    chunk_capacity = check_number("chunk_capacity", chunk_capacity, minimum=1)
    max_prefix_len = _check_prefix_lens(
        prefix_lens_cpu, min(max_pages * page_size, INT32_MAX), chunk_capacity
    )
    if is_validating(req_to_page):
        validate_pool_indices("req_pool_indices", req_pool_indices, num_rows)
        validate_equal("prefix_lens", prefix_lens, "prefix_lens_cpu", prefix_lens_cpu)
        rows, positions = list_tokens(req_pool_indices, torch.zeros_like(prefix_lens), prefix_lens)
        validate_slots("prefix_slots", torch.int32, req_to_page, rows, positions, page_size)
    return max_prefix_len, chunk_capacity // max(batch_size, 1), page_size


def _get_chunks(
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    req_to_page: torch.Tensor,
    req_pool_indices: torch.Tensor,
    page_size: int,
    num_chunks: int,
    chunk_len: int,
) -> tuple[Chunks, list[torch.Tensor]]:
    """Return the chunks on the device and the slots of each, views of one allocation."""
    if num_chunks == 0:
        return _chunk(prefix_lens, 0, chunk_len), []
    check_launchable("req_to_page", req_to_page, get_chunks_paged_kernel)
    batch_size = prefix_lens.numel()
    num_cells = num_chunks * batch_size
    with on_device_of(req_to_page):
        chunk_ends = _chunk_ends(prefix_lens_cpu, num_chunks, chunk_len, req_to_page.is_cuda)
        chunk_sizes = [end - begin for begin, end in pairwise(chunk_ends.tolist())]
        sizes = [num_cells, num_cells, num_cells, num_cells + num_chunks, *chunk_sizes]
        flat = torch.empty(sum(sizes), dtype=torch.int32, device=req_to_page.device)
        # Every chunk has the first one's programs: none has more tokens.
        shape = ragged_shape(batch_size, chunk_sizes[0])
        num_programs, num_parts = ragged_grid(batch_size, chunk_sizes[0], chunk_len, shape)
        get_chunks_paged_kernel[(num_chunks, 1 + num_programs, num_parts)](
            prefix_lens,
            flat,
            # torch hands out pinned memory again only when the copies from it are done.
            chunk_ends.to(req_to_page.device, non_blocking=True),
            req_to_page,
            req_pool_indices,
            num_chunks,
            batch_size,
            chunk_len,
            req_to_page.stride(0),
            *req_to_page.shape,
            page_size,
            *shape.constants,
            num_warps=shape.num_warps,
        )
    pieces = torch.split_with_sizes(flat, sizes)
    starts, ends, len_in_chunk, cum_seq_lens, *kv_indices_list = pieces
    shape_of_cells = (num_chunks, batch_size)
    chunks = Chunks(
        starts.view(shape_of_cells),
        ends.view(shape_of_cells),
        len_in_chunk.view(shape_of_cells),
        cum_seq_lens.view(num_chunks, batch_size + 1),
    )
    return chunks, kv_indices_list


def _chunk_ends(
    prefix_lens_cpu: torch.Tensor, num_chunks: int, chunk_len: int, is_pinned: bool
) -> torch.Tensor:
    """Return how many tokens the first 0, 1, 2, ... num_chunks chunks have; int64."""
    ends = torch.empty(num_chunks + 1, dtype=torch.int64, device="cpu", pin_memory=is_pinned)
    bounds = np.arange(0, (num_chunks + 1) * chunk_len, chunk_len)
    np.minimum(prefix_lens_cpu.numpy(), bounds[:, None]).sum(axis=1, out=ends.numpy())
    return ends


def _chunk(prefix_lens: torch.Tensor, num_chunks: int, chunk_len: int) -> Chunks:
    if not can_launch(chunking_kernel, prefix_lens):
        return _chunk_with_torch(prefix_lens, num_chunks, chunk_len)
    batch_size = prefix_lens.numel()
    num_cells = num_chunks * batch_size
    flat = torch.empty(4 * num_cells + num_chunks, dtype=torch.int32, device=prefix_lens.device)
    starts, ends, len_in_chunk = flat[: 3 * num_cells].view(3, num_chunks, batch_size)
    cum_seq_lens = flat[3 * num_cells :].view(num_chunks, batch_size + 1)
    if num_chunks > 0:
        with on_device_of(prefix_lens):
            chunking_kernel[(num_chunks,)](
                prefix_lens, flat, num_chunks, batch_size, chunk_len, CHUNKING_WINDOW_SIZE
            )
    return Chunks(starts, ends, len_in_chunk, cum_seq_lens)


def _chunk_with_torch(prefix_lens: torch.Tensor, num_chunks: int, chunk_len: int) -> Chunks:
    starts, ends, len_in_chunk, cum_seq_lens = _compute_chunks(prefix_lens, num_chunks, chunk_len)
    return Chunks(starts.int(), ends.int(), len_in_chunk.int(), cum_seq_lens.int())


def _compute_chunks(
    prefix_lens: torch.Tensor, num_chunks: int, chunk_len: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the four tensors of `Chunks` as int64, where they fit whatever they are."""
    bounds = torch.arange(0, (num_chunks + 1) * chunk_len, chunk_len, device=prefix_lens.device)
    # [c][i]: how many tokens of request i the first c chunks have.
    covered = torch.minimum(prefix_lens.clamp(min=0), bounds[:, None])
    starts = bounds[:-1, None].expand(num_chunks, prefix_lens.numel())
    ends = covered[1:]
    len_in_chunk = ends - covered[:-1]
    cum_seq_lens = torch.nn.functional.pad(len_in_chunk.cumsum(1), (1, 0))
    return starts, ends, len_in_chunk, cum_seq_lens


def _launch_create_kv_indices(
    req_to_page: torch.Tensor,
    req_pool_indices: torch.Tensor,
    chunk_starts: torch.Tensor,
    chunk_seq_lens: torch.Tensor,
    chunk_cum_seq_lens: torch.Tensor,
    chunk_kv_indices: torch.Tensor,
    page_size: int,
) -> None:
    num_rows, max_pages = req_to_page.shape
    batch_size = req_pool_indices.numel()
    num_elements = chunk_kv_indices.numel()
    if 0 in (batch_size, num_elements):
        return
    shape = ragged_shape(batch_size, num_elements)
    grid = ragged_grid(batch_size, num_elements, num_elements, shape)
    kernel = create_chunked_cache_kv_indices_paged_kernel
    check_launchable("req_to_page", req_to_page, kernel)
    with on_device_of(req_to_page):
        kernel[grid](
            req_to_page,
            req_pool_indices,
            chunk_starts,
            chunk_seq_lens,
            chunk_cum_seq_lens,
            chunk_kv_indices,
            batch_size,
            num_elements,
            req_to_page.stride(0),
            num_rows,
            max_pages,
            page_size,
            *shape.constants,
            num_warps=shape.num_warps,
        )


def _check_starts_fit(num_chunks: int, chunk_len: int) -> None:
    last_start = (num_chunks - 1) * chunk_len
    if last_start > INT32_MAX:
        raise ValueError(
            f"num_chunks is {num_chunks} and chunk_len {chunk_len}: the last start is "
            f"{last_start}, but must be <= {INT32_MAX}"
        )


def _check_prefix_lens(prefix_lens_cpu: torch.Tensor, limit: int, chunk_capacity: int) -> int:
    """Return the longest of the prefixes, none of which is negative or past the limit."""
    batch_size = prefix_lens_cpu.numel()
    if batch_size > chunk_capacity:
        raise ValueError(
            f"chunk_capacity is {chunk_capacity}, but must be >= {batch_size}, the batch size"
        )
    if batch_size == 0:
        return 0
    shortest, longest = (int(length.item()) for length in prefix_lens_cpu.aminmax())
    if shortest < 0 or longest > limit:
        is_bad = (prefix_lens_cpu < 0) | (prefix_lens_cpu > limit)
        req_idx = int(is_bad.nonzero()[0, 0])
        raise ValueError(
            f"prefix_lens_cpu[{req_idx}] is {int(prefix_lens_cpu[req_idx])}, but must be in "
            f"0 ... {limit}, what a row of req_to_page and an int32 hold"
        )
    return longest


def _validate_offsets(
    chunk_seq_lens: torch.Tensor, chunk_cum_seq_lens: torch.Tensor, num_elements: int
) -> None:
    """Refuse a request whose cells are past the next one's offset, or past the output."""
    offsets = chunk_cum_seq_lens.long()
    limits = offsets[1:].clamp(max=num_elements)
    is_bad = chunk_seq_lens.long() > limits - offsets[:-1]
    if bool(is_bad.any()):
        req_idx = int(is_bad.nonzero()[0, 0])
        raise ValueError(
            f"chunk_cum_seq_lens[{req_idx}] is {int(offsets[req_idx])} and "
            f"chunk_seq_lens[{req_idx}] {int(chunk_seq_lens[req_idx])}, but their sum must be "
            f"<= {int(limits[req_idx])}, the next offset and the size of chunk_kv_indices"
        )
