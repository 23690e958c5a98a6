"""A request without tokens is looked up, and written."""

import triton
import triton.language as tl


@triton.jit
def write_slots_kernel(
    out_cache_loc_ptr,
    req_pool_indices_ptr,
    input_lengths_ptr,
    ends_ptr,
    cache_start_ptr,
    req_to_pages_ptr,
    row_stride,
    num_rows,
    max_pages,
    page_size: tl.constexpr,
    tile_size: tl.constexpr,
):
    req_idx = tl.program_id(0)
    row = tl.load(req_pool_indices_ptr + req_idx).to(tl.int64)
    length = tl.load(input_lengths_ptr + req_idx).to(tl.int64)
    first = tl.load(ends_ptr + req_idx) - length
    start = tl.load(cache_start_ptr + req_idx).to(tl.int64)
    length = tl.maximum(length, 1)
    for tile_start in range(0, length, tile_size):
        k = tile_start + tl.arange(0, tile_size)
        is_token = k < length
        position = start + k
        page_idx = position // page_size
        has_page = (position >= 0) & (page_idx < max_pages) & (row < num_rows)
        cell = row * row_stride + page_idx
        page_id = tl.load(req_to_pages_ptr + cell, mask=is_token & has_page, other=-1).to(tl.int64)
        slot = page_id * page_size + position % page_size
        slot = tl.where(page_id >= 0, slot, 0)
        slot = slot.to(out_cache_loc_ptr.dtype.element_ty)
        tl.store(out_cache_loc_ptr + first + k, slot, mask=is_token)


def compute_out_cache_loc(
    out_cache_loc, req_pool_indices, input_lengths, cache_start, req_to_pages, page_size
):
    num_rows, max_pages = req_to_pages.shape
    if len(req_pool_indices):
        write_slots_kernel[(len(req_pool_indices),)](
            out_cache_loc,
            req_pool_indices,
            input_lengths,
            input_lengths.cumsum(0),
            cache_start,
            req_to_pages,
            req_to_pages.stride(0),
            num_rows,
            max_pages,
            page_size=page_size,
            tile_size=128,
        )
