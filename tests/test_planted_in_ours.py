"""Faults planted in copies of our own kernels, whose values are right or hardly ever wrong.

Each is found by its access, with the tensor, the index and the kernel's line.
"""

import itertools
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagefault.checker import Checker
from pagefault.conformance import session
from pagefault.family import family_named
from pagefault.minimal import Budget, minimise
from pagefault.stream import draw_cases
from pagefault.target import load_target

pytestmark = pytest.mark.skipif(
    session.device != "cpu", reason="addresses are watched in the interpreter"
)

KERNELS = Path(__file__).parents[1] / "kernels"
MOST_CASES = 1500
_numbers = itertools.count()
SECONDS = 20.0


@dataclass(frozen=True)
class Planted:
    """One fault and what must be said of it.

    Attributes:
        name: For people.
        file: The kernel's file.
        old: Text that is there once.
        new: Text in its place.
        kind: The finding's.
        headline: What must be found, as a regular expression, once the case is small.
        at: Text of the kernel's line that must be named, the first that has it.
    """

    name: str
    file: str
    old: str
    new: str
    kind: str
    headline: str
    at: str
    function: str = "compute_out_cache_loc"

    def __str__(self) -> str:
        return self.name


LOAD = "    page_id = tl.load(\n        req_to_page_ptr + req_pool_idx * row_stride + page_idx,\n"
ACTIVE = "mask=is_active & is_in_pool & has_column"
TABLE = r"req_to_pages\[-?\d+\]\[-?\d+\]"

PLANTED = [
    Planted(
        "clamp removed",
        *("slots.py", "has_column = (position >= 0) & (page_idx < max_pages)"),
        "has_column = position >= 0",
        *("address", rf"read of {TABLE}, which is no element of it"),
        "page_id = tl.load(",
    ),
    Planted(
        "less or equal",
        *(
            "slots.py",
            "& (page_idx < max_pages)\n    page_id",
            "& (page_idx <= max_pages)\n    page_id",
        ),
        *("address", r"read of req_to_pages\[0\]\[0\], which is no element of it"),
        "page_id = tl.load(",
    ),
    Planted(
        "one past the row, not used",
        *("slots.py", LOAD),
        "    next_ptr = req_to_page_ptr + req_pool_idx * row_stride + page_idx + 1\n"
        f"    tl.load(next_ptr, {ACTIVE})\n{LOAD}",
        *("address", r"read of req_to_pages\[0\]\[1\], which is no element of it"),
        "tl.load(next_ptr",
    ),
    Planted(
        "next row, not used",
        *("slots.py", LOAD),
        f"    next_row = (req_pool_idx + 1) % num_rows\n"
        f"    tl.load(req_to_page_ptr + next_row * row_stride + page_idx, {ACTIVE})\n{LOAD}",
        *("row", r"read of req_to_pages\[\d\]\[0\], a row that belongs to no request of the call"),
        "next_row * row_stride",
    ),
    Planted(
        "mask removed",
        *("ragged_slots.py", "        mask=is_token & (element >= 0) & (element < num_elements),"),
        "        mask=(element >= 0) & (element < num_elements),",
        *("outside", r"out_cache_loc\[\d+\] = -?\d+, but should still be -?\d+"),
        "    tl.store(",
    ),
    Planted(
        "two programs, one cell",
        *("ragged_slots.py", "program * group_size,"),
        "program * (group_size - 1),",
        *("race", r"write of out_cache_loc\[0\], which another program touches"),
        "    tl.store(",
    ),
    Planted(
        "a neighbour's cell, which its owner overwrites later",
        *("ragged_slots.py", "tile_ptr + lane, slot, mask=(lane >= first) & (lane < end))"),
        "tile_ptr + lane, slot, mask=(lane >= first) & (lane <= end))",
        *("race", r"write of out_cache_loc\[9\], which another program touches"),
        "tl.store(tile_ptr + lane, slot",
    ),
    Planted(
        "the tail is written with what it holds",
        *("out_cache_loc.py", '    """Write what one program owes'),
        "    tail_ptr = out_cache_loc_ptr + num_elements - 1\n"
        "    tl.store(tail_ptr, tl.load(tail_ptr))\n"
        '    """Write what one program owes',
        *("outside", r"write of out_cache_loc\[0\], which the contract does not name"),
        "tl.store(tail_ptr",
    ),
    Planted(
        "an input is written with what it holds",
        *("out_cache_loc.py", '    """Write what one program owes'),
        "    tl.store(cache_start_ptr, tl.load(cache_start_ptr))\n"
        '    """Write what one program owes',
        *("input changed", r"write of cache_start\[0\], which the contract does not name"),
        "tl.store(cache_start_ptr",
    ),
]


@pytest.fixture
def target_with(tmp_path):
    """A function that returns a target of our kernels with one change, and the changed file."""

    def make(planted):
        # Python keeps a package that it has imported once.
        name = f"kernels_{next(_numbers)}_copied"
        package = tmp_path / name
        shutil.copytree(KERNELS, package, ignore=shutil.ignore_patterns("__pycache__"))
        path = package / planted.file
        text = path.read_text()
        assert planted.old in text
        path.write_text(text.replace(planted.old, planted.new, 1))
        target = tmp_path / "target.py"
        target.write_text(f"from {name}.out_cache_loc import {planted.function}\n")
        return load_target(str(target)), path

    return make


@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_what_the_values_do_not_show_is_found_with_tensor_index_and_line(
    planted, target_with, record_property
):
    target, path = target_with(planted)
    family = family_named(planted.function)
    checker = Checker(target, "cpu")
    found = []
    num_cases = 0

    def use(case):
        nonlocal num_cases
        num_cases += 1
        verdict = checker.check(family, case)
        if any(finding.kind == planted.kind for finding in verdict.findings):
            found.append((case, verdict))
        return bool(found)

    draw_cases(family.strategy(checker.domain(family)), MOST_CASES, 1, use)
    record_property("cases until found", num_cases)
    assert found
    minimal = minimise(
        family,
        *found[0],
        lambda case: checker.check_thoroughly(family, case),
        Budget(seconds=SECONDS),
    )
    finding = next(f for f in minimal.verdict.findings if f.kind == planted.kind)
    text = "\n".join([finding.headline, *finding.lines])
    assert re.search(planted.headline, text), text
    lines = path.read_text().splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if planted.at in line]
    assert any(f"{planted.file}:{number}" in text for number in numbers), (text, numbers)


def test_nothing_planted_is_nothing_found(target_with):
    same = Planted("nothing", "slots.py", "has_column", "has_column", "", "", "")
    target, _ = target_with(same)
    family = family_named(same.function)
    checker = Checker(target, "cpu")
    verdicts = []
    draw_cases(
        family.strategy(checker.domain(family)),
        100,
        1,
        lambda case: verdicts.append(checker.check(family, case).text()),
    )
    assert set(verdicts) == {f"{same.function}: passed"}
