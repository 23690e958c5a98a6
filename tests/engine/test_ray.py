"""A campaign on a Ray cluster: machines that die cost what was under way, and nothing else."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

import pytest

from pagefault.findings import FindingsFolder
from pagefault.state import State

FAMILY = "compute_out_cache_loc"
NUM_CASES = 3000
# Two faults, of which the second is rare.
SPOIL = """
if page_size > 4 and input_lengths.sum(): out_cache_loc[0] += 1
if page_size == 2 and len(req_pool_indices) > 8 and input_lengths.sum(): out_cache_loc[-1] = -5
"""


@pytest.fixture
def cluster():
    """A cluster of three nodes with a core each."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'pagefault[ray]'")
    from ray.cluster_utils import Cluster

    with ExitStack() as stack:
        # The paths of Ray's sockets have to be short.
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        head = {"num_cpus": 1, "include_dashboard": False, "temp_dir": folder}
        started = Cluster(initialize_head=True, head_node_args=head)
        stack.callback(started.shutdown)
        for _ in range(2):
            started.add_node(num_cpus=1)
        started.wait_for_nodes()
        yield started


def fuzz_command(target, *more):
    return [
        *(sys.executable, "-m", "pagefault", "fuzz", "--target", str(target), "--family", FAMILY),
        *("--device", "cpu", "--time", "120s", "--max-cases", str(NUM_CASES), "--seed", "3"),
        *("--machine", "here", "--json", "report.json", *map(str, more)),
    ]


@pytest.fixture
def start(environment):
    """A function that starts a command in a folder that it makes."""

    def start_in(folder, command):
        folder.mkdir(exist_ok=True)
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


@pytest.fixture
def fuzz(start):
    """A function that runs a campaign, and something once it has run some of its cases."""

    def run(folder, command, half_way=None):
        process = start(folder, command)
        if half_way is not None:
            wait_for(lambda: num_cases_in(folder) >= NUM_CASES // 3, process)
            assert process.poll() is None, process.communicate()
            half_way(process)
        said, _ = process.communicate(timeout=200)
        assert process.returncode in (0, 1, 3, 130), said
        return said, json.loads((folder / "report.json").read_text())

    return run


def num_cases_in(folder):
    """Return how many cases have been run that the state of the campaign in a folder counts."""
    paths = [*(folder / ".pagefault" / "campaigns").glob("*/state.json")]
    return State.from_json(paths[0].read_text()).result.cases if paths else 0


def wait_for(condition, process, seconds=100.0):
    deadline = time.monotonic() + seconds
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def assert_ended(pids):
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def counts_of(report):
    return sorted((finding["signature"], finding["count"]) for finding in report["findings"])


@pytest.mark.slow
def test_a_cluster_that_loses_a_node_ends_as_one_machine_does(
    cluster, fuzz, write_target, tmp_path
):
    target = write_target(SPOIL)
    node = cluster.list_all_nodes()[-1]
    said, report = fuzz(
        tmp_path / "cluster",
        fuzz_command(target, "--ray", cluster.address),
        lambda process: cluster.remove_node(node, allow_graceful=False),
    )
    assert f"3 workers on the Ray cluster {cluster.address}; " in said
    assert "workers lost with their machine: 1" in said
    assert report["workers_lost"] == 1
    assert report["void"] == "", said
    assert report["families"][FAMILY]["cases"] == NUM_CASES
    _, alone = fuzz(tmp_path / "alone", fuzz_command(target, "--workers", 3))
    assert len(alone["findings"]) >= 2
    assert counts_of(report) == counts_of(alone)
    assert report["families"][FAMILY]["edges"] == alone["families"][FAMILY]["edges"]
    filed = FindingsFolder(tmp_path / "cluster" / ".pagefault" / "findings").load().values()
    assert sorted((str(record.signature), record.count) for record in filed) == counts_of(report)
    for record in filed:
        assert record.smallest.how_small.startswith("minimal: ")


@pytest.mark.slow
def test_a_kernel_that_ends_its_process_is_found_and_its_machine_is_not_lost(
    cluster, fuzz, write_target, tmp_path
):
    target = write_target("if page_size == 64 and len(req_pool_indices) > 1: ctypes.string_at(0)")
    said, report = fuzz(tmp_path, fuzz_command(target, "--ray", cluster.address, "--workers", 2))
    (finding,) = report["findings"]
    assert finding["signature"] == f"{FAMILY}: died: SIGSEGV"
    assert finding["minimal"].startswith("minimal: ")
    assert "lost" not in said


@pytest.mark.slow
def test_a_campaign_on_a_cluster_is_interrupted_and_resumed(cluster, fuzz, write_target, tmp_path):
    pids = tmp_path / "pids"
    target = write_target(
        f"with open({str(pids)!r}, 'a') as file: file.write(f'{{os.getpid()}} {{os.getppid()}}\\n')"
    )
    command = fuzz_command(target, "--ray", cluster.address, "--workers", 2, "--resume")
    # So many that they are not done before the signal arrives.
    num_cases = 3 * NUM_CASES
    command += ["--max-cases", str(num_cases)]
    said, report = fuzz(tmp_path, command, lambda process: process.send_signal(signal.SIGINT))
    assert "interrupted" in said
    assert report["families"][FAMILY]["cases"] < num_cases
    assert_ended(set(pids.read_text().split()))
    said, report = fuzz(tmp_path, command)
    assert "resumed: " in said
    assert report["families"][FAMILY]["cases"] == num_cases


@pytest.mark.slow
def test_workers_end_when_the_driver_is_killed(cluster, start, write_target, tmp_path):
    pids = tmp_path / "pids"
    target = write_target(
        f"with open({str(pids)!r}, 'a') as file: file.write(f'{{os.getpid()}}\\n')\ntime.sleep(60)"
    )
    process = start(tmp_path, fuzz_command(target, "--ray", cluster.address, "--workers", 2))
    wait_for(lambda: pids.exists() and len(set(pids.read_text().split())) == 2, process)
    process.kill()
    process.communicate()
    workers = set(pids.read_text().split())
    assert len(workers) == 2
    assert_ended(workers)


@pytest.mark.slow
def test_an_address_that_nobody_answers_is_one_line(pagefault, plain_target, tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'pagefault[ray]'")
    process = pagefault("fuzz", "--target", plain_target, "--ray", "127.0.0.1:1", cwd=tmp_path)
    assert process.returncode == 2
    assert process.stderr == "pagefault: --ray '127.0.0.1:1': nobody has answered in 20 s\n"


def test_without_ray_the_option_says_what_is_missing(pagefault, plain_target, tmp_path):
    (tmp_path / "ray.py").write_text("raise ImportError('there is none')")
    process = pagefault(
        *("fuzz", "--target", plain_target, "--ray", "auto"),
        cwd=tmp_path,
        PYTHONPATH=str(tmp_path),
    )
    assert process.returncode == 2
    assert process.stderr == "pagefault: --ray needs Ray: pip install 'pagefault[ray]'\n"
