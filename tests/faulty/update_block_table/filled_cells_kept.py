"""A cell that has a page keeps it."""

import logging

import torch
import triton
import triton.language as tl

INT32 = range(-(2**31), 2**31)


@triton.jit
def write_pages_kernel(
    req_to_page_ptr,
    req_pool_indices_ptr,
    page_ids_ptr,
    num_pages_ptr,
    ends_ptr,
    begins_ptr,
    row_stride,
    tile_size: tl.constexpr,
):
    req_idx = tl.program_id(0)
    row = tl.load(req_pool_indices_ptr + req_idx)
    num_pages = tl.load(num_pages_ptr + req_idx)
    first = tl.load(ends_ptr + req_idx) - num_pages
    begin = tl.load(begins_ptr + req_idx)
    for tile_start in range(0, num_pages, tile_size):
        k = tile_start + tl.arange(0, tile_size)
        is_page = k < num_pages
        page_id = tl.load(page_ids_ptr + first + k, mask=is_page, other=0)
        cell_ptr = req_to_page_ptr + row * row_stride + begin + k
        is_page &= tl.load(cell_ptr, mask=is_page, other=0) <= 0
        tl.store(cell_ptr, page_id, mask=is_page)


def update_block_table(forward_op, device, req_to_page):
    num_rows, max_pages = req_to_page.shape
    rows, begins = forward_op.request_pool_indices, forward_op.begins
    if len({len(entries) for entries in vars(forward_op).values()}) > 1:
        raise ValueError("the lists differ in length")
    for row, begin, size, page_ids in zip(
        rows, begins, forward_op.sizes, forward_op.new_occupied_pages
    ):
        if not 0 <= row < num_rows:
            raise ValueError(f"pool index {row} of {num_rows} rows")
        if begin < 0:
            raise ValueError(f"begin {begin}")
        if size != len(page_ids):
            raise ValueError(f"size {size} of {len(page_ids)} pages")
        if any(page_id not in INT32 for page_id in page_ids):
            raise ValueError("a page id does not fit int32")
    kept = []
    for request_id, begin, page_ids in zip(
        forward_op.request_ids, begins, forward_op.new_occupied_pages
    ):
        size = len(page_ids)
        if size and begin + size > max_pages:
            logging.getLogger(__name__).warning(
                "%s: %d pages from %d on, but %d columns", request_id, size, begin, max_pages
            )
            page_ids = page_ids[: max(0, max_pages - begin)]
        kept.append(page_ids)
    num_pages = torch.tensor([len(page_ids) for page_ids in kept], device=device)
    flat = [page_id for page_ids in kept for page_id in page_ids]
    if flat:
        write_pages_kernel[(len(rows),)](
            req_to_page,
            torch.tensor(rows, device=device),
            torch.tensor(flat, dtype=torch.int32, device=device),
            num_pages,
            num_pages.cumsum(0),
            torch.tensor(begins, device=device),
            req_to_page.stride(0),
            tile_size=128,
        )
