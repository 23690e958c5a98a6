"""What the tests of reports share: findings made by real checks of faulty kernels, and a run."""

import dataclasses
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from pagefault.checker import Checker
from pagefault.conformance import session
from pagefault.family import case_from_json
from pagefault.finding_record import Rate
from pagefault.findings import Context
from pagefault.pace import Pace
from pagefault.plan import Plan
from pagefault.result import FamilyTally, Found, Result
from pagefault.target import load_target

FAULTY = Path(__file__).resolve().parents[1] / "faulty"

OVERFLOW = """{"schema": 1, "family": "compute_out_cache_loc", "req_pool_indices": [1, 0],
 "input_lengths": [2, 1], "cache_start": [1, 0], "req_to_pages": [[3, 10], [17, 24]],
 "page_size": 1}"""
SPILL = """{"schema": 1, "family": "update_req_to_page", "req_pool_indices": [0], "begins": [0],
 "new_occupied_pages": [[9, 11]], "req_to_page": [[3], [10]]}"""
WIDE = """{"schema": 1, "family": "compute_out_cache_loc", "req_pool_indices": [4],
 "input_lengths": [40], "cache_start": [0], "page_size": 1,
 "req_to_pages": {"num_rows": 6, "max_pages": 50}, "layout": {"req_to_pages": {"pitch": 3}}}"""
PITCHED = """{"schema": 1, "family": "build_chunked_prefill_metadata_arrays",
 "req_pool_indices": [1], "prefix_lens": [1], "req_to_page": [[3], [10]], "page_size": 1,
 "chunk_capacity": 1, "layout": {"req_to_page": {"pitch": 1}}}"""

# Target (of `faulty/`), case.
FAULTS = {
    "clamped": ("compute_out_cache_loc/overflow_clamped.py", OVERFLOW),
    "one too many": ("compute_out_cache_loc/one_past_the_end.py", OVERFLOW),
    "spill": ("update_req_to_page/spills_into_the_next_row.py", SPILL),
    "wide": ("compute_out_cache_loc/row_stride_from_width.py", WIDE),
    "wrong stride": ("build_chunked_prefill_metadata_arrays/row_stride_from_width.py", PITCHED),
}


@cache
def found_by(fault):
    """Return what a check of a faulty kernel finds."""
    path, text = FAULTS[fault]
    family, case = case_from_json(text)
    verdict = Checker(load_target(str(FAULTY / path)), "cpu").check_thoroughly(family, case)
    made = Found.of(family, case, verdict, "minimal: no single step makes it smaller")
    return dataclasses.replace(made, reproduced=Rate(10, 10))


@pytest.fixture(scope="session")
def found():
    """`found_by`, as a fixture because test modules can't import a conftest."""
    if session.device == "cuda":
        pytest.skip("what the address oracle says is part of what is reported")
    return found_by


def context_of(target="mine.py", device="cpu", run=1):
    """Return the context of a run."""
    return Context(
        run=f"2026010{run}T000000Z-here-{run:08x}",
        target=target,
        commit="0123abc",
        seed=run,
        machine="here",
        device=device,
        device_name=f"{device} of here",
        driver="",
        memory="arena",
        versions={"torch": "2.13"},
    )


@pytest.fixture(scope="session")
def context():
    """`context_of`, as a fixture."""
    return context_of


@pytest.fixture(scope="session")
def campaign(found):
    """A function that returns the arguments of `report_of_campaign` for a run with findings."""

    def make(*faults):
        target = load_target(str(FAULTY / FAULTS["clamped"][0]))
        plan = Plan(target.name, ["compute_out_cache_loc"], "cpu", 60.0, None, 5, 2)
        tally = FamilyTally(500, 10.0, Counter({"hole": 3, "overflow: some": 20}))
        result = Result({"compute_out_cache_loc": tally}, seconds=10.0)
        for fault in faults:
            result.add(found(fault))
        pace = Pace(samples=[(0.0, 0), (10.0, 200), (20.0, 500)])
        return {
            "plan": plan,
            "result": result,
            "target": target,
            "context": context_of(target.name),
            "paths": {signature: Path("cases/one.json") for signature in result.findings},
            "folders": {},
            "pace": pace,
        }

    return make


@pytest.fixture(scope="session")
def pagefault():
    """A function that runs `python -m pagefault` with arguments in a folder."""

    def run(*arguments, cwd, **changes):
        ours = ("PYTEST_", "TRITON_INTERPRET", "HYPOTHESIS_", "PAGEFAULT_", "CI", "GITHUB_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return subprocess.run(
            [sys.executable, "-m", "pagefault", *map(str, arguments)],
            cwd=cwd,
            env={**kept, "NO_COLOR": "1", "COLUMNS": "200", **changes},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run
