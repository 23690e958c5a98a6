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
        row_stride: Scalar, elements from one row to the next.
        num_rows: Scalar.
        max_pages: Scalar.
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


@triton.jit
def load_slots_of_run(
    req_to_page_ptr,
    row_stride,
    num_rows,
    max_pages,
    req_pool_idx,
    position,
    first,
    end,
    tile_size: tl.constexpr,
    page_size: tl.constexpr,
    slot_type: tl.constexpr,
):
    """Return what `load_slots` does for consecutive positions of one request.

    Nothing 64 bits wide is computed for each lane: large tiles are bound by their arithmetic.

    Args:
        req_to_page_ptr: [num_rows, max_pages], page ids; int32.
        row_stride: Scalar, elements from one row to the next.
        num_rows: Scalar.
        max_pages: Scalar.
        req_pool_idx: int64 scalar, any value.
        position: int64 scalar, that of lane 0; any value, also where a lane before the first has
            a negative position.
        first: int32 scalar, the first lane that may read the page table.
        end: int32 scalar, the lane behind the last that may.
        tile_size: Lanes.
        page_size: Tokens per page.
        slot_type: int32 or int64. A slot that does not fit is cut off.

    Returns:
        [tile_size] of slot_type.
    """
    # Triton rounds towards zero, so a negative position has an offset that is 0 or negative, and
    # lanes that are counted from there.
    page_idx = position // page_size
    offset = (position - page_idx * page_size).to(tl.int32)

    # The lanes whose page is 0 ... max_pages - 1. No lane is in a further page than end is.
    pages_to_first = tl.minimum(-page_idx, end + 1)
    pages_to_end = tl.minimum(tl.maximum(max_pages - page_idx, 0), end + 1)
    pages_to_end = tl.where((req_pool_idx >= 0) & (req_pool_idx < num_rows), pages_to_end, 0)
    first = tl.maximum(first, tl.minimum(pages_to_first * page_size - offset, end)).to(tl.int32)
    end = tl.minimum(end, pages_to_end * page_size - offset).to(tl.int32)

    # An offset is below 2**31 - 1, and so is a lane: their sum fits if it is unsigned, and is none
    # of a lane in front of the first only where the offset is negative.
    lane = tl.arange(0, tile_size)
    token = lane.to(tl.uint32) + offset
    page_id = tl.load(
        req_to_page_ptr + (req_pool_idx * row_stride + page_idx) + token // page_size,
        mask=(lane >= first) & (lane < end),
        other=-1,
    ).to(slot_type)
    offset_in_page = (token % page_size).to(slot_type)
    return tl.where(page_id >= 0, page_id * page_size + offset_in_page, 0)
