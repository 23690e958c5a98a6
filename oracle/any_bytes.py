"""What a call gives whatever its tensors hold: the meanings of the other modules, made total.

Lengths below 0 count as 0, positions below 0 have no page, columns below 0 are dropped, and a pool
index that is no row has no cells. None stands for an element, or a whole answer, that nothing
fixes, because a sum is larger than the tensor that it has to fit in.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from . import chunked_prefill
from .slots import Holes, slot_of_position


def slot_of_token(
    req_pool_idx: int,
    position: int,
    req_to_page: Sequence[Sequence[int]],
    page_size: int,
    overflow_slot: int = 0,
    holes: Holes = "divert",
) -> int:
    """Return the slot of any position of any request, diverted where it has no page.

    >>> [slot_of_token(row, 5, [[3, 5]], page_size=4) for row in (-1, 0, 1)]
    [0, 21, 0]
    >>> slot_of_token(0, -1, [[3, 5]], page_size=4)
    0
    """
    if not 0 <= req_pool_idx < len(req_to_page):
        return overflow_slot
    return slot_of_position(position, req_to_page[req_pool_idx], page_size, overflow_slot, holes)


def compute_out_cache_loc(
    num_elements: int,
    req_pool_indices: Sequence[int],
    input_lengths: Sequence[int],
    cache_start: Sequence[int],
    req_to_pages: Sequence[Sequence[int]],
    page_size: int,
    *,
    overflow_slot: int = 0,
    holes: Holes = "divert",
) -> list[int] | None:
    """Return the slots of every request's new tokens, or None if the output can't hold them.

    Args:
        num_elements: Elements of the output.
        req_pool_indices: [batch_size], any numbers.
        input_lengths: [batch_size], any numbers.
        cache_start: [batch_size], any numbers.
        req_to_pages: [req_pool_size + 1, max_pages], page id per page index.
        page_size: Tokens per page.
        overflow_slot: Where overflow and holes go.
        holes: What a page id below 0 means, see `slot_of_position`.

    >>> compute_out_cache_loc(9, [0, 1, 0], [-3, 1, 3], [0, 0, -1], [[3, 5]], page_size=4)
    [0, 0, 12, 13]
    >>> compute_out_cache_loc(9, [0], [10], [0], [[3, 5]], page_size=4)
    """
    lengths = [max(0, length) for length in input_lengths]
    if sum(lengths) > num_elements:
        return None
    return [
        slot_of_token(row, start + k, req_to_pages, page_size, overflow_slot, holes)
        for row, length, start in zip(req_pool_indices, lengths, cache_start, strict=True)
        for k in range(length)
    ]


def page_writes(
    num_rows: int,
    max_pages: int,
    req_pool_indices: Sequence[int],
    new_occupied_pages: Sequence[int],
    new_occupied_pages_num: Sequence[int],
    pages_copy_starts: Sequence[int],
) -> dict[tuple[int, int], int | None] | None:
    """Return the page id that each cell gets, or None if the counts are more than the ids.

    A cell that two requests write may get either's.

    >>> page_writes(1, 2, [1, 0], [7, 8, 9], [1, 2], [0, -1])
    {(0, 0): 9}
    >>> page_writes(1, 2, [0, 0], [7, 8, 9], [1, 2], [0, 0])
    {(0, 0): None, (0, 1): 9}
    >>> page_writes(1, 2, [0], [7, 8, 9], [4], [0])
    """
    counts = [max(0, count) for count in new_occupied_pages_num]
    if sum(counts) > len(new_occupied_pages):
        return None
    writes: dict[tuple[int, int], int | None] = {}
    firsts = accumulate(counts, initial=0)
    for row, first, count, start in zip(req_pool_indices, firsts, counts, pages_copy_starts):
        for k in range(count):
            cell = (row, start + k)
            if 0 <= row < num_rows and 0 <= start + k < max_pages:
                writes[cell] = None if cell in writes else new_occupied_pages[first + k]
    return writes


class DecodeInputs(NamedTuple):
    """The three outputs of `fused_decode_input_prep`."""

    out_cache_loc: list[int | None]
    positions: list[int | None]
    seq_lens_out: list[int | None]


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

    A negative cached length can be read as a length that counts as 0, or as the start of
    negative positions: nothing is said of its request.

    >>> fused_decode_input_prep([0, 1, 2], [3, -1], 2, [[3, 5], [7, 9]], page_size=4)
    DecodeInputs(out_cache_loc=[15, 20, None, None, 0, 0], positions=[3, 4, None, None, 0, 1], \
seq_lens_out=[5, None, 2])
    """
    length = uniform_input_length
    outputs = DecodeInputs([], [], [])
    for row in req_pool_indices:
        start = valid_cache_lengths[row] if 0 <= row < len(valid_cache_lengths) else 0
        if start < 0:
            outputs.out_cache_loc.extend([None] * length)
            outputs.positions.extend([None] * length)
            outputs.seq_lens_out.append(None)
            continue
        for position in range(start, start + length):
            outputs.out_cache_loc.append(
                slot_of_token(row, position, req_to_pages, page_size, overflow_slot, holes)
            )
            outputs.positions.append(position)
        outputs.seq_lens_out.append(start + length)
    return outputs


def create_chunked_cache_kv_indices_paged(
    num_elements: int,
    req_to_page: Sequence[Sequence[int]],
    req_pool_indices: Sequence[int],
    chunk_starts: Sequence[int],
    chunk_seq_lens: Sequence[int],
    chunk_cum_seq_lens: Sequence[int],
    page_size: int,
    *,
    overflow_slot: int = 0,
    holes: Holes = "divert",
) -> dict[int, int] | None:
    """Return the slots by the index they are written to, or None if the offsets do not agree.

    >>> create_chunked_cache_kv_indices_paged(3, [[3]], [0, 1], [0, 0], [2, -1], [1, 3, 3], 4)
    {1: 12, 2: 13}
    >>> create_chunked_cache_kv_indices_paged(3, [[3]], [0], [0], [2], [2, 3], page_size=4)
    """
    lengths = [max(0, length) for length in chunk_seq_lens]
    ends = [offset + length for offset, length in zip(chunk_cum_seq_lens, lengths)]
    is_orderly = all(offset <= following for offset, following in pairwise(chunk_cum_seq_lens))
    if (
        not is_orderly
        or chunk_cum_seq_lens[0] < 0
        or any(end > following for end, following in zip(ends, chunk_cum_seq_lens[1:]))
        or max(ends, default=0) > num_elements
    ):
        return None
    return {
        offset + k: slot_of_token(row, start + k, req_to_page, page_size, overflow_slot, holes)
        for row, start, length, offset in zip(
            req_pool_indices, chunk_starts, lengths, chunk_cum_seq_lens
        )
        for k in range(length)
    }


def chunking(
    prefix_lens: Sequence[int], num_chunks: int, batch_size: int, chunk_len: int
) -> chunked_prefill.Chunks:
    """Return where each chunk of each prefix starts and ends.

    >>> chunking([-7, 3], num_chunks=1, batch_size=2, chunk_len=4)
    Chunks(starts=[[0, 0]], ends=[[0, 3]], len_in_chunk=[[0, 3]], cum_seq_lens=[[0, 0, 3]])
    """
    lengths = [max(0, length) for length in prefix_lens]
    return chunked_prefill.chunking(lengths, num_chunks, batch_size, chunk_len)


def get_chunks_paged(
    prefix_lens: Sequence[int],
    prefix_lens_cpu: Sequence[int],
    req_to_page: Sequence[Sequence[int]],
    req_pool_indices: Sequence[int],
    page_size: int,
    chunk_capacity: int,
    *,
    overflow_slot: int = 0,
    holes: Holes = "divert",
) -> tuple[chunked_prefill.Chunks, list[list[int | None]], chunked_prefill.Chunks]:
    """Return the chunks of both prefixes, and the slots, as many as the CPU's prefixes ask for.

    Args:
        prefix_lens: [batch_size], any numbers.
        prefix_lens_cpu: [batch_size], legal lengths; they say how many chunks there are.
        req_to_page: [req_pool_size + 1, max_pages], page id per page index.
        req_pool_indices: [batch_size], any numbers.
        page_size: Tokens per page.
        chunk_capacity: Tokens per chunk, over all requests.
        overflow_slot: Where overflow and holes go.
        holes: What a page id below 0 means, see `slot_of_position`.

    >>> get_chunks_paged([1], [2], [[3, 5]], [0], page_size=2, chunk_capacity=2)[1]
    [[6, None]]
    >>> get_chunks_paged([3], [2], [[3, 5]], [0], page_size=2, chunk_capacity=3)[1]
    [[None, None]]
    """
    batch_size = len(prefix_lens)
    chunk_len = chunk_capacity // batch_size if batch_size else 1
    num_chunks = -(-max(prefix_lens_cpu, default=0) // chunk_len)
    chunks_cpu = chunking(prefix_lens_cpu, num_chunks, batch_size, chunk_len)
    chunks = chunking(prefix_lens, num_chunks, batch_size, chunk_len)
    kv_indices_list = []
    for starts, lens, sums in zip(chunks.starts, chunks.len_in_chunk, chunks_cpu.cum_seq_lens):
        slots = compute_out_cache_loc(
            sums[-1],
            req_pool_indices,
            lens,
            starts,
            req_to_page,
            page_size,
            overflow_slot=overflow_slot,
            holes=holes,
        )
        written: Mapping[int, int] = dict(enumerate(slots or ()))
        kv_indices_list.append([written.get(idx) for idx in range(sums[-1])])
    return chunks, kv_indices_list, chunks_cpu
