"""Findings on the command line: kept as soon as they are known, counted, replayed, merged."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from pagefault.findings import FindingsFolder, read_finding

FAMILY = "compute_out_cache_loc"
SPOIL = "if page_size > 4 and input_lengths.sum(): out_cache_loc[0] += 1"


def arguments_for(target, seed, *more):
    return (
        *("fuzz", "--target", target, "--family", FAMILY, "--device", "cpu", "--workers", 1),
        *("--time", "20s", "--max-cases", 40, "--seed", seed, *more),
    )


@pytest.fixture(scope="module")
def twice(pagefault, write_target, tmp_path_factory):
    """A folder in which a wrong target was fuzzed with two seeds, and the second run's process."""
    folder = tmp_path_factory.mktemp("twice")
    target = write_target(SPOIL)
    for seed in (8, 9):
        process = pagefault(*arguments_for(target, seed, "--json", f"{seed}.json"), cwd=folder)
        assert process.returncode == 1, process.stdout + process.stderr
    return folder, process


def test_a_fault_found_in_two_runs_is_one_finding_counted_in_both(twice):
    folder, _ = twice
    findings = FindingsFolder(folder / ".pagefault" / "findings").load()
    reports = [json.loads((folder / f"{seed}.json").read_text()) for seed in (8, 9)]
    counts = {}
    for report in reports:
        for finding in report["findings"]:
            counts.setdefault(finding["signature"], []).append(finding["count"])
    assert {str(record.signature) for record in findings.values()} == set(counts)
    assert {str(record.signature): record.count for record in findings.values()} == {
        signature: sum(seen) for signature, seen in counts.items()
    }
    assert any(len(record.runs) == 2 for record in findings.values())
    for record in findings.values():
        assert record.smallest.how_small.startswith("minimal: ")
        ((_, rates),) = record.reproduced.items()
        assert set(rates.values()) == {(10, 10)}


def test_each_finding_names_its_folder(twice):
    folder, process = twice
    report = json.loads((folder / "9.json").read_text())
    assert report["findings"]
    for finding in report["findings"]:
        assert f"  finding: {finding['folder']}\n" in process.stdout
        assert (folder / finding["folder"] / "repro.py").exists()
    assert "of earlier runs in .pagefault/findings" in process.stdout


def test_a_finding_is_replayed_by_its_folder_alone(pagefault, twice):
    folder, _ = twice
    path, *_ = FindingsFolder(folder / ".pagefault" / "findings").load()
    path = folder / ".pagefault" / "findings" / path
    process = pagefault("repro", path, "--device", "cpu", cwd=folder)
    assert process.returncode == 1, process.stderr
    assert process.stdout == read_finding(path).smallest.verdict + "\n"
    # As it is, or moved somewhere else.
    path = path.rename(path.with_name("renamed"))
    assert pagefault("repro", path, "--device", "cpu", cwd=folder).stdout == process.stdout
    path.rename(path.with_name(read_finding(path).name))


def test_a_folder_that_is_no_finding_is_one_line(pagefault, tmp_path):
    process = pagefault("repro", tmp_path, "--device", "cpu", cwd=tmp_path)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == (
        f"pagefault: {tmp_path}: no finding.json: No such file or directory\n"
    )


def test_a_findings_folder_that_can_not_be_written_is_one_line(pagefault, plain_target, tmp_path):
    (tmp_path / "file").write_text("in the way")
    arguments = arguments_for(plain_target, 1, "--findings", "file/below")
    process = pagefault(*arguments, cwd=tmp_path)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == (
        "pagefault: findings 'file/below' can't be written: Not a directory\n"
    )


def test_a_damaged_finding_is_set_aside_and_the_run_goes_on(pagefault, plain_target, tmp_path):
    damaged = tmp_path / "found" / "compute_out_cache_loc-value-00000000"
    damaged.mkdir(parents=True)
    (damaged / "finding.json").write_text('{"schema": 1, "tar')
    arguments = arguments_for(plain_target, 1, "--findings", "found")
    process = pagefault(*arguments, cwd=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"found/{damaged.name}: finding.json is damaged: " in process.stdout
    assert f"set aside as {damaged.name}.damaged-1" in process.stdout


def test_merging_on_the_command_line_counts_and_reports(pagefault, twice, tmp_path):
    folder, _ = twice
    source = folder / ".pagefault" / "findings"
    records = FindingsFolder(source).load()
    process = pagefault("merge", source, source, "--into", "all", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert lines[-1] == f"{len(records)} findings in all"
    assert sorted(lines[:-1]) == sorted(
        f"all/{name}: {record.signature}; seen {record.count} times"
        for name, record in records.items()
    )
    refused = pagefault("merge", "gone", "--into", "all", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "pagefault: 'gone' is no folder of findings\n"


def test_whole_folders_are_merged_with_their_corpora(pagefault, twice, tmp_path):
    folder, _ = twice
    whole = folder / ".pagefault"
    records = FindingsFolder(whole / "findings").load()
    process = pagefault("merge", whole, whole, "--into", "all", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    *_, sets, last = process.stdout.splitlines()
    assert last == f"{len(records)} findings in all/findings"
    assert sets.endswith(" sets of edges in all/corpus.jsonl")
    assert FindingsFolder(tmp_path / "all" / "findings").load() == records
    (corpus,) = whole.glob("campaigns/*/corpus.jsonl")
    assert (tmp_path / "all" / "corpus.jsonl").read_bytes() == corpus.read_bytes()
    mixed = pagefault("merge", whole, whole / "findings", "--into", "all", cwd=tmp_path)
    assert (mixed.returncode, mixed.stdout) == (2, "")


def test_a_finding_is_there_when_the_campaign_is_killed(environment, write_target, tmp_path):
    target = write_target(SPOIL)
    process = subprocess.Popen(
        [sys.executable, "-m", "pagefault"]
        + [str(word) for word in arguments_for(target, 8)]
        + ["--time", "60s", "--max-cases", "1000000"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    findings = tmp_path / ".pagefault" / "findings"
    deadline = time.monotonic() + 60
    while not [*findings.glob(f"{FAMILY}-*/finding.json")] and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    folder = FindingsFolder(findings)
    assert folder.load()
    assert folder.set_aside == []
