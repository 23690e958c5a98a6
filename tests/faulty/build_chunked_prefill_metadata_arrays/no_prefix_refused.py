"""Where there is no prefix there is nothing to build."""

import torch
import triton
import triton.language as tl


@triton.jit
def write_slots_kernel(
    kv_indices_ptr,
    req_to_page_ptr,
    req_pool_indices_ptr,
    len_in_chunk_ptr,
    cum_seq_lens_ptr,
    start,
    row_stride,
    max_pages,
    page_size: tl.constexpr,
    tile_size: tl.constexpr,
):
    req_idx = tl.program_id(0)
    row = tl.load(req_pool_indices_ptr + req_idx).to(tl.int64)
    length = tl.load(len_in_chunk_ptr + req_idx).to(tl.int64)
    first = tl.load(cum_seq_lens_ptr + req_idx).to(tl.int64)
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


def build_chunked_prefill_metadata_arrays(
    extend_prefix_lens,
    extend_prefix_lens_cpu,
    req_to_page,
    req_pool_indices,
    page_size,
    chunk_capacity,
):
    max_pages = req_to_page.shape[1]
    prefixes = extend_prefix_lens_cpu.tolist()
    batch_size = len(prefixes)
    longest = max(prefixes, default=0)
    if chunk_capacity < max(1, batch_size):
        raise ValueError(f"capacity {chunk_capacity} for {batch_size} requests")
    if min(prefixes, default=0) < 0 or longest > max_pages * page_size:
        raise ValueError(f"prefixes {prefixes} in {max_pages} pages of {page_size}")
    assert longest, "no prefix"
    chunk_len = chunk_capacity // max(1, batch_size)
    num_chunks = -(-longest // chunk_len)
    starts = torch.arange(num_chunks, device=extend_prefix_lens.device)[:, None] * chunk_len
    lens = (extend_prefix_lens - starts).clamp(0, chunk_len).int().reshape(num_chunks, batch_size)
    sums = torch.nn.functional.pad(lens.cumsum(1), (1, 0)).int()
    max_lens = [min(longest - chunk_idx * chunk_len, chunk_len) for chunk_idx in range(num_chunks)]
    kv_indices_list = []
    for chunk_idx in range(num_chunks):
        start = chunk_idx * chunk_len
        num_tokens = sum(min(max(0, prefix - start), chunk_len) for prefix in prefixes)
        kv_indices = torch.empty(num_tokens, dtype=torch.int32, device=lens.device)
        write_slots_kernel[(batch_size,)](
            kv_indices,
            req_to_page,
            req_pool_indices,
            lens[chunk_idx],
            sums[chunk_idx],
            start,
            req_to_page.stride(0),
            max_pages,
            page_size=page_size,
            tile_size=128,
        )
        kv_indices_list.append(kv_indices)
    return num_chunks, kv_indices_list, lens, sums, max_lens
