"""A campaign: worker processes that draw and check cases, and what they found."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

from . import reached, specialisations
from .case import Case
from .device import is_device_lost
from .explanation import through_interpreter
from .family import Domain, Family, family_named
from .findings import reproduce_rate
from .isolation import check_in_child, death_verdict, hang_verdict
from .journal import Journal, last_noted, seconds_since_noted
from .minimal import Budget, Minimal, minimise, size_of
from .record import Rate
from .specialisations import Variants, add_variants
from .strategies.edges import HUGE_PAGE_SIZES, PAGE_SIZES
from .stream import derived_seed, draw_cases
from .verdict import Signature, Verdict

# A family that has run this many cases must have reached its edges.
RUN_THAT_MUST_REACH = 1000

MINIMISE_BUDGET = Budget(seconds=20.0)
# What is found last may be made smaller for so long after the run's time.
OVERTIME_SECONDS = 15.0
# How long one case may take, a first compilation included.
CASE_SECONDS = 60.0

# For findings that end or block processes; a check that never returns costs its whole time.
SHRINK_BUDGET = Budget(seconds=60.0)
SHRINK_CASE_SECONDS = {"cpu": 3.0, "cuda": 15.0}
MOST_SIGNATURES_PER_FAMILY = 6
# A family that has ended so many workers has shown its fault: the others get the time.
MOST_DEATHS_PER_FAMILY = 3

# A round is short enough for families to take turns, and to stop.
CASES_PER_ROUND = {"cpu": 64, "cuda": 1024}

# How long a worker on a GPU stays with the same page sizes and pairings of dtypes.
ROUNDS_PER_EPOCH = 40
# To map the pages of a wide table takes as long as a hundred cases: of so many rounds one has some.
ROUNDS_PER_WIDE_TABLES = 8
RARE_PAGE_SIZES = sorted({*PAGE_SIZES, *HUGE_PAGE_SIZES} - {16})

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
        case_seconds: How long one case may take before it counts as a hang.
        memory: Where tensors lie on a GPU, see `Checker`.
        is_soak: Whether garbage and relations have their share, see `soak`.
        strict: Whether needless reads are findings, see `Checker`.
    """

    target: str
    families: Sequence[str]
    device: str
    seconds: float
    max_cases: int | None
    seed: int
    num_workers: int
    case_seconds: float = CASE_SECONDS
    memory: str = "mixed"
    is_soak: bool = False
    strict: bool = False


@dataclass
class FamilyTally:
    """What was run of one family, and beside it."""

    cases: int = 0
    seconds: float = 0.0
    edges: Counter[str] = field(default_factory=Counter)
    batch_sizes: Counter[int] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    variants: Variants = field(default_factory=dict)

    def add(self, other: FamilyTally) -> None:
        self.cases += other.cases
        self.seconds += other.seconds
        self.edges += other.edges
        self.batch_sizes += other.batch_sizes
        self.checks += other.checks
        add_variants(self.variants, other.variants)


@dataclass(frozen=True)
class Found:
    """One finding with its case.

    Attributes:
        signature: What tells it apart.
        case: The smallest case known, as JSON text.
        size: How large that is, see `size_of`.
        verdict: The report's text.
        how_small: What is known of its size.
        reproduced: How often the case has shown it again, or None where that was not tried.
    """

    signature: Signature
    case: str
    size: tuple[int, ...]
    verdict: str
    how_small: str
    reproduced: Rate | None = None


@dataclass
class Result:
    """What a campaign ran and found.

    Attributes:
        tallies: By family.
        findings: By signature.
        counts: How often each was seen.
        known: How often each known fault was seen, by its place among the target's.
        lane_failures: What a soak has found beside legal cases, a report each.
        seconds: How long it ran.
        interrupted: Whether it was ended early.
        failures: Of workers.
        unchecked: What could not be checked, and why, or "".
    """

    tallies: dict[str, FamilyTally] = field(default_factory=dict)
    findings: dict[Signature, Found] = field(default_factory=dict)
    counts: Counter[Signature] = field(default_factory=Counter)
    known: Counter[int] = field(default_factory=Counter)
    lane_failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False
    failures: list[str] = field(default_factory=list)
    unchecked: str = ""

    @property
    def cases(self) -> int:
        return sum(tally.cases for tally in self.tallies.values())

    @property
    def checks(self) -> Counter[str]:
        """How often each check was carried out, see `reached`."""
        return sum((tally.checks for tally in self.tallies.values()), Counter())

    @property
    def variants(self) -> Variants:
        """The variants of kernels that were run."""
        together: Variants = {}
        for tally in self.tallies.values():
            add_variants(together, tally.variants)
        return together

    def add(self, found: Found) -> None:
        """Keep a finding, or the smaller case of one that is known."""
        known = self.findings.get(found.signature)
        if known is None or found.size <= known.size:
            self.findings[found.signature] = found

    def unreached(
        self,
        without: Callable[[str], Collection[str]] = lambda family: (),
        of_all: bool = False,
    ) -> dict[str, list[str]]:
        """Return the edges that a run of this length must have reached and has not, by family.

        Args:
            without: Returns the edges that no case of a family may have.
            of_all: Whether all must be reached, whatever the length.
        """
        missing = {}
        for name, tally in self.tallies.items():
            family = family_named(name)
            wanted = family.all_edges if of_all else family.must_reach
            edges = wanted - set(without(name)) - set(tally.edges)
            if edges and (of_all or tally.cases >= RUN_THAT_MUST_REACH):
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
        # A pipe for each worker: one that dies while it writes takes no lock of others along.
        self._channels: dict[Connection, int] = {}
        self._go = self._context.Event()
        self._stop = self._context.Event()
        self._workers: dict[int, BaseProcess] = {}
        self._ready: set[int] = set()
        self._ended: set[int] = set()
        self._result = Result({name: FamilyTally() for name in plan.families})
        self._hung: set[int] = set()
        self._deaths: Counter[str] = Counter()
        self._shrinking: set[Signature] = set()
        self._num_spawned = 0
        self._deadline = float("inf")

    def run(self) -> Result:
        previous = signal.signal(signal.SIGTERM, _raise_interrupt)
        started = time.monotonic()
        try:
            for _ in range(self._plan.num_workers):
                self._spawn(self._plan.seconds, self._plan)
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

    def _spawn(self, seconds: float, plan: Plan) -> None:
        journal = self._journal_path(self._num_spawned)
        self._start(_work, plan, self._num_spawned, seconds, journal, self._go, self._stop)

    def _spawn_shrinker(self, family: Family, case: Case, verdict: Verdict) -> None:
        """Start a process that finds the smallest case of a finding that ends processes."""
        if verdict.signature not in self._shrinking:
            self._shrinking.add(verdict.signature)
            self._start(_shrink, self._plan, family.name, case, verdict, self._stop)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        number = self._num_spawned
        self._num_spawned += 1
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=work, args=(sender, *arguments), name=f"pagefault worker {number}"
        )
        # A terminal's Ctrl-C goes to all processes: a worker, which inherits this mask, goes on
        # until it is told to stop, and none is started that nobody knows of.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
            sender.close()
            self._workers[number] = process
            self._channels[receiver] = number
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def _journal_path(self, number: int) -> Path:
        return self._folder / f"journal-{number}"

    def _collect_until(self, done: Callable[[], bool]) -> None:
        while not done():
            for channel in wait(list(self._channels), timeout=0.2):
                assert isinstance(channel, Connection)
                number = self._channels[channel]
                try:
                    kind, content = channel.recv()
                except (EOFError, OSError, pickle.UnpicklingError):
                    # Nothing more comes from this worker, and all that it said was taken.
                    del self._channels[channel]
                    channel.close()
                    self._look_at_the_end_of(number)
                else:
                    self._take(number, kind, content)
            self._kill_the_hung()
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
        elif kind == "unchecked":
            self._result.unchecked = content
        elif kind == "known":
            self._result.known += content
        elif kind == "failed":
            self._result.failures.append(content)
        elif kind == "lane failed":
            self._result.lane_failures.append(content)
        elif kind == "ended":
            self._ended.add(number)
        elif kind == "device lost":
            self._ended.add(number)
            family_name, *shown = content
            self._deaths[family_name] += 1
            if shown:
                self._spawn_shrinker(family_named(family_name), *shown)
            self._replace()

    def _kill_the_hung(self) -> None:
        for number, process in self._workers.items():
            waited = seconds_since_noted(self._journal_path(number))
            if waited > self._plan.case_seconds and number not in self._ended | self._hung:
                self._hung.add(number)
                process.kill()

    def _look_at_the_end_of(self, number: int) -> None:
        process = self._workers[number]
        process.join(timeout=STOP_SECONDS)
        if number in self._ended:
            return
        self._ended.add(number)
        self._report_death(number, process.exitcode or 0)
        self._replace()

    def _report_death(self, number: int, exitcode: int) -> None:
        noted = last_noted(self._journal_path(number))
        if noted is None:
            self._result.failures.append(
                f"worker {number} died outside any case (exit code {exitcode})"
            )
            return
        family = family_named(noted.family)
        verdict = (
            hang_verdict(family, self._plan.case_seconds)
            if number in self._hung
            else death_verdict(family, exitcode)
        )
        self._deaths[family.name] += 1
        if not isinstance(noted.case, Case):
            self._result.lane_failures.append(f"{verdict.text()}\n{noted.case.to_json(family)}")
            return
        self._result.counts[verdict.signature] += 1
        self._result.add(_found(family, noted.case, verdict, "not shrunk yet"))
        self._spawn_shrinker(family, noted.case, verdict)

    def _replace(self) -> None:
        """Start a worker for the time that is left, without families that end every worker."""
        left = self._deadline - time.monotonic()
        families = [f for f in self._plan.families if self._deaths[f] < MOST_DEATHS_PER_FAMILY]
        if left > 1 and families and not self._stop.is_set():
            self._spawn(left, dataclasses.replace(self._plan, families=families))


def _raise_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _found(
    family: Family, case: Case, verdict: Verdict, how_small: str, explained: str = ""
) -> Found:
    text = "\n".join(filter(None, [verdict.text(), explained]))
    return Found(verdict.signature, family.to_json(case), size_of(family, case), text, how_small)


def _explained(plan: Plan, family: Family, minimal: Minimal) -> str:
    """Return what the interpreter says of what a GPU has found; it knows the kernel's line."""
    if plan.device == "cpu":
        return ""
    return through_interpreter(plan.target, family, minimal.case)


def _work(
    channel: Connection,
    plan: Plan,
    number: int,
    seconds: float,
    journal_path: Path,
    go: Any,
    stop: Any,
) -> None:
    """Run one worker process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def say(kind: str, content: Any = None) -> None:
        channel.send((kind, content))

    try:
        from .device import prepare

        prepare(plan.device, number)
        worker = _Worker(plan, number, Journal(journal_path), say, stop)
        say("ready")
        go.wait()
        try:
            worker.run(seconds)
            say("ended")
        except _DeviceLost as lost:
            say("device lost", lost.args)
    except Exception:
        say("failed", f"worker {number}: {traceback.format_exc()}")
        say("ended")
    channel.close()
    # A CUDA context that has faulted can hang interpreter shutdown.
    os._exit(0)


def _shrink(
    channel: Connection, plan: Plan, family_name: str, case: Case, verdict: Verdict, stop: Any
) -> None:
    """Run a process that makes a case smaller whose check ends or blocks processes.

    It never touches the device itself: each check is a child's.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    family = family_named(family_name)
    seconds = min(plan.case_seconds, SHRINK_CASE_SECONDS[plan.device])
    try:
        from .device import prepare

        prepare(plan.device)

        import torch

        from .checker import Checker
        from .target import load_target

        torch.set_num_threads(1)
        target = load_target(plan.target)

        def check_here(candidate: Case) -> Verdict:
            checker = Checker(target, plan.device, plan.memory, plan.strict)
            return checker.check_thoroughly(family, candidate)

        def check(candidate: Case) -> Verdict:
            if stop.is_set():
                raise _Stopped
            if not target.allows(family, candidate):
                return Verdict(family.name)
            return check_in_child(check_here, family, candidate, seconds)

        again = check(case)
        if again.passed or again.signature != verdict.signature:
            how_small = "not shrunk: it did not happen again in a process of its own"
            found = _found(family, case, verdict, how_small)
        else:
            minimal = minimise(family, case, verdict, check, SHRINK_BUDGET)
            explained = _explained(plan, family, minimal)
            found = _found(family, minimal.case, minimal.verdict, str(minimal), explained)
            channel.send(("found", found))
            rate = reproduce_rate(check, minimal.case, verdict.signature)
            found = dataclasses.replace(found, reproduced=rate)
        channel.send(("found", found))
    except _Stopped:
        pass
    except Exception:
        channel.send(("failed", f"shrinking {family_name}: {traceback.format_exc()}"))
    channel.send(("ended", None))
    channel.close()
    os._exit(0)


class _Stopped(BaseException):
    """Ends a search for a smaller case: somebody waits for this process to end."""


class _DeviceLost(BaseException):
    """Ends a round: nothing can be launched in this process any more.

    Its arguments are the family's name and, of a legal case, the case and the verdict.
    """


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
        from .soak import Lanes
        from .target import load_target

        torch.set_num_threads(1)
        self._plan = plan
        self._number = number
        self._journal = journal
        self._say = say
        self._stop = stop
        self._target = load_target(plan.target)
        self._checker = Checker(self._target, plan.device, plan.memory, plan.strict)
        self._lanes = Lanes(plan, self._target, self._checker, number, journal)
        self._recorder = specialisations.install()
        self._families = [family_named(name) for name in plan.families]
        self._best: dict[Signature, tuple[Case, Verdict]] = {}
        self._minimised: set[Signature] = set()
        self._seen: Counter[Signature] = Counter()
        self._known: Counter[int] = Counter()
        self._deadline = 0.0
        share = plan.max_cases
        self._cases_left: float = float("inf") if share is None else -(-share // plan.num_workers)

    def run(self, seconds: float) -> None:
        """Go on until the time is over.

        Raises:
            _DeviceLost: A case has made the device unusable for this process.
        """
        self._deadline = time.monotonic() + seconds
        if self._checker.unchecked:
            self._say("unchecked", self._checker.unchecked)
        spent: dict[str, float] = {family.name: 0.0 for family in self._families}
        num_rounds = {family.name: 0 for family in self._families}
        # Workers start with different families, so that a short run sees them all.
        first = self._number % len(self._families)
        order = self._families[first:] + self._families[:first]
        try:
            while self._goes_on():
                family = min(order, key=lambda family: spent[family.name])
                started = time.monotonic()
                tally = self._round(family, num_rounds[family.name])
                if self._plan.is_soak:
                    self._run_lanes(family, num_rounds[family.name])
                tally.checks, tally.variants = reached.take(), self._recorder.take_new()
                num_rounds[family.name] += 1
                # A soak gives families as many cases, to reach the rare edges of slow ones too.
                share = tally.cases if self._plan.is_soak else time.monotonic() - started
                spent[family.name] += share
                self._say("tally", (family.name, tally))
                self._report_new()
        finally:
            self._say("seen", self._seen)
            self._say("known", self._known)

    def _run_lanes(self, family: Family, round_number: int) -> None:
        """Run what a soak has beside a round."""
        narrowed = partial(self._narrowed, family, round_number)
        for failure in self._lanes.run(family, round_number, narrowed):
            self._say("lane failed", failure)
            if is_device_lost(self._plan.device):
                raise _DeviceLost(family.name)

    def _goes_on(self) -> bool:
        over = time.monotonic() >= self._deadline or self._cases_left < 1
        return not (over or self._stop.is_set())

    def _round(self, family: Family, round_number: int) -> FamilyTally:
        """Run one round of a family, the same cases in every run of the same campaign."""
        tally = FamilyTally()
        seed = derived_seed(self._plan.seed, self._number, family.name, round_number)
        domain = self._narrowed(family, round_number, self._checker.domain(family))

        def use(case: Case) -> bool:
            if not self._goes_on():
                return True
            tally.cases += 1
            self._cases_left -= 1
            tally.edges.update(family.edges(case))
            tally.batch_sizes[case.num_requests] += 1
            verdict = self._check(self._checker.check, family, case)
            if not verdict.passed:
                self._note(family, case, verdict)
            return False

        started = time.monotonic()
        num_cases = CASES_PER_ROUND[self._plan.device]
        draw_cases(family.strategy(domain), num_cases, seed, use)
        tally.seconds = time.monotonic() - started
        return tally

    def _narrowed(self, family: Family, round_number: int, domain: Domain) -> Domain:
        """Return what may be drawn in a round; on a GPU a few compiled variants at a time.

        A page size or a pairing of dtypes that is new compiles for longer than a hundred cases
        run, so a worker stays with some of them before it goes on to others. In a soak, which has
        to reach all, it goes on after each round, and workers share the page sizes out.
        """
        if self._plan.device == "cpu":
            return domain
        if round_number % ROUNDS_PER_WIDE_TABLES:
            domain = dataclasses.replace(domain, without=domain.without | {"wide table"})
        epoch = round_number if self._plan.is_soak else round_number // ROUNDS_PER_EPOCH
        draw = Random(derived_seed(self._plan.seed, self._number, family.name, "epoch", epoch))
        rare = draw.choice(RARE_PAGE_SIZES)
        if self._plan.is_soak:
            turn = epoch * self._plan.num_workers + self._number
            rare = RARE_PAGE_SIZES[turn % len(RARE_PAGE_SIZES)]
        return dataclasses.replace(
            domain, page_sizes=(16, rare), dtype_choices=(0, 0, draw.getrandbits(8))
        )

    def _check(
        self, check: Callable[[Family, Case], Verdict], family: Family, case: Case
    ) -> Verdict:
        if not self._target.allows(family, case):
            return Verdict(family.name)  # A step of the minimiser to what is never drawn.
        self._journal.note(family.name, case)
        verdict = check(family, case)
        self._journal.clear()
        if verdict.fatal:
            self._seen[verdict.signature] += 1
            self._say("found", _found(family, case, verdict, "not shrunk yet"))
            raise _DeviceLost(family.name, case, verdict)
        verdict, known = self._target.without_known(family, case, verdict)
        self._known.update(known)
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
            left = self._deadline + OVERTIME_SECONDS - time.monotonic()
            if siblings > MOST_SIGNATURES_PER_FAMILY or left <= 0:
                why = "one of many" if left > 0 else "the time was over"
                self._say("found", _found(family, case, verdict, f"not shrunk: {why}"))
                continue
            # Known before it is small, should this process die of a smaller case.
            self._say("found", _found(family, case, verdict, "not shrunk yet"))
            check = partial(self._check_unless_stopped, family)
            try:
                budget = dataclasses.replace(
                    MINIMISE_BUDGET, seconds=min(MINIMISE_BUDGET.seconds, left)
                )
                minimal = minimise(family, case, verdict, check, budget)
                explained = _explained(self._plan, family, minimal)
                found = _found(family, minimal.case, minimal.verdict, str(minimal), explained)
                self._say("found", found)
                rate = reproduce_rate(check, minimal.case, signature, seconds=OVERTIME_SECONDS)
            except _Stopped:
                return
            self._say("found", dataclasses.replace(found, reproduced=rate))

    def _check_unless_stopped(self, family: Family, case: Case) -> Verdict:
        if self._stop.is_set():
            raise _Stopped
        return self._check(self._checker.check_thoroughly, family, case)
