"""What strategies draw: legal cases, every edge, and not the same case twice."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import pytest

from pagefault.case import NUM_IDS, PageTable
from pagefault.families import chunked_prefill, decode_input_prep, out_cache_loc, req_to_page
from pagefault.family import Domain, family_named
from pagefault.strategies.edges import made_from_choices, only_where, sampler_of
from pagefault.stream import draw_cases

SEEDS = (1, 2, 3)
CASES_PER_SEED = 2000
RUN_THAT_MUST_REACH = 1000

FAMILIES = [
    family.name
    for module in (req_to_page, out_cache_loc, decode_input_prep, chunked_prefill)
    for family in module.FAMILIES
]
WITH_TABLE = [name for name in FAMILIES if name != "chunking"]


@dataclass
class Stream:
    """What is kept of the cases of one seed."""

    edges: list[frozenset[str]] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    hashes: set[int] = field(default_factory=set)
    some: list = field(default_factory=list)


@cache
def streams(name: str) -> list[Stream]:
    """Return the streams of a family; a case that is not legal raises when it is made."""
    family = family_named(name)
    drawn = []
    for seed in SEEDS:
        stream = Stream()

        def use(case, stream=stream):
            stream.edges.append(family.edges(case))
            stream.batch_sizes.append(case.num_requests)
            stream.hashes.add(hash(case))
            if len(stream.edges) % 10 == 0:
                stream.some.append(case)

        draw_cases(family.strategy(Domain()), CASES_PER_SEED, seed, use)
        assert len(stream.edges) == CASES_PER_SEED
        drawn.append(stream)
    return drawn


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("idx", range(len(SEEDS)), ids=lambda idx: f"seed{SEEDS[idx]}")
def test_a_short_run_reaches_what_a_run_must_reach(name, idx):
    reached = frozenset().union(*streams(name)[idx].edges[:RUN_THAT_MUST_REACH])
    assert family_named(name).must_reach - reached == set()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_long_run_reaches_every_edge(name):
    reached = frozenset().union(*(edges for stream in streams(name) for edges in stream.edges))
    assert family_named(name).all_edges - reached == set()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_edge_that_is_reached_is_in_the_list(name):
    reached = frozenset().union(*(edges for stream in streams(name) for edges in stream.edges))
    assert reached - family_named(name).all_edges == set()


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_run_must_reach_is_in_the_list(name):
    family = family_named(name)
    assert family.must_reach <= family.all_edges


@pytest.mark.parametrize("name", FAMILIES)
def test_hardly_a_case_is_drawn_twice(name):
    for stream in streams(name):
        assert len(stream.hashes) > 0.9 * CASES_PER_SEED


@pytest.mark.parametrize("name", FAMILIES)
def test_other_seeds_draw_other_cases(name):
    first, second, third = (stream.hashes for stream in streams(name))
    assert len(first & second & third) < 0.1 * CASES_PER_SEED


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_seed_draws_the_same_cases(name):
    family = family_named(name)
    first, again = [], []
    draw_cases(family.strategy(Domain()), 20, 1, first.append)
    draw_cases(family.strategy(Domain()), 20, 1, again.append)
    assert len(first) == 20
    assert first == again


@pytest.mark.parametrize("name", FAMILIES)
def test_half_of_the_batches_have_two_requests_or_more(name):
    sizes = sorted(size for stream in streams(name) for size in stream.batch_sizes)
    assert sizes[len(sizes) // 2] >= 2


def test_a_tenth_of_the_cases_takes_more_than_one_tile():
    num_large = num_cases = 0
    for name in WITH_TABLE:
        for stream in streams(name):
            num_cases += len(stream.edges)
            num_large += sum("more than one tile" in edges for edges in stream.edges)
    assert num_large >= num_cases / 10


@pytest.mark.parametrize("name", FAMILIES)
def test_about_half_of_the_layouts_are_plain_but_for_dtypes(name):
    fancy = {"offset", "pitched table", "spare output"}
    edges = [edges for stream in streams(name) for edges in stream.edges]
    accepted = [e for e in edges if not any(edge.startswith("refused") for edge in e)]
    share = sum(bool(fancy & e) for e in accepted) / len(accepted)
    assert 0.2 < share < 0.6


@pytest.mark.parametrize("name", FAMILIES)
def test_a_drawn_case_reads_back_from_its_json(name):
    family = family_named(name)
    cases = [case for stream in streams(name) for case in stream.some]
    assert len(cases) == len(SEEDS) * CASES_PER_SEED / 10
    for case in cases:
        assert family.from_json(family.to_json(case)) == case


def short_enough(cases):
    """Return the cases whose tables can be listed cell by cell."""
    return [case for case in cases if all(table.num_cells <= NUM_IDS for table in tables_of(case))]


def tables_of(case):
    return [value for value in vars(case).values() if isinstance(value, PageTable)]


@pytest.mark.parametrize("name", WITH_TABLE)
def test_page_ids_are_unique_tags_but_for_the_edits(name):
    for stream in streams(name):
        for case in short_enough(stream.some):
            (table,) = tables_of(case)
            edited = {(row, column) for row, column, _ in table.edits}
            ids = [
                (row * table.max_pages + column, page_id)
                for row, page_ids in enumerate(table.rows)
                for column, page_id in enumerate(page_ids)
                if (row, column) not in edited
            ]
            assert len({page_id for _, page_id in ids}) == len(ids)
            assert all(page_id not in (0, cell) for cell, page_id in ids)
            # Of neighbours too, so that a page id tells them apart.
            assert all(abs(b - a) > 1 for (_, a), (_, b) in pairwise(ids))


@pytest.mark.parametrize("name", WITH_TABLE)
def test_edits_are_few(name):
    most = max(len(tables_of(case)[0].edits) for stream in streams(name) for case in stream.some)
    assert most <= 3


@pytest.mark.parametrize("name", ["update_req_to_page", "update_block_table"])
def test_new_page_ids_are_tags_that_the_table_does_not_have(name):
    for stream in streams(name):
        for case in short_enough(stream.some):
            ids = Counter(page_id for ids in case.new_occupied_pages for page_id in ids)
            in_table = {page_id for row in case.req_to_page.rows for page_id in row}
            special = {-1, 0, 1, 2**31 - 1, -(2**31)}
            assert in_table.isdisjoint(set(ids) - special)
            assert all(count == 1 for page_id, count in ids.items() if page_id not in special)


@pytest.mark.parametrize("name", FAMILIES)
def test_edges_that_a_target_can_not_do_are_not_drawn(name):
    family = family_named(name)
    without = frozenset(sorted(family.must_reach)[:3])
    seen = []
    domain = Domain(without=without)
    draw_cases(family.strategy(domain), 100, 1, lambda case: seen.append(family.edges(case)))
    assert len(seen) == 100
    assert frozenset().union(*seen).isdisjoint(without)


@pytest.mark.parametrize("name", WITH_TABLE)
def test_page_sizes_and_dtypes_can_be_kept_to_a_few(name):
    family = family_named(name)
    cases = []
    domain = Domain(page_sizes=(4, 6), dtype_choices=(0,))
    draw_cases(family.strategy(domain), 100, 1, cases.append)
    assert len(cases) == 100
    assert {case.page_size for case in cases if hasattr(case, "page_size")} <= {4, 6}
    for case in cases:
        assert [at.dtype for _, at in case.layout] == [case.PLAIN[n].dtype for n, _ in case.layout]


@pytest.mark.parametrize("by_hypothesis", [False, True])
def test_a_stream_has_different_cases_and_ends_where_there_are_no_more(by_hypothesis):
    """Whether they are sampled, or drawn by Hypothesis because nothing else can."""
    strategy = made_from_choices(lambda choices: choices.below(8))
    if by_hypothesis:
        strategy = strategy.map(lambda number: number)
    assert (sampler_of(strategy) is None) == by_hypothesis
    drawn = []
    draw_cases(strategy, 100, 1, drawn.append)
    assert sorted(drawn) == list(range(8))
    for num_cases in (0, 3):
        drawn = []
        draw_cases(strategy, num_cases, 1, drawn.append)
        assert len(drawn) == len(set(drawn)) == num_cases


def test_a_stream_ends_when_its_taker_says_so():
    drawn = []
    strategy = made_from_choices(lambda choices: choices.below(8))
    draw_cases(strategy, 100, 1, lambda number: drawn.append(number) or number == drawn[0])
    assert len(drawn) == 1


def test_nothing_is_drawn_of_a_strategy_that_accepts_nothing():
    strategy = only_where(made_from_choices(lambda choices: choices.below(8)), lambda number: False)
    draw_cases(strategy, 10, 1, lambda number: pytest.fail("drawn"))


@pytest.mark.parametrize("name", FAMILIES)
def test_batches_are_drawn_near_the_sizes_of_a_target(name):
    drawn = set()
    domain = Domain(sizes=(700,))
    draw_cases(
        family_named(name).strategy(domain), 1000, 1, lambda case: drawn.add(case.num_requests)
    )
    assert {699, 700, 701, 1401, 2801} <= drawn
    assert not {699, 700, 701, 1401, 2801} & set(streams(name)[0].batch_sizes)


@pytest.mark.parametrize("name", ["compute_out_cache_loc", "fused_decode_input_prep"])
def test_outputs_are_drawn_longer_by_the_sizes_of_a_target(name):
    spares = set()
    draw_cases(
        family_named(name).strategy(Domain(sizes=(2**18,))),
        1000,
        1,
        lambda case: spares.add(case.placement("out_cache_loc").spare),
    )
    assert {2**18 - 1, 2**18, 2**18 + 1} <= spares


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("compute_out_cache_loc", "input_lengths"),
        ("create_chunked_cache_kv_indices_paged", "chunk_seq_lens"),
        ("update_req_to_page", "new_occupied_pages"),
        ("get_chunks_paged", "prefix_lens"),
    ],
)
def test_a_large_batch_may_have_something_for_its_last_request_alone(name, field):
    found = []

    def use(case):
        lengths = [bool(length) for length in getattr(case, field)]
        found.append(len(lengths) > 256 and not any(lengths[:-1]) and lengths[-1])

    draw_cases(family_named(name).strategy(Domain()), CASES_PER_SEED, 1, use)
    assert any(found)
