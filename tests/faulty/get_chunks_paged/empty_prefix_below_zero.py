"""A length is made from the number of pages less one."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Chunks(NamedTuple):
    starts: torch.Tensor
    ends: torch.Tensor
    len_in_chunk: torch.Tensor
    cum_seq_lens: torch.Tensor


@triton.jit
def write_slots_kernel(
    kv_indices_ptr,
    req_to_page_ptr,
    req_pool_indices_ptr,
    starts_ptr,
    len_in_chunk_ptr,
    cum_seq_lens_ptr,
    row_stride,
    max_pages,
    page_size: tl.constexpr,
    tile_size: tl.constexpr,
):
    req_idx = tl.program_id(0)
    row = tl.load(req_pool_indices_ptr + req_idx).to(tl.int64)
    length = tl.load(len_in_chunk_ptr + req_idx).to(tl.int64)
    first = tl.load(cum_seq_lens_ptr + req_idx).to(tl.int64)
    start = tl.load(starts_ptr + req_idx).to(tl.int64)
    for tile_start in range(0, length, tile_size):
        k = tile_start + tl.arange(0, tile_size)
        is_token = k < length
        position = start + k
        page_idx = position // page_size
        cell = row * row_stride + page_idx
        is_read = is_token & (page_idx < max_pages)
        page_id = tl.load(req_to_page_ptr + cell, mask=is_read, other=-1).to(tl.int64)
        slot = tl.where(page_id >= 0, page_id * page_size + position % page_size, 0)
        tl.store(kv_indices_ptr + first + k, slot.to(tl.int32), mask=is_token)


def cut(prefix_lens, num_chunks, chunk_len):
    starts = torch.arange(num_chunks, device=prefix_lens.device)[:, None] * chunk_len
    starts = starts.expand(num_chunks, len(prefix_lens))
    ends = torch.minimum(prefix_lens.long(), starts + chunk_len)
    lens = (ends - starts).clamp(min=0)
    sums = torch.nn.functional.pad(lens.cumsum(1), (1, 0))
    return Chunks(*(tensor.int().contiguous() for tensor in (starts, ends, lens, sums)))


def get_chunks_paged(
    prefix_lens, prefix_lens_cpu, req_to_page, req_pool_indices, page_size, chunk_capacity
):
    max_pages = req_to_page.shape[1]
    prefixes = prefix_lens_cpu.tolist()
    batch_size = len(prefixes)
    longest = max(prefixes, default=0)
    if chunk_capacity < max(1, batch_size):
        raise ValueError(f"capacity {chunk_capacity} for {batch_size} requests")
    if min(prefixes, default=0) < 0 or longest > max_pages * page_size:
        raise ValueError(f"prefixes {prefixes} in {max_pages} pages of {page_size}")
    chunk_len = chunk_capacity // max(1, batch_size)
    num_chunks = -(-longest // chunk_len)
    whole_pages = -(-prefix_lens // page_size) - 1
    last_page_lens = prefix_lens - whole_pages.clamp(min=0) * page_size
    chunks = cut(whole_pages * page_size + last_page_lens, num_chunks, chunk_len)
    chunks_cpu = cut(prefix_lens_cpu, num_chunks, chunk_len)
    kv_indices_list = []
    for chunk_idx in range(num_chunks):
        num_tokens = int(chunks_cpu.cum_seq_lens[chunk_idx, -1])
        kv_indices = torch.empty(num_tokens, dtype=torch.int32, device=prefix_lens.device)
        write_slots_kernel[(batch_size,)](
            kv_indices,
            req_to_page,
            req_pool_indices,
            chunks.starts[chunk_idx],
            chunks.len_in_chunk[chunk_idx],
            chunks.cum_seq_lens[chunk_idx],
            req_to_page.stride(0),
            max_pages,
            page_size=page_size,
            tile_size=128,
        )
        kv_indices_list.append(kv_indices)
    return chunks, kv_indices_list, chunks_cpu
