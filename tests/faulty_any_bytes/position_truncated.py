"""compute_out_cache_loc_uniform that looks a position just below 0 up in page 0.

Triton divides towards 0.
"""

import triton
import triton.language as tl


@triton.jit
def write_slots_kernel(
    out_cache_loc_ptr,
    req_pool_indices_ptr,
    cache_start_ptr,
    req_to_pages_ptr,
    num_tokens,
    length,
    row_stride,
    num_rows,
    max_pages,
    page_size: tl.constexpr,
    tile_size: tl.constexpr,
):
    token = tl.program_id(0) * tile_size + tl.arange(0, tile_size)
    is_token = token < num_tokens
    req_idx = token // length
    row = tl.load(req_pool_indices_ptr + req_idx, mask=is_token, other=0).to(tl.int64)
    start = tl.load(cache_start_ptr + req_idx, mask=is_token, other=0).to(tl.int64)
    position = start + token % length
    page_idx = position // page_size
    has_page = (page_idx >= 0) & (page_idx < max_pages) & (row >= 0) & (row < num_rows)
    cell = row * row_stride + page_idx
    page_id = tl.load(req_to_pages_ptr + cell, mask=is_token & has_page, other=-1).to(tl.int64)
    slot = tl.where(page_id >= 0, page_id * page_size + position % page_size, 0)
    tl.store(out_cache_loc_ptr + token, slot.to(out_cache_loc_ptr.dtype.element_ty), mask=is_token)


def compute_out_cache_loc_uniform(
    out_cache_loc, req_pool_indices, uniform_input_length, cache_start, req_to_pages, page_size
):
    num_tokens = len(req_pool_indices) * uniform_input_length
    num_rows, max_pages = req_to_pages.shape
    if num_tokens:
        write_slots_kernel[(triton.cdiv(num_tokens, 128),)](
            out_cache_loc,
            req_pool_indices,
            cache_start,
            req_to_pages,
            num_tokens,
            uniform_input_length,
            req_to_pages.stride(0),
            num_rows,
            max_pages,
            page_size=page_size,
            tile_size=128,
        )
