"""Chunks of cached prefixes, worked out by hand."""

import pytest

from pagefault.oracle.chunked_prefill import (
    build_chunked_prefill_metadata_arrays,
    chunking,
    create_chunked_cache_kv_indices_paged,
    get_chunks_paged,
)

TABLE = [[3, 5], [7, 9]]


@pytest.mark.parametrize(
    ("prefix_lens", "num_chunks", "chunk_len", "starts", "ends", "lens", "sums"),
    [
        # Chunk 1 of the second prefix starts at 4, past its end at 3.
        pytest.param(
            *([7, 3], 2, 4),
            *([[0, 0], [4, 4]], [[4, 3], [7, 3]], [[4, 3], [3, 0]], [[0, 4, 7], [0, 3, 3]]),
            id="one prefix ends in the first chunk",
        ),
        pytest.param(
            *([3], 2, 4),
            *([[0], [4]], [[3], [3]], [[3], [0]], [[0, 3], [0, 0]]),
            id="chunk end -1",
        ),
        pytest.param(
            *([4], 2, 4),
            *([[0], [4]], [[4], [4]], [[4], [0]], [[0, 4], [0, 0]]),
            id="chunk end +0",
        ),
        pytest.param(
            *([5], 2, 4),
            *([[0], [4]], [[4], [5]], [[4], [1]], [[0, 4], [0, 1]]),
            id="chunk end +1",
        ),
        # 2 * 3 = 6 tokens of 10: the last end is where the chunks stop.
        pytest.param(
            *([10], 2, 3),
            *([[0], [3]], [[3], [6]], [[3], [3]], [[0, 3], [0, 3]]),
            id="chunks do not cover",
        ),
        # In chunk 2 even the longest prefix is over: end 3 < start 4.
        pytest.param(
            *([3], 3, 2),
            *([[0], [2], [4]], [[2], [3], [3]], [[2], [1], [0]], [[0, 2], [0, 1], [0, 0]]),
            id="one chunk too many",
        ),
        pytest.param(
            *([0, 5], 1, 8),
            *([[0, 0]], [[0, 5]], [[0, 5]], [[0, 0, 5]]),
            id="first prefix is 0",
        ),
        pytest.param(
            *([5, 0], 1, 8),
            *([[0, 0]], [[5, 0]], [[5, 0]], [[0, 5, 5]]),
            id="last prefix is 0",
        ),
        pytest.param([5], 0, 8, [], [], [], [], id="no chunks"),
        pytest.param([], 2, 8, [[], []], [[], []], [[], []], [[0], [0]], id="no requests"),
        pytest.param(
            *([2], 2, 1),
            *([[0], [1]], [[1], [2]], [[1], [1]], [[0, 1], [0, 1]]),
            id="chunks of 1",
        ),
        # 2 * 2**30 = 2**31 does not fit 32 bits, but no end is there.
        pytest.param(
            *([2**30 + 1], 2, 2**30),
            *([[0], [2**30]], [[2**30], [2**30 + 1]], [[2**30], [1]], [[0, 2**30], [0, 1]]),
            id="reach past 32 bits",
        ),
    ],
)
def test_chunks_are_what_was_worked_out_by_hand(
    prefix_lens, num_chunks, chunk_len, starts, ends, lens, sums
):
    chunks = chunking(prefix_lens, num_chunks, len(prefix_lens), chunk_len)
    assert chunks == (starts, ends, lens, sums)


@pytest.mark.parametrize(
    ("rows", "starts", "lens", "offsets", "slots"),
    [
        # 7 * 4 + 3 | 9 * 4 + 0
        pytest.param([1], [3], [2], [0, 2], {0: 31, 1: 36}, id="across a page boundary"),
        # 9 * 4 + 3 | past the row
        pytest.param([1], [7], [2], [0, 2], {0: 39, 1: 0}, id="across the row end"),
        # A gap of 2 before, 1 between, 3 behind: 3 * 4 + 0 || 7 * 4 + 0
        pytest.param([0, 1], [0, 0], [1, 1], [2, 4, 8], {2: 12, 4: 28}, id="gaps"),
        pytest.param([0, 1], [0, 0], [0, 1], [0, 0, 1], {0: 28}, id="first has no tokens"),
        pytest.param([0, 1], [0, 0], [1, 0], [0, 1, 1], {0: 12}, id="last has no tokens"),
        pytest.param([0, 1], [0, 0], [0, 0], [0, 0, 0], {}, id="no tokens"),
        pytest.param([], [], [], [0], {}, id="no requests"),
        # 5 * 4 + 1 twice
        pytest.param([0, 0], [5, 5], [1, 1], [0, 1, 2], {0: 21, 1: 21}, id="two of one row"),
    ],
)
def test_slots_of_a_chunk_lie_at_the_offsets(rows, starts, lens, offsets, slots):
    found = create_chunked_cache_kv_indices_paged(TABLE, rows, starts, lens, offsets, page_size=4)
    assert found == slots


def test_slots_of_a_chunk_follow_the_dialect():
    arguments = [[[-1]], [0], [1], [2], [0, 2], 2]
    found = create_chunked_cache_kv_indices_paged(*arguments, overflow_slot=-1)
    assert found == {0: -1, 1: -1}
    # -1 * 2 + 1, then past the row
    found = create_chunked_cache_kv_indices_paged(*arguments, holes="multiply")
    assert found == {0: -1, 1: 0}


@pytest.mark.parametrize(
    ("prefix_lens", "capacity", "lens", "kv_indices_list"),
    [
        # 4 // 2 = 2 tokens each: 3 * 2 + 0, 3 * 2 + 1 || 7 * 2 + 0 ||| 5 * 2 + 0
        pytest.param([3, 1], 4, [[2, 1], [1, 0]], [[6, 7, 14], [10]], id="capacity divides"),
        # 5 // 2 = 2: one token of capacity that nobody gets.
        pytest.param([3, 1], 5, [[2, 1], [1, 0]], [[6, 7, 14], [10]], id="capacity leaves a rest"),
        pytest.param([2, 2], 4, [[2, 2]], [[6, 7, 14, 15]], id="up to the chunk end"),
        # One token each: positions 0 || 0, then 1 of the first.
        pytest.param([2, 1], 2, [[1, 1], [1, 0]], [[6, 14], [7]], id="capacity of the batch"),
        pytest.param([0, 1], 8, [[0, 1]], [[14]], id="first prefix is 0"),
        pytest.param([4, 4], 99, [[4, 4]], [[6, 7, 10, 11, 14, 15, 18, 19]], id="full rows"),
        pytest.param([0, 0], 4, [], [], id="no prefix at all"),
    ],
)
def test_chunks_of_whole_prefixes_are_what_was_worked_out_by_hand(
    prefix_lens, capacity, lens, kv_indices_list
):
    chunks, slots = get_chunks_paged(prefix_lens, TABLE, [0, 1], 2, capacity)
    assert (chunks.len_in_chunk, slots) == (lens, kv_indices_list)

    metadata = build_chunked_prefill_metadata_arrays(prefix_lens, TABLE, [0, 1], 2, capacity)
    assert metadata.num_chunks == len(lens)
    assert metadata.kv_indices_list == kv_indices_list
    assert metadata.len_in_chunk == lens
    assert metadata.cum_seq_lens == chunks.cum_seq_lens
    assert metadata.max_len_per_chunk == [max(row) for row in lens]


def test_no_requests_have_no_chunks():
    assert get_chunks_paged([], TABLE, [], 2, 4) == (([], [], [], []), [])
    assert build_chunked_prefill_metadata_arrays([], TABLE, [], 2, 4) == (0, [], [], [], [])


def test_whole_prefixes_follow_the_dialect():
    # A page of 2 that is a hole: diverted, diverted to -1, -1 * 2 + 0 and -1 * 2 + 1.
    arguments = [[2], [[-1]], [0], 2, 2]
    assert get_chunks_paged(*arguments)[1] == [[0, 0]]
    assert get_chunks_paged(*arguments, overflow_slot=-1)[1] == [[-1, -1]]
    assert get_chunks_paged(*arguments, holes="multiply")[1] == [[-2, -1]]
    metadata = build_chunked_prefill_metadata_arrays(*arguments, holes="multiply")
    assert metadata.kv_indices_list == [[-2, -1]]
