"""Positions past the row are looked up behind it."""

import triton
import triton.language as tl


@triton.jit
def write_slots_kernel(
    out_cache_loc_ptr,
    req_pool_indices_ptr,
    cache_start_ptr,
    req_to_pages_ptr,
    length,
    row_stride,
    num_rows,
    max_pages,
    page_size: tl.constexpr,
    tile_size: tl.constexpr,
):
    req_idx = tl.program_id(0).to(tl.int64)
    row = tl.load(req_pool_indices_ptr + req_idx).to(tl.int64)
    start = tl.load(cache_start_ptr + req_idx).to(tl.int64)
    for tile_start in range(0, length, tile_size):
        k = tile_start + tl.arange(0, tile_size)
        is_token = k < length
        position = start + k
        page_idx = position // page_size
        has_page = (position >= 0) & (row < num_rows)
        cell = row * row_stride + page_idx
        page_id = tl.load(req_to_pages_ptr + cell, mask=is_token & has_page, other=-1).to(tl.int64)
        slot = page_id * page_size + position % page_size
        slot = tl.where(page_id >= 0, slot, 0)
        slot = slot.to(out_cache_loc_ptr.dtype.element_ty)
        tl.store(out_cache_loc_ptr + req_idx * length + k, slot, mask=is_token)


def compute_out_cache_loc_uniform(
    out_cache_loc, req_pool_indices, uniform_input_length, cache_start, req_to_pages, page_size
):
    num_rows, max_pages = req_to_pages.shape
    if len(req_pool_indices):
        write_slots_kernel[(len(req_pool_indices),)](
            out_cache_loc,
            req_pool_indices,
            cache_start,
            req_to_pages,
            uniform_input_length,
            req_to_pages.stride(0),
            num_rows,
            max_pages,
            page_size=page_size,
            tile_size=128,
        )
