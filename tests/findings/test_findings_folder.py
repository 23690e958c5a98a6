"""Findings on disk: counted and kept small, whatever happens to the process, the disk or a file."""

import errno
import json
import os
import random
import signal
import time

import pytest

from pagefault import findings
from pagefault.campaign import Result
from pagefault.finding_record import Rate
from pagefault.findings import Filing, FindingsError, FindingsFolder, read_finding
from pagefault.target import Target

FILES = {"repro.py": b"print('it shows')\n", "kernel/mine.py": b"# a kernel\n"}


# What is kept


def test_a_finding_is_a_folder_with_everything_about_it(tmp_path, found, context, tree):
    path = FindingsFolder(tmp_path).add(found(3), context(1), 2, FILES)
    assert path.parent == tmp_path
    assert path.name.startswith("compute_out_cache_loc-value-")
    content = tree(path)
    assert set(content) == {"finding.json", "case.json", "verdict.txt", *FILES}
    assert json.loads(content["case.json"])["req_pool_indices"] == [3]
    assert content["repro.py"] == FILES["repro.py"]
    text = content["verdict.txt"].decode()
    assert "wrong in row 3" in text
    assert "shows in 10 of 10 runs on cpu of here" in text
    assert "seen 2 times in 1 run" in text
    record = json.loads(content["finding.json"])
    assert record["count"] == 2
    assert record["runs"][context(1).run]["seed"] == 1


def test_the_same_fault_found_again_is_counted_and_not_filed_again(tmp_path, found, context):
    folder = FindingsFolder(tmp_path)
    folder.add(found(3), context(1), 2, FILES)
    folder.add(found(3), context(1), 5, FILES)
    folder.add(found(3), context(2), 1, FILES)
    ((_, record),) = folder.load().items()
    assert record.count == 6
    assert {run.seed: run.count for run in record.runs.values()} == {1: 5, 2: 1}


def test_the_smaller_case_is_kept_with_its_files_whichever_comes_first(tmp_path, found, context):
    for order in ((2, 5), (5, 2)):
        folder = FindingsFolder(tmp_path / str(order[0]))
        for row in order:
            path = folder.add(found(row), context(1), 1, {"repro.py": b"%d" % row})
        assert json.loads((path / "case.json").read_text())["req_pool_indices"] == [2]
        assert (path / "repro.py").read_bytes() == b"2"
        assert "wrong in row 2" in (path / "verdict.txt").read_text()


def test_of_one_case_what_is_known_best_is_kept(tmp_path, found, context):
    folder = FindingsFolder(tmp_path)
    path = folder.add(found(2), context(1), 1, {})
    folder.add(found(2, how_small="not shrunk yet"), context(2), 1, {})
    assert read_finding(path).smallest.how_small == "minimal: no single step"


def test_a_rate_goes_with_the_case_that_it_is_of(tmp_path, found, context):
    folder = FindingsFolder(tmp_path)
    path = folder.add(found(5), context(1), 1, {})
    folder.add(found(5, rate=Rate(3, 10)), context(2, device="cuda"), 1, {})
    assert {*read_finding(path).reproduced} == {"cpu of here", "cuda of here"}
    folder.add(found(2, rate=None), context(2), 1, {})
    assert read_finding(path).reproduced == {}
    assert "was not measured" in (path / "verdict.txt").read_text()


def test_other_signatures_and_other_targets_are_other_findings(tmp_path, found, context):
    folder = FindingsFolder(tmp_path)
    folder.add(found(1), context(1), 1, {})
    folder.add(found(1, role="hole token"), context(1), 1, {})
    folder.add(found(1), context(1, target="elsewhere/theirs.py"), 1, {})
    assert len(folder.load()) == 3
    # The same file in another checkout is the same target.
    folder.add(found(1), context(2, target="checkout/mine.py"), 1, {})
    assert len(folder.load()) == 3


def test_files_of_an_earlier_case_do_not_stay_behind(tmp_path, found, context, tree):
    folder = FindingsFolder(tmp_path)
    folder.add(found(5), context(1), 1, FILES)
    path = folder.add(found(2), context(1), 1, {"no-repro.txt": b"why"})
    assert set(tree(path)) == {"finding.json", "case.json", "verdict.txt", "no-repro.txt"}


# Damage


def test_a_record_cut_off_at_any_length_is_set_aside_and_the_others_are_read(
    tmp_path, found, context
):
    folder = FindingsFolder(tmp_path)
    path = folder.add(found(1), context(1), 1, FILES)
    other = folder.add(found(1, role="hole token"), context(1), 1, FILES)
    whole = (path / "finding.json").read_bytes()
    aside = tmp_path / f"{path.name}.damaged-1"
    for length in range(len(whole.rstrip())):
        (path / "finding.json").write_bytes(whole[:length])
        reader = FindingsFolder(tmp_path)
        assert [*reader.load()] == [other.name], length
        assert len(reader.set_aside) == 1
        assert f"set aside as {aside.name}" in reader.set_aside[0]
        assert (aside / "finding.json").read_bytes() == whole[:length]
        aside.rename(path)
    (path / "finding.json").write_bytes(whole)
    assert {*FindingsFolder(tmp_path).load()} == {path.name, other.name}


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda d: d.update(schema=99), id="schema"),
        pytest.param(lambda d: d["smallest"].update(size="large"), id="size"),
        pytest.param(lambda d: d["smallest"].update(size=[1, "2"]), id="sizes"),
        pytest.param(lambda d: d["smallest"].update(case=[1]), id="case"),
        pytest.param(lambda d: d["smallest"].update(run="another"), id="run"),
        pytest.param(lambda d: d["smallest"]["files"].update({"../out": "0"}), id="file outside"),
        pytest.param(lambda d: d["runs"].update(x=3), id="runs"),
        pytest.param(lambda d: d.update(reproduced={"cpu": 3}), id="rates"),
        pytest.param(lambda d: d.update(role="another"), id="another finding's"),
        pytest.param(lambda d: d.pop("target"), id="no target"),
    ],
)
def test_a_record_that_makes_no_sense_is_set_aside(tmp_path, found, context, spoil):
    path = FindingsFolder(tmp_path).add(found(1), context(1), 1, {})
    document = json.loads((path / "finding.json").read_text())
    spoil(document)
    (path / "finding.json").write_text(json.dumps(document))
    folder = FindingsFolder(tmp_path)
    assert folder.load() == {}
    assert len(folder.set_aside) == 1


def test_what_is_found_again_after_damage_is_filed_anew_and_nothing_is_deleted(
    tmp_path, found, context
):
    folder = FindingsFolder(tmp_path)
    for number in (1, 2):
        path = folder.add(found(1), context(number), 1, FILES)
        (path / "finding.json").write_text("")
    assert folder.add(found(1), context(3), 1, FILES) == path
    assert len(folder.load()) == 1
    assert [line.rpartition(" ")[2] for line in folder.set_aside] == [
        f"{path.name}.damaged-1",
        f"{path.name}.damaged-2",
    ]
    assert (tmp_path / f"{path.name}.damaged-2" / "repro.py").read_bytes() == FILES["repro.py"]


# Disks


def test_a_folder_that_can_not_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FindingsError) as refused:
        FindingsFolder(tmp_path / "file" / "below")
    assert str(refused.value) == (
        f"findings '{tmp_path / 'file' / 'below'}' can't be written: Not a directory"
    )
    assert (tmp_path / "file").read_text() == "in the way"


class FullDisk:
    """Lets some calls through, then fails as a full disk does."""

    def __init__(self, real, num_left):
        self.real = real
        self.num_left = num_left
        self.has_failed = False

    def __call__(self, *arguments):
        if not self.num_left:
            self.has_failed = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.num_left -= 1
        return self.real(*arguments)


@pytest.mark.parametrize("function", ["write", "replace", "fsync"])
def test_a_disk_that_is_full_at_any_moment_costs_no_earlier_finding(
    tmp_path, found, context, monkeypatch, function
):
    folder = FindingsFolder(tmp_path)
    path = folder.add(found(5), context(1), 3, {**FILES, "repro.py": b"5"})
    real = getattr(os, function)
    num_failures = 0
    said = set()
    for num_left in range(100):
        disk = FullDisk(real, num_left)
        row, role = 4 - num_failures % 2, f"role {num_failures}"
        with monkeypatch.context() as patched:
            patched.setattr(os, function, disk)
            for other in (found(row), found(1, role=role)):
                try:
                    folder.add(other, context(2), 1, {**FILES, "repro.py": b"%d" % row})
                except FindingsError as error:
                    said.add(str(error))
        loaded = FindingsFolder(tmp_path).load()
        assert loaded[path.name].runs[context(1).run].count == 3
        assert loaded[path.name].smallest.size in ((1, 5), (1, 4), (1, 3))
        assert FindingsFolder(tmp_path).set_aside == folder.set_aside == []
        num_failures += disk.has_failed
        if not disk.has_failed:
            break
    assert num_failures > 1
    assert said == {f"findings '{tmp_path}' can't be written: No space left on device"}
    folder.add(found(2), context(3), 1, {**FILES, "repro.py": b"2"})
    assert (path / "repro.py").read_bytes() == b"2"


def test_a_campaign_goes_on_without_the_disk_and_files_what_it_can_later(
    tmp_path, found, context, monkeypatch
):
    monkeypatch.setattr(findings, "RETRY_SECONDS", 0.0)
    filing = Filing(FindingsFolder(tmp_path), context(1), Target("mine.py", {}))
    result = Result()
    first, second = found(5), found(1, role="hole token")
    result.add(first)
    filing.take(result)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", FullDisk(os.write, 0))
        result.add(second)
        filing.take(result)
        filing.take(result)
    assert {*filing.paths} == {first.signature}
    assert "No space left on device" in filing.failures[second.signature]
    result.counts[second.signature] = 7
    filing.take(result, is_over=True)
    assert filing.failures == {}
    assert read_finding(filing.paths[second.signature]).count == 7


# Processes that are killed


def add_for_ever(folder, found, context, acknowledged):
    """Add ever smaller findings of three signatures, and say so after each."""
    folder = FindingsFolder(folder)
    for number in range(1, 10**6):
        script = b"#" * random.randrange(20_000)
        role = f"role {number % 3}"
        folder.add(found(10**6 - number, role), context(1), number, {**FILES, "repro.py": script})
        os.write(acknowledged, number.to_bytes(4, "big"))


def test_a_process_killed_at_any_moment_leaves_every_finding_that_it_has_written(
    tmp_path, found, context
):
    draw = random.Random(1)
    most = 0
    for _ in range(20):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                add_for_ever(tmp_path, found, context, writer)
            finally:
                os._exit(3)
        os.close(writer)
        os.read(reader, 4)  # It has begun.
        time.sleep(draw.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        said = b""
        while chunk := os.read(reader, 65536):
            said += chunk
        os.close(reader)
        last = int.from_bytes(said[-4:], "big") if said else 1
        folder = FindingsFolder(tmp_path)
        loaded = folder.load()
        assert folder.set_aside == []
        assert max(record.count for record in loaded.values()) >= last
        assert len(loaded) >= min(3, last)
        assert not [*tmp_path.rglob(".new-*")]
        most = max(most, last)
    assert most > 3


def test_two_processes_that_write_at_once_lose_no_count(tmp_path, found, context):
    children = []
    for number in (1, 2):
        child = os.fork()
        if not child:
            status = 3
            try:
                folder = FindingsFolder(tmp_path)
                for count in range(1, 31):
                    folder.add(found(9 - number), context(number), count, {})
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    ((_, record),) = FindingsFolder(tmp_path).load().items()
    assert record.count == 60
    assert record.smallest.size == (1, 7)
