"""What GitHub shows beside the lines of a pull request, and what JUnit XML says of a finding."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from pagefault import github
from pagefault.conformance import session
from pagefault.github import Spot
from pagefault.target import load_target

FAULTY = Path(__file__).parents[1] / "faulty" / "build_chunked_prefill_metadata_arrays"

TEST = f"""
from pagefault import assert_conforms
from pagefault.target import load_target

target = load_target({str(FAULTY / "row_stride_from_width.py")!r})
function = target.functions["build_chunked_prefill_metadata_arrays"]


def test_chunks():
    assert_conforms(function, num_cases=200, seed=1)


def test_of_another_sort():
    raise AssertionError("not ours")
"""


def test_signs_that_mean_something_to_github_are_escaped():
    line = github.annotation("50 %\r\nnext: x, y", "a: b, c\nd", None)
    assert line == "::error title=a%3A b%2C c%0Ad::50 %25%0D%0Anext: x, y"


def test_a_file_is_named_from_the_root_of_the_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    line = github.annotation("wrong", "title", Spot(str(tmp_path / "kernels" / "mine.py"), 12))
    assert line.startswith("::error file=kernels/mine.py,line=12,title=title::")


def test_a_file_elsewhere_keeps_its_path(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "checkout"))
    assert "file=/elsewhere/mine.py," in github.annotation("", "", Spot("/elsewhere/mine.py", 1))


def test_annotations_are_for_jobs_of_github():
    assert github.are_wanted({"GITHUB_ACTIONS": "true"})
    assert not github.are_wanted({"CI": "true"})


def test_the_line_of_a_kernel_is_that_of_the_loaded_module():
    load_target(str(FAULTY / "row_stride_from_width.py"))
    said = "  row_stride_from_width.py:32, in write_slots_kernel, program (0, 0, 0)"
    assert github.kernel_spot(said) == Spot(str(FAULTY / "row_stride_from_width.py"), 32)


@pytest.mark.parametrize(
    "said", ["nothing", "  row_stride_from_width.py:32, in no_such_kernel, program (0, 0, 0)"]
)
def test_a_line_that_cannot_be_known_is_not_guessed(said):
    assert github.kernel_spot(said) is None


def test_a_function_is_where_it_is_defined():
    spot = github.function_spot(test_a_function_is_where_it_is_defined)
    assert spot is not None
    assert Path(spot.file) == Path(__file__)
    assert github.function_spot(len) is None


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("0", id="one process"),
        pytest.param("2", id="two workers", marks=pytest.mark.slow),
    ],
)
def job(request, tmp_path_factory):
    """What a job of GitHub's prints that runs pytest, and the XML that it writes."""
    if session.device == "cuda":
        pytest.skip("the interpreter names the kernel's line")
    folder = tmp_path_factory.mktemp("job")
    (folder / "test_mine.py").write_text(TEST)
    process = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--device", "cpu"),
            *("-n", request.param, "--junitxml", "out.xml", "test_mine.py"),
        ],
        cwd=folder,
        env={**os.environ, "GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(FAULTY.parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 1, process.stdout + process.stderr
    return process.stdout, ElementTree.parse(folder / "out.xml").getroot(), folder


def test_pytest_annotates_findings_and_nothing_else(job):
    printed, _, _ = job
    lines = [line for line in printed.splitlines() if line.startswith("::error")]
    (line,) = lines
    assert "line=32,title=test_mine.py%3A%3Atest_chunks::read of req_to_page[" in line
    assert "file=build_chunked_prefill_metadata_arrays/row_stride_from_width.py," in line
    assert "%0A  minimal: no single step makes it smaller" in line


def test_the_verdict_can_be_read_in_junit_xml(job):
    _, xml, folder = job
    (case,) = xml.iterfind(".//testcase[@name='test_chunks']")
    failure = case.find("failure")
    assert failure.get("message").startswith(
        "pagefault.conformance.NonConformance: read of req_to_p"
    )
    for text in ("which is no element of it", "minimal: ", "case: .pagefault/cases/"):
        assert text.replace("case: ", "") in failure.text
    noted = {p.get("name"): p.get("value") for p in case.iterfind("properties/property")}
    assert Path(noted["pagefault.case"]).parent == folder / ".pagefault" / "cases"
    assert noted["pagefault.kernel"].endswith("row_stride_from_width.py:32")
