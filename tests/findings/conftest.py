"""What the tests of findings share: something found, and a run that has found it."""

import json
from pathlib import Path

import pytest

from pagefault.campaign import Found
from pagefault.finding_record import Rate
from pagefault.findings import Context
from pagefault.verdict import Signature

ALWAYS = Rate(10, 10)


def found_in_row(row, role="token", how_small="minimal: no single step", rate=ALWAYS):
    """Return a finding whose case is the larger, the larger the row."""
    case = {"schema": 1, "family": "compute_out_cache_loc", "req_pool_indices": [row]}
    text = "{\n" + ",\n".join(f'  "{k}": {json.dumps(v)}' for k, v in case.items()) + "\n}\n"
    signature = Signature("compute_out_cache_loc", "value", f"out_cache_loc: {role}")
    return Found(signature, text, (1, row), f"wrong in row {row}", how_small, rate)


def context_of_run(number, target="mine.py", device="cpu"):
    """Return the context of a run; later ones have larger numbers."""
    return Context(
        run=f"2026010{number}T000000Z-here-{number:08x}",
        target=target,
        commit="",
        seed=number,
        machine="here",
        device=device,
        device_name=f"{device} of here",
        driver="",
        memory="arena",
        versions={"torch": "2.13"},
    )


def files_below(folder: Path) -> dict[str, bytes]:
    """Return the content of every file, by its path; names that start with a dot left out."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


@pytest.fixture(scope="session")
def found():
    """`found_in_row`, as a fixture because test modules can't import a conftest."""
    return found_in_row


@pytest.fixture(scope="session")
def context():
    """`context_of_run`, as a fixture."""
    return context_of_run


@pytest.fixture(scope="session")
def tree():
    """`files_below`, as a fixture."""
    return files_below
