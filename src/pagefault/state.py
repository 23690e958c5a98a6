"""The state of a campaign: what goes on after somebody has killed all of its processes.

    .pagefault/campaigns/ours-cpu-5d1c7a02/
        state.json      the plan, the rounds done, what was run and found so far
        journals/       what each worker was about to launch
        corpus.jsonl    small cases of the sets of edges that were reached, by all campaigns here

There is one such folder for each target, device and machine. The state is written beside its place
and then put there. What it says is of one moment: the rounds that it calls done are those whose
cases and findings it counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TextIO

from . import durable
from .corpus import CORPUS, Corpus
from .finding_record import Rate, Record
from .findings import target_name
from .journal import SIZE_BYTES
from .plan import Plan
from .result import FamilyTally, Found, Result
from .specialisations import KernelVariants, Treatment
from .target import pair_of
from .verdict import Signature

SCHEMA = 1

# How often the state is written when nothing is found.
SAVE_SECONDS = 2.0
# How long to wait before a state that could not be written is tried again.
RETRY_SECONDS = 10.0
# How often the corpus is.
CORPUS_SECONDS = 30.0

_STATE = "state.json"


class StateError(Exception):
    """A campaign's folder that can't be used; the message is one line that says why."""


@dataclass
class Progress:
    """How far one worker is.

    Attributes:
        cases: How many it has run.
        rounds: How many rounds of each family are done; the next has this number.
    """

    cases: int = 0
    rounds: Counter[str] = field(default_factory=Counter)


@dataclass
class State:
    """Where a campaign is.

    Attributes:
        run: Its id in findings.
        plan: What it runs.
        result: What it has run and found.
        progress: Of each worker.
        deaths: How many workers each family has ended, and each thing that side cases of one are
            held to; see `cause`.
        settled: The names of the journals that hold nothing that is not counted in the result.
        is_over: Whether all was run.
    """

    run: str
    plan: Plan
    result: Result
    progress: list[Progress]
    deaths: Counter[str] = field(default_factory=Counter)
    settled: set[str] = field(default_factory=set)
    is_over: bool = False

    @classmethod
    def at_start(cls, run: str, plan: Plan) -> Self:
        """Return the state of a campaign that has run nothing."""
        result = Result({name: FamilyTally() for name in plan.families})
        return cls(run, plan, result, [Progress() for _ in range(plan.num_workers)])

    def cases_left(self, worker: int) -> float:
        """Return how many cases a worker still has to run; each has the same share of all."""
        if self.plan.max_cases is None:
            return float("inf")
        return -(-self.plan.max_cases // self.plan.num_workers) - self.progress[worker].cases

    def add_filed(self, records: Iterable[Record]) -> None:
        """Add what this campaign has filed and had no time to note in its state."""
        for record in records:
            if self.run in record.runs and record.signature not in self.result.findings:
                smallest = record.smallest
                self.result.findings[record.signature] = Found(
                    record.signature,
                    smallest.case,
                    smallest.size,
                    smallest.verdict,
                    smallest.how_small,
                )

    def to_json(self) -> str:
        """Return the text of the `state.json`."""
        result = self.result
        document = {
            "schema": SCHEMA,
            "run": self.run,
            "is_over": self.is_over,
            "plan": {**dataclasses.asdict(self.plan), "families": list(self.plan.families)},
            "seconds": result.seconds,
            "workers": [{"cases": p.cases, "rounds": dict(p.rounds)} for p in self.progress],
            "deaths": self.deaths,
            "settled": sorted(self.settled),
            "rechecked": result.rechecked,
            "findings": [
                {**dataclasses.asdict(found), "signature": [*found.signature]}
                for found in result.findings.values()
            ],
            "counts": [[*signature, count] for signature, count in result.counts.items()],
            "known": [*result.known.items()],
            "failures": result.failures,
            "num_lost": result.num_lost,
            "tallies": {name: _of_tally(tally) for name, tally in result.tallies.items()},
        }
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the state that a `state.json` describes.

        Raises:
            ValueError: It describes none; the message says why.
        """
        try:
            document = json.loads(text)
            if document["schema"] != SCHEMA:
                raise ValueError(f"schema: {document['schema']}, but should be {SCHEMA}")
            result = Result(
                {name: _tally(tally) for name, tally in document["tallies"].items()},
                {found.signature: found for found in map(_found, document["findings"])},
                Counter({Signature(*words): count for *words, count in document["counts"]}),
                Counter(dict(document["known"])),
                seconds=float(document["seconds"]),
                failures=[str(line) for line in document["failures"]],
                rechecked={str(name): str(said) for name, said in document["rechecked"].items()},
                num_lost=int(document["num_lost"]),
            )
            state = cls(
                str(document["run"]),
                Plan(**document["plan"]),
                result,
                [Progress(int(p["cases"]), Counter(p["rounds"])) for p in document["workers"]],
                Counter(document["deaths"]),
                set(document["settled"]),
                bool(document["is_over"]),
            )
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if len(state.progress) != state.plan.num_workers:
            raise ValueError("workers: not as many as the plan has")
        if set(result.tallies) != set(state.plan.families):
            raise ValueError("tallies: of other families than the plan has")
        return state


def _of_tally(tally: FamilyTally) -> dict[str, Any]:
    return {
        "cases": tally.cases,
        "seconds": tally.seconds,
        "edges": tally.edges,
        "batch_sizes": [*tally.batch_sizes.items()],
        "checks": tally.checks,
        "variants": {
            name: [kernel.parameters, kernel.menus, sorted(kernel.seen)]
            for name, kernel in tally.variants.items()
        },
    }


def _tally(document: Mapping[str, Any]) -> FamilyTally:
    return FamilyTally(
        int(document["cases"]),
        float(document["seconds"]),
        Counter(document["edges"]),
        Counter({int(size): int(times) for size, times in document["batch_sizes"]}),
        Counter(document["checks"]),
        {
            name: KernelVariants(
                tuple(parameters),
                tuple(map(tuple, menus)),
                {tuple(Treatment(*words) for words in variant) for variant in seen},
            )
            for name, (parameters, menus, seen) in document["variants"].items()
        },
    )


def _found(document: Mapping[str, Any]) -> Found:
    rate = document["reproduced"]
    json.loads(document["case"])
    return Found(
        Signature(*document["signature"]),
        document["case"],
        tuple(map(int, document["size"])),
        document["verdict"],
        document["how_small"],
        None if rate is None else Rate(*rate),
    )


class CampaignFolder:
    """The folder of a campaign; nobody else uses it while this object has it open.

    Args:
        path: Made if it is missing; None for a temporary one, which goes with the object.

    Attributes:
        path: Where it is.
        set_aside: What could not be read so far, a line each.
        failure: Why the state could not be written the last time, or "".
        corpus_failure: The same of the corpus.
        journal_failure: Why journals lie elsewhere, or "".

    Raises:
        StateError: It can't be made, or another campaign uses it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.set_aside: list[str] = []
        self.failure = self.corpus_failure = self.journal_failure = ""
        self._elsewhere: tempfile.TemporaryDirectory[str] | None = None
        self._temporary = None
        if path is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="pagefault-")
            path = Path(self._temporary.name)
        self.path = path
        self._written_at = float("-inf")
        self._corpus_written_at = time.monotonic()
        self._lock: TextIO | None = None
        try:
            self.journals.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("a")
            # Unlike flock's, of this process alone: workers do not keep it when it is killed.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise StateError(f"{str(path)!r} is in use by another campaign") from error
        except OSError as error:
            # Some network file systems have no locks.
            if self._lock is None:
                raise StateError(f"{str(path)!r} can't be written: {error.strerror}") from error

    @property
    def journals(self) -> Path:
        """Where the journals of the workers lie."""
        return self.path / "journals"

    @property
    def troubles(self) -> list[str]:
        """What could not be read or written, a line each."""
        failures = [self.failure, self.corpus_failure, self.journal_failure]
        return [*self.set_aside, *filter(None, failures)]

    def journal_path(self, name: str) -> Path:
        """Return where a new journal is to lie: elsewhere while this disk is full."""
        if shutil.disk_usage(self.journals).free >= 2 * SIZE_BYTES:
            return self.journals / name
        self.journal_failure = (
            f"journals have no room in {str(self.journals)!r}: if the campaign is killed, what was "
            "under way is not found again"
        )
        if self._elsewhere is None:
            self._elsewhere = tempfile.TemporaryDirectory(prefix="pagefault-")
        return Path(self._elsewhere.name) / name

    def close(self) -> None:
        """Let others use the folder."""
        if self._elsewhere is not None:
            self._elsewhere.cleanup()
        if self._lock is not None:
            self._lock.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    @property
    def corpus(self) -> Path:
        """The file of the corpus."""
        return self.path / CORPUS

    def load_corpus(self) -> Corpus:
        """Return the corpus of all campaigns here; what is damaged of it is set aside."""
        corpus, troubles = Corpus.read(self.corpus)
        self.set_aside += troubles
        return corpus

    def save_corpus(self, corpus: Corpus, at_once: bool = False) -> None:
        """Write the corpus, if it is time to; an error is kept, and writing is tried again."""
        if not at_once and time.monotonic() < self._corpus_written_at + CORPUS_SECONDS:
            return
        self._corpus_written_at = time.monotonic()
        try:
            corpus.write(self.corpus)
        except OSError as error:
            self.corpus_failure = f"corpus {str(self.corpus)!r} can't be written: {error.strerror}"
        else:
            self.corpus_failure = ""

    def load(self) -> State | None:
        """Return what an earlier campaign has left, or None where there is nothing to be read.

        What is damaged is set aside under another name.
        """
        path = self.path / _STATE
        try:
            return State.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.set_aside.append(f"{path} is damaged: {error}; {_moved(path)}")
            return None

    def left_journals(self, settled: set[str]) -> list[Path]:
        """Return the journals of processes that were killed, without those that are settled."""
        return sorted(path for path in self.journals.iterdir() if path.name not in settled)

    def set_journal_aside(self, path: Path, reason: str) -> None:
        """Keep a journal that can't be read where nobody looks for journals."""
        aside = self.path / f"{path.name}.damaged"
        try:
            path.rename(aside)
        except OSError as error:
            self.set_aside.append(f"{reason}; it can't be moved: {error.strerror}")
        else:
            self.set_aside.append(f"{reason}; set aside as {aside.name}")

    def save(self, state: State, at_once: bool = False) -> None:
        """Write the state, if it is time to; an error is kept, and writing is tried again.

        Args:
            state: What to write.
            at_once: Whether it is time already.
        """
        waits = RETRY_SECONDS if self.failure else 0.0 if at_once else SAVE_SECONDS
        if time.monotonic() < self._written_at + waits:
            return
        self._written_at = time.monotonic()
        try:
            durable.replace(self.path / _STATE, state.to_json().encode())
        except OSError as error:
            self.failure = f"state {str(self.path)!r} can't be written: {error.strerror}"
            return
        self.failure = ""
        with contextlib.suppress(OSError):
            for name in state.settled:
                (self.journals / name).unlink(missing_ok=True)
            state.settled.clear()


def _moved(path: Path) -> str:
    try:
        return f"set aside as {durable.set_aside(path).name}"
    except OSError as error:
        return f"it can't be set aside: {error.strerror}"


def folder_for(plan: Plan, campaigns: Path) -> Path:
    """Return where a campaign keeps its state: one place for each target, device and machine.

    Args:
        plan: The campaign's.
        campaigns: Where all such folders lie.
    """
    target = target_name(plan.target)
    names = pair_of(plan.target)
    where = [str(Path(name).resolve()) if name.endswith(".py") else name for name in names]
    digest = hashlib.sha256("\0".join([*where, plan.device, plan.machine]).encode()).hexdigest()
    return campaigns / f"{re.sub(r'[^0-9A-Za-z_.-]', '-', target)}-{plan.device}-{digest[:8]}"


@dataclass
class Opened:
    """A campaign that may start.

    Attributes:
        folder: Where it keeps its state.
        state: Where it is.
        lines: What there is to say of that.
    """

    folder: CampaignFolder
    state: State
    lines: list[str]

    def end(self) -> None:
        """Note that the campaign has run all that it had to, unless it was ended early."""
        if not self.state.result.interrupted:
            self.state.is_over = True
            self.folder.save(self.state, at_once=True)


def open_campaign(plan: Plan, run: str, campaigns: Path, resume: bool) -> Opened:
    """Return a campaign that starts, or one that goes on.

    Args:
        plan: What it runs if it starts; one that goes on has its own.
        run: Its id in findings, likewise.
        campaigns: Where all of them keep their state.
        resume: Whether to go on with one that was not over, if there is one.
    """
    lines = []
    try:
        folder = CampaignFolder(folder_for(plan, campaigns))
    except StateError as error:
        lines.append(f"state {error}: if this campaign is killed, it can't be resumed")
        folder = CampaignFolder()
    earlier = folder.load()
    state = State.at_start(run, plan)
    if earlier is not None:
        # Other journals still hold what was about to be launched.
        state.settled = earlier.settled
    if earlier is not None and not earlier.is_over:
        where = f"{earlier.result.cases} cases in {earlier.result.seconds:.0f} s"
        if resume:
            state = earlier
            lines.append(f"resumed: {where} were run before, {len(earlier.result.findings)} found")
        else:
            lines.append(f"an earlier campaign was not over after {where}; this is a new one")
    elif resume:
        lines.append("there is no campaign to resume: this is a new one")
    return Opened(folder, state, lines)
