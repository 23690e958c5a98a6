"""A corpus: the smallest case that was run of each set of edges, as far as there is room.

A set of edges says what a case means: which boundaries it touches, where it overflows, how it lies
in memory. Of all sets that a campaign reaches, those are kept whose digests are the least: a fair
sample, the same whatever comes first, that says how many sets there are as well. Beside them the
smallest case of each edge is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from . import durable
from .case import Case
from .family import Family
from .minimal import size_of

# Its file, in the folder of a campaign's state and where corpora are joined.
CORPUS = "corpus.jsonl"

# Sets of each family, and bytes of a case's JSON.
MOST_SETS = 128
MOST_CASE_BYTES = 20_000

_DIGEST_BYTES = 8
_NUM_DIGESTS = 1 << 8 * _DIGEST_BYTES


@dataclass(frozen=True)
class Entry:
    """One case of a corpus.

    Attributes:
        family: The family's name.
        edges: Those that the case touches, sorted.
        size: How large it is, see `size_of`.
        source: The case, or its JSON in one line.
    """

    family: str
    edges: tuple[str, ...]
    size: tuple[int, ...]
    source: Case | str

    @cached_property
    def case(self) -> str:
        """The case's JSON, in one line; most entries are replaced before it is asked for."""
        if isinstance(self.source, str):
            return self.source
        return json.dumps(json.loads(self.source.to_json(self.family)))

    def is_before(self, other: Entry | None) -> bool:
        """Return whether this one is kept where both could be."""
        if other is None or self.size != other.size:
            return other is None or self.size < other.size
        return self.case < other.case

    def to_json(self) -> str:
        """Return the entry as a line of JSON."""
        fields = {"family": self.family, "edges": self.edges, "size": self.size}
        return f'{json.dumps(fields)[:-1]}, "case": {self.case}}}'

    @classmethod
    def from_json(cls, line: str) -> Entry:
        """Return the entry that a line describes.

        Raises:
            ValueError: It describes none.
        """
        document = json.loads(line)
        fields = document if isinstance(document, dict) else {}
        family, edges, size = (fields.get(name) for name in ("family", "edges", "size"))
        if (
            isinstance(family, str)
            and isinstance(edges, list)
            and all(isinstance(edge, str) for edge in edges)
            and isinstance(size, list)
            and size
            and all(type(number) is int for number in size)
            and isinstance(fields.get("case"), dict)
        ):
            case = json.dumps(fields["case"])
            return cls(family, tuple(sorted(edges)), tuple(size), case)
        raise ValueError(f"{line[:60]!r} is no case of a corpus")


def digest_of(edges: Iterable[str]) -> int:
    """Return a number from 0 to 2**64 - 1 that is another for each set of edges."""
    text = "\n".join(sorted(edges))
    digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
    return int.from_bytes(digest, "big")


class FamilyCorpus:
    """The corpus of one family."""

    def __init__(self) -> None:
        self._by_digest: dict[int, Entry] = {}
        self._by_edge: dict[str, Entry] = {}
        self._largest = -1

    @property
    def num_sets(self) -> int:
        """How many sets of edges were reached; an estimate, once there was no room for all."""
        if len(self._by_digest) < MOST_SETS:
            return len(self._by_digest)
        return (MOST_SETS - 1) * _NUM_DIGESTS // max(1, self._largest)

    def entries(self) -> list[Entry]:
        """Return what is kept, in an order of its own."""
        kept = {
            (entry.edges, entry.size, entry.case): entry
            for entry in (*self._by_digest.values(), *self._by_edge.values())
        }
        return [kept[key] for key in sorted(kept) if len(kept[key].case) <= MOST_CASE_BYTES]

    def may_keep(self, case: Case, edges: frozenset[str]) -> bool:
        """Return whether a case can be of use here; quick, and now and then wrongly True."""
        num_requests = case.num_requests
        for edge in edges:
            known = self._by_edge.get(edge)
            if known is None or num_requests < known.size[0]:
                return True
        digest = digest_of(edges)
        known = self._by_digest.get(digest)
        if known is not None:
            return num_requests < known.size[0]
        return len(self._by_digest) < MOST_SETS or digest < self._largest

    def add(self, entry: Entry) -> bool:
        """Keep an entry where it is smaller than what is kept; return whether it was."""
        is_kept = False
        for edge in entry.edges:
            if entry.is_before(self._by_edge.get(edge)):
                self._by_edge[edge] = entry
                is_kept = True
        digest = digest_of(entry.edges)
        has_room = len(self._by_digest) < MOST_SETS or digest <= self._largest
        if has_room and entry.is_before(self._by_digest.get(digest)):
            self._by_digest[digest] = entry
            if len(self._by_digest) > MOST_SETS:
                del self._by_digest[self._largest]
            self._largest = max(self._by_digest)
            is_kept = True
        return is_kept


class Corpus:
    """Corpora by family.

    Attributes:
        families: By name.
    """

    def __init__(self) -> None:
        self.families: dict[str, FamilyCorpus] = {}

    def take(self, family: Family, case: Case, edges: frozenset[str]) -> Entry | None:
        """Keep a case that was run, and return its entry if it is of use.

        Args:
            family: The case's.
            case: The case.
            edges: Those that it touches.
        """
        kept = self.families.setdefault(family.name, FamilyCorpus())
        if not kept.may_keep(case, edges):
            return None
        entry = Entry(family.name, tuple(sorted(edges)), size_of(family, case), case)
        return entry if kept.add(entry) else None

    def add(self, entries: Iterable[Entry]) -> bool:
        """Keep what is of use of some entries; in any order the same. Return whether any was."""
        kept = [
            self.families.setdefault(entry.family, FamilyCorpus()).add(entry) for entry in entries
        ]
        return any(kept)

    def entries(self) -> Iterator[Entry]:
        """Yield what is kept, family by family."""
        for name in sorted(self.families):
            yield from self.families[name].entries()

    def num_sets(self) -> Mapping[str, int]:
        """Return how many sets of edges were reached, by family; see `FamilyCorpus.num_sets`."""
        return {name: self.families[name].num_sets for name in sorted(self.families)}

    def write(self, path: Path) -> None:
        """Write a file with a line for each entry, whole or not at all.

        Raises:
            OSError: It can't be written; what was there before still is.
        """
        durable.replace(path, "".join(f"{entry.to_json()}\n" for entry in self.entries()).encode())

    @classmethod
    def read(cls, path: Path) -> tuple[Corpus, list[str]]:
        """Return the corpus of a file, and what could not be read, a line each.

        Damaged lines are kept in a file beside it; where there is no file, the corpus is empty.
        """
        corpus = cls()
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            return corpus, []
        except OSError as error:
            return corpus, [f"corpus {str(path)!r} can't be read: {error.strerror}"]
        damaged: list[bytes] = []
        for line in lines:
            try:
                corpus.add([Entry.from_json(line.decode())])
            except (ValueError, RecursionError):
                damaged.append(line)
        return corpus, _set_aside(path, damaged)


def _set_aside(path: Path, damaged: list[bytes]) -> list[str]:
    if not damaged:
        return []
    what = f"corpus {str(path)!r}: {len(damaged)} damaged lines"
    aside = path.with_name(f"{path.name}.damaged")
    with contextlib.suppress(OSError):
        with aside.open("ab") as file:
            file.write(b"".join(line + b"\n" for line in damaged))
        return [f"{what}; set aside in {aside.name}"]
    return [f"{what}; they can't be set aside"]


def corpora_of(folder: Path) -> list[Path]:
    """Return the files of the corpora in a whole .pagefault folder, or where some were joined."""
    return [
        path for path in (folder / CORPUS, *folder.glob(f"campaigns/*/{CORPUS}")) if path.exists()
    ]


def merge(files: Iterable[Path], into: Path) -> tuple[Corpus, list[str]]:
    """Join corpora into one, which keeps what it has; in any order the same.

    Args:
        files: The corpora.
        into: The file of the joined one.

    Returns:
        The corpus, and what could not be read or written, a line each.
    """
    corpus, damaged = Corpus.read(into)
    for path in files:
        other, more = Corpus.read(path)
        corpus.add(other.entries())
        damaged += more
    try:
        corpus.write(into)
    except OSError as error:
        damaged.append(f"corpus {str(into)!r} can't be written: {error.strerror}")
    return corpus, damaged
