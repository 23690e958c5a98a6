"""A family of somebody else's package, by the entry point group `pagefault.families`."""

import json
import os
import subprocess
import sys

import pytest

PYPROJECT = """
[build-system]
requires = ["setuptools>=68"]
build-backend = "setuptools.build_meta"

[project]
name = "double-ids"
version = "1.0"

[project.entry-points."pagefault.families"]
double_ids = "{entry}"

[tool.setuptools]
py-modules = ["double_ids_family"]
"""

FAMILY = '''
"""A family that pagefault does not know: out[i] = 2 * ids[i]."""

from dataclasses import dataclass
from typing import ClassVar

from hypothesis import strategies as st

from pagefault.case import Case, PerRequest, Placement
from pagefault.family import Expected, Family, Tensor


@dataclass(frozen=True)
class DoubleIdsCase(Case):
    PLAIN: ClassVar = {"out": Placement(), "ids": Placement()}

    ids: PerRequest


def edges(case):
    found = {"negative"} if min(case.ids, default=0) < 0 else set()
    return frozenset(found | ({"no ids"} if not case.ids else set()))


double_ids = Family(
    name="double_ids",
    parameters=("out", "ids"),
    case_type=DoubleIdsCase,
    cases=lambda domain: st.lists(st.integers(-1000, 1000), max_size=8).map(
        lambda ids: DoubleIdsCase(tuple(ids))
    ),
    arguments=lambda case: [
        Tensor("out", (len(case.ids),), None),
        Tensor("ids", (len(case.ids),), case.ids),
    ],
    expect=lambda case, dialect: Expected({"out": [2 * i for i in case.ids]}),
    edges=edges,
    size=lambda case: len(case.ids),
    all_edges=frozenset(["negative", "no ids"]),
    must_reach=frozenset(["negative"]),
)
'''

TARGET = """
def double_ids(out, ids):
    out[:] = 2 * ids
    out[ids > {limit}] = 0
"""


@pytest.fixture(scope="module")
def install(tmp_path_factory):
    """A function that installs the package with some entry point and returns where it lies."""

    def with_entry(entry):
        source = tmp_path_factory.mktemp("double_ids")
        (source / "pyproject.toml").write_text(PYPROJECT.format(entry=entry))
        (source / "double_ids_family.py").write_text(FAMILY)
        installed = tmp_path_factory.mktemp("installed")
        process = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
                *("--no-build-isolation", "--target", str(installed), str(source)),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert process.returncode == 0, process.stderr
        return installed

    return with_entry


@pytest.fixture(scope="module")
def installed(install):
    """Where the package is installed."""
    return install("double_ids_family:double_ids")


@pytest.fixture
def fuzz(pagefault, tmp_path):
    """A function that fuzzes a target with the family."""

    def run(installed, limit):
        (tmp_path / "engine_of_theirs.py").write_text(TARGET.format(limit=limit))
        return pagefault(
            *("fuzz", "--family", "double_ids", "--target", "engine_of_theirs"),
            *("--workers", 1, "--max-cases", 200, "--time", "20s", "--device", "cpu"),
            *("--json", "report.json"),
            cwd=tmp_path,
            PYTHONPATH=os.pathsep.join([str(installed), str(tmp_path)]),
        )

    return run


def test_a_fault_planted_in_its_function_is_found_and_made_small(fuzz, installed, tmp_path):
    process = fuzz(installed, limit=99)
    assert process.returncode == 1, process.stdout + process.stderr
    assert "out[0] = 0, but should be 200" in process.stdout
    (finding,) = json.loads((tmp_path / "report.json").read_text())["findings"]
    assert finding["signature"] == "double_ids: value: out: cell"
    case = json.loads((tmp_path / finding["case"]).read_text())
    assert case == {"schema": 1, "family": "double_ids", "ids": [100]}


def test_a_right_function_of_it_passes(fuzz, installed, tmp_path):
    process = fuzz(installed, limit=100_000)
    assert process.returncode == 0, process.stdout + process.stderr
    ran = json.loads((tmp_path / "report.json").read_text())["families"]["double_ids"]
    assert ran["cases"] == 200
    assert set(ran["edges"]) == {"negative", "no ids"}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        pytest.param("no_such_module:family", "No module named 'no_such_module'", id="module"),
        pytest.param("double_ids_family:edges", "but should be a Family", id="no family"),
    ],
)
def test_an_entry_point_that_can_not_be_loaded_is_one_line(fuzz, installed, tmp_path, entry, words):
    """The metadata is edited where it was installed: each build of it costs seconds."""
    (metadata,) = installed.glob("double_ids-*.dist-info")
    broken = tmp_path / "broken"
    (broken / metadata.name).mkdir(parents=True)
    for name in ("METADATA", "entry_points.txt"):
        text = (metadata / name).read_text()
        (broken / metadata.name / name).write_text(
            text.replace("double_ids_family:double_ids", entry)
        )
    (broken / "double_ids_family.py").write_text(FAMILY)
    process = fuzz(broken, limit=99)
    assert process.returncode == 2, process.stdout + process.stderr
    (line,) = process.stderr.splitlines()
    assert line.startswith("pagefault: ")
    assert words in line
    assert entry in line
    assert not (tmp_path / "report.json").exists()
