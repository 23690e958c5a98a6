"""What is found shrinks to the smallest case that has it, worked out here by hand.

A case is small if it has few requests, then few new tokens, pages or chunks, then few cells in
the table, then small pages, few edits, small numbers, and a plain layout.
"""

from random import Random

import hypothesis
import pytest
from hypothesis import HealthCheck

from pagefault.family import Domain, family_named
from pagefault.minimal import minimise
from pagefault.verdict import Finding, Verdict

NO_ROWS = {"num_rows": 0, "max_pages": 0}
NO_COLUMNS = {"num_rows": 1, "max_pages": 0}


def smallest(family, edge, seed):
    """Return the smallest case with an edge that Hypothesis and then the engine come to."""

    def check(case):
        finding = Finding("value", edge, edge)
        return Verdict(family.name, (finding,) if edge in family.edges(case) else ())

    found = hypothesis.find(
        family.strategy(Domain()),
        lambda case: edge in family.edges(case),
        settings=hypothesis.settings(
            max_examples=6000,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
        random=Random(seed),
    )
    minimal = minimise(family, found, check(found), check)
    assert minimal.exhausted == ""
    return minimal.case


def tokens(rows=(), lengths=(), starts=(), table=NO_ROWS, page_size=1, **more):
    return {
        "req_pool_indices": list(rows),
        "input_lengths": list(lengths),
        "cache_start": list(starts),
        "req_to_pages": table,
        "page_size": page_size,
        **more,
    }


WIDE = {"dtype": "int64"}
# Not here: "position past 2**31 - 1", which also a start of 32 bits with two tokens has, and no
# single step leads from there to a start of 64 bits with one.
TOKENS = {
    "no requests": tokens(),
    "no pages in the table": tokens(),
    "pitched table": tokens(layout={"req_to_pages": {"pitch": 1}}),
    "spare output": tokens(layout={"out_cache_loc": {"spare": 1}}),
    "offset cache_start": tokens(layout={"cache_start": {"offset": 1}}),
    "int32 req_pool_indices": tokens(layout={"req_pool_indices": {"dtype": "int32"}}),
    "page size no power of two": tokens(page_size=3),
    "row repeated": tokens([0, 0], [0, 0], [0, 0], NO_COLUMNS),
    # The greater row comes first; nothing is looked up, so the rows need no columns.
    "rows permuted": tokens([1, 0], [0, 0], [0, 0], {"num_rows": 2, "max_pages": 0}),
    "zero length: middle": tokens([0] * 3, [0] * 3, [0] * 3, NO_COLUMNS),
    "more than 64 requests": tokens([0] * 65, [0] * 65, [0] * 65, NO_COLUMNS),
    # The others need no tokens for the middle one to be in the middle.
    "overflow in the middle request": tokens([0] * 3, [0, 1, 0], [0] * 3, NO_COLUMNS),
    "overflow: all": tokens([0], [1], [0], NO_COLUMNS),
    # One token with a page, and one without.
    "overflow: some": tokens([0], [2], [0], [[3]]),
    "overflow: none": tokens([0], [1], [0], [[3]]),
    "end at row end +0": tokens([0], [1], [0], [[3]]),
    # Where a page has 1 or 2 positions, the last one counts as the boundary itself, or as 1 past.
    "start at page boundary -1": tokens([0], [1], [2], NO_COLUMNS, page_size=3),
    "start at page boundary +1": tokens([0], [1], [1], NO_COLUMNS, page_size=2),
    # 256 tokens fill one tile.
    "more than one tile": tokens([0], [257], [0], NO_COLUMNS),
    "hole": tokens([0], [1], [0], [[-1]]),
    "page id 0": tokens([0], [1], [0], [[0]]),
    "largest page id": tokens([0], [1], [0], [[2**31 - 1]]),
    # 2**30 * 2 is the first product that does not fit; with pages of 1 any id fits.
    "slot past 2**31 - 1": tokens(
        *([0], [1], [0], [[2**30]]), page_size=2, layout={"out_cache_loc": WIDE}
    ),
}


def pages(rows=(0,), begins=(0,), ids=((0,),), table=NO_COLUMNS, **more):
    return {
        "req_pool_indices": list(rows),
        "begins": list(begins),
        "new_occupied_pages": [list(page_ids) for page_ids in ids],
        "req_to_page": table,
        **more,
    }


PAGES = {
    "everything clamped away": pages(),
    "begin at the row end": pages(),
    "begin past the row end": pages(begins=[1]),
    "row filled": pages(table=[[3]]),
    "far begin": pages(begins=[2**30 + 1]),
    "hole": pages(ids=[[-1]]),
    "more than one tile": pages(ids=[[0] * 257]),
    "no pages: first request": pages(ids=[[]]),
}
BLOCK_TABLE = {
    # Row 0 of no rows.
    "refused: pool index": pages(ids=[[]], table=NO_ROWS, sizes=[0]),
    "refused: begin": pages(begins=[-1], ids=[[]], sizes=[0]),
    "refused: size": pages(ids=[[]], sizes=[1]),
    "refused: page id": pages(ids=[[2**31]], sizes=[1]),
    "clamped: one": pages(sizes=[1]),
}


def chunks(prefix_lens, num_chunks, batch_size, chunk_len, **more):
    return {
        "prefix_lens": prefix_lens,
        "num_chunks": num_chunks,
        "batch_size": batch_size,
        "chunk_len": chunk_len,
        **more,
    }


CHUNKING = {
    "chunks do not cover": chunks([1], 0, 1, 1),
    "chunks past the longest prefix": chunks([], 1, 0, 1),
    # With chunks of 1 every prefix ends at a chunk's end.
    "prefix ends at chunk end -1": chunks([1], 0, 1, 2),
    "prefix ends at chunk end +0": chunks([2], 0, 1, 2),
    "several chunks": chunks([], 2, 0, 1),
    "prefix past 2**31 - 1": chunks([2**31], 0, 1, 1, layout={"prefix_lens": WIDE}),
    "refused: chunk_len": chunks([], 0, 0, 0),
    "refused: batch_size": chunks([], 0, 1, 1),
    "refused: num_chunks": chunks([], -1, 0, 1),
    # The third start, 2 * 2**30, is the first that does not fit; 2**31 is no chunk_len.
    "refused: start past int32": chunks([0], 3, 1, 2**30),
}


def prefixes(rows, prefix_lens, table, page_size, chunk_capacity):
    return {
        "req_pool_indices": rows,
        "prefix_lens": prefix_lens,
        "req_to_page": table,
        "page_size": page_size,
        "chunk_capacity": chunk_capacity,
    }


PREFIXES = {
    "no requests": prefixes([], [], NO_ROWS, 1, 1),
    "one chunk": prefixes([0], [1], [[3]], 1, 1),
    # Two tokens in one page are a smaller table than in two.
    "several chunks": prefixes([0], [2], [[3]], 2, 1),
    "capacity divides nothing": prefixes([0, 0], [0, 0], NO_COLUMNS, 1, 3),
    "refused: chunk_capacity": prefixes([], [], NO_ROWS, 1, 0),
    "refused: more requests than capacity": prefixes([0, 0], [0, 0], NO_COLUMNS, 1, 1),
    "refused: negative prefix": prefixes([0], [-1], NO_COLUMNS, 1, 1),
    "refused: prefix past the table": prefixes([0], [1], NO_COLUMNS, 1, 1),
}

SMALLEST = [
    pytest.param(name, edge, fields, id=f"{name}-{edge}")
    for name, cases in {
        "compute_out_cache_loc": TOKENS,
        "update_req_to_page": PAGES,
        "update_block_table": BLOCK_TABLE,
        "chunking": CHUNKING,
        "get_chunks_paged": PREFIXES,
    }.items()
    for edge, fields in cases.items()
]


@pytest.mark.parametrize(("name", "edge", "fields"), SMALLEST)
def test_an_edge_shrinks_to_the_smallest_case_that_has_it(name, edge, fields):
    family = family_named(name)
    expected = family.case_type.from_fields(fields)
    assert edge in family.edges(expected)
    assert smallest(family, edge, seed=1) == expected
