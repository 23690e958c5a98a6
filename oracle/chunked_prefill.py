"""A cached prefix, cut into chunks that attention can take one at a time."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from .out_cache_loc import compute_out_cache_loc
from .slots import Holes


class Chunks(NamedTuple):
    """Per chunk and request; cum_seq_lens has a leading 0 in every chunk."""

    starts: list[list[int]]
    ends: list[list[int]]
    len_in_chunk: list[list[int]]
    cum_seq_lens: list[list[int]]


class PrefillMetadata(NamedTuple):
    """What an MLA backend feeds to its attention calls."""

    num_chunks: int
    kv_indices_list: list[list[int]]
    len_in_chunk: list[list[int]]
    cum_seq_lens: list[list[int]]
    max_len_per_chunk: list[int]


def chunking(
    prefix_lens: Sequence[int], num_chunks: int, batch_size: int, chunk_len: int
) -> Chunks:
    """Return where each chunk of each prefix starts and ends.

    Args:
        prefix_lens: [batch_size], cached tokens of each request.
        num_chunks: Chunks; they need not cover the prefixes.
        batch_size: Number of prefixes.
        chunk_len: Tokens per chunk and request.

    >>> chunking([7, 3], num_chunks=2, batch_size=2, chunk_len=4)._asdict()
    {'starts': [[0, 0], [4, 4]], 'ends': [[4, 3], [7, 3]], \
'len_in_chunk': [[4, 3], [3, 0]], 'cum_seq_lens': [[0, 4, 7], [0, 3, 3]]}
    """
    starts = [[chunk_idx * chunk_len] * batch_size for chunk_idx in range(num_chunks)]
    ends = [
        [min(prefix_len, start + chunk_len) for prefix_len, start in zip(prefix_lens, row)]
        for row in starts
    ]
    lens = [
        [max(0, end - start) for start, end in zip(start_row, end_row)]
        for start_row, end_row in zip(starts, ends)
    ]
    return Chunks(starts, ends, lens, [list(accumulate(row, initial=0)) for row in lens])


def create_chunked_cache_kv_indices_paged(
    req_to_page: Sequence[Sequence[int]],
    req_pool_indices: Sequence[int],
    chunk_starts: Sequence[int],
    chunk_seq_lens: Sequence[int],
    chunk_cum_seq_lens: Sequence[int],
    page_size: int,
    *,
    overflow_slot: int = 0,
    holes: Holes = "divert",
) -> dict[int, int]:
    """Return the slots of one chunk by the index they are written to.

    Args:
        req_to_page: [req_pool_size + 1, max_pages], page id per page index.
        req_pool_indices: [batch_size], row of each request.
        chunk_starts: [batch_size], position of the chunk's first token.
        chunk_seq_lens: [batch_size], tokens of each request in the chunk.
        chunk_cum_seq_lens: [batch_size + 1], index of each request's first slot.
        page_size: Tokens per page.
        overflow_slot: Where overflow and holes go.
        holes: What a page id below 0 means, see `slot_of_position`.

    >>> create_chunked_cache_kv_indices_paged([[3, 5]], [0], [3], [2], [1, 3], page_size=4)
    {1: 15, 2: 20}
    """
    slots = compute_out_cache_loc(
        req_pool_indices,
        chunk_seq_lens,
        chunk_starts,
        req_to_page,
        page_size,
        overflow_slot=overflow_slot,
        holes=holes,
    )
    indices = [
        first + k
        for first, length in zip(chunk_cum_seq_lens, chunk_seq_lens)
        for k in range(length)
    ]
    return dict(zip(indices, slots, strict=True))


def get_chunks_paged(
    prefix_lens: Sequence[int],
    req_to_page: Sequence[Sequence[int]],
    req_pool_indices: Sequence[int],
    page_size: int,
    chunk_capacity: int,
    *,
    overflow_slot: int = 0,
    holes: Holes = "divert",
) -> tuple[Chunks, list[list[int]]]:
    """Return the chunks that cover the prefixes, and the slots of each chunk.

    Args:
        prefix_lens: [batch_size], cached tokens of each request.
        req_to_page: [req_pool_size + 1, max_pages], page id per page index.
        req_pool_indices: [batch_size], row of each request.
        page_size: Tokens per page.
        chunk_capacity: Tokens per chunk, over all requests.
        overflow_slot: Where overflow and holes go.
        holes: What a page id below 0 means, see `slot_of_position`.

    >>> chunks, kv_indices_list = get_chunks_paged([3, 1], [[3, 5], [7, 9]], [0, 1], 2, 4)
    >>> chunks.len_in_chunk, kv_indices_list
    ([[2, 1], [1, 0]], [[6, 7, 14], [10]])
    """
    batch_size = len(prefix_lens)
    longest = max(prefix_lens, default=0)
    chunk_len = chunk_capacity // batch_size if batch_size else 1
    num_chunks = -(-longest // chunk_len)
    chunks = chunking(prefix_lens, num_chunks, batch_size, chunk_len)
    kv_indices_list = [
        compute_out_cache_loc(
            req_pool_indices,
            lens,
            starts,
            req_to_page,
            page_size,
            overflow_slot=overflow_slot,
            holes=holes,
        )
        for starts, lens in zip(chunks.starts, chunks.len_in_chunk)
    ]
    return chunks, kv_indices_list


def build_chunked_prefill_metadata_arrays(
    extend_prefix_lens: Sequence[int],
    req_to_page: Sequence[Sequence[int]],
    req_pool_indices: Sequence[int],
    page_size: int,
    chunk_capacity: int,
    *,
    overflow_slot: int = 0,
    holes: Holes = "divert",
) -> PrefillMetadata:
    """Return what an MLA backend needs to attend to the prefixes chunk by chunk.

    Args as for `get_chunks_paged`.

    >>> build_chunked_prefill_metadata_arrays([3, 1], [[3, 5], [7, 9]], [0, 1], 2, 4)[2:]
    ([[2, 1], [1, 0]], [[0, 2, 3], [0, 1, 1]], [2, 1])
    """
    chunks, kv_indices_list = get_chunks_paged(
        extend_prefix_lens,
        req_to_page,
        req_pool_indices,
        page_size,
        chunk_capacity,
        overflow_slot=overflow_slot,
        holes=holes,
    )
    return PrefillMetadata(
        len(chunks.starts),
        kv_indices_list,
        chunks.len_in_chunk,
        chunks.cum_seq_lens,
        [max(lens) for lens in chunks.len_in_chunk],
    )
