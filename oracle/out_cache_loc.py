"""Slots of the new tokens of a batch."""

from collections.abc import Sequence

from .slots import Holes, slot_of_position


def compute_out_cache_loc(
    req_pool_indices: Sequence[int],
    input_lengths: Sequence[int],
    cache_start: Sequence[int],
    req_to_pages: Sequence[Sequence[int]],
    page_size: int,
    *,
    overflow_slot: int = 0,
    holes: Holes = "divert",
) -> list[int]:
    """Return the slots of every request's new tokens, one request after another.

    Args:
        req_pool_indices: [batch_size], row of req_to_pages of each request.
        input_lengths: [batch_size], new tokens of each request.
        cache_start: [batch_size], position of each request's first new token.
        req_to_pages: [req_pool_size + 1, max_pages], page id per page index.
        page_size: Tokens per page.
        overflow_slot: Where overflow and holes go.
        holes: What a page id below 0 means, see `slot_of_position`.

    >>> compute_out_cache_loc([1, 0], [2, 3], [3, 7], [[3, 5], [7, 9]], page_size=4)
    [31, 36, 23, 0, 0]
    """
    slots = []
    for req_pool_idx, length, start in zip(
        req_pool_indices, input_lengths, cache_start, strict=True
    ):
        page_ids = req_to_pages[req_pool_idx]
        for position in range(start, start + length):
            slots.append(slot_of_position(position, page_ids, page_size, overflow_slot, holes))
    return slots


def compute_out_cache_loc_uniform(
    req_pool_indices: Sequence[int],
    uniform_input_length: int,
    cache_start: Sequence[int],
    req_to_pages: Sequence[Sequence[int]],
    page_size: int,
    *,
    overflow_slot: int = 0,
    holes: Holes = "divert",
) -> list[int]:
    """Return what `compute_out_cache_loc` does when every request has one length.

    >>> compute_out_cache_loc_uniform([1, 0], 2, [3, 7], [[3, 5], [7, 9]], page_size=4)
    [31, 36, 23, 0]
    """
    return compute_out_cache_loc(
        req_pool_indices,
        [uniform_input_length] * len(req_pool_indices),
        cache_start,
        req_to_pages,
        page_size,
        overflow_slot=overflow_slot,
        holes=holes,
    )
