"""A campaign goes on after anything: killed at any moment, it loses nothing and counts once.

The number of kills is small here; PAGEFAULT_TEST_KILLS=100, or `make test-kills`, asks for more.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from pagefault.findings import FindingsFolder
from pagefault.state import State

FAMILY = "compute_out_cache_loc"
NUM_KILLS = int(os.environ.get("PAGEFAULT_TEST_KILLS", "5"))
# So many that kills find something left to run.
NUM_CASES = max(2400, 300 * NUM_KILLS)
SECONDS = max(90, 6 * NUM_KILLS)
# Two faults, of which the second is rare.
SPOIL = """
if page_size > 4 and input_lengths.sum(): out_cache_loc[0] += 1
if page_size == 2 and len(req_pool_indices) > 8 and input_lengths.sum(): out_cache_loc[-1] = -5
"""


def fuzz_command(target, *more, cases=NUM_CASES):
    return [
        *(sys.executable, "-m", "pagefault", "fuzz", "--target", str(target), "--family", FAMILY),
        *("--device", "cpu", "--workers", "2", "--time", f"{SECONDS}s", "--max-cases", str(cases)),
        *("--seed", "3", "--machine", "here", "--json", "report.json", *map(str, more)),
    ]


@pytest.fixture(scope="module")
def start(environment):
    """A function that starts a command in a folder, in a process group of its own."""

    def start_in(folder, command):
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return start_in


def ended(process):
    """Return what a process has printed when it has ended by itself."""
    said, _ = process.communicate(timeout=60 + SECONDS)
    assert process.returncode in (0, 1, 3), said
    return said


def killed(process):
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def findings_in(folder):
    """Return the findings on disk, and check that none is damaged."""
    reader = FindingsFolder(folder / ".pagefault" / "findings")
    loaded = reader.load()
    assert reader.set_aside == []
    return loaded


def state_in(folder):
    """Return the state of the one campaign in a folder, or None."""
    paths = [*(folder / ".pagefault" / "campaigns").glob("*/state.json")]
    return State.from_json(paths[0].read_text()) if paths else None


def has_gone_on(folder, before):
    """Return whether more cases have been run than in an earlier state."""
    now = state_in(folder)
    return now is not None and now.result.cases > (before.result.cases if before else 0)


def wait_for(condition, process, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def counts_of(report):
    return {finding["signature"]: finding["count"] for finding in report["findings"]}


def edges_of(report):
    return report["families"][FAMILY]["edges"]


@pytest.fixture(scope="module")
def target(write_target):
    """A target with two faults."""
    return write_target(SPOIL)


@pytest.fixture(scope="module")
def undisturbed(start, target, tmp_path_factory):
    """The report of a campaign that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended(start(folder, fuzz_command(target)))
    return json.loads((folder / "report.json").read_text())


@pytest.mark.slow
def test_a_campaign_killed_again_and_again_ends_as_if_nobody_had(
    start, target, undisturbed, tmp_path
):
    draw = random.Random(NUM_KILLS)
    command = fuzz_command(target, "--resume")
    known = {}
    cases = num_progressed = 0
    for kill in range(NUM_KILLS):
        process = start(tmp_path, command)
        if kill % 4:
            before = state_in(tmp_path)
            wait_for(lambda before=before: has_gone_on(tmp_path, before), process)
            time.sleep(draw.uniform(0, 0.5))
        else:
            time.sleep(draw.uniform(0, 6))
        assert process.poll() is None, "the campaign was over before it could be killed"
        killed(process)
        found = findings_in(tmp_path)
        for name, size in known.items():
            assert name in found
            assert found[name].smallest.size <= size
        known = {name: record.smallest.size for name, record in found.items()}
        state = state_in(tmp_path)
        if state is not None:
            assert state.result.cases >= cases
            num_progressed += state.result.cases > cases
            cases = state.result.cases
    said = ended(start(tmp_path, command))
    report = json.loads((tmp_path / "report.json").read_text())
    assert counts_of(report) == counts_of(undisturbed), said
    assert edges_of(report) == edges_of(undisturbed)
    assert num_progressed >= min(2, NUM_KILLS)
    assert "resumed: " in said
    records = findings_in(tmp_path)
    assert {str(record.signature): record.count for record in records.values()} == counts_of(report)
    assert all(len(record.runs) == 1 for record in records.values())
    for record in records.values():
        assert record.smallest.how_small.startswith("minimal: ")


def test_the_campaign_that_nobody_kills_finds_both_faults(undisturbed):
    assert len(undisturbed["findings"]) >= 2
    assert all(count >= 1 for count in counts_of(undisturbed).values())
    assert undisturbed["families"][FAMILY]["cases"] == NUM_CASES


def test_workers_lost_before_a_kill_are_told_by_the_campaign_that_goes_on(
    start, write_target, tmp_path
):
    target = write_target("pass")
    command = fuzz_command(target, "--resume", "--report", "report", cases=40)
    ended(start(tmp_path, command))
    assert json.loads((tmp_path / "report.json").read_text())["workers_lost"] == 0
    (path,) = tmp_path.glob(".pagefault/campaigns/*/state.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_lost": 2, "is_over": False}))
    assert "workers lost with their machine: 2" in ended(start(tmp_path, command))
    assert json.loads((tmp_path / "report.json").read_text())["workers_lost"] == 2
    for name in ("report.md", "report.html"):
        assert "workers lost with their machine: 2" in (tmp_path / "report" / name).read_text()


@pytest.mark.slow
def test_a_case_that_kills_the_whole_campaign_is_found_when_it_goes_on(
    start, write_target, tmp_path
):
    marker = tmp_path / "killed"
    target = write_target(
        "if page_size == 64 and len(req_pool_indices) > 1:\n"
        f"    if not os.path.exists({str(marker)!r}):\n"
        f"        open({str(marker)!r}, 'w').close()\n"
        "        os.killpg(0, 9)\n"
        "    ctypes.string_at(0)"
    )
    process = start(tmp_path, fuzz_command(target, cases=200))
    process.communicate(timeout=100)
    assert process.returncode == -signal.SIGKILL
    assert findings_in(tmp_path) == {}
    killed_in = state_in(tmp_path).result.cases
    said = ended(start(tmp_path, fuzz_command(target, "--resume", cases=200)))
    ((_, record),) = findings_in(tmp_path).items()
    assert record.signature == (FAMILY, "died", "SIGSEGV")
    assert record.smallest.how_small.startswith("minimal: ")
    assert json.loads(record.smallest.case)["page_size"] == 64
    assert record.smallest.size[0] == 2
    report = json.loads((tmp_path / "report.json").read_text())
    # What the other worker was about to launch may fail as well.
    assert "fails" in report["rechecked"].values(), said
    assert report["families"][FAMILY]["cases"] >= killed_in
    assert record.count == report["findings"][0]["count"]
    # What was in the journal has been dealt with.
    assert not [*tmp_path.glob(".pagefault/campaigns/*/journals/*")]


def test_workers_end_when_the_campaign_is_killed_alone(start, write_target, tmp_path):
    pids = tmp_path / "pids"
    target = write_target(
        f"with open({str(pids)!r}, 'a') as file: file.write(f'{{os.getpid()}}\\n')\ntime.sleep(60)"
    )
    process = start(tmp_path, fuzz_command(target))
    wait_for(lambda: pids.exists() and len(set(pids.read_text().split())) == 2, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)
    workers = set(map(int, pids.read_text().split()))
    assert len(workers) == 2
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}")]


@pytest.fixture(scope="module")
def fuzz(start, tmp_path_factory):
    """A function that runs a campaign in a folder of its own; it returns what it said."""

    def run(target, *more, folder=None, cases=120):
        folder = folder or tmp_path_factory.mktemp("fuzz")
        command = fuzz_command(target, "--workers", 1, *more, cases=cases)
        said = ended(start(folder, command))
        return folder, said, json.loads((folder / "report.json").read_text())

    return run


@pytest.mark.slow
def test_equal_seeds_draw_the_same_on_one_machine_and_others_on_another(fuzz, plain_target):
    here, again, elsewhere = (
        edges_of(fuzz(plain_target, "--machine", name)[2]) for name in ("here", "here", "there")
    )
    assert here == again
    assert here != elsewhere


@pytest.mark.slow
def test_a_finding_that_no_longer_shows_is_fixed_and_one_that_shows_again_is_open_again(
    fuzz, write_target
):
    target = write_target("if page_size > 4: raise KeyError(page_size)")
    wrong = target.read_text()
    folder, _, _ = fuzz(target)
    ((name, record),) = findings_in(folder).items()
    assert record.status == "open"
    _, said, _ = fuzz(target, "--max-cases", 2, folder=folder)
    assert f"still open: .pagefault/findings/{name}" in said
    target.write_text(wrong.replace("raise KeyError(page_size)", "pass"))
    _, said, report = fuzz(target, folder=folder)
    assert f"fixed: .pagefault/findings/{name}: its case passes now" in said
    assert report["rechecked"] == {name: "passes"}
    assert findings_in(folder)[name].status == "fixed"
    assert (
        "fixed: its case passed"
        in (folder / ".pagefault" / "findings" / name / "verdict.txt").read_text()
    )
    # Said once, when it is news.
    _, said, _ = fuzz(target, folder=folder)
    assert "fixed:" not in said
    target.write_text(wrong)
    _, said, _ = fuzz(target, "--max-cases", 2, folder=folder)
    assert f"open again: .pagefault/findings/{name}" in said
    assert findings_in(folder)[name].status == "open"


# Every second case: to make one smaller takes many that hang.
HANGS = "while sum(input_lengths.tolist()) % 2: pass"
OVERTIME_SECONDS = 6.0


def short_overtime(target, *more):
    """Return a command whose overtime is short, so that a test need not wait for it."""
    code = (
        "import sys, pagefault.worker as worker\n"
        f"worker.OVERTIME_SECONDS, worker.WORKER_OVERTIME_SECONDS = {OVERTIME_SECONDS}, 1.0\n"
        "from pagefault.cli import main\n"
        "main()"
    )
    arguments = fuzz_command(target, "--time", "3s", "--case-time", "1s", *more)[3:]
    return [sys.executable, "-c", code, *arguments]


@pytest.fixture(scope="module")
def out_of_overtime(start, write_target, tmp_path_factory):
    """A folder with a campaign in which making a hang smaller takes longer than there is time for;
    and how many seconds it took after its time."""
    folder = tmp_path_factory.mktemp("overtime")
    process = start(folder, short_overtime(write_target(HANGS)))
    wait_for(lambda: state_in(folder) is not None and state_in(folder).result.seconds, process)
    started = time.monotonic()
    ended(process)
    return folder, time.monotonic() - started - 3.0


@pytest.mark.slow
def test_a_campaign_with_a_hang_is_over_within_its_overtime(out_of_overtime):
    _, seconds = out_of_overtime
    # A second for the deadline of a case, and a few to start and end processes.
    assert seconds < OVERTIME_SECONDS + 1.0 + 5.0


@pytest.mark.slow
def test_a_finding_says_that_the_overtime_ran_out(out_of_overtime):
    folder, _ = out_of_overtime
    ((_, record),) = findings_in(folder).items()
    assert record.signature == (FAMILY, "hang", "deadline")
    assert "the time for it after the run, 6 s and the deadline of a case, ran out" in (
        record.smallest.how_small
    )


@pytest.mark.slow
def test_what_there_was_no_time_to_make_smaller_is_left_to_the_next_campaign(
    start, write_target, tmp_path
):
    target = write_target(HANGS)
    code = short_overtime(target)
    code[2] = code[2].replace(f"= {OVERTIME_SECONDS}", "= 0.0")
    ended(start(tmp_path, code))
    ((name, record),) = findings_in(tmp_path).items()
    assert record.smallest.how_small == (
        "not shrunk yet: the time for it after the run, 0 s and the deadline of a case, ran out"
    )
    ended(start(tmp_path, fuzz_command(target, "--time", "60s", "--case-time", "1s")))
    assert findings_in(tmp_path)[name].smallest.how_small.startswith("minimal: ")


def bug_file(folder, *page_sizes):
    folder.mkdir(exist_ok=True)
    case = {"schema": 1, "family": FAMILY, "req_pool_indices": [0], "input_lengths": [1]}
    case |= {"cache_start": [0], "req_to_pages": [[3]]}
    cases = [{"case": {**case, "page_size": size}, "expected": {}} for size in page_sizes]
    (folder / "bug-1.json").write_text(json.dumps({"id": "bug#1", "cases": cases}))


@pytest.mark.slow
def test_reported_bugs_are_checked_first_and_one_that_shows_is_a_finding(
    fuzz, write_target, tmp_path
):
    target = write_target("if page_size == 97 and input_lengths.sum(): out_cache_loc[0] += 1")
    bug_file(tmp_path / "bugs", 4, 97)
    (tmp_path / "bugs" / "broken.json").write_text("{")
    _, said, report = fuzz(target, folder=tmp_path, cases=4)
    assert report["rechecked"].pop("bugs/broken.json").startswith("not checked again: ")
    assert report["rechecked"] == {"bugs/bug-1.json[0]": "passes", "bugs/bug-1.json[1]": "fails"}
    assert "bugs/bug-1.json[1]: fails" in said
    assert "1 of 3 other known cases pass" in said
    (finding,) = report["findings"]
    assert finding["minimal"].startswith("minimal: ")
    assert json.loads((tmp_path / finding["case"]).read_text())["page_size"] == 97


def test_what_is_damaged_is_set_aside_and_the_campaign_starts_anew(
    fuzz, start, plain_target, tmp_path
):
    process = start(tmp_path, fuzz_command(plain_target, cases=10**6))
    wait_for(lambda: state_in(tmp_path) is not None, process)
    killed(process)
    (path,) = tmp_path.glob(".pagefault/campaigns/*/state.json")
    content = path.read_bytes()[:-50]
    path.write_bytes(content)
    (path.parent / "corpus.jsonl").write_text("{")
    journals = path.parent / "journals"
    (journals / "some").write_bytes(b"\x09" + bytes(15) + b"no pickle")
    _, said, report = fuzz(plain_target, "--resume", folder=tmp_path)
    assert report["families"][FAMILY]["cases"] == 120
    assert report["void"] == ""
    assert f"{path.relative_to(tmp_path)} is damaged" in said
    assert "there is no campaign to resume: this is a new one" in said
    assert (path.parent / "state.json.damaged-1").read_bytes() == content
    assert "set aside as some.damaged" in said
    assert [*journals.iterdir()] == []
    assert "1 damaged lines; set aside in corpus.jsonl.damaged" in said
    assert len((path.parent / "corpus.jsonl").read_text().splitlines()) > 20


def test_a_state_that_can_not_be_written_is_reported_and_survived(fuzz, plain_target, tmp_path):
    (tmp_path / "file").write_text("in the way")
    _, said, report = fuzz(plain_target, "--state", "file/below", folder=tmp_path)
    assert report["families"][FAMILY]["cases"] == 120
    assert "can't be written: Not a directory: if this campaign is killed" in said


@pytest.mark.slow
def test_two_campaigns_at_once_do_not_share_a_state(fuzz, start, write_target, tmp_path):
    slow = write_target("time.sleep(0.05)")
    process = start(tmp_path, fuzz_command(slow, cases=10**6))
    wait_for(lambda: state_in(tmp_path) is not None, process)
    _, said, report = fuzz(slow, "--resume", folder=tmp_path, cases=20)
    killed(process)
    assert report["families"][FAMILY]["cases"] == 20
    assert "is in use by another campaign" in said
