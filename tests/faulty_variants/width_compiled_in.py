"""The slots of new tokens, by a kernel that is compiled anew for each width of the table."""

import torch
import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["row_stride", "batch_size"],
    do_not_specialize_on_alignment=[0, 1, 2, 3, 4],
)
def slots_of_request_kernel(
    out_ptr,
    rows_ptr,
    lens_ptr,
    starts_ptr,
    table_ptr,
    row_stride,
    batch_size,
    page_size: tl.constexpr,
    max_pages: tl.constexpr,
):
    req_idx = tl.program_id(0).to(tl.int64)
    first = tl.full((), 0, tl.int64)
    for before in range(batch_size):
        first += tl.where(before < req_idx, tl.load(lens_ptr + before).to(tl.int64), 0)
    row = tl.load(rows_ptr + req_idx).to(tl.int64)
    start = tl.load(starts_ptr + req_idx).to(tl.int64)
    for k in range(tl.load(lens_ptr + req_idx)):
        page_idx = (start + k) // page_size
        page_id = tl.load(
            table_ptr + row * row_stride + page_idx, mask=page_idx < max_pages, other=-1
        ).to(tl.int64)
        slot = tl.where(page_id >= 0, page_id * page_size + (start + k) % page_size, 0)
        tl.store(out_ptr + first + k, slot)


def compute_out_cache_loc(
    out_cache_loc: torch.Tensor,
    req_pool_indices: torch.Tensor,
    input_lengths: torch.Tensor,
    cache_start: torch.Tensor,
    req_to_pages: torch.Tensor,
    page_size: int,
) -> None:
    batch_size = len(req_pool_indices)
    if batch_size:
        slots_of_request_kernel[(batch_size,)](
            out_cache_loc,
            req_pool_indices,
            input_lengths,
            cache_start,
            req_to_pages,
            req_to_pages.stride(0),
            batch_size,
            page_size,
            req_to_pages.shape[1],
        )
