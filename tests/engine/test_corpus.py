"""The corpus: the smallest case of each set of edges, bounded, in any order the same."""

import errno
import json
import os
import random

import pytest

from pagefault import corpus
from pagefault.corpus import Corpus, Entry, FamilyCorpus, corpora_of, merge
from pagefault.family import Domain, family_named
from pagefault.minimal import size_of
from pagefault.stream import draw_cases

FAMILY = family_named("compute_out_cache_loc")


@pytest.fixture(scope="module")
def cases():
    """A thousand cases."""
    drawn = []
    draw_cases(FAMILY.strategy(Domain(without=frozenset(["wide table"]))), 1000, 5, drawn.append)
    return drawn


def taken(cases):
    kept = Corpus()
    for case in cases:
        kept.take(FAMILY, case, FAMILY.edges(case))
    return kept


def entry_of(case):
    return Entry("f", tuple(sorted(FAMILY.edges(case))), size_of(FAMILY, case), case)


def test_of_each_edge_the_smallest_case_is_kept_by_number_of_requests(cases):
    smallest = {}
    for case in cases:
        for edge in FAMILY.edges(case):
            smallest[edge] = min(smallest.get(edge, case.num_requests), case.num_requests)
    kept = {}
    for entry in taken(cases).entries():
        for edge in entry.edges:
            kept[edge] = min(kept.get(edge, entry.size[0]), entry.size[0])
    assert kept == smallest


def test_of_one_set_the_smaller_case_is_kept_whichever_comes_first(cases):
    by_edges = {}
    for case in cases:
        by_edges.setdefault(FAMILY.edges(case), []).append(case)
    same = next(group for group in by_edges.values() if len(group) > 1)
    least = min(size_of(FAMILY, case) for case in same)
    for order in (same, same[::-1]):
        family_corpus = FamilyCorpus()
        for case in order:
            family_corpus.add(Entry(FAMILY.name, ("edge",), size_of(FAMILY, case), case))
        (entry,) = family_corpus.entries()
        assert entry.size == least
        assert FAMILY.from_json(entry.case) in same


def test_there_is_room_for_so_many_sets_and_the_number_of_all_is_known_about(cases):
    family_corpus = taken(cases).families[FAMILY.name]
    num_sets = len({FAMILY.edges(case) for case in cases})
    assert num_sets > 4 * corpus.MOST_SETS
    assert len(family_corpus.entries()) <= corpus.MOST_SETS + len(FAMILY.all_edges)
    assert num_sets / 1.4 < family_corpus.num_sets < 1.4 * num_sets
    few = taken(cases[:20]).families[FAMILY.name]
    assert few.num_sets == len({FAMILY.edges(case) for case in cases[:20]})


def test_joining_in_any_order_any_number_of_times_gives_one_corpus(cases, tmp_path):
    parts = [[*taken(cases[i::4]).entries()] for i in range(4)]
    contents = set()
    for seed in range(4):
        draw = random.Random(seed)
        joined = Corpus()
        for part in [*draw.sample(parts, 4), *draw.sample(parts, 2)]:
            joined.add(draw.sample(part, len(part)))
        joined.write(tmp_path / "corpus")
        contents.add((tmp_path / "corpus").read_bytes())
    assert len(contents) == 1


def test_what_is_written_is_read_and_its_cases_are_cases(cases, tmp_path):
    path = tmp_path / "corpus.jsonl"
    taken(cases).write(path)
    again, troubles = Corpus.read(path)
    assert troubles == []
    again.write(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    for entry in again.entries():
        assert FAMILY.edges(FAMILY.from_json(entry.case)) == set(entry.edges)


def test_a_case_too_long_is_left_out(cases, tmp_path, monkeypatch):
    lengths = sorted(len(entry.case) for entry in taken(cases).entries())
    monkeypatch.setattr(corpus, "MOST_CASE_BYTES", lengths[len(lengths) // 2])
    left = [len(entry.case) for entry in taken(cases).entries()]
    assert left
    assert max(left) <= corpus.MOST_CASE_BYTES


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b'{"family": "compute_out', id="cut off"),
        pytest.param(b"\xff\xfe", id="no text"),
        pytest.param(b"[]", id="no object"),
        pytest.param(b'{"family": "f", "edges": [], "size": [1, "2"], "case": {}}', id="size"),
        pytest.param(b'{"family": "f", "edges": [3], "size": [1], "case": {}}', id="edges"),
        pytest.param(b'{"family": "f", "edges": [], "size": [1]}', id="no case"),
    ],
)
def test_damaged_lines_are_set_aside_and_the_others_are_read(cases, tmp_path, line):
    path = tmp_path / "corpus.jsonl"
    taken(cases[:30]).write(path)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:3], line, *lines[3:]]))
    again, troubles = Corpus.read(path)
    assert [json.loads(entry.to_json()) for entry in again.entries()] == [*map(json.loads, lines)]
    assert troubles == [f"corpus '{path}': 1 damaged lines; set aside in corpus.jsonl.damaged"]
    assert (tmp_path / "corpus.jsonl.damaged").read_bytes() == line + b"\n"


def test_a_full_disk_leaves_the_corpus_that_there_was(cases, tmp_path, monkeypatch):
    path = tmp_path / "corpus.jsonl"
    taken(cases[:30]).write(path)
    before = path.read_bytes()

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        taken(cases).write(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_joined_in_any_order_corpora_give_the_same_file(cases, tmp_path):
    paths = [tmp_path / f"{number}.jsonl" for number in range(10)]
    for number, path in enumerate(paths):
        taken(cases[number * 60 : number * 60 + 200]).write(path)
    written = []
    for seed in range(3):
        order = random.Random(seed).sample(paths, 10)
        into = tmp_path / f"joined {seed}.jsonl"
        merge(order[:4], into)
        corpus, damaged = merge([*order[4:], *order[:2]], into)
        assert damaged == []
        written.append(into.read_bytes())
    assert written[0] == written[1] == written[2]
    assert corpus.num_sets() == taken(cases[:740]).num_sets()


def test_corpora_are_found_in_a_whole_folder(tmp_path):
    (tmp_path / "campaigns" / "ours-cpu-1").mkdir(parents=True)
    (tmp_path / "campaigns" / "ours-cpu-2").mkdir()
    assert corpora_of(tmp_path) == []
    for path in ("corpus.jsonl", "campaigns/ours-cpu-1/corpus.jsonl"):
        (tmp_path / path).touch()
    assert corpora_of(tmp_path) == [
        tmp_path / "corpus.jsonl",
        tmp_path / "campaigns" / "ours-cpu-1" / "corpus.jsonl",
    ]
