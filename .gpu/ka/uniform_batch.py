"""Which request owns an element where all have equally many: shared by the kernels.

A request has a power of two of lanes of a tile, so that no lane has to divide; or, where that is as
many as the tile has, tiles of its own.
"""

import triton
import triton.language as tl


def count_lane_bits(length: int) -> int:
    """Return the logarithm of how many lanes a request of `length` elements has."""
    return (max(length, 1) - 1).bit_length()


def has_own_tiles(length: int, tile_size: int) -> bool:
    """Return whether no two requests share a tile."""
    return 1 << count_lane_bits(length) >= tile_size


def count_uniform_programs(batch_size: int, length: int, tile_size: int) -> int:
    """Return how many programs cover a batch."""
    if has_own_tiles(length, tile_size):
        return batch_size * -(-length // tile_size)
    return -(-batch_size // (tile_size >> count_lane_bits(length)))


@triton.jit
def find_requests(batch_size, lane_bits, tile_size: tl.constexpr):
    """Return the requests of a program's lanes, where each has 2**lane_bits of them.

    Returns:
        req_idx: [tile_size] int64.
        idx_in_req: [tile_size] int32, the lane's place within its request.
        is_request: [tile_size] bool, whether there is such a request.
    """
    lane = tl.arange(0, tile_size)
    first_req_idx = tl.program_id(0).to(tl.int64) * (tile_size >> lane_bits)
    req_idx = first_req_idx + (lane >> lane_bits)
    return req_idx, lane - ((lane >> lane_bits) << lane_bits), req_idx < batch_size


@triton.jit
def find_tile(length, tile_size: tl.constexpr):
    """Return the request and the tile of a program, where each request has tiles of its own.

    Returns:
        req_idx: int64 scalar.
        first: int64 scalar, the tile's first element within the request.
        tile_len: int32 scalar, how many elements the request has there.
    """
    num_tiles = tl.cdiv(length, tile_size)
    req_idx = tl.program_id(0) // num_tiles
    first = (tl.program_id(0) - req_idx * num_tiles).to(tl.int64) * tile_size
    tile_len = tl.minimum(length - first, tile_size).to(tl.int32)
    return req_idx.to(tl.int64), first, tile_len
