"""compute_out_cache_loc_uniform that cuts a distance of pages off at 32 bits.

How many tokens lie before the first that has a page is right for every legal position, and for most
of those before 0.
"""

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
    req_idx = tl.program_id(0)
    row = tl.load(req_pool_indices_ptr + req_idx).to(tl.int64)
    start = tl.load(cache_start_ptr + req_idx).to(tl.int64)
    is_in_pool = (row >= 0) & (row < num_rows)
    first_page = start // page_size
    first_page = tl.where(start < first_page * page_size, first_page - 1, first_page)
    offset = start - first_page * page_size
    pages_before = tl.minimum(tl.maximum(-first_page, 0), length)
    num_before = (pages_before * page_size - offset).to(tl.int32)
    for begin in range(0, length, tile_size):
        token = begin + tl.arange(0, tile_size)
        page_idx = first_page + (offset + token) // page_size
        has_page = (token >= num_before) & (page_idx < max_pages) & is_in_pool
        cell = req_to_pages_ptr + row * row_stride + page_idx
        page_id = tl.load(cell, mask=(token < length) & has_page, other=-1).to(tl.int64)
        slot = tl.where(page_id >= 0, page_id * page_size + (offset + token) % page_size, 0)
        tl.store(
            out_cache_loc_ptr + req_idx * length + token,
            slot.to(out_cache_loc_ptr.dtype.element_ty),
            mask=token < length,
        )


def compute_out_cache_loc_uniform(
    out_cache_loc, req_pool_indices, uniform_input_length, cache_start, req_to_pages, page_size
):
    num_requests = len(req_pool_indices)
    num_rows, max_pages = req_to_pages.shape
    if num_requests and uniform_input_length:
        write_slots_kernel[(num_requests,)](
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
