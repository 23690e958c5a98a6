"""The sum before request 0 is loaded, and not used."""

import triton
import triton.language as tl


@triton.jit
def write_pages_kernel(
    req_to_page_ptr,
    req_pool_indices_ptr,
    new_occupied_pages_ptr,
    new_occupied_pages_num_ptr,
    ends_ptr,
    pages_copy_starts_ptr,
    row_stride,
    num_rows,
    max_pages,
    tile_size: tl.constexpr,
):
    req_idx = tl.program_id(0)
    row = tl.load(req_pool_indices_ptr + req_idx).to(tl.int64)
    num_pages = tl.load(new_occupied_pages_num_ptr + req_idx).to(tl.int64)
    first = tl.where(req_idx > 0, tl.load(ends_ptr + req_idx - 1), 0)
    start = tl.load(pages_copy_starts_ptr + req_idx).to(tl.int64)
    for tile_start in range(0, num_pages, tile_size):
        k = tile_start + tl.arange(0, tile_size)
        is_page = k < num_pages
        page_id = tl.load(new_occupied_pages_ptr + first + k, mask=is_page, other=0)
        page_idx = start + k
        is_written = is_page & (page_idx < max_pages) & (row < num_rows)
        tl.store(req_to_page_ptr + row * row_stride + page_idx, page_id, mask=is_written)


def update_req_to_page(
    req_to_page, req_pool_indices, new_occupied_pages, new_occupied_pages_num, pages_copy_starts
):
    num_rows, max_pages = req_to_page.shape
    if len(new_occupied_pages):
        write_pages_kernel[(len(req_pool_indices),)](
            req_to_page,
            req_pool_indices,
            new_occupied_pages,
            new_occupied_pages_num,
            new_occupied_pages_num.cumsum(0),
            pages_copy_starts,
            req_to_page.stride(0),
            num_rows,
            max_pages,
            tile_size=128,
        )
