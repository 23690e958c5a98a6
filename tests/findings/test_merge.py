"""Merging folders of findings: in any order, any number of times, one result."""

import random
import shutil

import pytest

from pagefault.finding_record import Rate
from pagefault.findings import FindingsError, FindingsFolder, merge

NUM_FOLDERS = 10
ROLES = ("token", "hole token", "overflow token")
SIZES = ("not shrunk yet", "not known to be minimal: ran out", "minimal: (3 cases tried)")


def fill(folder, draw, found, context):
    """Add a few findings, drawn from so few that folders overlap."""
    for _ in range(draw.randrange(4, 20)):
        run = draw.randrange(1, 5)
        rate = draw.choice([None, Rate(draw.randrange(4), 10)])
        row, how_small = draw.randrange(1, 4), draw.choice(SIZES)
        script = b"%d of %d" % (row, run)
        path = folder.add(
            found(row, draw.choice(ROLES), how_small, rate),
            context(run, device=draw.choice(["cpu", "cuda"])),
            draw.randrange(1, 100),
            {"repro.py": script, f"kernel/of_run_{run}.py": b"#"},
        )
        if draw.random() < 0.3:
            folder.add_pass(path.name, context(draw.randrange(1, 9)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory, found, context):
    """Ten folders that overlap; some began as a copy of another, and went on."""
    draw = random.Random(4)
    made = []
    for number in range(NUM_FOLDERS):
        path = tmp_path_factory.mktemp("findings") / "findings"
        if made and number % 2:
            shutil.copytree(draw.choice(made), path)
        fill(FindingsFolder(path), draw, found, context)
        made.append(path)
    return made


@pytest.fixture(scope="module")
def merged(folders, tmp_path_factory, tree):
    """All files of the ten, merged in order."""
    into = tmp_path_factory.mktemp("merged")
    merge(folders, into)
    return tree(into)


def test_the_folders_overlap_and_differ(folders, merged, tree):
    trees = [tree(folder) for folder in folders]
    assert len({tuple(sorted(content.items())) for content in trees}) > NUM_FOLDERS / 2
    assert any(len(FindingsFolder(folder).load()) > 1 for folder in folders)
    assert all(content != merged for content in trees)
    statuses = [r.status for folder in folders for r in FindingsFolder(folder).load().values()]
    assert {*statuses} == {"open", "fixed"}


@pytest.mark.parametrize("seed", range(5))
def test_any_order_and_any_repetition_gives_the_same_bytes(folders, merged, tmp_path, tree, seed):
    draw = random.Random(seed)
    order = draw.sample(folders, NUM_FOLDERS) + draw.sample(folders, 3)
    merge(order, tmp_path)
    assert tree(tmp_path) == merged


@pytest.mark.parametrize("seed", range(3))
def test_merging_some_first_and_the_rest_later_gives_the_same_bytes(
    folders, merged, tmp_path, tree, seed
):
    order = random.Random(seed).sample(folders, NUM_FOLDERS)
    merge(order[:4], tmp_path / "some")
    merge(order[4:7], tmp_path / "others")
    merge([tmp_path / "others", *order[7:]], tmp_path / "some")
    assert tree(tmp_path / "some") == merged
    merge([tmp_path / "some", tmp_path / "some"], tmp_path / "some")
    assert tree(tmp_path / "some") == merged


def test_counts_are_those_of_each_run_once(tmp_path, found, context):
    first, second = FindingsFolder(tmp_path / "1"), FindingsFolder(tmp_path / "2")
    first.add(found(1), context(1), 5, {})
    shutil.copytree(first.path, tmp_path / "copy")
    first.add(found(1), context(1), 7, {})
    second.add(found(1), context(2), 2, {})
    findings, damaged = merge([first.path, second.path, tmp_path / "copy"], tmp_path / "all")
    assert [record.count for record in findings.values()] == [9]
    assert damaged == []


def test_a_damaged_finding_is_left_out_and_left_alone(tmp_path, found, context):
    folder = FindingsFolder(tmp_path / "1")
    path = folder.add(found(1), context(1), 1, {})
    folder.add(found(1, role="hole token"), context(1), 1, {})
    (path / "finding.json").write_text("{")
    findings, damaged = merge([tmp_path / "1"], tmp_path / "all")
    assert len(findings) == 1
    assert path.name not in findings
    assert len(damaged) == 1
    assert str(path) in damaged[0]
    assert (path / "finding.json").read_text() == "{"


def test_what_is_no_folder_of_findings_is_refused_before_anything_is_written(
    tmp_path, found, context
):
    path = FindingsFolder(tmp_path / "1").add(found(1), context(1), 1, {})
    for wrong in (path, tmp_path / "gone", path / "case.json"):
        with pytest.raises(FindingsError, match="is no folder of findings"):
            merge([tmp_path / "1", wrong], tmp_path / "all")
    assert not (tmp_path / "all").exists()
