"""A campaign: worker processes that draw and check cases, and what they found."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import queue
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

from .case import Case
from .family import Domain, Family, family_named
from .journal import Journal, last_noted
from .minimal import Budget, minimise, size_of
from .strategies.edges import HUGE_PAGE_SIZES, PAGE_SIZES
from .stream import derived_seed, draw_cases
from .verdict import Finding, Signature, Verdict

# A family that has run this many cases must have reached its edges.
RUN_THAT_MUST_REACH = 1000

MINIMISE_BUDGET = Budget(seconds=20.0)
MOST_SIGNATURES_PER_FAMILY = 6
MOST_RESPAWNS = 20

# How long a worker on a GPU stays with the same page sizes and pairings of dtypes.
ROUNDS_PER_EPOCH = 60
RARE_PAGE_SIZES = sorted({*PAGE_SIZES, *HUGE_PAGE_SIZES} - {4, 16})

# Time that workers get to stop.
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Plan:
    """What a campaign runs.

    Attributes:
        target: As `load_target` takes it.
        families: Names.
        device: "cpu" or "cuda".
        seconds: How long, from when the workers are ready.
        max_cases: Over all workers, or None.
        seed: Of the campaign; each worker, family and round has one derived from it.
        num_workers: Processes.
    """

    target: str
    families: Sequence[str]
    device: str
    seconds: float
    max_cases: int | None
    seed: int
    num_workers: int


@dataclass
class FamilyTally:
    """What was run of one family."""

    cases: int = 0
    seconds: float = 0.0
    edges: Counter[str] = field(default_factory=Counter)
    batch_sizes: Counter[int] = field(default_factory=Counter)

    def add(self, other: FamilyTally) -> None:
        self.cases += other.cases
        self.seconds += other.seconds
        self.edges += other.edges
        self.batch_sizes += other.batch_sizes


@dataclass(frozen=True)
class Found:
    """One finding with its case.

    Attributes:
        signature: What tells it apart.
        case: The smallest case known, as JSON text.
        size: How large that is, see `size_of`.
        verdict: The report's text.
        how_small: What is known of its size.
    """

    signature: Signature
    case: str
    size: tuple[int, ...]
    verdict: str
    how_small: str


@dataclass
class Result:
    """What a campaign ran and found."""

    tallies: dict[str, FamilyTally] = field(default_factory=dict)
    findings: dict[Signature, Found] = field(default_factory=dict)
    counts: Counter[Signature] = field(default_factory=Counter)
    seconds: float = 0.0
    interrupted: bool = False
    failures: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return sum(tally.cases for tally in self.tallies.values())

    def add(self, found: Found) -> None:
        """Keep a finding, or the smaller case of one that is known."""
        known = self.findings.get(found.signature)
        if known is None or found.size <= known.size:
            self.findings[found.signature] = found

    def unreached(self, without: frozenset[str] = frozenset()) -> dict[str, list[str]]:
        """Return the edges that a run of this length must have reached and has not, by family."""
        missing = {}
        for name, tally in self.tallies.items():
            edges = family_named(name).must_reach - without - set(tally.edges)
            if tally.cases >= RUN_THAT_MUST_REACH and edges:
                missing[name] = sorted(edges)
        return missing


def run(plan: Plan, watch: Callable[[Result], None] = lambda result: None) -> Result:
    """Run a campaign and return what it found; SIGINT and SIGTERM end it early.

    Args:
        plan: What to run.
        watch: Called with the result so far, several times a second.
    """
    with tempfile.TemporaryDirectory(prefix="pagefault-") as folder:
        return _Campaign(plan, watch, Path(folder)).run()


class _Campaign:
    def __init__(self, plan: Plan, watch: Callable[[Result], None], folder: Path) -> None:
        self._plan = plan
        self._watch = watch
        self._folder = folder
        self._context = multiprocessing.get_context("spawn")
        self._messages: Any = self._context.Queue()
        self._go = self._context.Event()
        self._stop = self._context.Event()
        self._workers: dict[int, BaseProcess] = {}
        self._ready: set[int] = set()
        self._ended: set[int] = set()
        self._result = Result({name: FamilyTally() for name in plan.families})
        self._num_spawned = 0
        self._deadline = float("inf")

    def run(self) -> Result:
        previous = signal.signal(signal.SIGTERM, _raise_interrupt)
        started = time.monotonic()
        try:
            for _ in range(self._plan.num_workers):
                self._spawn(self._plan.seconds)
            self._collect_until(lambda: len(self._ready | self._ended) == len(self._workers))
            started = time.monotonic()
            self._deadline = started + self._plan.seconds
            self._go.set()
            self._collect_until(lambda: len(self._ended) == len(self._workers))
        except KeyboardInterrupt:
            self._result.interrupted = True
            self._stop.set()
            self._go.set()
            limit = time.monotonic() + STOP_SECONDS
            self._collect_until(
                lambda: len(self._ended) == len(self._workers) or time.monotonic() > limit
            )
        finally:
            signal.signal(signal.SIGTERM, previous)
            for process in self._workers.values():
                process.join(timeout=1)
                if process.is_alive():
                    process.kill()
                    process.join()
        self._result.seconds = time.monotonic() - started
        return self._result

    def _spawn(self, seconds: float) -> None:
        number = self._num_spawned
        self._num_spawned += 1
        process = self._context.Process(
            target=_work,
            args=(
                self._plan,
                number,
                seconds,
                self._journal_path(number),
                self._messages,
                self._go,
                self._stop,
            ),
            name=f"pagefault worker {number}",
        )
        process.start()
        self._workers[number] = process

    def _journal_path(self, number: int) -> Path:
        return self._folder / f"journal-{number}"

    def _collect_until(self, done: Callable[[], bool]) -> None:
        while not done():
            try:
                number, kind, content = self._messages.get(timeout=0.2)
            except queue.Empty:
                self._look_for_the_dead()
            else:
                self._take(number, kind, content)
            self._watch(self._result)

    def _take(self, number: int, kind: str, content: Any) -> None:
        if kind == "ready":
            self._ready.add(number)
        elif kind == "tally":
            name, tally = content
            self._result.tallies[name].add(tally)
        elif kind == "found":
            self._result.add(content)
        elif kind == "seen":
            self._result.counts += content
        elif kind == "failed":
            self._result.failures.append(content)
        elif kind == "ended":
            self._ended.add(number)
        elif kind == "device lost":
            self._ended.add(number)
            self._replace()

    def _look_for_the_dead(self) -> None:
        for number, process in list(self._workers.items()):
            if number in self._ended or process.is_alive():
                continue
            # What it said last may still be under way.
            while True:
                try:
                    self._take(*self._messages.get(timeout=0.2))
                except queue.Empty:
                    break
            if number in self._ended:
                continue
            self._ended.add(number)
            self._report_death(number, process.exitcode or 0)
            self._replace()

    def _report_death(self, number: int, exitcode: int) -> None:
        how = signal.Signals(-exitcode).name if exitcode < 0 else f"exit status {exitcode}"
        noted = last_noted(self._journal_path(number))
        if noted is None:
            self._result.failures.append(f"worker {number} died ({how}) outside any case")
            return
        family = family_named(noted[0])
        verdict = death_verdict(family, how)
        found = _found(family, noted[1], verdict, "not shrunk: the process died")
        self._result.counts[found.signature] += 1
        self._result.add(found)

    def _replace(self) -> None:
        left = self._deadline - time.monotonic()
        if left > 1 and self._num_spawned < self._plan.num_workers + MOST_RESPAWNS:
            self._spawn(min(left, self._plan.seconds))


def death_verdict(family: Family, how: str) -> Verdict:
    """Return the verdict on a case whose launch killed the process."""
    return Verdict(family.name, (Finding("died", how, f"{family.name}: the process died: {how}"),))


def _raise_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _found(family: Family, case: Case, verdict: Verdict, how_small: str) -> Found:
    return Found(
        verdict.signature, family.to_json(case), size_of(family, case), verdict.text(), how_small
    )


def _work(
    plan: Plan,
    number: int,
    seconds: float,
    journal_path: Path,
    messages: Any,
    go: Any,
    stop: Any,
) -> None:
    """Run one worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def say(kind: str, content: Any = None) -> None:
        messages.put((number, kind, content))

    try:
        from .device import prepare

        prepare(plan.device, number)
        worker = _Worker(plan, number, Journal(journal_path), say, stop)
        say("ready")
        go.wait()
        lost = worker.run(seconds)
        say("device lost" if lost else "ended")
    except Exception:
        say("failed", f"worker {number}: {traceback.format_exc()}")
        say("ended")
    messages.close()
    messages.join_thread()
    # A CUDA context that has faulted can hang interpreter shutdown.
    os._exit(0)


class _DeviceLost(BaseException):
    """Ends a round: nothing can be launched in this process any more."""


class _Worker:
    """Draws and checks cases of each family in turn, each for its share of the time."""

    def __init__(
        self,
        plan: Plan,
        number: int,
        journal: Journal,
        say: Callable[..., None],
        stop: Any,
    ) -> None:
        import torch

        from .checker import Checker
        from .target import load_target

        torch.set_num_threads(1)
        self._plan = plan
        self._number = number
        self._journal = journal
        self._say = say
        self._stop = stop
        self._target = load_target(plan.target)
        self._checker = Checker(self._target, plan.device)
        self._families = [family_named(name) for name in plan.families]
        self._best: dict[Signature, tuple[Case, Verdict]] = {}
        self._minimised: set[Signature] = set()
        self._seen: Counter[Signature] = Counter()
        self._deadline = 0.0
        share = plan.max_cases
        self._cases_left: float = float("inf") if share is None else -(-share // plan.num_workers)

    def run(self, seconds: float) -> bool:
        """Go on until the time is over; return whether the device was lost."""
        self._deadline = time.monotonic() + seconds
        spent = {family.name: 0.0 for family in self._families}
        round_sizes = {family.name: 20 for family in self._families}
        # Workers start with different families, so that a short run sees them all.
        first = self._number % len(self._families)
        order = self._families[first:] + self._families[:first]
        round_number = 0
        try:
            while self._goes_on():
                family = min(order, key=lambda family: spent[family.name])
                num_cases = int(min(round_sizes[family.name], self._cases_left))
                tally = self._round(family, num_cases, round_number)
                spent[family.name] += tally.seconds
                self._cases_left -= tally.cases
                self._say("tally", (family.name, tally))
                # Rounds of about half a second: short enough to take turns and to stop.
                pace = tally.cases / max(tally.seconds, 1e-3)
                round_sizes[family.name] = max(5, min(500, int(pace / 2)))
                round_number += 1
                self._report_new()
        except _DeviceLost:
            return True
        finally:
            self._say("seen", self._seen)
        return False

    def _goes_on(self) -> bool:
        over = time.monotonic() >= self._deadline or self._cases_left < 1
        return not (over or self._stop.is_set())

    def _round(self, family: Family, num_cases: int, round_number: int) -> FamilyTally:
        tally = FamilyTally()
        seed = derived_seed(self._plan.seed, self._number, family.name, round_number)
        domain = self._domain(round_number)

        def use(case: Case) -> None:
            if not self._goes_on():
                return
            tally.cases += 1
            tally.edges.update(family.edges(case))
            tally.batch_sizes[case.num_requests] += 1
            verdict = self._check(family, case)
            if not verdict.passed:
                self._note(family, case, verdict)

        started = time.monotonic()
        draw_cases(family.strategy(domain), num_cases, seed, use)
        tally.seconds = time.monotonic() - started
        return tally

    def _domain(self, round_number: int) -> Domain:
        """Return what may be drawn; on a GPU a few compiled variants at a time.

        A page size or a pairing of dtypes that is new compiles for longer than a hundred cases
        run, so a worker stays with some of them before it goes on to others.
        """
        domain = self._target.domain
        if self._plan.device == "cpu":
            return domain
        epoch = round_number // ROUNDS_PER_EPOCH
        draw = Random(derived_seed(self._plan.seed, self._number, "epoch", epoch))
        return dataclasses.replace(
            domain,
            page_sizes=(16, 4, *draw.sample(RARE_PAGE_SIZES, 3)),
            dtype_choices=(0, 0, 0, *(draw.getrandbits(8) for _ in range(3))),
        )

    def _check(self, family: Family, case: Case) -> Verdict:
        self._journal.note(family.name, case)
        verdict = self._checker.check(family, case)
        self._journal.clear()
        if verdict.fatal:
            self._seen[verdict.signature] += 1
            self._say("found", _found(family, case, verdict, "not shrunk: the device was lost"))
            raise _DeviceLost
        return verdict

    def _note(self, family: Family, case: Case, verdict: Verdict) -> None:
        signature = verdict.signature
        self._seen[signature] += 1
        known = self._best.get(signature)
        if known is None or size_of(family, case) < size_of(family, known[0]):
            self._best[signature] = (case, verdict)

    def _report_new(self) -> None:
        """Minimise and report each signature that is new since the last round."""
        for signature, (case, verdict) in list(self._best.items()):
            if signature in self._minimised:
                continue
            self._minimised.add(signature)
            family = family_named(signature.family)
            siblings = sum(other.family == signature.family for other in self._minimised)
            if siblings > MOST_SIGNATURES_PER_FAMILY:
                self._say("found", _found(family, case, verdict, "not shrunk: one of many"))
                continue
            # Known before it is small, should this process die of a smaller case.
            self._say("found", _found(family, case, verdict, "not shrunk yet"))
            minimal = minimise(
                family, case, verdict, lambda c: self._check(family, c), MINIMISE_BUDGET
            )
            self._say("found", _found(family, minimal.case, minimal.verdict, str(minimal)))
