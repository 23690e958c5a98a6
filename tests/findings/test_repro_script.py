"""`repro.py` shows a finding where there is no pagefault, and says nothing of a right kernel."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagefault import repro_script
from pagefault.campaign import Found, Result
from pagefault.checker import Checker
from pagefault.conformance import session
from pagefault.family import family_named
from pagefault.findings import Filing, FindingsFolder, reproduce_rate
from pagefault.isolation import check_in_child
from pagefault.minimal import size_of
from pagefault.target import load_target
from pagefault.verdict import Signature

pytestmark = pytest.mark.skipif(
    session.device == "cuda", reason="what the address oracle says is part of what is expected"
)

FAULTY = Path(__file__).parents[1] / "faulty"

BLOCKER = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pagefault", "hypothesis"):
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Blocker())
"""

# One token past a row without columns, whose slot is 0.
ONE_TOKEN = {
    "req_pool_indices": [0],
    "input_lengths": [1],
    "cache_start": [0],
    "req_to_pages": {"num_rows": 1, "max_pages": 0},
    "page_size": 1,
}
ONE_PAGE = {**ONE_TOKEN, "req_to_pages": [[3]]}
NO_REQUEST = {
    "req_pool_indices": [],
    "input_lengths": [],
    "cache_start": [],
    "req_to_pages": {"num_rows": 0, "max_pages": 0},
    "page_size": 1,
}
TWO_ROWS = {**ONE_TOKEN, "req_pool_indices": [1], "req_to_pages": [[3], [10]]}

# Function, file in tests/faulty, the finding's kind, the case, what the script says.
# How many of these scripts run in `make test`; the others are slow.
NUM_QUICK = 5

PLANTED = [
    (
        *("compute_out_cache_loc", "overflow_clamped", "value"),
        {**ONE_PAGE, "cache_start": [1]},
        "out_cache_loc[0] = 3, but should be 0",
    ),
    (
        *("compute_out_cache_loc", "slots_in_32_bits", "value"),
        {
            **ONE_PAGE,
            "req_to_pages": [[2**30]],
            "page_size": 2,
            "layout": {"out_cache_loc": {"dtype": "int64", "offset": 3}},
        },
        "out_cache_loc[0] = -2147483648, but should be 2147483648",
    ),
    (
        *("compute_out_cache_loc", "row_stride_from_width", "address"),
        {**TWO_ROWS, "layout": {"req_to_pages": {"pitch": 1}}},
        "read of req_to_pages[0][1], which is no element of it (shape [2, 1]), in "
        "row_stride_from_width.py:33",
    ),
    (
        *("compute_out_cache_loc", "pool_index_ignored", "row"),
        TWO_ROWS,
        "read of req_to_pages[0][0], a row that belongs to no request of the call",
    ),
    (
        *("compute_out_cache_loc", "output_zeroed", "outside"),
        {**NO_REQUEST, "layout": {"out_cache_loc": {"spare": 1}}},
        "out_cache_loc[0] = 0, but should still be -7",
    ),
    (
        *("compute_out_cache_loc", "added_to_the_output", "stale"),
        ONE_PAGE,
        "with 11 in every byte that is no input and the programs in reverse order: "
        "out_cache_loc[0] = 14, but should be 3",
    ),
    (
        *("compute_out_cache_loc", "starts_advanced", "input changed"),
        ONE_TOKEN,
        "cache_start[0] = 1, but should still be 0",
    ),
    (
        *("fused_decode_input_prep", "no_tokens_no_launch", "unwritten"),
        {
            "req_pool_indices": [0],
            "valid_cache_lengths": [0],
            "uniform_input_length": 0,
            "req_to_pages": {"num_rows": 1, "max_pages": 0},
            "page_size": 1,
        },
        "seq_lens_out[0] = 11, but should be 0",
    ),
    # Every value is right.
    (
        *("update_req_to_page", "empty_request_counted", "address"),
        {
            "req_pool_indices": [0, 0],
            "begins": [0, 0],
            "new_occupied_pages": [[], [0]],
            "req_to_page": {"num_rows": 1, "max_pages": 0},
        },
        "read of new_occupied_pages[1], which is no element of it",
    ),
    (
        *("update_block_table", "no_warning", "log"),
        {
            "req_pool_indices": [0],
            "begins": [0],
            "new_occupied_pages": [[0]],
            "sizes": [1],
            "req_to_page": {"num_rows": 1, "max_pages": 0},
        },
        "0 warnings logged, but should be 1",
    ),
    (
        *("get_chunks_paged", "short_prefix_repeated", "returned"),
        {
            "req_pool_indices": [0, 0],
            "prefix_lens": [1, 2],
            "req_to_page": [[3]],
            "page_size": 2,
            "chunk_capacity": 2,
        },
        "kv_indices_list[1] is ('int32', 'cpu', [2]), but should be ('int32', 'cpu', [1])",
    ),
    (
        *("chunking", "batch_size_unchecked", "not refused"),
        {"prefix_lens": [0], "num_chunks": 0, "batch_size": 0, "chunk_len": 1},
        "returned, but should raise ValueError",
    ),
    # More cells than a script spells out.
    (
        *("compute_out_cache_loc", "tile_offset_missing", "value"),
        {
            **ONE_PAGE,
            "input_lengths": [129],
            "req_to_pages": {"num_rows": 1, "max_pages": 128, "edits": [[0, 5, -1]]},
        },
        "out_cache_loc[128] = 3, but should be 0",
    ),
]

KERNEL = """
import ctypes

import triton
import triton.language as tl


@triton.jit
def faulty_kernel(out_ptr, num_elements):
    tl.store(out_ptr, 0)
    beside = out_ptr + 1 + tl.arange(0, 1)
    is_there = 1 + tl.arange(0, 1) < num_elements
    tl.store(beside, tl.load(beside, mask=is_there), mask=is_there)


def compute_out_cache_loc(out, rows, lengths, starts, table, page_size):
    {body}
"""

# Body, kind, the case, what the script says.
WRITTEN_HERE = [
    pytest.param(
        *("faulty_kernel[(2,)](out, 1)", "race", ONE_TOKEN),
        "write of out_cache_loc[0], which another program touches",
        id="race",
    ),
    pytest.param(
        *("faulty_kernel[(1,)](out, 2)", "outside"),
        {**ONE_TOKEN, "layout": {"out_cache_loc": {"spare": 1}}},
        "write of out_cache_loc[1], which the contract does not name",
        id="written back",
    ),
    pytest.param(
        *("out.nonsense()", "raised", NO_REQUEST),
        "raised AttributeError: 'Tensor' object has no attribute 'nonsense'",
        id="raised",
    ),
    pytest.param(
        *("ctypes.string_at(0)", "died", NO_REQUEST),
        "compute_out_cache_loc: the process died: SIGSEGV",
        id="died",
    ),
    pytest.param(
        *("while True: pass", "hang", NO_REQUEST),
        "compute_out_cache_loc had not returned after 1 s",
        id="hang",
        marks=pytest.mark.slow,
    ),
]


@pytest.fixture(scope="module")
def run_without_pagefault(tmp_path_factory):
    """A function that runs Python with arguments where pagefault and Hypothesis are not there."""
    folder = tmp_path_factory.mktemp("blocker")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    ours = ("PYTEST_", "TRITON_INTERPRET", "HYPOTHESIS_", "PAGEFAULT_", "COV_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            env={**kept, "PYTHONPATH": str(folder)},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.fixture
def file_finding(tmp_path, context):
    """A function that checks a case of a target, and returns its finding's folder and kind."""

    def file(target_path, function, fields):
        target = load_target(str(target_path))
        family = family_named(function)
        case = family.case_type.from_fields(fields)

        def check(case):
            return Checker(target, "cpu").check_thoroughly(family, case)

        verdict = check_in_child(check, family, case, 3.0)
        size = size_of(family, case)
        found = Found(
            verdict.signature, family.to_json(case), size, verdict.text(), "not shrunk yet"
        )
        result = Result()
        result.add(found)
        filing = Filing(
            FindingsFolder(tmp_path / "found"), context(1, target=str(target_path)), target
        )
        filing.take(result)
        assert filing.failures == {}
        return filing.paths[verdict.signature], verdict.signature.kind

    return file


@pytest.mark.parametrize("module", ["pagefault", "hypothesis"])
def test_the_scripts_run_where_neither_can_be_imported(run_without_pagefault, module):
    process = run_without_pagefault("-c", f"import {module}")
    assert process.returncode == 1
    assert f"ImportError: {module} is blocked" in process.stderr


@pytest.mark.parametrize(
    ("function", "fault", "kind", "fields", "says"),
    [
        pytest.param(
            *planted, id="-".join(planted[:2]), marks=[pytest.mark.slow] if i >= NUM_QUICK else []
        )
        for i, planted in enumerate(PLANTED)
    ],
)
def test_a_planted_fault_shows_from_the_folder_alone(
    run_without_pagefault, file_finding, tmp_path, function, fault, kind, fields, says
):
    target = tmp_path / f"{fault}.py"
    shutil.copy(FAULTY / function / target.name, target)
    folder, found = file_finding(target, function, fields)
    assert found == kind
    target.unlink()
    process = run_without_pagefault(folder / "repro.py")
    assert process.returncode == 1, process.stdout + process.stderr
    assert f"{function} of {folder / 'kernel' / target.name} on cpu" in process.stdout
    assert says in process.stdout
    assert process.stdout.endswith("the fault shows\n")
    assert process.stderr == ""


@pytest.mark.parametrize("planted", [PLANTED[2], PLANTED[9], PLANTED[10]], ids=lambda p: p[1])
def test_the_same_call_of_a_right_kernel_shows_nothing(
    run_without_pagefault, file_finding, planted
):
    function, fault, _, fields, _ = planted
    folder, _ = file_finding(FAULTY / function / f"{fault}.py", function, fields)
    right = run_without_pagefault(folder / "repro.py", FAULTY / function / "correct.py")
    assert right.returncode == 0, right.stdout + right.stderr
    assert right.stdout.endswith("correct.py on cpu\nthe fault does not show\n")


@pytest.mark.parametrize(("body", "kind", "fields", "says"), WRITTEN_HERE)
def test_what_values_do_not_show_is_shown(
    run_without_pagefault, file_finding, tmp_path, monkeypatch, body, kind, fields, says
):
    monkeypatch.setitem(repro_script.SECONDS_OF_KIND, "hang", 1.0)
    target = tmp_path / "a file, of mine.py"
    target.write_text(KERNEL.format(body=body))
    folder, found = file_finding(target, "compute_out_cache_loc", fields)
    assert found == kind
    process = run_without_pagefault(folder / "repro.py")
    assert process.returncode == 1, process.stdout + process.stderr
    assert f"compute_out_cache_loc of {target} on cpu" in process.stdout
    assert says in process.stdout
    assert process.stdout.endswith("the fault shows\n")


def test_a_file_that_has_been_put_right_shows_nothing_any_more(
    run_without_pagefault, file_finding, tmp_path
):
    target = tmp_path / "mine.py"
    target.write_text(KERNEL.format(body="ctypes.string_at(0)"))
    folder, _ = file_finding(target, "compute_out_cache_loc", NO_REQUEST)
    target.write_text(KERNEL.format(body="pass"))
    process = run_without_pagefault(folder / "repro.py")
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"compute_out_cache_loc of {target} on cpu" in process.stdout


def test_the_script_is_there_to_be_read(file_finding, tmp_path):
    target = tmp_path / "mine.py"
    shutil.copy(FAULTY / "compute_out_cache_loc" / "row_stride_from_width.py", target)
    fields = {**TWO_ROWS, "layout": {"req_to_pages": {"pitch": 1}}}
    folder, _ = file_finding(target, "compute_out_cache_loc", fields)
    text = (folder / "repro.py").read_text()
    assert text.startswith(
        '"""compute_out_cache_loc: address: read of req_to_pages\n\n'
        "read of req_to_pages[0][1], which is no element of it\n"
    )
    assert (
        '    req_to_pages = memory.tensor("req_to_pages", [[3], [10]], torch.int32, row_stride=2)\n'
    ) in text
    assert '        "out_cache_loc": [10],\n' in text
    lines = [line for line in text.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 100


def test_what_can_not_be_written_as_a_script_is_filed_with_the_reason(tmp_path, context):
    target_path = tmp_path / "mine.py"
    target_path.write_text(KERNEL.format(body="pass"))
    family = family_named("compute_out_cache_loc")
    fields = {**TWO_ROWS, "layout": {"req_to_pages": {"pitch": 10**6}}}
    text = family.to_json(family.case_type.from_fields(fields))
    signature = Signature(family.name, "value", "out_cache_loc: token")
    result = Result()
    result.add(Found(signature, text, (1,), "wrong", "not shrunk yet"))
    target = load_target(str(target_path))
    folder = FindingsFolder(tmp_path / "found")
    filing = Filing(folder, context(1, target=str(target_path)), target)
    filing.take(result)
    path = filing.paths[signature]
    assert not (path / "repro.py").exists()
    assert (path / "no-repro.txt").read_text() == (
        "There is no repro.py: req_to_pages spans 2000002 elements, but a script fills 1000000\n"
    )


def test_our_kernels_are_copied_with_what_they_import(run_without_pagefault, tmp_path):
    target = load_target("ours")
    family = family_named("chunking")
    case = family.case_type.from_fields(PLANTED[-2][3])
    kernel = repro_script.kernel_of(target, family.name)
    assert {"chunked_prefill.py", "checks.py", "launches.py", "slots.py"} <= set(kernel.files)
    assert not kernel.needs_pagefault
    (tmp_path / "kernel").mkdir()
    for name, text in kernel.files.items():
        (tmp_path / "kernel" / name).write_bytes(text)
    signature = Signature(family.name, "value", "chunks.ends: ends")
    script = repro_script.script_of(target, family, signature, case, "", "cpu", kernel)
    (tmp_path / "repro.py").write_text(script)
    process = run_without_pagefault(tmp_path / "repro.py", "kernel/chunked_prefill.py")
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"chunking of {tmp_path / 'kernel' / 'chunked_prefill.py'}" in process.stdout


def test_a_target_that_imports_pagefault_itself_is_told_apart(
    run_without_pagefault, file_finding, tmp_path
):
    target = tmp_path / "mine.py"
    target.write_text("import pagefault.case\n" + KERNEL.format(body="out.nonsense()"))
    folder, _ = file_finding(target, "compute_out_cache_loc", NO_REQUEST)
    assert ", and pagefault too, which that file imports." in (folder / "repro.py").read_text()
    process = run_without_pagefault(folder / "repro.py")
    assert process.returncode == 2
    assert "the kernel can't be loaded: ImportError: pagefault is blocked" in process.stdout


@pytest.mark.parametrize(
    ("bad_calls", "of", "shown"),
    [pytest.param(1, 10, 10, id="always"), pytest.param(3, 10, 4, id="now and then")],
)
def test_how_often_a_fault_shows_is_counted(bad_calls, of, shown, tmp_path):
    target_path = tmp_path / "mine.py"
    spoil = f"calls.append(0); out[:1] = 5 if (len(calls) - 1) // 2 % {bad_calls} == 0 else 0"
    target_path.write_text(KERNEL.format(body=spoil) + "\ncalls = []\n")
    target = load_target(str(target_path))
    family = family_named("compute_out_cache_loc")
    case = family.case_type.from_fields(ONE_TOKEN)
    checker = Checker(target, "cpu")
    signature = Signature(family.name, "value", "out_cache_loc: overflow token")
    rate = reproduce_rate(lambda case: checker.check(family, case), case, signature)
    assert rate == (shown, of)
    other = signature._replace(kind="stale")
    assert reproduce_rate(lambda case: checker.check(family, case), case, other) == (0, of)
