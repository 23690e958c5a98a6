"""Which request owns an element of a flat, ragged output: shared by the kernels.

Requests own elements one after another, in batch order, as many as their length says. Where the
output has room for many elements of each of not too many requests, each has programs of its own.
Elsewhere a launch has two sorts of programs, which write different elements and need nothing of
each other:

- One program a group of requests writes the elements of those that have few, each in lanes of its
  own, so that no lane has to search for its request. That is all there is in a decode step.
- The other programs share the tiles of the output, and write the elements of requests that have
  more. A tile that lies in one such request is a run of consecutive positions.

Global loads that need each other take most of the time, so a program loads what it may need of all
requests in a window at once, and picks from registers.
"""

import triton
import triton.language as tl


@triton.jit
def load_lens(lens_ptr, req_idx, is_request, num_skipped, max_len):
    """Return the elements of each request.

    Args:
        lens_ptr: [batch_size], any values; int32 or int64.
        req_idx: [lanes], int32 or int64.
        is_request: [lanes] bool, lanes that have a request.
        num_skipped: Scalar, elements of each request that come before those that count.
        max_len: Scalar; a longer length counts as this. Sums are of its type, and do not wrap
            unless the lengths are more than their output.

    Returns:
        [lanes] of the type of max_len, in 0 ... max_len.
    """
    lens = tl.load(lens_ptr + req_idx, mask=is_request, other=0)
    lens = tl.maximum(lens, 0) - num_skipped
    return tl.minimum(tl.maximum(lens, 0), max_len).to(max_len.dtype)


@triton.jit
def add_lens_before(
    lens_ptr,
    end_idx,
    num_skipped,
    max_len,
    window_size: tl.constexpr,
    has_one_window: tl.constexpr,
):
    """Return parts of the sum of the lengths before request `end_idx`, one a lane.

    The sum of the parts is left to the caller, who may load something else before it waits.
    """
    if has_one_window:
        req_idx = tl.arange(0, window_size)
        return load_lens(lens_ptr, req_idx, req_idx < end_idx, num_skipped, max_len)
    else:
        # Only a sum has to fit registers here, so four windows at a time do.
        parts = tl.zeros([4 * window_size], max_len.dtype)
        walked = 0
        while walked < end_idx:
            req_idx = walked + tl.arange(0, 4 * window_size)
            parts += load_lens(lens_ptr, req_idx, req_idx < end_idx, num_skipped, max_len)
            walked += 4 * window_size
        return parts


@triton.jit
def has_long_requests(
    lens_ptr,
    batch_size,
    num_skipped,
    max_len,
    short_len,
    window_size: tl.constexpr,
    has_one_window: tl.constexpr,
):
    """Return whether any request has more than short_len elements."""
    if has_one_window:
        req_idx = tl.arange(0, window_size)
        lens = load_lens(lens_ptr, req_idx, req_idx < batch_size, num_skipped, max_len)
    else:
        # As in add_lens_before, four windows at a time fit registers.
        lens = tl.zeros([4 * window_size], max_len.dtype)
        walked = 0
        while walked < batch_size:
            req_idx = walked + tl.arange(0, 4 * window_size)
            is_request = req_idx < batch_size
            lens = tl.maximum(lens, load_lens(lens_ptr, req_idx, is_request, num_skipped, max_len))
            walked += 4 * window_size
    return tl.max(lens, axis=0) > short_len


@triton.jit
def clip_to_tile(begins, lens, tile_start, tile_len):
    """Return where each request's elements start and end in a tile, as int32.

    Args:
        begins: [window_size], first element of each request; any values.
        lens: [window_size], none negative.
        tile_start: int64 scalar.
        tile_len: Scalar, elements of the tile that exist.
    """
    first = begins - tile_start
    end = first + lens
    first = tl.minimum(tl.maximum(first, 0), tile_len)
    end = tl.minimum(tl.maximum(end, 0), tile_len)
    return first.to(tl.int32), end.to(tl.int32)


@triton.jit
def sum_four(a, b, c, d):
    """Return the sums of four tensors of one type, scalars.

    A sum over several warps goes through shared memory and two barriers; this does so once.
    """
    sums = tl.sum(tl.join(tl.join(a, b), tl.join(c, d)), axis=0)
    sums_of_a_and_b, sums_of_c_and_d = tl.split(sums)
    sum_of_a, sum_of_b = tl.split(sums_of_a_and_b)
    sum_of_c, sum_of_d = tl.split(sums_of_c_and_d)
    return sum_of_a, sum_of_b, sum_of_c, sum_of_d


@triton.jit
def find_owners(first_in_tile, num_lanes: tl.constexpr):
    """Return which request of a window each of the first num_lanes lanes of a tile belongs to.

    Args:
        first_in_tile: [window_size] int32, ascending and none negative, first lane of each request;
            num_lanes or more for one behind the tile.
        num_lanes: Lanes.

    Returns:
        owner: [num_lanes] int32, the last request that does not start behind the lane. Whether it
            reaches that far is for the caller to see.
        has_owner: [num_lanes] bool, whether there is one.
    """
    num_first = tl.histogram(first_in_tile, num_lanes, mask=first_in_tile < num_lanes)
    num_begun = tl.cumsum(num_first, 0)
    return tl.maximum(num_begun - 1, 0), num_begun > 0
