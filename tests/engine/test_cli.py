"""The command, as a process: exit statuses, one line for each error, and what is left behind."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagefault import cli
from pagefault.family import FamilyError

FAMILY = "compute_out_cache_loc"
# Quick and small: a function in plain torch, one worker, a few cases.
QUICK = ("--time", "20s", "--workers", 1, "--device", "cpu", "--seed", 7)
CASE = {
    "schema": 1,
    "family": FAMILY,
    "req_pool_indices": [1],
    "input_lengths": [2],
    "cache_start": [3],
    "req_to_pages": [[5, 9], [7, 4]],
    "page_size": 4,
}


@pytest.fixture
def case_file(tmp_path):
    """The path of a small case."""
    path = tmp_path / "case.json"
    path.write_text(json.dumps(CASE))
    return path


def assert_refused(process, *words):
    """Check for exit status 2 and one line on stderr with these words."""
    assert process.returncode == 2, process.stderr
    assert process.stdout == ""
    lines = process.stderr.splitlines()
    assert len(lines) == 1, process.stderr
    assert lines[0].startswith("pagefault: ")
    for word in words:
        assert word in lines[0]


# Help


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--help"], ["fuzz", "repro", "targets"], id="command"),
        pytest.param(
            ["fuzz", "--help"],
            [
                *("--target", "--family", "--time", "--max-cases", "--seed", "--workers"),
                *("--device", "--out", "--json", "Exit status"),
            ],
            id="fuzz",
        ),
        pytest.param(
            ["repro", "--help"], ["--target", "--device", "Exit status"], id="repro"
        ),
    ],
)  # fmt: skip
def test_help_says_what_there_is(pagefault, tmp_path, arguments, words):
    process = pagefault(*arguments, cwd=tmp_path)
    assert process.returncode == 0
    for word in words:
        assert word in process.stdout


def test_the_version_is_the_packages(pagefault, tmp_path):
    import pagefault as package

    process = pagefault("--version", cwd=tmp_path)
    assert (process.returncode, process.stdout) == (0, f"pagefault {package.__version__}\n")


def test_targets_lists_names_and_functions(pagefault, tmp_path):
    process = pagefault("targets", cwd=tmp_path)
    assert process.returncode == 0
    assert "ours" in process.stdout
    assert "chunking(prefix_lens, num_chunks, batch_size, chunk_len)" in process.stdout


# Bad usage


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--time", "soon"], ["--time 'soon'", "60s, 5m or 8h"], id="time"),
        pytest.param(["--time", "0s"], ["--time '0s'", "60s, 5m or 8h"], id="no time"),
        pytest.param(["--workers", "many"], ["--workers 'many'", "auto"], id="workers"),
        pytest.param(["--workers", "0"], ["--workers '0'", "auto"], id="no workers"),
        pytest.param(["--device", "tpu"], ["device 'tpu'", "auto, cpu, cuda"], id="device"),
        pytest.param(
            ["--target", "no_such_engine"], ["'no_such_engine' can't be imported"], id="target"
        ),
        pytest.param(["--target", "gone.py"], ["target 'gone.py': no such file"], id="file"),
    ],
)
def test_a_run_that_can_not_start_is_one_line_and_leaves_nothing(
    pagefault, tmp_path, arguments, words
):
    process = pagefault("fuzz", *arguments, "--out", "found", "--json", "report.json", cwd=tmp_path)
    assert_refused(process, *words)
    assert list(tmp_path.iterdir()) == []


def test_options_that_are_not_there_are_status_2(pagefault, tmp_path):
    process = pagefault("fuzz", "--nonsense", cwd=tmp_path)
    assert process.returncode == 2
    assert "No such option" in process.stderr
    assert "Traceback" not in process.stderr


def test_families_that_can_not_be_tested_are_refused_with_the_reason(plain):
    def chosen(*names):
        return cli._chosen_families(list(names), set(plain.functions), plain.skipped)

    assert chosen(FAMILY, "chunking") == ["chunking", FAMILY]
    with pytest.raises(FamilyError, match="no family 'attention', but should be one of: "):
        chosen(FAMILY, "attention")
    with pytest.raises(cli.Usage, match="no get_chunks_paged: the target has no function of this"):
        chosen(FAMILY, "get_chunks_paged")


def test_an_unknown_family_is_one_line_with_the_known_ones(pagefault, plain_target, tmp_path):
    process = pagefault(
        "fuzz", "--target", plain_target, "--family", "attention", "--out", "found", cwd=tmp_path
    )
    assert_refused(process, "no family 'attention', but should be one of: ", FAMILY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--out", "--json"])
def test_a_place_that_can_not_be_written_is_one_line(pagefault, plain_target, tmp_path, option):
    (tmp_path / "file").write_text("in the way")
    process = pagefault("fuzz", "--target", plain_target, option, "file/below/it", cwd=tmp_path)
    assert_refused(process, option, "file/below/it", "can't be written")
    assert [path.name for path in tmp_path.iterdir() if path.name != ".pagefault"] == ["file"]
    assert (tmp_path / "file").read_text() == "in the way"


def has_gpu():
    import torch

    return torch.cuda.is_available()


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
@pytest.mark.parametrize("command", ["fuzz", "repro"])
def test_a_gpu_that_is_not_there_is_one_line(pagefault, case_file, tmp_path, command):
    arguments = [case_file] if command == "repro" else []
    process = pagefault(command, *arguments, "--device", "cuda", cwd=tmp_path)
    assert_refused(process, "device 'cuda'", "no GPU")


# Cases to replay


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param('{"schema": 1,', ["not JSON"], id="broken"),
        pytest.param("\udce4\udcff", ["can't be read"], id="not text"),
        pytest.param('{"schema": 9}', ["schema: 9", "reads 1"], id="schema"),
    ],
)
def test_a_case_that_can_not_be_read_is_one_line(pagefault, tmp_path, text, words):
    path = tmp_path / "broken.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    process = pagefault("repro", path, "--device", "cpu", cwd=tmp_path)
    assert_refused(process, f"case '{path}'", *words)


def test_a_case_that_is_not_there_is_one_line(pagefault, tmp_path):
    process = pagefault("repro", "gone.json", cwd=tmp_path)
    assert_refused(process, "case 'gone.json' can't be read", "No such file")


def test_a_case_of_an_unknown_family_is_one_line(pagefault, case_file, tmp_path):
    case_file.write_text(json.dumps({**CASE, "family": "attention"}))
    process = pagefault("repro", case_file, cwd=tmp_path)
    assert_refused(process, "no family 'attention', but should be one of: ", FAMILY)


def test_replaying_a_case_that_passes_is_status_0(pagefault, plain_target, case_file, tmp_path):
    process = pagefault(
        "repro", case_file, "--target", plain_target, "--device", "cpu", cwd=tmp_path
    )
    assert (process.returncode, process.stdout) == (0, f"{FAMILY}: passed\n")


def test_a_target_that_is_refused_while_replaying_is_one_line(pagefault, case_file, tmp_path):
    (tmp_path / "exits.py").write_text("raise SystemExit(1)\n")
    process = pagefault("repro", case_file, "--target", "exits.py", "--device", "cpu", cwd=tmp_path)
    assert_refused(process, "exits.py' can't be imported", "SystemExit: 1")


# Runs


def replay_lines(text):
    return [
        shlex.split(line.partition("replay: pagefault ")[2])
        for line in text.splitlines()
        if "replay: pagefault " in line
    ]


@pytest.fixture(scope="module")
def fuzz(pagefault, tmp_path_factory):
    """A function that runs 60 cases of a target; it returns folder, process and report."""

    def run(target, seed):
        folder = tmp_path_factory.mktemp("fuzz")
        process = pagefault(
            *("fuzz", "--target", target, "--family", FAMILY, *QUICK[:-1], seed),
            *("--max-cases", 60, "--out", "what was found", "--json", "report.json"),
            cwd=folder,
        )
        assert process.stderr == ""
        return folder, process, json.loads((folder / "report.json").read_text())

    return run


@pytest.fixture(scope="module")
def quiet_run(fuzz, plain_target):
    """A run of a right target with seed 7."""
    return fuzz(plain_target, 7)


@pytest.fixture(scope="module")
def run_with_findings(fuzz, write_target):
    """A run of a wrong target with seed 8."""
    spoil = "if page_size > 4 and input_lengths.sum(): out_cache_loc[0] += 1"
    return fuzz(write_target(spoil, name="a b.py"), 8)


def test_a_run_that_finds_nothing_is_status_0_and_says_what_it_ran(quiet_run, plain_target):
    folder, process, report = quiet_run
    assert process.returncode == 0, process.stdout
    assert "60 cases" in process.stdout
    assert "seed 7" in process.stdout
    assert {"target", "versions", "seed", "families", "findings"} <= set(report)
    assert report["target"] == str(plain_target)
    assert report["seed"] == 7
    assert {"pagefault", "python", "torch", "triton", "hypothesis"} <= set(report["versions"])
    assert report["findings"] == []
    assert list((folder / "what was found").iterdir()) == []
    ran = report["families"][FAMILY]
    assert set(ran) == {"cases", "seconds", "edges", "edge_sets", "never"}
    assert ran["cases"] == 60
    assert ran["seconds"] > 0
    assert all(1 <= count <= 60 for count in ran["edges"].values())
    assert len(ran["edges"]) > 20
    others = [report["families"][name] for name in report["families"] if name != FAMILY]
    assert {"skipped": "the target has no function of this name"} in others
    assert all(set(family) == {"skipped"} for family in others)


def test_one_seed_draws_the_same_cases_and_another_draws_others(
    fuzz, plain_target, quiet_run, run_with_findings
):
    first, again, other = (
        report["families"][FAMILY]
        for _, _, report in (quiet_run, fuzz(plain_target, 7), run_with_findings)
    )
    assert again["edges"] == first["edges"]
    assert other["cases"] == first["cases"]
    assert other["edges"] != first["edges"]


def test_a_finding_is_status_1_with_its_smallest_case(run_with_findings):
    folder, process, report = run_with_findings
    assert process.returncode == 1, process.stdout
    assert report["findings"]
    for finding in report["findings"]:
        assert {"signature", "kind", "family", "case"} <= set(finding)
        assert finding["family"] == FAMILY
        assert finding["kind"] == "value"
        assert finding["signature"].startswith(f"{FAMILY}: value: out_cache_loc: ")
        case = json.loads((folder / finding["case"]).read_text())
        assert case["page_size"] == 5
        assert len(case["req_pool_indices"]) == 1
        assert case["input_lengths"] == [1]
    written = sorted(path.name for path in (folder / "what was found").iterdir())
    assert written == sorted(Path(finding["case"]).name for finding in report["findings"])


def test_the_line_that_a_finding_prints_replays_it(pagefault, run_with_findings):
    folder, process, report = run_with_findings
    lines = replay_lines(process.stdout)
    assert len(lines) == len(report["findings"])
    replayed = pagefault(*lines[0], cwd=folder)
    assert replayed.returncode == 1
    assert replayed.stderr == ""
    assert replayed.stdout.splitlines()[0] in process.stdout
    assert "but should be" in replayed.stdout


def test_a_case_that_kills_the_process_is_a_finding_and_the_run_goes_on(
    pagefault, write_target, tmp_path
):
    kills = write_target("if page_size == 64: ctypes.string_at(0)")
    process = pagefault(
        *("fuzz", "--target", kills, *QUICK[2:], "--time", "3s", "--json", "report.json"),
        cwd=tmp_path,
    )
    assert process.returncode == 1, process.stdout + process.stderr
    assert "the process died: SIGSEGV" in process.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert [finding["kind"] for finding in report["findings"]] == ["died"]
    case = json.loads((tmp_path / report["findings"][0]["case"]).read_text())
    assert (case["page_size"], case["req_pool_indices"]) == (64, [])
    assert report["findings"][0]["minimal"].startswith("minimal: ")
    assert report["findings"][0]["count"] > 1
    replayed = pagefault(*replay_lines(process.stdout)[0], cwd=tmp_path)
    assert replayed.returncode == 1
    assert replayed.stdout == f"{FAMILY}: the process died: SIGSEGV\n"


def test_a_run_in_which_no_case_is_left_is_void(pagefault, plain_target, tmp_path):
    void = tmp_path / "void.py"
    void.write_text(
        plain_target.read_text()
        + "\nfrom pagefault.family import family_named\n"
        + f"edges = family_named({FAMILY!r}).all_edges\n"
        + "pagefault_target = {'without': dict.fromkeys(edges, 'a test')}\n"
    )
    process = pagefault(
        *("fuzz", "--target", void, "--family", FAMILY, *QUICK[2:], "--time", "0.5s"),
        *("--json", "report.json"),
        cwd=tmp_path,
    )
    assert process.returncode == 3, process.stdout + process.stderr
    assert "void run: no case ran" in process.stdout
    assert "Traceback" not in process.stdout + process.stderr
    assert json.loads((tmp_path / "report.json").read_text())["void"] == "no case ran"


def test_a_run_whose_worker_fails_is_void(pagefault, plain_target, tmp_path):
    fails = tmp_path / "fails.py"
    fails.write_text(
        "import multiprocessing\n"
        "if multiprocessing.parent_process(): raise RuntimeError('not in a worker')\n"
        + plain_target.read_text()
    )
    process = pagefault("fuzz", "--target", fails, *QUICK, cwd=tmp_path)
    assert process.returncode == 3, process.stdout + process.stderr
    assert "void run: " in process.stdout
    assert "not in a worker" in process.stdout


def children_of(pid):
    """Return the ids of the processes that a process has started, and theirs."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = [int(child) for child in listed]
    return found + [below for child in found for below in children_of(child)]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(
    not Path(f"/proc/self/task/{os.getpid()}/children").exists(),
    reason="this kernel does not list a process's children",
)
def test_a_case_that_takes_all_memory_is_a_finding_and_the_run_goes_on(
    pagefault, write_target, tmp_path
):
    eats = write_target("while page_size == 64: EATEN.append(bytearray(1 << 24))")
    eats.write_text(f"EATEN = []\n{eats.read_text()}")
    process = pagefault(
        *("fuzz", "--target", eats, *QUICK[2:], "--time", "3s", "--json", "report.json"),
        cwd=tmp_path,
        PAGEFAULT_MEMORY_LIMIT="200",
    )
    assert process.returncode == 1, process.stdout + process.stderr
    assert "the process took more memory than its share" in process.stdout
    (finding,) = json.loads((tmp_path / "report.json").read_text())["findings"]
    assert finding["signature"] == f"{FAMILY}: memory: host"
    case = json.loads((tmp_path / finding["case"]).read_text())
    assert (case["page_size"], case["req_pool_indices"]) == (64, [])
    assert finding["minimal"].startswith("minimal: ")


def test_ctrl_c_ends_a_run_with_a_summary_and_no_process_left(environment, write_target, tmp_path):
    started = tmp_path / "started"
    slow = write_target(f"open({str(started)!r}, 'w').close()")
    process = subprocess.Popen(
        [sys.executable, "-m", "pagefault", "fuzz", "--target", slow, "--json", "report.json"]
        + [str(option) for option in (*QUICK[2:], "--time", "60s")],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Where a shell has started the tests in the background, children ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 60
    while not started.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    children = children_of(process.pid)
    assert children
    os.killpg(process.pid, signal.SIGINT)  # As a terminal does: to the workers as well.
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stdout + stderr
    assert "interrupted" in stdout
    assert "0 findings" in stdout
    assert stderr == ""
    assert json.loads((tmp_path / "report.json").read_text())["findings"] == []
    deadline = time.monotonic() + 5
    while any(map(is_running, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, children))


# A case with garbage


def test_garbage_is_shown_again_by_its_case(pagefault, tmp_path):
    tests = Path(__file__).parents[1]
    arguments = ("repro", tests / "garbage" / "before_huge_pages.json", "--device", "cpu")
    target = tests / "faulty_any_bytes" / "first_page_truncated.py"
    process = pagefault(*arguments, "--target", target, cwd=tmp_path)
    assert process.returncode == 1, process.stdout + process.stderr
    assert "read of req_to_pages[" in process.stdout
    process = pagefault(*arguments, cwd=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
