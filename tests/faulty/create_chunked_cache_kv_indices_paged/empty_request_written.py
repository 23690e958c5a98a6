"""A request without tokens is looked up, and written."""

import triton
import triton.language as tl


@triton.jit
def write_slots_kernel(
    req_to_page_ptr,
    req_pool_indices_ptr,
    chunk_starts_ptr,
    chunk_seq_lens_ptr,
    chunk_cum_seq_lens_ptr,
    chunk_kv_indices_ptr,
    row_stride,
    num_rows,
    max_pages,
    page_size: tl.constexpr,
    tile_size: tl.constexpr,
):
    req_idx = tl.program_id(0)
    row = tl.load(req_pool_indices_ptr + req_idx).to(tl.int64)
    length = tl.load(chunk_seq_lens_ptr + req_idx).to(tl.int64)
    first = tl.load(chunk_cum_seq_lens_ptr + req_idx).to(tl.int64)
    start = tl.load(chunk_starts_ptr + req_idx).to(tl.int64)
    length = tl.maximum(length, 1)
    for tile_start in range(0, length, tile_size):
        k = tile_start + tl.arange(0, tile_size)
        is_token = k < length
        position = start + k
        page_idx = position // page_size
        has_page = (position >= 0) & (page_idx < max_pages) & (row < num_rows)
        cell = row * row_stride + page_idx
        page_id = tl.load(req_to_page_ptr + cell, mask=is_token & has_page, other=-1).to(tl.int64)
        slot = page_id * page_size + position % page_size
        slot = tl.where(page_id >= 0, slot, 0)
        slot = slot.to(chunk_kv_indices_ptr.dtype.element_ty)
        tl.store(chunk_kv_indices_ptr + first + k, slot, mask=is_token)


def create_chunked_cache_kv_indices_paged(
    req_to_page,
    req_pool_indices,
    chunk_starts,
    chunk_seq_lens,
    chunk_cum_seq_lens,
    chunk_kv_indices,
    page_size,
):
    num_rows, max_pages = req_to_page.shape
    if len(req_pool_indices):
        write_slots_kernel[(len(req_pool_indices),)](
            req_to_page,
            req_pool_indices,
            chunk_starts,
            chunk_seq_lens,
            chunk_cum_seq_lens,
            chunk_kv_indices,
            req_to_page.stride(0),
            num_rows,
            max_pages,
            page_size=page_size,
            tile_size=128,
        )
