"""The pytest plugin, in processes of their own: options, header, seeds, streams and workers."""

import os
import re
from types import SimpleNamespace

import pytest

from pagefault import device as devices
from pagefault import plugin

FAMILY = "compute_out_cache_loc"

# Notes of each case that it is called with, in a file for each test.
NOTING = f"""
import os, re
from pathlib import Path

def note(name, *arguments):
    test = re.sub(r"\\W+", "_", os.environ["PYTEST_CURRENT_TEST"].split(" ")[0])
    line = repr([getattr(a, "tolist", lambda: a)() for a in arguments[1:]]) + "\\n"
    with Path("streams", test).open("a") as file:
        file.write(line)

right = plain.{FAMILY}
plain.{FAMILY} = lambda *arguments: (note("", *arguments), right(*arguments))[1]
"""
CONFTEST = """
from hypothesis import settings

settings.register_profile("short", max_examples=12)
settings.register_profile("fixed", max_examples=12, derandomize=True)
settings.load_profile("short")
"""
PROPERTIES = f"""
def test_conforms(conforms):
    conforms({FAMILY!r})

def test_lacking(conforms):
    conforms("fused_decode_input_prep")
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with two properties and a profile of 12 cases."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_mine.py").write_text(PROPERTIES)
    (tmp_path / "streams").mkdir()
    return tmp_path


@pytest.fixture
def noting_target(write_target):
    """A right target that notes its cases."""
    return write_target("", name="notes.py", extra=NOTING)


def streams_in(folder):
    """Return what was noted, by test, and forget it."""
    found = {}
    for path in sorted((folder / "streams").iterdir()):
        found[path.name] = path.read_text()
        path.unlink()
    return found


def seed_in(process):
    return int(re.search(r"^pagefault: .*, seed (\d+)$", process.stdout, re.MULTILINE)[1])


def test_the_header_says_on_what_the_answer_depends(run_pytest, noting_target):
    process = run_pytest(f"--target={noting_target}", "--collect-only", "--hypothesis-seed=5")
    header = next(line for line in process.stdout.splitlines() if line.startswith("pagefault: "))
    assert header.startswith("pagefault: device cpu (interpreter), pagefault ")
    for package in ("python", "torch", "triton", "hypothesis"):
        assert re.search(rf", {package} \d+\.\d+", header)
    assert header.endswith(f", target {noting_target}, profile short, seed 5")


@pytest.mark.slow
def test_shards_are_streams_of_their_own_that_the_seed_of_the_header_repeats(
    run_pytest, noting_target, folder
):
    options = (f"--target={noting_target}", "--shards=3")
    process = run_pytest(*options, "-n", 2, "-rs")
    assert "3 passed, 3 skipped" in process.stdout, process.stdout
    assert "the target has no function of this name" in process.stdout
    streams = streams_in(folder)
    assert [name.split("shard")[1] for name in streams] == ["0_", "1_", "2_"]
    assert len(set(streams.values())) == 3
    # Two replicas of 12 cases each.
    assert [len(stream.splitlines()) for stream in streams.values()] == [24, 24, 24]
    # The workers had the seed of the header, and one process with that seed draws the same.
    seed = seed_in(process)
    run_pytest(*options, f"--hypothesis-seed={seed}")
    assert streams_in(folder) == streams
    run_pytest(options[0], f"--hypothesis-seed={seed + 1}")
    (other,) = streams_in(folder).values()
    assert other not in streams.values()


def test_without_a_seed_each_run_has_one_of_its_own(run_pytest):
    seeds = {seed_in(run_pytest("--collect-only")) for _ in range(2)}
    assert len(seeds) == 2


@pytest.mark.parametrize("profile", ["fixed", "ci"])
def test_a_deterministic_profile_has_the_same_seed_in_each_run(run_pytest, profile):
    process = run_pytest("--collect-only", f"--hypothesis-profile={profile}")
    assert f"profile {profile}, seed 0" in process.stdout


def test_a_given_seed_wins_over_a_deterministic_profile(run_pytest):
    options = ("--collect-only", "--hypothesis-profile=ci", "--hypothesis-seed=9")
    assert seed_in(run_pytest(*options)) == 9


# Usage


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--device", "tpu"], "device 'tpu', but should be one of", id="device"),
        pytest.param(["--shards", "0"], "--shards '0', but should be", id="no shards"),
        pytest.param(["--shards", "few"], "--shards 'few', but should be", id="shards"),
        pytest.param(["--target", "gone.py"], "target 'gone.py': no such file", id="target"),
    ],
)
def test_options_that_make_no_sense_are_refused_with_a_reason(run_pytest, arguments, words):
    process = run_pytest(*arguments)
    assert process.returncode in (2, 4)
    assert words in process.stdout + process.stderr
    assert "Traceback" not in process.stdout + process.stderr


@pytest.mark.parametrize("where", ["conftest", "plugin"])
def test_short_names_that_somebody_else_has_are_theirs(run_pytest, folder, where):
    """A conftest registers its options after this plugin, a plugin that -p names before it."""
    name = "conftest" if where == "conftest" else "other_plugin"
    (folder / f"{name}.py").write_text(
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--device', default='none')\n"
        "    parser.getgroup('other').addoption('--shards', type=str)\n"
    )
    (folder / "test_mine.py").write_text(
        "def test_options(pytestconfig, pagefault_shard):\n"
        "    assert pytestconfig.getoption('--device') == 'theirs'\n"
        "    assert pytestconfig.getoption('--shards') == 'many'\n"
        "    assert pytestconfig.getoption('pagefault_device') == 'cpu'\n"
        "    assert pytestconfig.getoption('pagefault_target') == 'mine'\n"
    )
    process = run_pytest(
        *(["-p", name] if where == "plugin" else []),
        *("--device", "theirs", "--shards=many", "--pagefault-shards=2", "--target", "mine"),
        PYTHONPATH=str(folder),
    )
    assert "2 passed" in process.stdout, process.stdout + process.stderr


def test_a_kernel_that_a_conftest_imports_is_interpreted(run_pytest, folder):
    (folder / "conftest.py").write_text(
        "import os\n\nINTERPRET = os.environ.get('TRITON_INTERPRET')\n"
    )
    (folder / "test_mine.py").write_text(
        "def test_conftest(pytestconfig):\n"
        "    (conftest,) = [p for p in pytestconfig.pluginmanager.get_plugins()\n"
        "                   if hasattr(p, 'INTERPRET')]\n"
        "    assert conftest.INTERPRET == '1'\n"
    )
    assert "1 passed" in run_pytest("--device", "cpu").stdout


# assert_conforms


def test_assert_conforms_passes_a_right_function_and_explains_a_wrong_one(
    run_pytest, plain_target, pagefault, folder
):
    (folder / "kernels_of_mine.py").write_text(
        plain_target.read_text()
        + f"\nright = {FAMILY}\n\n\n"
        + f"def {FAMILY}(out, rows, lengths, starts, table, page_size):\n"
        + "    right(out, rows, lengths, starts, table, page_size)\n"
        + "    if lengths.sum() and starts[0] > 0:\n"
        + "        out[lengths.sum() - 1] += 1\n"
    )
    (folder / "test_mine.py").write_text(
        "import kernels_of_mine\n"
        "from pagefault import assert_conforms\n\n"
        f"def test_right():\n    assert_conforms(kernels_of_mine.right, family={FAMILY!r})\n\n"
        f"def test_wrong():\n    assert_conforms(kernels_of_mine.{FAMILY})\n\n"
        f"def test_dialect():\n"
        f"    assert_conforms(kernels_of_mine.right, {FAMILY!r}, overflow_slot=-1)\n"
    )
    process = run_pytest("--hypothesis-seed=1")
    assert "2 failed, 1 passed" in process.stdout, process.stdout + process.stderr
    assert "Traceback" not in process.stdout
    assert re.search(r"NonConformance: out_cache_loc\[0\] = \d+, but should be \d+", process.stdout)
    assert "minimal: no single step makes it smaller" in process.stdout
    assert "out_cache_loc[0] = 0, but should be -1" in process.stdout
    # Another name and another dialect: no command would find the same function.
    assert "  case: " in process.stdout
    (line,) = re.findall(r"replay: pagefault (repro .*)", process.stdout)
    replayed = pagefault(*line.split(), cwd=folder)
    assert replayed.returncode == 1, replayed.stderr
    assert replayed.stdout.splitlines()[0] in process.stdout


# Workers


def with_gpus(monkeypatch, count, visible=None):
    """Let this machine seem to have some GPUs, without a change to the environment that stays."""
    monkeypatch.setattr(devices, "count_gpus", lambda: count)
    monkeypatch.setenv("TRITON_INTERPRET", "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def auto_workers(device):
    config = SimpleNamespace(getoption=lambda name: device)
    return plugin.pytest_xdist_auto_num_workers(config)


def test_auto_is_answered_by_this_plugin(run_pytest, folder):
    (folder / "conftest.py").write_text(
        "from pagefault import plugin\n\nplugin.count_workers = lambda device: {'cpu': 3}[device]\n"
    )
    (folder / "test_mine.py").write_text("def test_nothing():\n    pass\n")
    assert "created: 3/3 workers" in run_pytest("-n", "auto", "-v").stdout


def test_auto_means_a_few_workers_for_each_gpu(monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    with_gpus(monkeypatch, 2)
    assert auto_workers("auto") == 2 * devices.WORKERS_PER_GPU
    assert 4 <= devices.WORKERS_PER_GPU <= 16
    assert auto_workers("cpu") == 64
    with_gpus(monkeypatch, 1, visible="3")
    assert auto_workers("auto") == devices.WORKERS_PER_GPU
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(2))
    assert auto_workers("auto") == 2


def test_a_number_of_workers_that_the_environment_gives_is_left_to_xdist(monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "3")
    assert auto_workers("cpu") is None


def test_auto_with_a_gpu_that_is_not_there_is_a_usage_error(monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    with_gpus(monkeypatch, 0)
    with pytest.raises(pytest.UsageError, match="device 'cuda'"):
        auto_workers("cuda")


def test_workers_are_spread_over_the_gpus_that_are_visible(monkeypatch):
    slots = []
    for slot in range(5):
        with_gpus(monkeypatch, 2, visible="4,7")
        devices.prepare("cuda", slot)
        slots.append(os.environ["CUDA_VISIBLE_DEVICES"])
        assert os.environ["TRITON_INTERPRET"] == "0"
    assert slots == ["4", "7", "4", "7", "4"]


def test_a_process_that_starts_workers_keeps_all_gpus_for_them(monkeypatch):
    with_gpus(monkeypatch, 2, visible="4,7")
    devices.prepare("cuda")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,7"


def test_a_worker_knows_its_slot_from_xdist(monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw11")
    assert plugin._gpu_slot() == 11
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert plugin._gpu_slot() is None
