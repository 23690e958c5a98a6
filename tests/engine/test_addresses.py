"""The address oracle: the order of programs, and reads and launches that nothing needs."""

import textwrap
from math import prod

import pytest

from pagefault.addresses import BACKWARDS, FORWARDS, ORDERS, SHUFFLED, _program_at
from pagefault.case import PageTable
from pagefault.checker import Checker
from pagefault.conformance import session
from pagefault.family import families, family_named
from pagefault.strategies.out_cache_loc import OutCacheLocCase
from pagefault.strategies.req_to_page import UpdateReqToPageCase
from pagefault.stream import draw_cases
from pagefault.target import load_target

pytestmark = pytest.mark.skipif(
    session.device != "cpu", reason="addresses are watched in the interpreter"
)

GRIDS = [(1, 1, 1), (2, 1, 1), (5, 1, 1), (8, 1, 1), (97, 1, 1), (3, 4, 1), (2, 3, 5), (256, 1, 1)]

ONE_TOKEN = OutCacheLocCase(
    req_pool_indices=(0,),
    input_lengths=(1,),
    cache_start=(0,),
    req_to_pages=PageTable(1, 3),
    page_size=1,
)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_each_program_of_a_grid_runs_once_whatever_the_order(order, grid):
    forwards = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
    programs = [_program_at(order, program, grid) for program in forwards]
    assert sorted(programs) == forwards
    if order == BACKWARDS:
        assert programs == forwards[::-1]
    elif order == FORWARDS:
        assert programs == forwards
    elif prod(grid) > 4:
        assert programs not in (forwards, forwards[::-1])
        assert programs[0] != forwards[0]
        assert order == SHUFFLED


@pytest.fixture
def target_file(tmp_path):
    """A function that writes a target whose one program reads what an expression says."""

    def write(first_read):
        path = tmp_path / "target.py"
        path.write_text(
            textwrap.dedent(
                f"""
                import triton
                import triton.language as tl


                @triton.jit
                def one_token_kernel(out, rows, starts, table, row_stride, last_column):
                    row, start = tl.load(rows), tl.load(starts)
                    column = tl.minimum(start, last_column)
                    page_id = tl.load(table + row * row_stride + {first_read})
                    page_id = tl.load(table + row * row_stride + column)
                    tl.store(out, page_id)


                def compute_out_cache_loc(out, rows, lengths, starts, table, page_size):
                    one_token_kernel[(1,)](
                        out, rows, starts, table, table.stride(0), table.shape[1] - 1
                    )
                """
            )
        )
        return load_target(str(path))

    return write


@pytest.mark.parametrize(
    ("first_read", "is_needless"), [("column", False), ("last_column", False), ("column + 1", True)]
)
def test_a_needless_read_is_reported_where_it_is_asked_for(target_file, first_read, is_needless):
    """The result needs column 0; a kernel may clamp a column to the last one, which is 2."""
    family = family_named("compute_out_cache_loc")
    target = target_file(first_read)
    assert Checker(target, "cpu").check_thoroughly(family, ONE_TOKEN).passed
    verdict = Checker(target, "cpu", strict=True).check_thoroughly(family, ONE_TOKEN)
    headlines = [(finding.kind, finding.headline) for finding in verdict.findings]
    found = ("needless", "read of req_to_pages[0][1], which the result does not need")
    assert headlines == ([found] if is_needless else [])
    if is_needless:
        assert "target.py:10, in one_token_kernel, program (0, 0, 0)" in verdict.text()


@pytest.mark.parametrize("name", list(families()))
def test_ours_read_nothing_that_they_do_not_need(name):
    checker = Checker(load_target("ours"), "cpu", strict=True)
    family = family_named(name)
    verdicts = []
    draw_cases(
        family.strategy(checker.domain(family)),
        40,
        1,
        lambda case: verdicts.append(checker.check(family, case).text()),
    )
    assert set(verdicts) == {f"{name}: passed"}


NO_PAGES = UpdateReqToPageCase((0,), (0,), ((),), PageTable(1, 1))
A_PAGE = UpdateReqToPageCase((0,), (0,), ((5,),), PageTable(1, 1))


def test_a_launch_with_nothing_to_write_is_reported(tmp_path):
    path = tmp_path / "target.py"
    path.write_text(
        textwrap.dedent(
            """
            import triton
            import triton.language as tl


            @triton.jit
            def one_page_kernel(table, page_ids, num_ids):
                page_id = tl.load(page_ids, mask=num_ids > 0, other=0)
                tl.store(table, page_id, mask=num_ids > 0)


            def update_req_to_page(table, rows, page_ids, counts, starts):
                one_page_kernel[(1,)](table, page_ids, len(page_ids))
            """
        )
    )
    checker = Checker(load_target(str(path)), "cpu")
    family = family_named("update_req_to_page")
    assert checker.check_thoroughly(family, A_PAGE).passed
    (finding,) = checker.check_thoroughly(family, NO_PAGES).findings
    assert finding.kind == "launch"
    assert finding.headline == (
        "update_req_to_page launched one_page_kernel, but has nothing to write"
    )
