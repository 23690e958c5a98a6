"""Cases that are checked again: which, in children that may die, and what is said of the others."""

import dataclasses
import json
import os
import signal
import time

import pytest

from pagefault.family import family_named
from pagefault.finding_record import Rate
from pagefault.findings import FindingsFolder
from pagefault.plan import Plan
from pagefault.recheck import OUT_OF_TIME, Again, in_children, of_bugs, of_findings
from pagefault.verdict import Finding, Verdict

FAMILY = family_named("compute_out_cache_loc")
PLAN = Plan("elsewhere/mine.py", [FAMILY.name], "cpu", 60.0, None, 1, 1)
CASE = {
    "schema": 1,
    "family": FAMILY.name,
    "req_pool_indices": [1],
    "input_lengths": [2],
    "cache_start": [3],
    "req_to_pages": [[5, 9], [7, 4]],
    "page_size": 4,
}
ALWAYS = Rate(10, 10)
PASSED = Verdict(FAMILY.name)
FAILED = Verdict(FAMILY.name, (Finding("value", "cell", "wrong"),))
LOST = Verdict(FAMILY.name, (Finding("device error", "device", "gone"),))


def items(*names):
    return [Again(name, FAMILY.name, None) for name in names]


def check(item):
    """Do what an item is called."""
    if item.name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if item.name == "leaves":
        os._exit(7)
    if item.name == "hangs":
        time.sleep(60)
    if item.name == "raises":
        raise ValueError("no such thing")
    return {"fails": FAILED, "loses": LOST}.get(item.name, PASSED)


def answers(*names, seconds=20.0, is_over=lambda: False):
    return [
        answer if isinstance(answer, str) else answer.signature[1:] if answer.findings else ()
        for answer in in_children(check, items(*names), seconds, is_over)
    ]


def test_each_case_has_its_own_answer_whatever_becomes_of_the_child():
    said = answers("passes", "dies", "fails", "leaves", "loses", "raises", "passes")
    assert said == [
        (),
        ("died", "SIGKILL"),
        ("value", "cell"),
        ("died", "exit status 7"),
        ("device error", "device"),
        "not checked again: ValueError: no such thing",
        (),
    ]


def test_a_case_that_hangs_is_given_up_and_the_next_one_is_checked():
    assert answers("hangs", "fails", seconds=0.5) == [("hang", "deadline"), ("value", "cell")]


def test_cases_for_which_there_is_no_time_are_not_checked():
    left = iter([False, False, True])
    said = answers("passes", "fails", "fails", is_over=lambda: next(left, True))
    assert said == [(), OUT_OF_TIME, OUT_OF_TIME]


def test_a_living_child_goes_on_with_the_next_case():
    pids = [
        verdict.findings[0].headline
        for verdict in in_children(
            lambda item: Verdict(FAMILY.name, (Finding("value", "cell", str(os.getpid())),)),
            items("1", "2", "3"),
            20.0,
            lambda: False,
        )
    ]
    assert len(pids) == 3
    assert len(set(pids)) == 1
    assert str(os.getpid()) not in pids


@pytest.fixture
def folder(tmp_path, found):
    return FindingsFolder(tmp_path / "findings")


def a_finding(found, role="token", rate=ALWAYS):
    """Return a finding with a case that is one."""
    return dataclasses.replace(found(1, role, rate=rate), case=json.dumps(CASE) + "\n")


def test_findings_of_the_target_and_device_are_checked_again_open_ones_first(
    folder, found, context
):
    fixed = folder.add(a_finding(found, "a"), context(1), 1, {}).name
    folder.add_pass(fixed, context(2))
    still = folder.add(a_finding(found, "b", Rate(3, 10)), context(1), 1, {}).name
    folder.add(a_finding(found, "c"), context(1, device="cuda"), 1, {})
    folder.add(a_finding(found, "d"), context(1, target="theirs.py"), 1, {})
    selected = of_findings(folder.load(), PLAN)
    assert [(item.name, item.times) for item in selected.items] == [(still, 10), (fixed, 1)]
    assert selected.left_out == {}


def test_a_finding_whose_case_can_not_be_read_says_so(folder, found, context):
    name = folder.add(found(1), context(1), 1, {}).name
    selected = of_findings(folder.load(), PLAN)
    assert selected.items == []
    assert selected.left_out[name].startswith("not checked again: ")


def test_bugs_and_plain_cases_are_read_and_other_files_are_left_out(tmp_path):
    (tmp_path / "bug.json").write_text(json.dumps({"cases": [{"case": CASE}, {"case": CASE}]}))
    (tmp_path / "case.json").write_text(json.dumps(CASE))
    (tmp_path / "other.json").write_text('{"name": "package"}')
    (tmp_path / "notes.txt").write_text("nothing")
    selected = of_bugs(tmp_path)
    names = [f"{tmp_path}/bug.json[0]", f"{tmp_path}/bug.json[1]", f"{tmp_path}/case.json"]
    assert [item.name for item in selected.items] == names
    assert [*selected.left_out] == [f"{tmp_path}/other.json"]


def test_a_pass_is_kept_and_a_later_run_that_sees_the_fault_opens_it_again(folder, found, context):
    name = folder.add(found(1), context(1), 1, {}).name

    def status():
        return folder.load()[name].status

    assert status() == "open"
    folder.add_pass(name, context(2))
    assert status() == "fixed"
    # The same run finds it after all.
    folder.add(found(1), context(2), 1, {})
    assert status() == "open"
    folder.add_pass(name, context(3))
    assert status() == "fixed"
    folder.add(found(1), context(4), 1, {})
    assert status() == "open"
