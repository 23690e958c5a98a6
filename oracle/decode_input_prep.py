"""What one decode step needs to know of its tokens."""

from collections.abc import Sequence
from typing import NamedTuple

from .out_cache_loc import compute_out_cache_loc_uniform
from .slots import Holes


class DecodeInputs(NamedTuple):
    """The three outputs of `fused_decode_input_prep`."""

    out_cache_loc: list[int]
    positions: list[int]
    seq_lens_out: list[int]


def fused_decode_input_prep(
    req_pool_indices: Sequence[int],
    valid_cache_lengths: Sequence[int],
    uniform_input_length: int,
    req_to_pages: Sequence[Sequence[int]],
    page_size: int,
    *,
    overflow_slot: int = 0,
    holes: Holes = "divert",
) -> DecodeInputs:
    """Return slots and positions of the new tokens, and the lengths after them.

    Args:
        req_pool_indices: [batch_size], row of req_to_pages of each request.
        valid_cache_lengths: [req_pool_size + 1], cached tokens per request pool index.
        uniform_input_length: New tokens of every request.
        req_to_pages: [req_pool_size + 1, max_pages], page id per page index.
        page_size: Tokens per page.
        overflow_slot: Where overflow and holes go.
        holes: What a page id below 0 means, see `slot_of_position`.

    >>> fused_decode_input_prep([1], [0, 3], 2, [[3, 5], [7, 9]], page_size=4)
    DecodeInputs(out_cache_loc=[31, 36], positions=[3, 4], seq_lens_out=[5])
    """
    starts = [valid_cache_lengths[req_pool_idx] for req_pool_idx in req_pool_indices]
    return DecodeInputs(
        compute_out_cache_loc_uniform(
            req_pool_indices,
            uniform_input_length,
            starts,
            req_to_pages,
            page_size,
            overflow_slot=overflow_slot,
            holes=holes,
        ),
        [start + k for start in starts for k in range(uniform_input_length)],
        [start + uniform_input_length for start in starts],
    )
