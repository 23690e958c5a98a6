"""The reported bugs of `bugs/`: oracle and target do what the contract says of each."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from pagefault.case import CaseError
from pagefault.checker import Checker
from pagefault.conformance import session
from pagefault.family import Dialect, TensorValue, case_from_json

FOLDER = Path(__file__).parent.parent / "bugs"
FAULTY = Path(__file__).parent / "faulty"
KINDS = {
    *("past-end", "sentinel", "stale rows", "stride", "dtype", "capacity", "page granularity"),
    *("index space/offset", "empty/zero-length", "language semantics", "int32 overflow"),
}
BUG_KEYS = {
    "id": str,
    "source": list,
    "goes_wrong": str,
    "kind": str,
    "faulty": list,
    "cases": list,
}
CASE_KEYS = {"case": dict, "expected": dict, "wrong": dict}


class BugError(ValueError):
    """A file that is no bug; the message says what it should have had."""


def read_bug(text):
    """Return the bug that JSON describes.

    Raises:
        BugError: A field is missing, unknown or of another type.
    """
    try:
        bug = json.loads(text)
    except ValueError as error:
        raise BugError(f"not JSON: {error}") from error
    _expect_fields("a bug", bug, BUG_KEYS)
    if not bug["source"] or not all(str(url).startswith("https://") for url in bug["source"]):
        raise BugError(f"source: {bug['source']!r}, but should be a list of https addresses")
    if bug["kind"] not in KINDS:
        raise BugError(f"kind: {bug['kind']!r}, but should be one of {sorted(KINDS)}")
    if not bug["faulty"]:
        raise BugError("faulty: [], but should name a kernel of tests/faulty/ at least")
    if not bug["cases"]:
        raise BugError("cases: [], but should be one case at least")
    for i, item in enumerate(bug["cases"]):
        _expect_fields(f"cases[{i}]", item, CASE_KEYS, optional={"wrong"})
    return bug


def _expect_fields(where, found, types, optional=frozenset()):
    if not isinstance(found, dict):
        raise BugError(f"{where}: {found!r}, but should be an object")
    for name, value in found.items():
        if name not in types:
            raise BugError(f"{where}: unknown field {name!r}, but should be one of {list(types)}")
        if not isinstance(value, types[name]):
            raise BugError(f"{where}.{name}: {value!r}, but should be a {types[name].__name__}")
    for name in types:
        if name not in found and name not in optional:
            raise BugError(f"{where}: field {name!r} is missing")


def spelled_out(values):
    """Return the numbers that a list of a bug file stands for.

    >>> spelled_out([7, {"first": 2, "last": 4}, {"value": 0, "times": 2}])
    [7, 2, 3, 4, 0, 0]
    """
    numbers = []
    for value in values if isinstance(values, list) else [values]:
        if not isinstance(value, dict):
            numbers.append(value)
        elif "first" in value:
            numbers.extend(range(value["first"], value["last"] + 1))
        else:
            numbers.extend([value["value"]] * value["times"])
    return numbers


def what_the_oracle_says(case, expected):
    """Return the oracle's answer as a bug file has it; what a table gets as [row, column, id]."""
    said = {}
    for name, values in expected.writes.items():
        if name == "req_to_page":
            width = case.req_to_page.max_pages
            said[name] = [[*divmod(cell, width), page_id] for cell, page_id in values.items()]
        elif isinstance(values, Mapping):
            assert list(values) == list(range(len(values)))
            said[name] = list(values.values())
        else:
            said[name] = list(values)
    for path, value in (expected.returns or {}).items():
        said[path] = list(value.values) if isinstance(value, TensorValue) else [value]
    return said


BUGS = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}


def _cases():
    """Return (file, number of the case) of each case; of a file that can't be read the first."""
    for name, path in BUGS.items():
        try:
            count = len(read_bug(path.read_text())["cases"])
        except BugError:
            count = 1
        for i in range(count):
            yield pytest.param(name, i, id=f"{name}-{i}" if count > 1 else name)


@pytest.mark.parametrize("name", BUGS)
def test_file_is_a_bug_named_after_its_report(name):
    bug = read_bug(BUGS[name].read_text())
    project, number = bug["id"].split("#")
    assert name == f"{project.split('/')[-1].lower()}-{number}"
    assert bug["source"][0].endswith(f"github.com/{project}/issues/{number}")


@pytest.mark.parametrize("name", BUGS)
def test_a_report_has_faulty_kernels_of_its_functions(name):
    bug = read_bug(BUGS[name].read_text())
    functions = {item["case"]["family"] for item in bug["cases"]}
    for kernel in bug["faulty"]:
        assert (FAULTY / f"{kernel}.py").is_file(), kernel
        assert kernel.split("/")[0] in functions


@pytest.fixture(scope="module")
def reported_faults():
    """The script that makes the table of reports and kernels."""
    path = FOLDER.parent / "scripts" / "reported_faults.py"
    spec = importlib.util.spec_from_file_location("reported_faults", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_reports_and_kernels_is_what_the_script_makes(reported_faults):
    assert reported_faults.PAGE.read_text() == reported_faults.page()


def test_what_is_planted_for_other_reports_is_there(reported_faults):
    rows = [*reported_faults.not_here()]
    assert len(rows) > 20
    planted = [path for _, _, paths in rows for path in paths]
    assert planted
    for path in planted:
        assert (FOLDER.parent / path).is_file(), path


@pytest.mark.parametrize(("name", "i"), [*_cases()])
def test_oracle_gives_what_the_contract_says_by_hand(name, i):
    item = read_bug(BUGS[name].read_text())["cases"][i]
    family, case = case_from_json(json.dumps(item["case"]))
    said = what_the_oracle_says(case, family.expect(case, Dialect()))
    assert said == {path: spelled_out(values) for path, values in item["expected"].items()}
    for path, values in item.get("wrong", {}).items():
        assert spelled_out(values) != said[path], f"{path} would not show the bug"


@pytest.mark.parametrize(("name", "i"), [*_cases()])
def test_target_does_what_the_contract_says(name, i, pagefault_target):
    item = read_bug(BUGS[name].read_text())["cases"][i]
    family, case = case_from_json(json.dumps(item["case"]))
    if family.name not in pagefault_target.functions:
        pytest.skip(f"{pagefault_target.name}: {pagefault_target.skipped[family.name]}")
    without = pagefault_target.terms_of(family.name).without
    for edge in sorted(family.edges(case) & set(without)):
        pytest.skip(f"{pagefault_target.name}: {edge}: {without[edge]}")
    verdict = Checker(pagefault_target, session.device).check(family, case)
    assert verdict.passed, verdict.text()


def test_host_update_keeps_what_fits_and_warns_of_the_rest():
    """The host's half of tokenspeed#506: width 513, of which the second request starts past."""
    item = read_bug(BUGS["tokenspeed-506"].read_text())["cases"][-1]
    family, case = case_from_json(json.dumps(item["case"]))
    assert case.req_to_page.max_pages == 513
    assert (case.begins, case.sizes) == ((400, 513, 100), (2, 1, 3))
    expected = family.expect(case, Dialect())
    assert expected.warnings == [["request-1", "513", "1", "513"]]
    assert {cell // 513 for cell in expected.writes["req_to_page"]} == {1, 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "typo"}, "kind: 'typo', but should be one of"),
        ({"source": []}, "source"),
        ({"faulty": []}, "faulty: .*, but should name a kernel"),
        ({"cases": []}, "one case at least"),
        ({"cases": [{"case": {}}]}, r"cases\[0\]: field 'expected' is missing"),
        ({"extra": 1}, "unknown field 'extra'"),
        ({"goes_wrong": 3}, "goes_wrong: 3, but should be a str"),
    ],
    ids=["kind", "source", "no kernel", "no cases", "no expected", "unknown field", "type"],
)
def test_file_that_is_no_bug_is_refused_with_the_reason(change, message):
    bug = read_bug(BUGS["tokenspeed-709"].read_text())
    with pytest.raises(BugError, match=message):
        read_bug(json.dumps({**bug, **change}))


def test_case_outside_the_domain_is_refused():
    item = read_bug(BUGS["tokenspeed-709"].read_text())["cases"][0]
    with pytest.raises(CaseError, match="cache_start"):
        case_from_json(json.dumps({**item["case"], "cache_start": [-1]}))
