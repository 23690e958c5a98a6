"""A campaign: worker processes that draw and check cases, and what they found."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from .family import family_named
from .isolation import death_verdict, hang_verdict
from .journal import JournalError, Noted, read_noted
from .plan import Plan
from .processes import GONE, STOP_SECONDS, End, LocalProcesses, Processes
from .recheck import JOURNALS, OUT_OF_TIME, Again, of_journals
from .result import FAILS, NOT_SHRUNK_YET, PASSES, FamilyTally, Found, Result
from .side_case import cause, told
from .state import CampaignFolder, State
from .verdict import Signature, Verdict
from .worker import (
    Assignment,
    Round,
    out_of_overtime,
    recheck,
    seconds_to_shrink,
    shrink,
    shrink_case_seconds,
    work,
)

__all__ = ["FamilyTally", "Found", "Plan", "Result", "run"]

# What has ended so many workers has shown its fault: a family, or what its side cases are held to.
# The others get the time.
MOST_DEATHS_PER_FAMILY = 3
# So many workers may fail outside any case before none is replaced any more.
MOST_FAILURES = 8

# How long to listen before looking at what else there is to do.
LISTEN_SECONDS = 0.2

Watch = Callable[[Result], None]


def run(
    plan: Plan,
    watch: Watch = lambda result: None,
    *,
    folder: CampaignFolder | None = None,
    state: State | None = None,
    recheck: Sequence[Again] = (),
    processes: Processes | None = None,
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
        processes: Where its processes run, or None for this machine.
    """
    state = State.at_start("", plan) if state is None else state
    with ExitStack() as stack:
        if folder is None:
            folder = CampaignFolder()
            stack.callback(folder.close)
        if processes is None:
            # Torch is loaded already, but a fork can't use CUDA if its parent has looked for it.
            method = "fork" if plan.device == "cpu" else "spawn"
            processes = LocalProcesses(folder.journal_path, plan.case_seconds, method)
        return _Campaign(plan, watch, folder, state, recheck, processes).run()


class _Campaign:
    def __init__(
        self,
        plan: Plan,
        watch: Watch,
        folder: CampaignFolder,
        state: State,
        recheck: Sequence[Again],
        processes: Processes,
    ) -> None:
        self._plan = plan
        self._watch = watch
        self._folder = folder
        self._state = state
        self._result = state.result
        self._corpus = folder.load_corpus()
        self._recheck = [*self._left_in_journals(), *recheck]
        self._processes = processes
        self._num_started = 0
        self._assignments: dict[int, Assignment] = {}
        self._ready: set[int] = set()
        self._ended: set[int] = set()
        self._is_stopping = False
        # Who is going to make a finding smaller.
        self._owners: dict[Signature, int] = {}
        self._to_shrink: deque[Signature] = deque()
        # What each process was given to make smaller.
        self._shrinkers: dict[int, Found] = {}
        self._is_out_of_overtime = False
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
            self._is_stopping = True
            self._processes.stop()
            limit = time.monotonic() + STOP_SECONDS
            self._collect_until(lambda: self._all_ended() or time.monotonic() > limit)
        finally:
            signal.signal(signal.SIGTERM, previous)
            self._processes.close()
            self._note_time()
            self._folder.save(self._state, at_once=True)
            self._folder.save_corpus(self._corpus, at_once=True)
        self._result.edge_sets = self._corpus.num_sets()
        return self._result

    def _run_all(self) -> None:
        """Check again what is to be checked again, then let the workers go until all have ended."""
        if self._recheck:
            self._start(recheck, self._plan, self._recheck)
        seconds = max(0.0, self._plan.seconds - self._seconds_before)
        if seconds > 0:
            for worker in range(self._plan.num_workers):
                self._spawn(worker)
        self._collect_until(self._are_ready)
        # What nobody is left to make smaller.
        self._to_shrink.extend(self._result.findings.keys() - self._owners.keys())
        self._started = time.monotonic()
        self._deadline = self._started + seconds
        self._processes.go(seconds)
        self._collect_until(lambda: self._all_ended() and not self._to_shrink)
        if self._is_out_of_overtime:
            self._say_not_shrunk()

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

    def _are_ready(self) -> bool:
        """Return whether all are ready, without workers that have found no place to run."""
        waited_for = set(range(self._num_started)) - self._ready - self._ended
        return all(
            number in self._assignments and self._processes.is_late(number) for number in waited_for
        )

    def _all_ended(self) -> bool:
        return len(self._ended) == self._num_started

    # Processes

    def _spawn(self, worker: int) -> None:
        """Start a worker where another has left off, without what ends every worker."""
        deaths = self._state.deaths
        left_out = frozenset(c for c, times in deaths.items() if times >= MOST_DEATHS_PER_FAMILY)
        families = [family for family in self._plan.families if family not in left_out]
        cases_left = self._state.cases_left(worker)
        if not families or cases_left < 1 or self._is_stopping:
            return
        assignment = Assignment(
            worker,
            families,
            dict(self._state.progress[worker].rounds),
            cases_left,
            f"{self._state.run}-{os.getpid()}-{time.time_ns()}-{worker}",
            left_out,
        )
        self._assignments[self._num_started] = assignment
        self._start(work, self._plan, assignment, journal=assignment.journal)

    def _spawn_shrinkers(self) -> None:
        """Start processes that make cases smaller, as many as there are workers."""
        while self._to_shrink and (self._is_stopping or time.monotonic() >= self._started):
            # One case is checked before any smaller one.
            left = seconds_to_shrink(self._plan, self._deadline)
            if left < shrink_case_seconds(self._plan) or self._is_stopping:
                self._is_out_of_overtime = not self._is_stopping
                self._to_shrink.clear()
                return
            if len(self._shrinkers.keys() - self._ended) >= self._plan.num_workers:
                return
            found = self._result.findings[self._to_shrink.popleft()]
            if found.is_to_shrink:
                number = self._start(shrink, self._plan, found)
                self._shrinkers[number] = found
                self._owners[found.signature] = number

    def _say_not_shrunk(self) -> None:
        """Say of findings why they are left to the next campaign to make smaller."""
        for found in [*self._result.findings.values()]:
            if found.is_to_shrink:
                how_small = f"{NOT_SHRUNK_YET}: {out_of_overtime()} ran out"
                self._result.add(dataclasses.replace(found, how_small=how_small))

    def _start(self, main: Callable[..., None], *arguments: Any, journal: str = "") -> int:
        """Start a process, and return its number."""
        number = self._num_started
        self._num_started += 1
        self._processes.start(number, main, *arguments, journal=journal)
        return number

    def _collect_until(self, done: Callable[[], bool]) -> None:
        while not done():
            for number, kind, content in self._processes.listen(LISTEN_SECONDS):
                self._take(number, kind, content)
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
        elif kind == "ended":
            self._ended.add(number)
            self._settle(number)
            self._shrink_smaller(number)
        elif kind == "device lost":
            self._ended.add(number)
            self._take_death(number, *content)
        elif kind == GONE and number not in self._ended:
            self._ended.add(number)
            self._take_end(number, content)

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

    def _take_death(self, number: int, cause: str, found: Found) -> None:
        """Note what has ended a worker, and replace it."""
        self._state.deaths[cause] += 1
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
        self._recheck = [other for other in self._recheck if other.name != item.name]
        self._has_news = True

    def _take_failure(self, item: Again, verdict: Verdict) -> None:
        family = family_named(item.family)
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
            self._state.deaths[cause(item.family, item.case)] += 1
            rounds = self._state.progress[item.worker].rounds
            rounds[item.family] = max(rounds[item.family], item.round_number + 1)

    # How they end

    def _take_end(self, number: int, end: End) -> None:
        """Note how a process has ended that had more to do, and replace it if it was a worker."""
        if number in self._assignments:
            self._take_end_of_worker(number, end)
        elif end.is_lost and number in self._shrinkers:
            self._hand_on(number)
        elif end.is_lost:
            self._recheck_others()
        else:
            self._result.failures.append(
                f"pagefault process {number} died (exit code {end.exitcode})"
            )

    def _recheck_others(self) -> None:
        """Check again what is left, without the case whose machine was lost."""
        if self._recheck:
            under_way, *self._recheck = self._recheck
            self._result.rechecked[under_way.name] = "not checked again: its machine was lost"
        if self._recheck and not self._is_stopping:
            self._start(recheck, self._plan, self._recheck)

    def _take_end_of_worker(self, number: int, end: End) -> None:
        if end.is_lost:
            # Its round is run again from the start, by the next one.
            self._result.num_lost += 1
            self._settle(number)
            self._replace(number)
            return
        assignment = self._assignments[number]
        noted, exitcode = end.noted, end.exitcode or 0
        if noted is None:
            self._num_failures += 1
            where = end.trouble or "outside any case"
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
            if end.is_hung
            else death_verdict(family, exitcode)
        )
        # The round counts as done: it would end the next worker as well.
        rounds = self._state.progress[assignment.worker].rounds
        rounds[family.name] = max(rounds[family.name], noted.round_number + 1)
        found = Found.of(family, noted.case, told(noted.case, verdict))
        self._take_death(number, cause(family.name, noted.case), found)

    def _settle(self, number: int) -> None:
        """Note that what a process had under way is taken, and find others for what it owned."""
        if number in self._assignments:
            self._state.settled.add(self._assignments[number].journal)
        if number not in self._shrinkers:
            self._hand_on(number)
        self._has_news = True

    def _hand_on(self, number: int) -> None:
        """Find others to make smaller what a process was to make smaller."""
        owned = [signature for signature, owner in self._owners.items() if owner == number]
        self._to_shrink.extend(owned)

    def _shrink_smaller(self, number: int) -> None:
        """Have a case made smaller that has come while another of its finding was."""
        given = self._shrinkers.get(number)
        if given is not None:
            found = self._result.findings[given.signature]
            if found.is_to_shrink and found.case != given.case:
                self._to_shrink.append(found.signature)

    def _replace(self, number: int) -> None:
        """Start a worker for the time that is left."""
        left = self._deadline - time.monotonic()
        if left > 1:
            self._spawn(self._assignments[number].worker)


def _raise_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
