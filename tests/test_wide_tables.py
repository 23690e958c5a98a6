"""Page tables of more than 2**31 elements: reserved, not filled, and checked like any other."""

import os
import resource
from pathlib import Path

import pytest
import torch

from pagefault.case import MOST_FILLED_ELEMENTS, CaseError, PageTable, Placement
from pagefault.checker import Checker
from pagefault.conformance import session
from pagefault.family import Domain, Tensor, families, family_named
from pagefault.footprint import needed_reads
from pagefault.memory import HostMemory, Plan
from pagefault.minimal import minimise
from pagefault.strategies.out_cache_loc import OutCacheLocCase
from pagefault.strategies.req_to_page import UpdateReqToPageCase
from pagefault.stream import draw_cases
from pagefault.target import load_target

FAULTY = Path(__file__).parent / "wide"
WITH_TABLE = [name for name in families() if name != "chunking"]
MOST_BYTES = 64 << 20

FAR_APART = OutCacheLocCase(
    req_pool_indices=(2,),
    input_lengths=(1,),
    cache_start=(0,),
    req_to_pages=PageTable(3, 1),
    page_size=1,
    layout=(("req_to_pages", Placement(pitch=2**30 - 1)),),
)
LONG_ROWS = FAR_APART.replace(
    req_pool_indices=(3,), cache_start=(2**29 - 1,), req_to_pages=PageTable(4, 2**29), layout=()
)


@pytest.fixture(scope="module")
def ours():
    return Checker(load_target("ours"), session.device)


def wide_cases(family, checker, edge, most=2):
    """Return a few cases that have an edge, of those that are drawn."""
    found = []

    def use(case):
        if edge in family.edges(case):
            found.append(case)
        return len(found) == most

    draw_cases(family.strategy(checker.domain(family)), 20_000, 1, use)
    return found


@pytest.mark.parametrize("edge", ["wide table", "long rows"])
@pytest.mark.parametrize("name", WITH_TABLE)
def test_wide_tables_are_drawn_and_take_no_memory(name, edge, ours):
    family = family_named(name)
    cases = wide_cases(family, ours, edge)
    assert len(cases) == 2
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in cases:
        (table,) = case.tables()
        assert case.span_of(table) > 2**31
        assert ours.check_thoroughly(family, case).passed
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < MOST_BYTES or ours.device == "cuda"


def test_slots_of_a_wide_table_are_those_of_the_rule(ours):
    for case in (FAR_APART, LONG_ROWS):
        row, column = case.req_pool_indices[0], case.cache_start[0]
        reads = needed_reads(family_named("compute_out_cache_loc"), case, ours.target.dialect)
        assert reads == {"req_to_pages": {(row, column)}}
        assert ours.check_thoroughly(family_named("compute_out_cache_loc"), case).passed


@pytest.mark.skipif(session.device != "cpu", reason="host memory")
def test_only_what_a_call_touches_is_filled():
    family = family_named("compute_out_cache_loc")
    tensors = [a for a in family.arguments(LONG_ROWS) if isinstance(a, Tensor)]
    plan = Plan(LONG_ROWS, tensors, {"req_to_pages": {(3, 2**29 - 1)}})
    memory = HostMemory()
    replicas = memory.place(plan, tensors)
    table = replicas.tensors[0][-1]
    assert table.shape == (4, 2**29)
    assert table[3, -3:].tolist() == [
        LONG_ROWS.req_to_pages.page_id(3, 2**29 - k) for k in (3, 2, 1)
    ]
    assert table[1, 2**28].item() == 0
    table[3, -2] = 77
    after = memory.read_back(plan)
    changed = [str(plan.cell_at(4 * int(word))) for word in (after != replicas.before).nonzero()[0]]
    assert changed == [f"req_to_pages[3][{2**29 - 2}]"]


def test_a_table_is_reserved_where_it_spans_more_than_is_filled():
    narrow = FAR_APART.replace(layout=(("req_to_pages", Placement(pitch=1)),))
    assert narrow.span_of("req_to_pages") < MOST_FILLED_ELEMENTS < FAR_APART.span_of("req_to_pages")


def test_a_row_product_of_32_bits_reads_far_in_front_of_the_table():
    family = family_named("compute_out_cache_loc")
    checker = Checker(load_target(str(FAULTY / "row_product_in_32_bits.py")), session.device)
    near = FAR_APART.replace(layout=(("req_to_pages", Placement(pitch=1)),))
    assert checker.check_thoroughly(family, near).passed
    verdict = checker.check_thoroughly(family, FAR_APART)
    assert not verdict.passed
    if session.device == "cpu":
        headline = verdict.findings[0].headline
        assert headline == "read of req_to_pages[-2][0], which is no element of it"


@pytest.mark.slow
def test_a_row_product_of_32_bits_is_found_and_made_smallest():
    family = family_named("compute_out_cache_loc")
    checker = Checker(load_target(str(FAULTY / "row_product_in_32_bits.py")), session.device)
    failures = []

    def use(case):
        verdict = checker.check(family, case)
        if not verdict.passed:
            failures.append((case, verdict))
        return bool(failures)

    draw_cases(family.strategy(checker.domain(family)), 3000, 1, use)
    assert failures
    minimal = minimise(family, *failures[0], lambda case: checker.check_thoroughly(family, case))
    assert minimal.exhausted == ""
    # The first row whose product with a stride below 2**31 does not fit 32 bits is row 2.
    assert minimal.case == FAR_APART
    headline = minimal.verdict.findings[0].headline
    if session.device == "cpu":
        assert headline == "read of req_to_pages[-2][0], which is no element of it"


@pytest.mark.skipif(session.device != "cpu", reason="host memory")
def test_a_write_to_a_wide_table_is_held_to_its_footprint(plain_update):
    case = UpdateReqToPageCase(
        req_pool_indices=(1,),
        begins=(1,),
        new_occupied_pages=((60,),),
        req_to_page=PageTable(3, 4),
        layout=(("req_to_page", Placement(pitch=2**30)),),
    )
    family = family_named("update_req_to_page")
    assert Checker(plain_update(0), "cpu").check(family, case).passed
    verdict = Checker(plain_update(1), "cpu").check(family, case)
    assert verdict.findings[0].headline.startswith("req_to_page[1][2] = 60, but should still be")


@pytest.fixture
def plain_update():
    """A function that makes a target whose update writes so many columns too far as well."""
    from pagefault.target import Target

    def make(num_columns_too_far):
        def update_req_to_page(table, rows, pages, counts, starts):
            row, start = rows.item(), starts.item()
            for k in range(1 + num_columns_too_far):
                table[row, start + k] = pages[0]

        return Target("planted", {"update_req_to_page": update_req_to_page})

    return make


def test_long_rows_are_not_drawn_for_what_computes_with_torch_alone(ours, plain_update):
    family = family_named("update_req_to_page")
    checker = Checker(plain_update(0), "cpu")
    assert "long rows" in checker.domain(family).without
    assert "long rows" not in ours.domain(family).without
    assert not wide_cases(family, checker, "long rows")


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (("cache_start", Placement(offset=2**31)), "MiB, but should not take 1024"),
        (("out_cache_loc", Placement(spare=2**30)), "MiB, but should not take 1024"),
    ],
)
def test_what_no_memory_holds_is_refused(placement, message):
    checker = Checker(load_target("ours"), session.device, "arena")
    with pytest.raises(CaseError, match=message):
        checker.check(family_named("compute_out_cache_loc"), FAR_APART.replace(layout=(placement,)))


@pytest.mark.skipif(session.device != "cuda", reason="host memory reserves")
def test_a_memory_that_reserves_nothing_refuses_a_wide_table():
    checker = Checker(load_target("ours"), "cuda", "arena")
    with pytest.raises(CaseError, match="do not fit the memory: arena"):
        checker.check(family_named("compute_out_cache_loc"), FAR_APART)


@pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="needs a GPU"
)
def test_without_a_net_wide_tables_are_not_drawn():
    checker = Checker(load_target("ours"), "cuda", "guard")
    family = family_named("compute_out_cache_loc")
    assert "wide table" in checker.domain(family).without
    assert checker.domain(family) != Domain()


@pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="needs a GPU"
)
@pytest.mark.parametrize("memory", ["guard", "net"])
def test_what_is_too_large_for_a_block_or_a_net_lies_in_an_arena(memory):
    checker = Checker(load_target("ours"), "cuda", memory)
    case = FAR_APART.replace(req_to_pages=PageTable(3, 2**20), layout=())
    assert checker.check(family_named("compute_out_cache_loc"), case).passed
