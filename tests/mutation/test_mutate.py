"""`pagefault mutate` on a target whose mutants are all known: what it says of each."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pagefault.mutation.command import ROUND_CASES

HERE = Path(__file__).parent
LEFT_OUT = """
[[left_out]]
file = "planted.py"
function = "compute_out_cache_loc_uniform"
statement = "*"
reason = "the subject are its helpers"
"""
LISTED = """
[[equivalent]]
file = "planted_beside.py"
function = "shifted"
operator = "arithmetic"
before = "return slot + 0"
after = "return slot {}"
reason = "0 is 0 either way"
"""
HANGS = {"number += 1", "number = 1", "pass", "number -= 0"}


@pytest.fixture
def target(tmp_path):
    """A folder with the target and a reviewed file."""
    for name in ("planted.py", "planted_beside.py"):
        shutil.copy(HERE / name, tmp_path)
    (tmp_path / "reviewed.toml").write_text(LEFT_OUT)
    return tmp_path


def command(folder, *arguments):
    return [
        *(sys.executable, "-m", "pagefault", "mutate", "--target", folder / "planted.py"),
        *("--equivalent", folder / "reviewed.toml", "--workers", "2", "--cases", "24"),
        *("--json", folder / "made.json", *arguments),
    ]


def mutate(folder, *arguments):
    """Run the command; return the process and what it wrote."""
    process = subprocess.run(command(folder, *arguments), capture_output=True, text=True)
    path = folder / "made.json"
    return process, json.loads(path.read_text()) if path.exists() else None


def status_of(made):
    return {row["after"]: row["status"] for row in made["rows"]}


def test_wrong_values_are_killed_and_what_nothing_tells_apart_survives(target):
    before = {path: path.read_bytes() for path in target.glob("*.py")}
    process, made = mutate(target, "--function", "shifted")
    assert process.returncode == 0, process.stderr
    assert status_of(made) == {
        "return slot - 0": "survived",
        "return slot": "survived",
        "return 0": "killed",
        "return slot + 1": "killed",
        "return slot + -1": "killed",
    }
    assert (made["killed"], made["survived"], made["score"]) == (3, 2, 0.6)
    # A slot that is one too large may not fit its output, which raises.
    alone = [row["after"] for row in made["rows"] if row["checks"] == ["values"]]
    assert {"return 0", "return slot + -1"} <= set(alone)
    assert made["checks"]["values"] == {"saw": 3, "first": 3, "alone": len(alone)}
    assert {row["line"] for row in made["rows"]} == {6}
    assert "- return slot + 0\n+ return slot - 0\n" in process.stdout
    assert before == {path: path.read_bytes() for path in target.glob("*.py")}


def test_a_listed_survivor_counts_as_equivalent(target):
    (target / "reviewed.toml").write_text(LEFT_OUT + LISTED.format("- 0"))
    process, made = mutate(target, "--function", "shifted", "--markdown", target / "made.md")
    assert process.returncode == 0, process.stderr
    assert status_of(made)["return slot - 0"] == "equivalent"
    assert (made["equivalent"], made["score"]) == (1, 0.75)
    text = (target / "made.md").read_text()
    assert "0 is 0 either way" in text
    assert "| kills nothing by itself |" in text


def test_a_listed_mutant_that_is_killed_is_an_error(target):
    text = LISTED.format("+ 1").replace("arithmetic", "constant")
    (target / "reviewed.toml").write_text(LEFT_OUT + text)
    process, made = mutate(target, "--listed")
    assert process.returncode == 1, process.stderr
    assert [row["after"] for row in made["rows"]] == ["return slot + 1"]
    assert made["killed"] == 1
    assert "listed as equivalent, but killed by values" in process.stdout


def survive(folder, num_cases):
    """Try the listed mutants until they have survived so many cases; return what is written."""
    path = folder / "survived.json"
    process, _ = mutate(folder, "--listed", "--survived", path, "--cases", str(num_cases))
    assert process.returncode == 0, process.stderr
    return [(row["after"], row["cases"], row["rounds"]) for row in json.loads(path.read_text())]


@pytest.mark.slow
def test_listed_mutants_are_tried_in_rounds_that_go_on_from_the_last(target):
    (target / "reviewed.toml").write_text(LEFT_OUT + LISTED.format("- 0"))
    assert survive(target, ROUND_CASES) == [("return slot - 0", ROUND_CASES, 1)]
    assert survive(target, ROUND_CASES + 1) == [("return slot - 0", 2 * ROUND_CASES, 2)]
    assert survive(target, ROUND_CASES + 1) == [("return slot - 0", 2 * ROUND_CASES, 2)]
    mutate(target, "--survived", target / "survived.json", "--markdown", target / "m.md")
    assert "| 1,000 |" in (target / "m.md").read_text()


@pytest.mark.slow
def test_a_listed_mutant_that_is_killed_is_tried_no_further(target):
    text = LISTED.format("+ 1").replace("arithmetic", "constant")
    (target / "reviewed.toml").write_text(LEFT_OUT + text)
    path = target / "survived.json"
    process, made = mutate(target, "--listed", "--survived", path, "--cases", "501")
    assert process.returncode == 1, process.stderr
    assert made["killed"] == 1
    assert json.loads(path.read_text()) == []


@pytest.mark.slow
def test_what_goes_on_and_on_is_timed_out_and_the_run_survives_it(target):
    process, made = mutate(target, "--function", "count_down")
    assert process.returncode == 0, process.stderr
    hanging = {after for after, status in status_of(made).items() if status == "timed out"}
    assert hanging == HANGS
    assert made["killed"] == 0
    assert all(row["kind"] == "hang" for row in made["rows"] if row["after"] in HANGS)


def test_what_ends_its_process_is_killed_and_the_run_survives_it(target):
    process, made = mutate(target, "--function", "end_if")
    assert process.returncode == 0, process.stderr
    killed = {after for after, status in status_of(made).items() if status == "killed"}
    assert killed == {"if code == 0:", "if code != 1:", "if code != -1:", "if True:"}
    assert {row["kind"] for row in made["rows"] if row["status"] == "killed"} == {"died"}


def test_what_eats_memory_is_refused_it(target):
    process, made = mutate(target, "--function", "hold")
    assert process.returncode == 0, process.stderr
    rows = {row["after"]: row for row in made["rows"]}
    eater = rows["return len(bytes(1 << 34))"]
    assert (eater["status"], eater["first_checks"]) == ("killed", ["process"])
    assert "MemoryError" in eater["headline"]


@pytest.mark.slow
def test_an_entry_of_no_mutant_is_an_error(target):
    (target / "reviewed.toml").write_text(LEFT_OUT + LISTED.format("* 0"))
    process, _ = mutate(target, "--cases", "2")
    assert process.returncode == 1, process.stderr
    assert "listed as equivalent, but no mutant: planted_beside.py" in process.stdout


def test_an_entry_without_a_reason_is_refused(target):
    (target / "reviewed.toml").write_text(LISTED.format("- 0").replace("0 is 0 either way", " "))
    process, _ = mutate(target)
    assert process.returncode == 2
    assert "equivalent 1: reason is ' ', but should be a text" in process.stderr


def test_an_original_that_fails_is_no_basis(target):
    path = target / "planted_beside.py"
    path.write_text(path.read_text().replace("slot + 0", "slot + 1"))
    process, made = mutate(target, "--function", "shifted")
    assert process.returncode == 3, process.stderr
    assert "the original fails in" in made["faults"][0]


def test_an_interrupt_leaves_a_partial_report_and_no_process(target):
    process = subprocess.Popen(
        command(target), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline().startswith("cases on the original: 48 of 48")
    os.kill(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in said
    assert json.loads((target / "made.json").read_text())["interrupted"]
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_report(target):
    reports = [mutate(target, "--function", "shifted")[1] for _ in range(2)]
    for report in reports:
        for row in report["rows"]:
            del row["seconds"]
    assert reports[0] == reports[1]
