"""Relations between the functions that hold whatever the input is."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from pagefault.oracle.chunked_prefill import get_chunks_paged
from pagefault.oracle.decode_input_prep import fused_decode_input_prep
from pagefault.oracle.out_cache_loc import compute_out_cache_loc, compute_out_cache_loc_uniform
from pagefault.oracle.req_to_page import update_block_table, update_req_to_page

ROWS = 4

page_sizes = st.integers(1, 7)
tables = st.integers(0, 4).flatmap(
    lambda width: st.lists(
        st.lists(st.integers(-2, 50), min_size=width, max_size=width), min_size=ROWS, max_size=ROWS
    )
)
requests = st.tuples(st.integers(0, ROWS - 1), st.integers(0, 6), st.integers(0, 30))
batches = st.lists(requests, max_size=6)


def slots_of(batch, table, page_size):
    """Return the slots of (row, length, start) requests."""
    columns = [[request[i] for request in batch] for i in range(3)]
    return compute_out_cache_loc(*columns, table, page_size)


@given(batches, batches, tables, page_sizes)
def test_the_slots_of_two_batches_are_those_of_the_one_they_make(first, second, table, page_size):
    whole = slots_of(first + second, table, page_size)
    assert whole == slots_of(first, table, page_size) + slots_of(second, table, page_size)


@given(batches, tables, page_sizes, st.data())
def test_permuting_a_batch_permutes_its_slots(batch, table, page_size, data):
    order = data.draw(st.permutations(range(len(batch))))
    permuted = slots_of([batch[i] for i in order], table, page_size)
    one_by_one = [slots_of([request], table, page_size) for request in batch]
    assert permuted == [slot for i in order for slot in one_by_one[i]]


@given(
    st.lists(st.integers(0, ROWS - 1), max_size=6),
    st.integers(0, 6),
    st.lists(st.integers(0, 30), min_size=ROWS, max_size=ROWS),
    tables,
    page_sizes,
)
def test_ragged_uniform_and_fused_agree(rows, length, cached, table, page_size):
    starts = [cached[row] for row in rows]
    ragged = compute_out_cache_loc(rows, [length] * len(rows), starts, table, page_size)
    uniform = compute_out_cache_loc_uniform(rows, length, starts, table, page_size)
    fused = fused_decode_input_prep(rows, cached, length, table, page_size)
    assert ragged == uniform == fused.out_cache_loc
    assert fused.seq_lens_out == [start + length for start in starts]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=ROWS), page_sizes)
def test_tokens_on_distinct_pages_have_distinct_slots_inside_their_pages(counts, page_size):
    empty = [[-1] * 4 for _ in range(ROWS)]
    rows = list(range(len(counts)))
    ids = list(range(1, sum(counts) + 1))
    table = update_req_to_page(empty, rows, ids, counts, [0] * len(counts))

    lengths = [count * page_size for count in counts]
    slots = compute_out_cache_loc(rows, lengths, [0] * len(counts), table, page_size)
    assert len(set(slots)) == sum(lengths)
    tokens_of_page = defaultdict(int)
    for slot in slots:
        tokens_of_page[slot // page_size] += 1
    assert tokens_of_page == dict.fromkeys(ids, page_size)


@given(
    st.integers(0, 4).flatmap(
        lambda width: st.tuples(
            st.lists(
                st.lists(st.integers(-2, 50), min_size=width, max_size=width),
                min_size=ROWS,
                max_size=ROWS,
            ),
            st.lists(
                st.tuples(st.integers(0, ROWS - 1), st.integers(0, 5 * width)),
                min_size=1,
                max_size=5,
            ),
        )
    ),
    st.integers(5, 40),
)
def test_chunks_in_order_are_the_slots_of_the_whole_prefix(table_and_prefixes, capacity):
    table, prefixes = table_and_prefixes
    rows = [row for row, _ in prefixes]
    prefix_lens = [prefix_len for _, prefix_len in prefixes]
    chunks, kv_indices_list = get_chunks_paged(prefix_lens, table, rows, 5, capacity)
    slots = defaultdict(list)
    for sums, kv_indices in zip(chunks.cum_seq_lens, kv_indices_list):
        assert len(kv_indices) == sums[-1] <= capacity
        for req_idx in range(len(prefixes)):
            slots[req_idx] += kv_indices[sums[req_idx] : sums[req_idx + 1]]
    for req_idx, (row, prefix_len) in enumerate(prefixes):
        assert slots[req_idx] == slots_of([(row, prefix_len, 0)], table, 5)


@given(tables, st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(-2, 99), max_size=4))))
def test_an_update_in_several_steps_leaves_the_table_of_one_step(table, wanted):
    requests = [(row, begin, page_ids) for row, (begin, page_ids) in enumerate(wanted[:ROWS])]
    at_once = update_block_table(
        table,
        [row for row, _, _ in requests],
        [begin for _, begin, _ in requests],
        [page_ids for _, _, page_ids in requests],
    )
    one_by_one = table
    for row, begin, page_ids in requests:
        for k, page_id in enumerate(page_ids):
            one_by_one = update_block_table(one_by_one, [row], [begin + k], [[page_id]])
    assert one_by_one == at_once
