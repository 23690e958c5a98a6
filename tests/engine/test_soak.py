"""A soak says what it has not reached, and counts checks where they are carried out."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from pagefault import reached
from pagefault.addresses import BACKWARDS
from pagefault.campaign import FamilyTally, Plan, Result
from pagefault.checker import Checker
from pagefault.comparison import Comparison
from pagefault.conformance import session
from pagefault.family import Domain, families, family_named
from pagefault.findings import FindingsFolder
from pagefault.garbage import Garbage, check_garbage
from pagefault.relations import RELATIONS, Related, check_relation
from pagefault.soak import demanded_checks, why_void
from pagefault.target import load_target
from pagefault.worker import ALL_PAGE_SIZES, Worker

FAULTY = Path(__file__).parents[1] / "faulty_any_bytes"

OURS = load_target("ours")
PLAN = Plan("ours", list(families()), "cpu", 60.0, 100, 1, 1, strict=True, is_soak=True)

IN_INTERPRETER = pytest.mark.skipif(session.device == "cuda", reason="counts the interpreter's")


def whole_result():
    """Return a result in which everything was reached."""
    tallies = {
        name: FamilyTally(cases=100, edges=Counter(family.all_edges))
        for name, family in families().items()
    }
    next(iter(tallies.values())).checks.update(demanded_checks(PLAN, OURS))
    return Result(tallies)


def test_a_soak_that_has_reached_everything_is_not_void():
    assert why_void(PLAN, whole_result(), OURS) == []


def test_a_soak_says_which_edges_it_has_not_reached():
    result = whole_result()
    del result.tallies["chunking"].edges["several chunks"]
    assert why_void(PLAN, result, OURS) == ["chunking has not reached: several chunks"]


@pytest.mark.parametrize("check", demanded_checks(PLAN, OURS))
def test_a_soak_says_which_check_it_has_not_carried_out(check):
    result = whole_result()
    for tally in result.tallies.values():
        tally.checks[check] = 0
    assert why_void(PLAN, result, OURS) == [f"not carried out: {check}"]


def test_a_soak_that_runs_out_of_time_is_void():
    plan = dataclasses.replace(PLAN, max_cases=1000)
    assert why_void(plan, whole_result(), OURS) == [
        f"the time was over after {100 * len(families())} of 1000 cases"
    ]


def test_what_only_some_functions_have_is_demanded_of_all_of_them_together():
    one = dataclasses.replace(PLAN, families=["chunking"])
    missing = set(demanded_checks(PLAN, OURS)) - set(demanded_checks(one, OURS))
    relations = {reached.relation(name) for name in RELATIONS} - {
        reached.relation("permuted chunking")
    }
    some = {
        *(reached.RETURNED_TENSORS, reached.RETURNED_NUMBERS),
        *(reached.EXCEPTIONS, reached.WARNINGS),
    }
    assert missing == some | relations


def test_on_a_gpu_every_kind_of_memory_is_demanded():
    plan = dataclasses.replace(PLAN, device="cuda")
    checks = demanded_checks(plan, OURS)
    for kind in ("arena", "guard after", "guard before", "net"):
        assert reached.memory(kind) in checks
    assert reached.ACCESSES not in checks
    only_guards = demanded_checks(dataclasses.replace(plan, memory="guard"), OURS)
    assert reached.memory("guard after") in only_guards
    assert reached.memory("arena") not in only_guards


SLOTS = family_named("compute_out_cache_loc")


def uniform_case():
    fields = {
        "req_pool_indices": [1],
        "uniform_input_length": 3,
        "cache_start": [0],
        "req_to_pages": [[3, 10], [17, 24]],
        "page_size": 4,
    }
    return family_named("compute_out_cache_loc_uniform").case_type.from_fields(fields)


def slots_case(num_requests, **changes):
    fields = {
        "req_pool_indices": [1] * num_requests,
        "input_lengths": [3] * num_requests,
        "cache_start": [0] * num_requests,
        "req_to_pages": [[3, 10], [17, 24]],
        "page_size": 4,
    }
    return SLOTS.case_type.from_fields({**fields, **changes})


def counted(family, *cases, target=OURS, strict=False):
    """Return what is counted while a new checker checks cases."""
    checker = Checker(target, "cpu", strict=strict)
    reached.take()
    for case in cases:
        verdict = checker.check(family, case)
        assert verdict.passed, verdict.text()
    return reached.take()


@IN_INTERPRETER
def test_checks_of_a_launch_count_themselves():
    counts = counted(SLOTS, slots_case(40))
    for check in (
        *(reached.ACCESSES, reached.ROWS, reached.FOOTPRINTS),
        *(reached.WRITE_RACES, reached.READ_RACES),
    ):
        assert counts[check] >= 1, check
    assert counts[reached.MEMORY] == 2
    assert counts[reached.VALUES] == 120
    assert [counts[reached.poison(value)] for value in (-7, 11)] == [1, 1]
    assert not counts[reached.RETURNED_TENSORS] + counts[reached.EXCEPTIONS]


@IN_INTERPRETER
def test_needed_reads_are_held_and_demanded_where_the_checker_is_strict():
    assert not counted(SLOTS, slots_case(2))[reached.NEEDED_READS]
    assert counted(SLOTS, slots_case(2), strict=True)[reached.NEEDED_READS]
    lenient = dataclasses.replace(PLAN, strict=False)
    assert set(demanded_checks(PLAN, OURS)) - set(demanded_checks(lenient, OURS)) == {
        reached.NEEDED_READS
    }


@IN_INTERPRETER
def test_orders_and_races_count_only_where_there_are_several_programs():
    chunking = family_named("chunking")
    fields = {"prefix_lens": [5], "batch_size": 1, "chunk_len": 4}
    one = chunking.case_type.from_fields({**fields, "num_chunks": 1})
    two = chunking.case_type.from_fields({**fields, "num_chunks": 2})
    for case, expected in ((one, False), (two, True)):
        counts = counted(chunking, case, case)
        assert bool(counts[reached.order(BACKWARDS)]) == expected
        assert bool(counts[reached.WRITE_RACES]) == expected
        assert counts[reached.RETURNED_TENSORS] == 8


@IN_INTERPRETER
def test_a_target_without_kernels_has_no_addresses_to_check(plain):
    counts = counted(SLOTS, slots_case(40), target=plain)
    assert not counts[reached.ACCESSES] + counts[reached.ROWS] + counts[reached.WRITE_RACES]
    assert counts[reached.MEMORY] == 2


@IN_INTERPRETER
def test_a_comparison_that_is_left_out_is_not_counted(monkeypatch):
    monkeypatch.setattr(Comparison, "_compare_memory", lambda *_, **__: None)
    counts = counted(SLOTS, slots_case(2))
    assert not counts[reached.MEMORY] + counts[reached.VALUES]


@IN_INTERPRETER
def test_refusals_warnings_and_numbers_count_themselves():
    chunking = family_named("chunking")
    refused = {"prefix_lens": [5], "num_chunks": 1, "batch_size": 2, "chunk_len": 4}
    counts = counted(chunking, chunking.case_type.from_fields(refused))
    assert counts[reached.EXCEPTIONS] == 1
    update = family_named("update_block_table")
    clamped = {
        "req_pool_indices": [0],
        "begins": [1],
        "new_occupied_pages": [[5, 6]],
        "sizes": [2],
        "req_to_page": [[3, 10]],
    }
    counts = counted(update, update.case_type.from_fields(clamped))
    assert counts[reached.WARNINGS] == 1
    build = family_named("build_chunked_prefill_metadata_arrays")
    prefix = {
        "req_pool_indices": [0],
        "prefix_lens": [3],
        "req_to_page": [[3, 10]],
        "page_size": 4,
        "chunk_capacity": 8,
    }
    counts = counted(build, build.case_type.from_fields(prefix))
    assert counts[reached.RETURNED_NUMBERS] == 2


@IN_INTERPRETER
def test_garbage_and_relations_count_themselves(monkeypatch):
    monkeypatch.setattr(session, "is_isolating", False)  # What a child counts stays there.
    checker = Checker(OURS, "cpu")
    reached.take()
    spoilt = (("input_lengths", 0, -1),)
    assert check_garbage(checker, SLOTS, Garbage(slots_case(2), spoilt)).passed
    assert reached.take()[reached.ANY_BYTES] == 1
    relation = RELATIONS["permuted chunking"]
    num_held = check_relation(OURS, relation, num_cases=5, seed=1, device="cpu")
    assert reached.take()[reached.relation(relation.name)] == num_held >= 1


# The command.


QUICK = ("fuzz", "--soak", "--device", "cpu", "--workers", 1, "--seed", 3, "--time", "60s")


def test_a_soak_of_a_target_without_kernels_is_void_and_says_why(pagefault, write_target, tmp_path):
    promises_nothing = "pagefault_target = {'without': {'any bytes': 'plain torch'}}"
    process = pagefault(
        *(*QUICK, "--target", write_target("pass", extra=promises_nothing), "--max-cases", 64),
        *("--json", "report.json"),
        cwd=tmp_path,
    )
    assert process.returncode == 3, process.stdout + process.stderr
    assert "void run: compute_out_cache_loc has not reached: " in process.stdout
    assert f"not carried out: {reached.ACCESSES}, {reached.ROWS}" in process.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["checks"][reached.MEMORY] >= 128
    assert report["checks"][reached.relation("permuted compute_out_cache_loc")] >= 1
    assert {reached.ANY_BYTES, reached.ACCESSES}.isdisjoint(report["checks"])
    assert report["specialisations"] == {}


@pytest.mark.slow
def test_a_soak_finds_what_only_garbage_shows(pagefault, tmp_path):
    process = pagefault(
        *(*QUICK, "--target", FAULTY / "negative_length_refused.py", "--max-cases", 128),
        cwd=tmp_path,
    )
    assert process.returncode == 1, process.stdout + process.stderr
    assert "compute_out_cache_loc raised ValueError" in process.stdout
    assert "any bytes are safe: input_lengths[0] = -1" in process.stdout


PARAMETERS = "out_cache_loc, req_pool_indices, input_lengths, cache_start, req_to_pages, page_size"
RIGHT = f"""
import os

from pagefault.kernels import out_cache_loc as ours


def compute_out_cache_loc({PARAMETERS}):
    ours.compute_out_cache_loc({PARAMETERS})
"""
REFUSES_GARBAGE = "    if (input_lengths < 0).any(): raise ValueError('input_lengths')\n"
BREAKS_RELATIONS = (
    "    if len(req_pool_indices) > 1 and input_lengths.sum(): out_cache_loc[0] += 1\n"
)
DIES_OF_GARBAGE = "    if (input_lengths < 0).any(): os.kill(os.getpid(), 9)\n"
HANGS_IN_RELATIONS = "    while sys._getframe(1).f_code.co_filename.endswith('calls.py'): pass\n"


def findings_in(folder):
    """Return the findings on disk by kind and role, with their folders."""
    records = FindingsFolder(folder / ".pagefault" / "findings").load()
    return {
        record.signature[1:]: (folder / ".pagefault" / "findings" / name, record)
        for name, record in records.items()
    }


GARBAGE = ("raised", "any bytes: ValueError")
SPLIT = ("value", "split compute_out_cache_loc")


@pytest.fixture(scope="module")
def soaked(pagefault, tmp_path_factory):
    """A folder in which a target is soaked that garbage and relations show faults of; what a soak
    of it and one of its mended version say."""
    folder = tmp_path_factory.mktemp("soaked")
    target = folder / "target.py"
    target.write_text(RIGHT + REFUSES_GARBAGE + BREAKS_RELATIONS)
    soak = (*QUICK, "--target", target, "--max-cases", 128, "--json", "report.json")
    found = pagefault(*soak, "--report", "report", cwd=folder)
    assert found.returncode == 1, found.stdout + found.stderr
    assert {GARBAGE, SPLIT} <= findings_in(folder).keys()
    shutil.copytree(folder, folder / "found")
    again = pagefault(*soak, "--seed", 4, "--max-cases", 16, cwd=folder)
    shutil.copytree(folder / ".pagefault", folder / "again" / ".pagefault")
    target.write_text(RIGHT)
    mended = pagefault(*soak, "--max-cases", 16, cwd=folder)
    return folder, found.stdout, again.stdout, mended.stdout


def test_what_a_soak_finds_beside_its_rounds_has_folders_as_all_findings(soaked):
    folder, said, _, _ = soaked
    path, record = findings_in(folder / "found")[GARBAGE]
    assert record.smallest.how_small.startswith("minimal: no single step makes it smaller")
    assert json.loads((path / "case.json").read_text())["spoilt"] == [["input_lengths", 0, -1]]
    assert "any bytes are safe: input_lengths[0] = -1" in (path / "verdict.txt").read_text()
    assert (path / "repro.py").is_file()
    path, record = findings_in(folder / "found")[SPLIT]
    assert record.smallest.how_small.startswith("minimal: no single step makes it smaller")
    assert json.loads((path / "case.json").read_text())["relation"] == SPLIT[1]
    why = (path / "no-repro.txt").read_text()
    assert f"the relation {SPLIT[1]!r} compares several calls" in why
    report = json.loads((folder / "found" / "report.json").read_text())
    assert {finding["signature"] for finding in report["findings"]} >= {
        f"compute_out_cache_loc: {kind}: {role}" for kind, role in (GARBAGE, SPLIT)
    }
    for kind, role in (GARBAGE, SPLIT):
        assert f"compute_out_cache_loc: {kind}: {role}" in said


@pytest.mark.slow
def test_side_cases_are_told_in_the_report(soaked):
    folder, *_ = soaked
    for name in ("report.html", "report.md"):
        text = (folder / "found" / "report" / name).read_text()
        assert "any bytes are safe: input_lengths[0] = -1" in text
        assert "split compute_out_cache_loc" in text


def test_side_cases_are_checked_first_in_the_next_soak_and_counted(soaked):
    folder, _, again, mended = soaked
    for signature in (GARBAGE, SPLIT):
        path, record = findings_in(folder / "again")[signature]
        assert len(record.runs) == 2
        assert f"still open: .pagefault/findings/{path.name}" in again
        assert f"fixed: .pagefault/findings/{path.name}: its case passes now" in mended
        assert findings_in(folder)[signature][1].status == "fixed"


@pytest.mark.slow
def test_side_cases_are_merged(soaked, pagefault):
    folder, *_ = soaked
    merged = folder / "merged"
    process = pagefault(
        "merge", folder / "found" / ".pagefault", folder / "again" / ".pagefault", "--into",
        merged / ".pagefault", cwd=folder,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    for signature in (GARBAGE, SPLIT):
        assert findings_in(merged)[signature][1] == findings_in(folder / "again")[signature][1]


@pytest.mark.slow  # tests/engine/test_cli.py does so with a case of garbage.
@pytest.mark.parametrize("signature", [GARBAGE, SPLIT])
def test_repro_takes_the_folder_of_a_side_case(soaked, pagefault, tmp_path, signature):
    folder, *_ = soaked
    path, _ = findings_in(folder / "found")[signature]
    faulty, right = tmp_path / "faulty.py", tmp_path / "right.py"
    faulty.write_text(RIGHT + REFUSES_GARBAGE + BREAKS_RELATIONS)
    right.write_text(RIGHT)
    arguments = ("repro", path, "--device", "cpu", "--target")
    assert pagefault(*arguments, faulty, cwd=tmp_path).returncode == 1
    assert pagefault(*arguments, right, cwd=tmp_path).returncode == 0


@pytest.mark.slow
def test_the_script_of_a_side_case_shows_it(soaked, environment, tmp_path):
    folder, *_ = soaked
    path, _ = findings_in(folder / "found")[GARBAGE]
    faulty, right = tmp_path / "faulty.py", tmp_path / "right.py"
    faulty.write_text(RIGHT + REFUSES_GARBAGE)
    right.write_text(RIGHT)
    statuses = [
        subprocess.run([sys.executable, path / "repro.py", kernel], env=environment()).returncode
        for kernel in (faulty, right)
    ]
    assert statuses == [1, 0]


def test_a_relation_that_nobody_knows_is_refused(soaked, pagefault, tmp_path):
    folder, *_ = soaked
    path, _ = findings_in(folder / "found")[SPLIT]
    case = tmp_path / "case.json"
    case.write_text(json.dumps({**json.loads((path / "case.json").read_text()), "relation": "x"}))
    process = pagefault("repro", case, "--device", "cpu", cwd=tmp_path)
    assert process.returncode == 2
    assert "relation: 'x', but should be one of permuted compute_out_cache_loc" in process.stderr


def test_a_relation_says_nothing_of_a_target_without_its_functions(pagefault, tmp_path):
    target, case = tmp_path / "target.py", tmp_path / "case.json"
    target.write_text(RIGHT.replace("compute_out_cache_loc", "compute_out_cache_loc_uniform"))
    related = Related(uniform_case(), "ragged and uniform")
    case.write_text(related.to_json("compute_out_cache_loc_uniform"))
    process = pagefault("repro", case, "--device", "cpu", "--target", target, cwd=tmp_path)
    assert process.returncode == 2
    assert "says nothing of target" in process.stderr


@pytest.mark.slow
def test_a_process_that_dies_of_garbage_leaves_the_garbage_behind(pagefault, tmp_path):
    target = tmp_path / "dies.py"
    target.write_text(RIGHT + DIES_OF_GARBAGE)
    process = pagefault(*(*QUICK, "--target", target, "--max-cases", 300), cwd=tmp_path)
    assert process.returncode == 1, process.stdout + process.stderr
    ((signature, (path, record)),) = findings_in(tmp_path).items()
    assert signature == ("died", "any bytes: SIGKILL")
    assert json.loads((path / "case.json").read_text())["spoilt"] == [["input_lengths", 0, -1]]
    assert record.smallest.how_small.startswith("minimal: no single step makes it smaller")
    # Its legal cases were run all the same.
    assert "300" in process.stdout


@pytest.mark.slow
def test_a_relation_that_hangs_is_given_up_and_the_round_goes_on(pagefault, tmp_path):
    target = tmp_path / "hangs.py"
    target.write_text(RIGHT.replace("import os", "import os, sys") + HANGS_IN_RELATIONS)
    process = pagefault(
        *(*QUICK, "--target", target, "--max-cases", 300, "--case-time", "2s"), cwd=tmp_path
    )
    assert process.returncode == 1, process.stdout + process.stderr
    assert {("hang", f"{name}: deadline") for name in (SPLIT[1],)} <= findings_in(tmp_path).keys()


def drawn_on_a_gpu(num_workers, num_rounds, is_soak):
    """Return the page sizes and pairings of dtypes of some rounds of some workers, in order."""
    plan = dataclasses.replace(PLAN, device="cuda", num_workers=num_workers, is_soak=is_soak)
    drawn = []
    for number in range(plan.num_workers):
        worker = object.__new__(Worker)
        worker._plan, worker._worker = plan, number
        domains = [worker._narrowed(SLOTS, round_, Domain()) for round_ in range(num_rounds)]
        drawn += [(*domain.page_sizes, *domain.dtype_choices) for domain in domains]
    return drawn


def test_on_a_gpu_the_workers_of_a_soak_share_out_page_sizes_and_dtypes():
    drawn = drawn_on_a_gpu(num_workers=12, num_rounds=16, is_soak=True)
    assert {page_size for page_size, _ in drawn} == set(ALL_PAGE_SIZES)
    assert {pairing % 16 for _, pairing in drawn} == set(range(16))


def test_on_a_gpu_no_two_workers_have_the_same_to_compile():
    for num_workers in (1, 2, 3, 12):
        drawn = drawn_on_a_gpu(num_workers, num_rounds=2, is_soak=False)
        compiled = [pair for pair in drawn if pair != (16, 0)]
        assert len({*compiled}) == len(compiled) == num_workers
    # However short the run, each bit of a pairing is set in some of those that come first.
    first = drawn_on_a_gpu(12, num_rounds=1, is_soak=False)
    assert {pairing % 4 for _, pairing in first} == {0, 1, 2, 3}


def test_on_a_gpu_one_worker_gets_round_too():
    drawn = drawn_on_a_gpu(num_workers=1, num_rounds=64 * 32, is_soak=False)
    assert {page_size for page_size, _ in drawn} == set(ALL_PAGE_SIZES)
    assert {pairing % 32 for _, pairing in drawn} == set(range(32))
    compiled = [pair for pair in drawn if pair != (16, 0)]
    assert sum(pair != after for pair, after in pairwise(compiled)) == 63


def test_on_a_gpu_either_sort_of_round_meets_wide_tables():
    plan = dataclasses.replace(PLAN, device="cuda")
    worker = object.__new__(Worker)
    worker._plan, worker._worker = plan, 0
    domains = [worker._narrowed(SLOTS, round_, Domain()) for round_ in range(16)]
    wide = [domain.page_sizes for domain in domains if "wide table" not in domain.without]
    assert (16,) in wide
    assert set(wide) - {(16,)}
