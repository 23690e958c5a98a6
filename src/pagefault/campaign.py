"""A campaign: worker processes that draw and check cases, and what they found."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from .case import Case
from .family import family_named
from .isolation import death_verdict, hang_verdict
from .journal import JournalError, Noted, read_noted, seconds_since_noted
from .plan import Plan
from .recheck import JOURNALS, OUT_OF_TIME, Again, of_journals
from .result import FAILS, NOT_SHRUNK_YET, PASSES, FamilyTally, Found, Result
from .state import CampaignFolder, State
from .verdict import Signature, Verdict
from .worker import SHRINK_BUDGET, Assignment, Round, recheck, shrink, work

__all__ = ["FamilyTally", "Found", "Plan", "Result", "run"]

# A family that has ended so many workers has shown its fault: the others get the time.
MOST_DEATHS_PER_FAMILY = 3
# So many workers may fail outside any case before none is replaced any more.
MOST_FAILURES = 8

# Time that workers get to stop.
STOP_SECONDS = 60.0

Watch = Callable[[Result], None]


def run(
    plan: Plan,
    watch: Watch = lambda result: None,
    *,
    folder: CampaignFolder | None = None,
    state: State | None = None,
    recheck: Sequence[Again] = (),
) -> Result:
    """Run a campaign and return what it found; SIGINT and SIGTERM end it early.

    Args:
        plan: What to run.
        watch: Called with the result so far, several times a second; what it has been shown is
            written to the state afterwards.
        folder: Where the state is kept, or None for a temporary folder. What processes were about
            to launch whose journals still lie there is checked first.
        state: Where the campaign is, or None for its start.
        recheck: Cases to be checked before any is drawn.
    """
    state = State.at_start("", plan) if state is None else state
    if folder is not None:
        return _Campaign(plan, watch, folder, state, recheck).run()
    with closing(CampaignFolder()) as temporary:
        return _Campaign(plan, watch, temporary, state, recheck).run()


class _Campaign:
    def __init__(
        self,
        plan: Plan,
        watch: Watch,
        folder: CampaignFolder,
        state: State,
        recheck: Sequence[Again],
    ) -> None:
        self._plan = plan
        self._watch = watch
        self._folder = folder
        self._state = state
        self._result = state.result
        self._corpus = folder.load_corpus()
        self._recheck = [*self._left_in_journals(), *recheck]
        # Torch is loaded already, but a fork can't use CUDA if its parent has looked for it.
        self._context: Any = multiprocessing.get_context(
            "fork" if plan.device == "cpu" else "spawn"
        )
        # A pipe for each process: one that dies while it writes takes no lock of others along.
        self._channels: dict[Connection, int] = {}
        self._go = self._context.Event()
        self._stop = self._context.Event()
        self._processes: dict[int, BaseProcess] = {}
        self._assignments: dict[int, Assignment] = {}
        self._ready: set[int] = set()
        self._ended: set[int] = set()
        self._hung: set[int] = set()
        # Who is going to make a finding smaller.
        self._owners: dict[Signature, int] = {}
        self._to_shrink: deque[Signature] = deque()
        self._shrinkers: set[int] = set()
        self._num_failures = 0
        self._seconds_before = self._result.seconds
        self._started = float("inf")
        self._deadline = float("inf")
        self._has_news = True

    def run(self) -> Result:
        previous = signal.signal(signal.SIGTERM, _raise_interrupt)
        try:
            self._run_all()
        except KeyboardInterrupt:
            self._result.interrupted = True
            self._stop.set()
            self._go.set()
            limit = time.monotonic() + STOP_SECONDS
            self._collect_until(lambda: self._all_ended() or time.monotonic() > limit)
        finally:
            signal.signal(signal.SIGTERM, previous)
            for process in self._processes.values():
                process.join(timeout=1)
                if process.is_alive():
                    process.kill()
                    process.join()
            self._note_time()
            self._folder.save(self._state, at_once=True)
            self._folder.save_corpus(self._corpus, at_once=True)
        self._result.edge_sets = self._corpus.num_sets()
        return self._result

    def _run_all(self) -> None:
        """Check again what is to be checked again, then let the workers go until all have ended."""
        if self._recheck:
            self._start(recheck, self._plan, self._recheck, self._stop)
        if self._plan.seconds > self._seconds_before:
            for worker in range(self._plan.num_workers):
                self._spawn(worker, self._plan.seconds - self._seconds_before)
        self._collect_until(lambda: len(self._ready | self._ended) == len(self._processes))
        # What nobody is left to make smaller.
        self._to_shrink.extend(self._result.findings.keys() - self._owners.keys())
        self._started = time.monotonic()
        self._deadline = self._started + self._plan.seconds - self._seconds_before
        self._go.set()
        self._collect_until(lambda: self._all_ended() and not self._to_shrink)

    def _left_in_journals(self) -> list[Again]:
        """Return what processes were about to launch that somebody has killed.

        Rounds of an earlier campaign say nothing of this one's.
        """
        noted: dict[str, Noted] = {}
        for path in self._folder.left_journals(self._state.settled):
            try:
                was = read_noted(path)
            except JournalError as error:
                self._folder.set_journal_aside(path, str(error))
                continue
            if was is None:
                self._state.settled.add(path.name)
            else:
                is_ours = path.name.startswith(f"{self._state.run}-")
                noted[path.name] = was if is_ours else was._replace(worker=None)
        return of_journals(noted).items

    def _all_ended(self) -> bool:
        return len(self._ended) == len(self._processes)

    # Processes

    def _spawn(self, worker: int, seconds: float) -> None:
        """Start a worker where another has left off, without families that end every worker."""
        deaths = self._state.deaths
        families = [f for f in self._plan.families if deaths[f] < MOST_DEATHS_PER_FAMILY]
        cases_left = self._state.cases_left(worker)
        if not families or cases_left < 1 or self._stop.is_set():
            return
        assignment = Assignment(
            worker,
            families,
            dict(self._state.progress[worker].rounds),
            cases_left,
            self._folder.journal_path(f"{self._state.run}-{os.getpid()}-{time.time_ns()}-{worker}"),
        )
        number = self._start(work, self._plan, assignment, seconds, self._go, self._stop)
        self._assignments[number] = assignment

    def _spawn_shrinkers(self) -> None:
        """Start processes that make cases smaller, as many as there are workers."""
        while self._to_shrink and self._go.is_set():
            is_over = time.monotonic() > self._deadline + SHRINK_BUDGET.seconds
            if is_over or self._stop.is_set():
                self._to_shrink.clear()
                return
            if len(self._shrinkers - self._ended) >= self._plan.num_workers:
                return
            found = self._result.findings[self._to_shrink.popleft()]
            if found.how_small == NOT_SHRUNK_YET:
                number = self._start(shrink, self._plan, found, self._stop)
                self._shrinkers.add(number)
                self._owners[found.signature] = number

    def _start(self, main: Callable[..., None], *arguments: Any) -> int:
        """Start a process, and return its number."""
        number = len(self._processes)
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=main, args=(sender, os.getpid(), *arguments), name=f"pagefault process {number}"
        )
        # A terminal's Ctrl-C goes to all processes: a worker, which inherits this mask, goes on
        # until it is told to stop, and none is started that nobody knows of.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
            sender.close()
            self._processes[number] = process
            self._channels[receiver] = number
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return number

    def _collect_until(self, done: Callable[[], bool]) -> None:
        while not done():
            for channel in wait(list(self._channels), timeout=0.2):
                assert isinstance(channel, Connection)
                number = self._channels[channel]
                try:
                    kind, content = channel.recv()
                except (EOFError, OSError, pickle.UnpicklingError):
                    # Nothing more comes from this process, and all that it said was taken.
                    del self._channels[channel]
                    channel.close()
                    self._look_at_the_end_of(number)
                else:
                    self._take(number, kind, content)
            self._kill_the_hung()
            self._spawn_shrinkers()
            self._note_time()
            # Findings are written before the state that counts them.
            self._watch(self._result)
            self._folder.save(self._state, at_once=self._has_news)
            self._has_news = False
            self._folder.save_corpus(self._corpus)

    def _note_time(self) -> None:
        elapsed = max(0.0, time.monotonic() - self._started)
        self._result.seconds = self._seconds_before + elapsed

    # What they say

    def _take(self, number: int, kind: str, content: Any) -> None:
        if kind == "ready":
            self._ready.add(number)
        elif kind == "round":
            self._take_round(content)
        elif kind == "found":
            self._take_found(number, content)
        elif kind == "rechecked":
            self._take_rechecked(*content)
        elif kind == "unchecked":
            self._result.unchecked = content
        elif kind == "failed":
            self._result.failures.append(content)
        elif kind == "lane failed":
            self._result.lane_failures.append(content)
            self._has_news = True
        elif kind == "ended":
            self._ended.add(number)
            self._settle(number)
        elif kind == "device lost":
            self._ended.add(number)
            self._take_death(number, *content)

    def _take_round(self, done: Round) -> None:
        self._result.tallies[done.family].add(done.tally)
        self._result.counts += done.seen
        self._result.known += done.known
        self._corpus.add(done.entries)
        progress = self._state.progress[done.worker]
        progress.cases += done.tally.cases
        progress.rounds[done.family] = max(progress.rounds[done.family], done.number + 1)

    def _take_found(self, number: int, found: Found) -> None:
        self._result.add(found)
        self._owners.setdefault(found.signature, number)
        self._has_news = True

    def _take_death(self, number: int, family: str, found: Found | None = None) -> None:
        """Note what has ended a worker, and replace it."""
        self._state.deaths[family] += 1
        if found is not None:
            self._result.counts[found.signature] += 1
            self._take_found(number, found)
        self._settle(number)
        self._replace(number)

    def _take_rechecked(self, item: Again, answer: Verdict | str) -> None:
        """Note what came of a case that was checked again."""
        if isinstance(answer, str):
            outcome = answer
        else:
            outcome = PASSES if answer.passed else FAILS
            if not answer.passed:
                self._take_failure(item, answer)
        if item.is_from_journal and outcome != OUT_OF_TIME:
            self._state.settled.add(item.name.removeprefix(JOURNALS))
        self._result.rechecked[item.name] = outcome
        self._has_news = True

    def _take_failure(self, item: Again, verdict: Verdict) -> None:
        family = family_named(item.family)
        if not isinstance(item.case, Case):
            self._result.lane_failures.append(f"{verdict.text()}\n{item.case.to_json(family)}")
            return
        how_small = item.how_small if verdict.signature == item.signature else NOT_SHRUNK_YET
        found = Found.of(family, item.case, verdict, how_small)
        self._result.add(found)
        ends_processes = verdict.fatal or verdict.signature.kind in ("died", "hang")
        if item.worker is None:
            self._result.counts[found.signature] += 1
        elif ends_processes and item.worker < len(self._state.progress):
            # Its round would end the next worker as well. Where only an answer is wrong, the
            # round is run again and counts it.
            self._result.counts[found.signature] += 1
            self._state.deaths[item.family] += 1
            rounds = self._state.progress[item.worker].rounds
            rounds[item.family] = max(rounds[item.family], item.round_number + 1)

    # How they end

    def _kill_the_hung(self) -> None:
        for number, assignment in self._assignments.items():
            if number in self._ended | self._hung:
                continue
            if seconds_since_noted(assignment.journal) > self._plan.case_seconds:
                self._hung.add(number)
                self._processes[number].kill()

    def _look_at_the_end_of(self, number: int) -> None:
        process = self._processes[number]
        process.join(timeout=STOP_SECONDS)
        if number in self._ended:
            return
        self._ended.add(number)
        if number in self._assignments:
            self._take_end_of_worker(number, process.exitcode or 0)
        else:
            self._result.failures.append(f"{process.name} died (exit code {process.exitcode})")

    def _take_end_of_worker(self, number: int, exitcode: int) -> None:
        assignment = self._assignments[number]
        where = "outside any case"
        try:
            noted = read_noted(assignment.journal)
        except JournalError as error:
            noted, where = None, str(error)
        if noted is None:
            self._num_failures += 1
            self._result.failures.append(
                f"worker {assignment.worker} died: {where} (exit code {exitcode})"
            )
            self._settle(number)
            if self._num_failures < MOST_FAILURES:
                self._replace(number)
            return
        family = family_named(noted.family)
        verdict = (
            hang_verdict(family, self._plan.case_seconds)
            if number in self._hung
            else death_verdict(family, exitcode)
        )
        # The round counts as done: it would end the next worker as well.
        rounds = self._state.progress[assignment.worker].rounds
        rounds[family.name] = max(rounds[family.name], noted.round_number + 1)
        if isinstance(noted.case, Case):
            self._take_death(number, family.name, Found.of(family, noted.case, verdict))
        else:
            self._result.lane_failures.append(f"{verdict.text()}\n{noted.case.to_json(family)}")
            self._take_death(number, family.name)

    def _settle(self, number: int) -> None:
        """Note that what a process had under way is taken, and find others for what it owned."""
        if number in self._assignments:
            self._state.settled.add(self._assignments[number].journal.name)
        if number not in self._shrinkers:
            owned = [signature for signature, owner in self._owners.items() if owner == number]
            self._to_shrink.extend(owned)
        self._has_news = True

    def _replace(self, number: int) -> None:
        """Start a worker for the time that is left."""
        left = self._deadline - time.monotonic()
        if left > 1:
            self._spawn(self._assignments[number].worker, min(left, self._plan.seconds))


def _raise_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
