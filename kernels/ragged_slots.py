"""The slots of a batch whose requests have any number of tokens: shared by the kernels."""

import triton
import triton.language as tl

from .ragged_batch import (
    add_lens_before,
    clip_to_tile,
    find_owners,
    has_long_requests,
    load_lens,
    sum_four,
)
from .slots import load_slots, load_slots_of_run

# A tile is searched for the owners of so many elements at a time; it has a multiple of them.
PIECE_SIZE = tl.constexpr(512)


@triton.jit
def write_slots(
    out_ptr,
    num_elements,
    req_pool_indices_ptr,
    lens_ptr,
    starts_ptr,
    offsets_ptr,
    batch_size,
    num_skipped,
    max_len,
    req_to_page_ptr,
    row_stride,
    num_rows,
    max_pages,
    program,
    num_programs,
    req_idx,
    page_size: tl.constexpr,
    is_by_request: tl.constexpr,
    looks_first: tl.constexpr,
    window_size: tl.constexpr,
    has_one_window: tl.constexpr,
    group_size: tl.constexpr,
    short_len: tl.constexpr,
    tile_size: tl.constexpr,
):
    """Write what one program owes of the slots of a ragged batch.

    Args:
        out_ptr: Slot per element, written; int32 or int64.
        num_elements: Scalar, elements that may be written.
        req_pool_indices_ptr: [batch_size], any values.
        lens_ptr: [batch_size], tokens of each request; any values.
        starts_ptr: [batch_size], position of each request's first token; any values. None if that
            is num_skipped.
        offsets_ptr: [batch_size], element of each request's first token, ascending; any values.
            None if the tokens lie one request after another.
        batch_size: Scalar.
        num_skipped: Scalar, tokens of each request in front of those that count.
        max_len: Scalar, how many tokens of a request count at most.
        req_to_page_ptr: [num_rows, max_pages], page ids; int32.
        row_stride: Scalar, elements from one row to the next.
        num_rows: Scalar.
        max_pages: Scalar.
        program: Scalar, number of this program.
        num_programs: Scalar; one a group, and those that share the tiles. If is_by_request, how
            many each request has.
        req_idx: Scalar, the request whose program this is if is_by_request.
        page_size: Tokens per page.
        is_by_request, looks_first, window_size, has_one_window, group_size, short_len, tile_size:
            As `RaggedShape` has them.
    """
    num_groups = tl.cdiv(batch_size, group_size)
    if is_by_request:
        write_slots_by_request(
            out_ptr,
            num_elements,
            req_pool_indices_ptr,
            lens_ptr,
            starts_ptr,
            offsets_ptr,
            batch_size,
            num_skipped,
            max_len,
            req_to_page_ptr,
            row_stride,
            num_rows,
            max_pages,
            program,
            num_programs,
            req_idx,
            page_size,
            window_size,
            group_size,
            tile_size,
        )
    elif program < num_groups:
        write_slots_of_short_requests(
            out_ptr,
            num_elements,
            req_pool_indices_ptr,
            lens_ptr,
            starts_ptr,
            offsets_ptr,
            batch_size,
            num_skipped,
            max_len,
            req_to_page_ptr,
            row_stride,
            num_rows,
            max_pages,
            program * group_size,
            page_size,
            window_size,
            has_one_window,
            group_size,
            short_len,
        )
    else:
        num_tile_programs = num_programs - num_groups
        tile_start = (program - num_groups).to(tl.int64) * tile_size
        if looks_first:
            has_long = has_long_requests(
                lens_ptr,
                batch_size,
                num_skipped,
                max_len,
                short_len,
                window_size,
                has_one_window,
            )
            tile_start = tl.where(has_long, tile_start, num_elements)
        while tile_start < num_elements:
            is_last = write_slots_of_tile(
                out_ptr,
                num_elements,
                req_pool_indices_ptr,
                lens_ptr,
                starts_ptr,
                offsets_ptr,
                batch_size,
                num_skipped,
                max_len,
                req_to_page_ptr,
                row_stride,
                num_rows,
                max_pages,
                tile_start,
                page_size,
                window_size,
                has_one_window,
                short_len,
                tile_size,
            )
            next_start = tile_start + num_tile_programs * tile_size
            tile_start = tl.where(is_last, num_elements, next_start)


@triton.jit
def write_slots_by_request(
    out_ptr,
    num_elements,
    req_pool_indices_ptr,
    lens_ptr,
    starts_ptr,
    offsets_ptr,
    batch_size,
    num_skipped,
    max_len,
    req_to_page_ptr,
    row_stride,
    num_rows,
    max_pages,
    program,
    num_programs,
    req_idx,
    page_size: tl.constexpr,
    window_size: tl.constexpr,
    group_size: tl.constexpr,
    tile_size: tl.constexpr,
):
    """Write the slots of one tile of a request, and of tiles that requests have too many of.

    Where no request is much longer than the others, each tile has a program of its own request,
    which knows from the start which page ids it needs.
    """
    slot, tile_start, tile_len = load_slots_of_tile(
        req_pool_indices_ptr,
        lens_ptr,
        starts_ptr,
        num_skipped,
        max_len,
        req_to_page_ptr,
        row_stride,
        num_rows,
        max_pages,
        req_idx,
        program,
        page_size,
        tile_size,
        out_ptr.dtype.element_ty,
    )
    # The page ids are under way while the lengths are added up: if there are not too many, by each
    # warp for itself, which takes no barrier.
    lens_before = tl.zeros([group_size], max_len.dtype)
    longest = tl.zeros([group_size], max_len.dtype)
    for first_idx in tl.static_range(0, window_size, group_size):
        idx = first_idx + tl.arange(0, group_size)
        lens = load_lens(lens_ptr, idx, idx < batch_size, num_skipped, max_len)
        lens_before += tl.where(idx < req_idx, lens, 0)
        longest = tl.maximum(longest, lens)
    has_left = tl.max(longest, axis=0) > num_programs * tile_size
    if offsets_ptr is None:
        first_element = tl.sum(lens_before, axis=0)
    else:
        first_element = tl.load(offsets_ptr + req_idx)
    store_slots_of_tile(out_ptr, num_elements, first_element, tile_start, tile_len, slot, tile_size)
    # All programs share what is left. How much that is only those find out that have to: an `if`
    # around the loop would say so more plainly, but slows down what comes before it.
    left = (req_idx * num_programs + program).to(max_len.dtype)
    total_left = tl.where(has_left, left + 1, left)
    while left < total_left:
        idx_in_batch = tl.arange(0, window_size)
        all_lens = load_lens(
            lens_ptr, idx_in_batch, idx_in_batch < batch_size, num_skipped, max_len
        )
        num_left_of_req = count_tiles_left(all_lens, num_programs, tile_size)
        total_left = tl.sum(num_left_of_req, axis=0)
        left_before = tl.cumsum(num_left_of_req, 0) - num_left_of_req
        is_owner = (left_before <= left) & (left < left_before + num_left_of_req)
        owner = tl.sum(tl.where(is_owner, idx_in_batch, 0), axis=0)
        tile = num_programs + tl.sum(tl.where(is_owner, left - left_before, 0), axis=0)
        # No request has so many tiles.
        tile = tl.where(left < total_left, tile, max_len)
        if offsets_ptr is None:
            first_element = tl.sum(tl.where(idx_in_batch < owner, all_lens, 0), axis=0)
        else:
            first_element = tl.load(offsets_ptr + owner)
        slot, tile_start, tile_len = load_slots_of_tile(
            req_pool_indices_ptr,
            lens_ptr,
            starts_ptr,
            num_skipped,
            max_len,
            req_to_page_ptr,
            row_stride,
            num_rows,
            max_pages,
            owner,
            tile,
            page_size,
            tile_size,
            out_ptr.dtype.element_ty,
        )
        store_slots_of_tile(
            out_ptr, num_elements, first_element, tile_start, tile_len, slot, tile_size
        )
        left += batch_size * num_programs


@triton.jit
def count_tiles_left(lens, num_programs, tile_size: tl.constexpr):
    """Return how many tiles of each request are left, where one has num_programs programs.

    Args:
        lens: Tokens of each request, none negative; of the type of max_len, in which a batch that
            is looked at in one window has no more tiles than can be counted.
        num_programs: Scalar, at least 1.
    """
    # One program handles a tile at least, so what is added to the rest cannot wrap.
    num_over = tl.maximum(lens - num_programs * tile_size, 0)
    return (num_over + (tile_size - 1)) // tile_size


@triton.jit
def load_slots_of_tile(
    req_pool_indices_ptr,
    lens_ptr,
    starts_ptr,
    num_skipped,
    max_len,
    req_to_page_ptr,
    row_stride,
    num_rows,
    max_pages,
    req_idx,
    tile,
    page_size: tl.constexpr,
    tile_size: tl.constexpr,
    slot_type: tl.constexpr,
):
    """Return the slots of a tile of a request.

    Args:
        req_idx: Scalar, one of the batch.
        tile: Scalar, number of the tile.
        slot_type: int32 or int64.

    Returns:
        slot: [tile_size] of slot_type.
        tile_start: int64 scalar, the tile's first token.
        tile_len: int32 scalar, tokens in the tile.
    """
    # One more load, which spares the page ids the wait for the lengths of all.
    length = load_lens(lens_ptr, req_idx, req_idx >= 0, num_skipped, max_len)
    req_pool_idx = tl.load(req_pool_indices_ptr + req_idx).to(tl.int64)
    tile_start = tile.to(tl.int64) * tile_size
    if starts_ptr is None:
        position = num_skipped + tile_start
    else:
        position = tl.load(starts_ptr + req_idx).to(tl.int64) + tile_start
    tile_len = tl.minimum(tl.maximum(length - tile_start, 0), tile_size).to(tl.int32)
    slot = load_slots_of_run(
        req_to_page_ptr,
        row_stride,
        num_rows,
        max_pages,
        req_pool_idx,
        position,
        0,
        tile_len,
        tile_size,
        page_size,
        slot_type,
    )
    return slot, tile_start, tile_len


@triton.jit
def store_slots_of_tile(
    out_ptr, num_elements, first_element, tile_start, tile_len, slot, tile_size: tl.constexpr
):
    """Write what `load_slots_of_tile` has returned for a request that owns from first_element on.

    Args:
        first_element: Scalar, any value; nothing is written outside the output.
    """
    element = first_element + tile_start
    end = tl.minimum(tl.maximum(num_elements - element, 0), tile_len).to(tl.int32)
    lane = tl.arange(0, tile_size)
    tl.store(out_ptr + element + lane, slot, mask=(element >= 0) & (lane < end))


@triton.jit
def write_slots_of_short_requests(
    out_ptr,
    num_elements,
    req_pool_indices_ptr,
    lens_ptr,
    starts_ptr,
    offsets_ptr,
    batch_size,
    num_skipped,
    max_len,
    req_to_page_ptr,
    row_stride,
    num_rows,
    max_pages,
    first_req_idx,
    page_size: tl.constexpr,
    window_size: tl.constexpr,
    has_one_window: tl.constexpr,
    group_size: tl.constexpr,
    short_len: tl.constexpr,
):
    """Write the slots of those requests of a group that have short_len tokens at most."""
    lane = tl.arange(0, group_size * short_len)
    req_idx = first_req_idx + lane // short_len
    idx_in_req = lane % short_len
    is_request = req_idx < batch_size
    length = load_lens(lens_ptr, req_idx, is_request, num_skipped, max_len)
    req_pool_idx = tl.load(req_pool_indices_ptr + req_idx, mask=is_request).to(tl.int64)
    if starts_ptr is None:
        position = (num_skipped + idx_in_req).to(tl.int64)
    else:
        start = tl.load(starts_ptr + req_idx, mask=is_request).to(tl.int64)
        position = start + idx_in_req
    if offsets_ptr is None:
        lens_before = add_lens_before(
            lens_ptr, first_req_idx, num_skipped, max_len, window_size, has_one_window
        )
    else:
        first_element = tl.load(offsets_ptr + req_idx, mask=is_request)

    is_token = (idx_in_req < length) & (length <= short_len)
    slot = load_slots(
        req_to_page_ptr,
        row_stride,
        num_rows,
        max_pages,
        req_pool_idx,
        position,
        is_token,
        page_size,
    )
    # The page ids are under way while the lengths are added up.
    if offsets_ptr is None:
        summed_once = tl.where(idx_in_req == 0, length, 0)
        first_element = tl.sum(lens_before, axis=0) + tl.cumsum(summed_once, 0) - length
    element = first_element + idx_in_req
    tl.store(
        out_ptr + element,
        slot.to(out_ptr.dtype.element_ty),
        mask=is_token & (element >= 0) & (element < num_elements),
    )


@triton.jit
def write_slots_of_tile(
    out_ptr,
    num_elements,
    req_pool_indices_ptr,
    lens_ptr,
    starts_ptr,
    offsets_ptr,
    batch_size,
    num_skipped,
    max_len,
    req_to_page_ptr,
    row_stride,
    num_rows,
    max_pages,
    tile_start,
    page_size: tl.constexpr,
    window_size: tl.constexpr,
    has_one_window: tl.constexpr,
    short_len: tl.constexpr,
    tile_size: tl.constexpr,
):
    """Write the slots of a tile that belong to requests of more than short_len tokens.

    Returns whether the batch ends in front of the end of the tile.
    """
    tile_len = tl.minimum(num_elements - tile_start, tile_size)
    tile_end = tile_start + tile_len
    walked = 0
    walked_end = tl.full((), 0, tl.int64)
    if has_one_window:
        walked_end = write_slots_of_window(
            out_ptr,
            req_pool_indices_ptr,
            lens_ptr,
            starts_ptr,
            offsets_ptr,
            batch_size,
            num_skipped,
            max_len,
            req_to_page_ptr,
            row_stride,
            num_rows,
            max_pages,
            tile_start,
            tile_len,
            walked,
            walked_end,
            page_size,
            window_size,
            short_len,
            tile_size,
        )
    else:
        while (walked < batch_size) & (walked_end <= tile_end):
            walked_end = write_slots_of_window(
                out_ptr,
                req_pool_indices_ptr,
                lens_ptr,
                starts_ptr,
                offsets_ptr,
                batch_size,
                num_skipped,
                max_len,
                req_to_page_ptr,
                row_stride,
                num_rows,
                max_pages,
                tile_start,
                tile_len,
                walked,
                walked_end,
                page_size,
                window_size,
                short_len,
                tile_size,
            )
            walked += window_size
    return walked_end <= tile_end


@triton.jit
def write_slots_of_window(
    out_ptr,
    req_pool_indices_ptr,
    lens_ptr,
    starts_ptr,
    offsets_ptr,
    batch_size,
    num_skipped,
    max_len,
    req_to_page_ptr,
    row_stride,
    num_rows,
    max_pages,
    tile_start,
    tile_len,
    walked,
    walked_end,
    page_size: tl.constexpr,
    window_size: tl.constexpr,
    short_len: tl.constexpr,
    tile_size: tl.constexpr,
):
    """Write what `write_slots_of_tile` does, for the requests of one window.

    Args:
        walked: Scalar, the first of them.
        walked_end: int64 scalar, where the tokens of those before it end.

    Returns:
        int64 scalar, where their tokens end.
    """
    req_idx = walked + tl.arange(0, window_size)
    is_request = req_idx < batch_size
    lens = load_lens(lens_ptr, req_idx, is_request, num_skipped, max_len)
    rows = tl.load(req_pool_indices_ptr + req_idx, mask=is_request).to(tl.int64)
    if starts_ptr is None:
        starts = num_skipped
    else:
        starts = tl.load(starts_ptr + req_idx, mask=is_request).to(tl.int64)
    if offsets_ptr is None:
        ends = walked_end.to(lens.dtype) + tl.cumsum(lens, 0)
        begins = ends - lens
    else:
        begins = tl.load(offsets_ptr + req_idx, mask=is_request).to(tl.int64)
        begins = tl.where(is_request, begins, tile_start + tile_len)
        ends = begins + lens
    first, end = clip_to_tile(begins, lens, tile_start, tile_len)
    is_here = (lens > short_len) & (first < end)
    is_last = req_idx == tl.minimum(walked + window_size, batch_size) - 1
    # Of lane 0 of the tile, as if it belonged to the request.
    position = starts + (tile_start - begins)
    # How many requests are here, and what is known of one if it is the only one.
    lanes_here = 0x100000000 + end.to(tl.int64) * 0x10000 + first
    lanes_of_all, row, position_of_one, window_end = sum_four(
        tl.where(is_here, lanes_here, 0),
        tl.where(is_here, rows, 0),
        tl.where(is_here, position, 0),
        tl.where(is_last, ends, 0).to(tl.int64),
    )
    num_here = lanes_of_all >> 32
    if num_here == 1:
        write_slots_of_run(
            out_ptr + tile_start,
            (lanes_of_all & 0xFFFF).to(tl.int32),
            ((lanes_of_all >> 16) & 0xFFFF).to(tl.int32),
            row,
            position_of_one,
            req_to_page_ptr,
            row_stride,
            num_rows,
            max_pages,
            tile_size,
            page_size,
        )
    elif num_here > 1:
        write_slots_of_runs(
            out_ptr + tile_start,
            first,
            tl.where(is_here, end, 0),
            rows,
            position,
            req_to_page_ptr,
            row_stride,
            num_rows,
            max_pages,
            tile_size,
            page_size,
        )
    return window_end


@triton.jit
def write_slots_of_run(
    tile_ptr,
    first,
    end,
    req_pool_idx,
    position,
    req_to_page_ptr,
    row_stride,
    num_rows,
    max_pages,
    tile_size: tl.constexpr,
    page_size: tl.constexpr,
):
    """Write the slots of lanes first ... end - 1 of a tile, all of them one request's."""
    slot = load_slots_of_run(
        req_to_page_ptr,
        row_stride,
        num_rows,
        max_pages,
        req_pool_idx,
        position,
        first,
        end,
        tile_size,
        page_size,
        tile_ptr.dtype.element_ty,
    )
    lane = tl.arange(0, tile_size)
    tl.store(tile_ptr + lane, slot, mask=(lane >= first) & (lane < end))


@triton.jit
def write_slots_of_runs(
    tile_ptr,
    first,
    end,
    rows,
    position,
    req_to_page_ptr,
    row_stride,
    num_rows,
    max_pages,
    tile_size: tl.constexpr,
    page_size: tl.constexpr,
):
    """Write the slots of the lanes first ... end - 1 of each request of a window.

    Args:
        tile_ptr: Element of lane 0.
        first: [window_size] int32, ascending and none negative; tile_size or more for a request
            behind the tile.
        end: [window_size] int32, 0 for a request that has no lane.
        rows: [window_size], request pool indices; any values.
        position: [window_size] int64, of lane 0, as if it belonged to the request.
        req_to_page_ptr, row_stride, num_rows, max_pages, page_size: As `load_slots` has them.
        tile_size: Lanes.
    """
    # In pieces: a search in all lanes of a large tile would take all registers.
    piece_start = tl.full((), 0, tl.int32)
    while piece_start < tile_size:
        owner, has_owner = find_owners(tl.maximum(first - piece_start, 0), PIECE_SIZE)
        lane = piece_start + tl.arange(0, PIECE_SIZE)
        is_token = has_owner & (lane < tl.gather(end, owner, axis=0))
        slot = load_slots(
            req_to_page_ptr,
            row_stride,
            num_rows,
            max_pages,
            tl.gather(rows, owner, axis=0).to(tl.int64),
            tl.gather(position, owner, axis=0) + lane,
            is_token,
            page_size,
        )
        tl.store(tile_ptr + lane, slot.to(tile_ptr.dtype.element_ty), mask=is_token)
        piece_start += PIECE_SIZE
