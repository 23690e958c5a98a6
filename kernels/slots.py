"""From a position of a request to its slot: shared by the kernels."""

import triton
import triton.language as tl


@triton.jit
def load_slots(
    req_to_page_ptr,
    row_stride,
    num_rows,
    max_pages,
    req_pool_idx,
    position,
    is_active,
    page_size: tl.constexpr,
):
    """Return the slot of each position: 0 for overflow, holes and whatever is no position.

    Args:
        req_to_page_ptr: [num_rows, max_pages], page ids; int32.
        row_stride: int64 scalar, elements from one row to the next.
        num_rows: int64 scalar.
        max_pages: int64 scalar.
        req_pool_idx: [tile_size] int64, any values.
        position: [tile_size] int64, any values; negative also where a sum has wrapped.
        is_active: [tile_size] bool, lanes that may read the page table.
        page_size: Tokens per page.

    Returns:
        [tile_size] int64.
    """
    # Triton divides towards zero, so nothing below holds for a negative position; those
    # lanes neither read the table nor keep their product.
    page_idx = position // page_size
    is_in_pool = (req_pool_idx >= 0) & (req_pool_idx < num_rows)
    has_column = (position >= 0) & (page_idx < max_pages)
    page_id = tl.load(
        req_to_page_ptr + req_pool_idx * row_stride + page_idx,
        mask=is_active & is_in_pool & has_column,
        other=-1,
    ).to(tl.int64)
    return tl.where(page_id >= 0, page_id * page_size + position % page_size, 0)
