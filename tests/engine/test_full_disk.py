"""A disk that is full for real: a small file system, mounted for the time of the test alone."""

import json
import shutil
import subprocess
import sys

import pytest

FAMILY = "compute_out_cache_loc"

TARGET = """
from pagefault.target import load_target

right = load_target("ours").functions["compute_out_cache_loc"]


def compute_out_cache_loc(out, rows, lengths, starts, table, page_size):
    right(out, rows, lengths, starts, table, page_size)
    if page_size == 16:
        out[:1] = -3
"""

# Enough for what is found first, and its journal.
SIZE = "4m"

FUZZ = (
    '"$PYTHON" -m pagefault fuzz --target target.py --family compute_out_cache_loc --workers 1'
    " --device cpu --findings disk/findings --state disk/state --out disk/cases"
)
SCRIPT = f"""
mount -t tmpfs -o size={SIZE} none disk || exit 99
{FUZZ} --seed 7 --max-cases 60 > first.txt 2>&1; echo $? > first.status
cp -a disk before
cat /dev/zero > disk/filler 2> /dev/null
{FUZZ} --seed 8 --max-cases 60 --json full.json > full.txt 2>&1; echo $? > full.status
rm disk/filler
cp -a disk after
"""


def files_in(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def can_mount():
    if shutil.which("unshare") is None:
        return False
    trial = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
    return subprocess.run(trial, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="no file system can be mounted in a namespace here")
def test_on_a_full_disk_a_campaign_goes_on_and_loses_no_earlier_finding(tmp_path, environment):
    (tmp_path / "target.py").write_text(TARGET)
    (tmp_path / "disk").mkdir()
    subprocess.run(
        ["unshare", "-rm", "sh", "-c", SCRIPT],
        cwd=tmp_path,
        env=environment(PYTHON=sys.executable),
        check=True,
        timeout=100,
    )
    said = (tmp_path / "full.txt").read_text()
    assert (tmp_path / "first.status").read_text() == "1\n", (tmp_path / "first.txt").read_text()
    assert (tmp_path / "full.status").read_text() == "1\n", said
    assert "No space left on device" in said
    assert "journals have no room in 'disk/state/" in said
    report = json.loads((tmp_path / "full.json").read_text())
    assert report["families"][FAMILY]["cases"] == 60
    earlier = files_in(tmp_path / "before" / "findings")
    assert len(earlier) > 1
    after = files_in(tmp_path / "after" / "findings")
    assert {path: after[path] for path in earlier} == earlier
