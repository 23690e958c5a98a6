"""Which request owns an element of a flat, ragged output: shared by the kernels."""

import triton
import triton.language as tl


@triton.jit
def find_requests(
    lens_ptr,
    batch_size,
    num_elements,
    tile_start,
    tile_size: tl.constexpr,
    num_steps: tl.constexpr,
):
    """Return what owns each of the elements tile_start ... tile_start + tile_size - 1.

    Requests own elements one after another, in batch order, as many as their length says.
    Every length is clamped to 0 ... num_elements before it is added, so that no content of
    lens_ptr makes a sum overflow; the walk ends where the tile does.

    Args:
        lens_ptr: [batch_size], elements of each request; int32 or int64.
        batch_size: int64 scalar.
        num_elements: int64 scalar, size of the flat output or input.
        tile_start: int64 scalar.
        tile_size: Elements handled by this program.
        num_steps: Steps of the search of an element's owner among the 2**num_steps requests that
            are looked at, at a time.

    Returns:
        req_idx: [tile_size] int64, valid where is_owned.
        idx_in_req: [tile_size] int64, the element's place within its request.
        is_owned: [tile_size] bool, whether a request owns the element and it exists.
    """
    window_size: tl.constexpr = 2**num_steps
    skip_size: tl.constexpr = 4 * window_size
    tile_last = tl.minimum(tile_start + tile_size, num_elements) - 1
    total = tl.full((), 0, tl.int64)
    walked = tl.full((), 0, tl.int64)

    # Requests that end before the tile only have to be added up, many at a time.
    is_skipping = tile_start > 0
    while is_skipping & (walked < batch_size):
        far_idx = walked + tl.arange(0, skip_size)
        far_lens = tl.load(lens_ptr + far_idx, mask=far_idx < batch_size, other=0).to(tl.int64)
        far_lens = tl.minimum(tl.maximum(far_lens, 0), num_elements)
        far_total = total + tl.sum(far_lens, axis=0)
        is_skipping = far_total <= tile_start
        total = tl.where(is_skipping, far_total, total)
        walked = tl.where(is_skipping, walked + skip_size, walked)

    lane = tl.arange(0, tile_size)
    num_ended = tl.zeros([tile_size], tl.int32)
    last_end_in_tile = tl.zeros([tile_size], tl.int32)
    num_skipped = walked
    last_end_before_tile = total
    while (walked < batch_size) & (total <= tile_last):
        req_idx = walked + tl.arange(0, window_size)
        is_request = req_idx < batch_size
        lens = tl.load(lens_ptr + req_idx, mask=is_request, other=0).to(tl.int64)
        lens = tl.minimum(tl.maximum(lens, 0), num_elements)
        ends = total + tl.cumsum(lens, 0)
        last_end_before_tile = tl.maximum(
            last_end_before_tile, tl.max(tl.where(ends <= tile_start, ends, 0), axis=0)
        )
        # Lengths are not negative, so the ends ascend. What is past the batch never ends.
        ends_in_tile = tl.minimum(tl.maximum(ends - tile_start, 0), tile_size)
        ends_in_tile = tl.where(is_request, ends_in_tile, tile_size).to(tl.int32)
        is_inside = (ends_in_tile > 0) & (ends_in_tile < tile_size)
        if tl.max(is_inside.to(tl.int32), axis=0) > 0:
            # Comparing every request with every element would spill registers: 100 times
            # slower than this search, whose steps go through shared memory.
            num_in_window = tl.zeros([tile_size], tl.int32)
            for step_idx in tl.static_range(num_steps):
                step = window_size >> (step_idx + 1)
                probed_end = tl.gather(ends_in_tile, num_in_window + step - 1, axis=0)
                is_ended = probed_end <= lane
                num_in_window += tl.where(is_ended, step, 0)
                last_end_in_tile = tl.maximum(last_end_in_tile, tl.where(is_ended, probed_end, 0))
            probed_end = tl.gather(ends_in_tile, num_in_window, axis=0)
            is_ended = probed_end <= lane
            num_ended += num_in_window + is_ended.to(tl.int32)
            last_end_in_tile = tl.maximum(last_end_in_tile, tl.where(is_ended, probed_end, 0))
        else:
            num_ended += tl.sum((ends_in_tile == 0).to(tl.int32), axis=0)
        total += tl.sum(lens, axis=0)
        walked += window_size

    first_element = tl.where(
        last_end_in_tile > 0, tile_start + last_end_in_tile, last_end_before_tile
    )
    element = tile_start + lane
    is_owned = (element < num_elements) & (element < total)
    return num_skipped + num_ended, element - first_element, is_owned
