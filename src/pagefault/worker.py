"""The processes of a campaign: workers that draw and check cases, and what they start beside them.

A process says what it has done over a pipe of its own, as pairs of a kind and a content.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from . import reached, specialisations
from .case import Case
from .corpus import Corpus, Entry
from .explanation import through_interpreter
from .family import Domain, Family, family_named
from .findings import reproduce_rate
from .isolation import SHRINK_CASE_SECONDS, checking_in_children
from .journal import Journal
from .lifetime import die_with_parent
from .memory_limit import limit_memory
from .minimal import Budget, Minimal, minimise, size_of
from .plan import Plan
from .processes import Place
from .recheck import Again, check_again
from .result import FamilyTally, Found
from .side_case import AnyCase, any_case_from_json, cause, check_any
from .strategies.edges import HUGE_PAGE_SIZES, PAGE_SIZES
from .stream import derived_seed, draw_cases
from .verdict import Signature, Verdict

if TYPE_CHECKING:
    from .soak import Side

MINIMISE_BUDGET = Budget(seconds=20.0)
# So long after the run's time, and the deadline of one case that hangs at its end, a campaign is
# over. Until then findings are made smaller; the first part of it is the workers'.
OVERTIME_SECONDS = 60.0
WORKER_OVERTIME_SECONDS = 15.0
# How long at most to go on with how often a minimal case shows.
RATE_SECONDS = 15.0

# For findings that end or block processes; a check that never returns costs its whole time.
SHRINK_BUDGET = Budget(seconds=60.0)
MOST_SIGNATURES_PER_CAUSE = 6

# A round is short enough for families to take turns, and to stop.
CASES_PER_ROUND = {"cpu": 64, "cuda": 512}

# How long a worker on a GPU stays with a page size and a pairing that have to be compiled.
ROUNDS_PER_EPOCH = 32
# In a soak, which has to reach all.
SOAK_ROUNDS_PER_EPOCH = 8
# To map the pages of a wide table takes as long as a hundred cases: of so many rounds one has some.
ROUNDS_PER_WIDE_TABLES = 7
ALL_PAGE_SIZES = sorted({*PAGE_SIZES, *HUGE_PAGE_SIZES})


@dataclass(frozen=True)
class Assignment:
    """What one worker is to do.

    Attributes:
        worker: Its index; one that replaces another takes over its index and its rounds.
        families: Their names.
        rounds: How many rounds of each family are done.
        cases_left: How many cases it may still run.
        journal: The name of the journal where it notes what it launches.
        left_out: What ends every worker, see `cause`.
    """

    worker: int
    families: list[str]
    rounds: Mapping[str, int]
    cases_left: float
    journal: str
    left_out: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Round:
    """What came of one round, or of the part of it that there was time for.

    Attributes:
        worker: The worker's index.
        family: The family's name.
        number: The round's.
        tally: What was run.
        seen: How often each finding was seen.
        known: How often each known fault was seen, by its place among the target's.
        entries: What is new in the worker's corpus.
    """

    worker: int
    family: str
    number: int
    tally: FamilyTally
    seen: Counter[Signature]
    known: Counter[int]
    entries: list[Entry]


def work(
    channel: Connection, parent: int, place: Place, plan: Plan, assignment: Assignment
) -> None:
    """Run one worker process."""
    _begin(parent)

    def say(kind: str, content: Any = None) -> None:
        channel.send((kind, content))

    try:
        from .device import prepare

        prepare(plan.device, assignment.worker)
        worker = Worker(plan, assignment, say, place)
        say("ready")
        place.go.wait()
        try:
            worker.run(place.over.value)
            say("ended")
        except _DeviceLost as lost:
            say("device lost", lost.args)
    except Exception:
        _fail(channel, f"worker {assignment.worker}")
    _end(channel)


def shrink(channel: Connection, parent: int, place: Place, plan: Plan, found: Found) -> None:
    """Run a process that makes a finding's case smaller whose check may end or block processes.

    It never touches the device itself: each check is a child's.
    """
    _begin(parent)
    try:
        _shrink(plan, found, place, lambda smaller: channel.send(("found", smaller)))
        channel.send(("ended", None))
    except _Stopped:
        channel.send(("ended", None))
    except Exception:
        _fail(channel, f"shrinking {found.signature.family}")
    _end(channel)


def recheck(channel: Connection, parent: int, place: Place, plan: Plan, items: list[Again]) -> None:
    """Run a process that checks cases again, each in a child."""
    _begin(parent)
    try:
        from .device import prepare

        prepare(plan.device)
        for item, answer in zip(items, check_again(plan, items, place.stop)):
            channel.send(("rechecked", (item, answer)))
        channel.send(("ended", None))
    except Exception:
        _fail(channel, "checking again")
    _end(channel)


def _begin(parent: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(parent)
    limit_memory()


def _fail(channel: Connection, who: str) -> None:
    with suppress(OSError):  # Of a parent that is gone.
        channel.send(("failed", f"{who}: {traceback.format_exc()}"))
        channel.send(("ended", None))


def _end(channel: Connection) -> NoReturn:
    channel.close()
    # A CUDA context that has faulted can hang interpreter shutdown.
    os._exit(0)


def overtime_end(plan: Plan, over: float) -> float:
    """Return when a campaign is over whose time is over at a moment of the monotonic clock."""
    return over + plan.case_seconds + OVERTIME_SECONDS


def seconds_to_shrink(plan: Plan, over: float) -> float:
    """Return how long a finding may be made smaller that needs a child for each case.

    There is time left for the case that is under way then, and for one that says whether the
    smallest shows again.
    """
    return overtime_end(plan, over) - 2 * shrink_case_seconds(plan) - time.monotonic()


def shrink_case_seconds(plan: Plan) -> float:
    """Return how long one such case may take."""
    return min(plan.case_seconds, SHRINK_CASE_SECONDS[plan.device])


def out_of_overtime() -> str:
    """Return what a report says has run out after the run's time."""
    return f"the time for it after the run, {OVERTIME_SECONDS:g} s and the deadline of a case,"


def _within(budget: Budget, seconds: float) -> Budget:
    """Return a budget, or what is left of the overtime where that is less."""
    if seconds >= budget.seconds:
        return budget
    return Budget(seconds, budget.num_checks, out_of_overtime())


def _shrink(plan: Plan, found: Found, place: Place, report: Callable[[Found], None]) -> None:
    from .device import prepare

    prepare(plan.device)

    import torch

    from .checker import Checker
    from .target import load_target

    torch.set_num_threads(1)
    place.go.wait()
    target = load_target(plan.target)
    family, case = any_case_from_json(found.case)

    check_unless_over = checking_in_children(
        target,
        family,
        lambda: Checker(target, plan.device, plan.memory, plan.strict),
        shrink_case_seconds(plan),
    )

    def check(candidate: AnyCase) -> Verdict:
        if place.stop.is_set():
            raise _Stopped
        return check_unless_over(candidate)

    again = check(case)
    if again.passed or again.signature != found.signature:
        how_small = "not shrunk: it did not happen again in a process of its own"
        report(dataclasses.replace(found, how_small=how_small))
        return
    left = seconds_to_shrink(plan, place.over.value)
    minimal = minimise(family, case, again, check, _within(SHRINK_BUDGET, left))
    smallest = _found_minimal(plan, family, minimal)
    report(smallest)
    left = seconds_to_shrink(plan, place.over.value)
    rate = reproduce_rate(check, minimal.case, found.signature, seconds=min(60.0, left))
    report(dataclasses.replace(smallest, reproduced=rate))


def _found_minimal(plan: Plan, family: Family, minimal: Minimal[Any]) -> Found:
    """Return a finding, with what the interpreter says of it: it knows the kernel's line."""
    explained = ""
    if plan.device == "cuda":
        explained = through_interpreter(plan.target, family, minimal.case)
    return Found.of(family, minimal.case, minimal.verdict, str(minimal), explained)


class _Stopped(BaseException):
    """Ends a search for a smaller case: somebody waits for this process to end."""


class _DeviceLost(BaseException):
    """Ends a round: nothing can be launched in this process any more.

    Its arguments are what is to blame, see `cause`, and what was found.
    """


class Worker:
    """Draws and checks cases of each family in turn, each for its share of the time.

    Args:
        plan: The campaign's.
        assignment: The worker's.
        say: Sends a pair of a kind and a content.
        place: Where it runs.
    """

    def __init__(
        self, plan: Plan, assignment: Assignment, say: Callable[..., None], place: Place
    ) -> None:
        import torch

        from .checker import Checker
        from .target import load_target

        torch.set_num_threads(1)
        self._plan = plan
        self._worker = assignment.worker
        self._rounds = Counter(assignment.rounds)
        self._cases_left = assignment.cases_left
        self._families = [family_named(name) for name in assignment.families]
        assert place.journal is not None
        self._journal = Journal(place.journal, assignment.worker)
        self._say = say
        self._stop = place.stop
        self._target = load_target(plan.target)
        self._checker = Checker(self._target, plan.device, plan.memory, plan.strict)
        self._left_out = assignment.left_out
        self._recorder = specialisations.install()
        self._best: dict[Signature, tuple[AnyCase, Verdict]] = {}
        # By what was to blame: what is wrong in many ways is made smaller in a few.
        self._minimised: dict[Signature, str] = {}
        self._seen: Counter[Signature] = Counter()
        self._known: Counter[int] = Counter()
        self._corpus = Corpus()
        self._entries: list[Entry] = []
        self._deadline = 0.0

    def run(self, deadline: float) -> None:
        """Go on until the time is over.

        Args:
            deadline: When that is, on the monotonic clock.

        Raises:
            _DeviceLost: A case has made the device unusable for this process.
        """
        self._deadline = deadline
        if self._checker.unchecked:
            self._say("unchecked", self._checker.unchecked)
        spent: dict[str, float] = {family.name: 0.0 for family in self._families}
        # Workers start with different families, so that a short run sees them all.
        first = self._worker % len(self._families)
        order = self._families[first:] + self._families[:first]
        while self._goes_on():
            family = min(order, key=lambda family: spent[family.name])
            started = time.monotonic()
            tally = FamilyTally()
            try:
                self._run_round(family, tally)
            finally:
                self._report_round(family, tally)
            # A soak gives families as many cases, to reach the rare edges of slow ones too.
            spent[family.name] += tally.cases if self._plan.is_soak else time.monotonic() - started
            self._report_new()

    def _run_round(self, family: Family, tally: FamilyTally) -> None:
        self._journal.round_number = self._rounds[family.name]
        self._round(family, tally)
        if self._plan.is_soak:
            self._sides(family)

    def _report_round(self, family: Family, tally: FamilyTally) -> None:
        """Say what a round has come to, all at once: it counts as a whole or not at all."""
        tally.checks, tally.variants = reached.take(), self._recorder.take_new()
        number = self._rounds[family.name]
        news = self._seen, self._known, self._entries
        self._say("round", Round(self._worker, family.name, number, tally, *news))
        self._rounds[family.name] += 1
        self._seen, self._known, self._entries = Counter(), Counter(), []

    def _sides(self, family: Family) -> None:
        """Run what a soak has beside a round, the same in every run of the same campaign."""
        from .soak import sides_of

        round_number = self._rounds[family.name]
        narrowed = partial(self._narrowed, family, round_number)
        for side in sides_of(self._checker, family, round_number, narrowed):

            def use(drawn: Any, side: Side = side) -> bool:
                self._check_and_note(family, side.of(drawn))
                return bool(self._stop.is_set())

            stream = (*self._plan.stream(self._worker, family.name), round_number, side.held_to)
            if f"{side.held_to}: {family.name}" not in self._left_out:
                draw_cases(side.strategy, side.num_cases, derived_seed(*stream), use)

    def _goes_on(self) -> bool:
        over = time.monotonic() >= self._deadline or self._cases_left < 1
        return not (over or self._stop.is_set())

    def _round(self, family: Family, tally: FamilyTally) -> None:
        """Run one round of a family, the same cases in every run of the same campaign."""
        round_number = self._rounds[family.name]
        seed = derived_seed(*self._plan.stream(self._worker, family.name), round_number)
        domain = self._narrowed(family, round_number, self._checker.domain(family))

        def use(case: Case) -> bool:
            if not self._goes_on():
                return True
            tally.cases += 1
            self._cases_left -= 1
            edges = family.edges(case)
            tally.edges.update(edges)
            tally.batch_sizes[case.num_requests] += 1
            entry = self._corpus.take(family, case, edges)
            if entry is not None:
                self._entries.append(entry)
            self._check_and_note(family, case)
            return False

        started = time.monotonic()
        num_cases = CASES_PER_ROUND[self._plan.device]
        draw_cases(family.strategy(domain), num_cases, seed, use)
        tally.seconds = time.monotonic() - started

    def _narrowed(self, family: Family, round_number: int, domain: Domain) -> Domain:
        """Return what may be drawn in a round; on a GPU one page size and pairing of dtypes.

        A page size or a pairing that is new compiles for longer than a thousand cases run. Every
        other round has the usual ones; the rounds between stay with others before they go on to the
        next, and workers share those out.
        """
        if self._plan.device == "cpu":
            return domain
        turn = round_number + self._worker
        if turn % ROUNDS_PER_WIDE_TABLES:
            domain = domain.excluding("wide table")
        if turn % 2 == 0:
            return dataclasses.replace(domain, page_sizes=(16,), dtype_choices=(0,))
        epoch = round_number // (SOAK_ROUNDS_PER_EPOCH if self._plan.is_soak else ROUNDS_PER_EPOCH)
        num_workers = self._plan.num_workers
        # Workers of odd number are the first to get here.
        place = self._worker // 2 if self._worker % 2 else (num_workers + self._worker) // 2
        share = epoch * num_workers + place
        all_sizes, page_size = divmod(share, len(ALL_PAGE_SIZES))
        return dataclasses.replace(
            domain,
            page_sizes=(ALL_PAGE_SIZES[page_size],),
            # Another pairing when the same page size comes again.
            dtype_choices=(1 + share + all_sizes,),
        )

    def _check_and_note(self, family: Family, case: AnyCase) -> None:
        verdict = self._check(family, case, thoroughly=False)
        if not verdict.passed:
            self._note(family, case, verdict)

    def _check(self, family: Family, case: AnyCase, thoroughly: bool) -> Verdict:
        if not self._target.allows(family, case):
            return Verdict(family.name)  # A step of the minimiser to what is never drawn.
        self._journal.note(family.name, case)
        verdict = check_any(self._checker, family, case, thoroughly)
        if verdict.fatal:
            # The case stays noted, should nobody be left to hear of it.
            raise _DeviceLost(cause(family.name, case), Found.of(family, case, verdict))
        self._journal.clear()
        verdict, known = self._target.without_known(family, case, verdict)
        self._known.update(known)
        return verdict

    def _note(self, family: Family, case: AnyCase, verdict: Verdict) -> None:
        signature = verdict.signature
        self._seen[signature] += 1
        known = self._best.get(signature)
        if known is None:
            # Known before the round is over, should this process die of another case.
            self._say("found", Found.of(family, case, verdict))
        if known is None or size_of(family, case) < size_of(family, known[0]):
            self._best[signature] = (case, verdict)

    def _report_new(self) -> None:
        """Minimise and report each signature that is new since the last round."""
        for signature, (case, verdict) in list(self._best.items()):
            if signature in self._minimised:
                continue
            family = family_named(signature.family)
            self._minimised[signature] = cause(family.name, case)
            siblings = [*self._minimised.values()].count(self._minimised[signature])
            if siblings > MOST_SIGNATURES_PER_CAUSE:
                self._say("found", Found.of(family, case, verdict, "not shrunk: one of many"))
                continue
            # Known before it is small, should this process die of a smaller case.
            self._say("found", Found.of(family, case, verdict))
            left = self._deadline + WORKER_OVERTIME_SECONDS - time.monotonic()
            if left <= 0:
                continue  # Others take it over when this process has ended.
            check = partial(self._check_unless_stopped, family)
            try:
                budget = _within(MINIMISE_BUDGET, left)
                minimal = minimise(family, case, verdict, check, budget)
                found = _found_minimal(self._plan, family, minimal)
                self._say("found", found)
                rate = reproduce_rate(check, minimal.case, signature, seconds=RATE_SECONDS)
            except _Stopped:
                return
            self._say("found", dataclasses.replace(found, reproduced=rate))

    def _check_unless_stopped(self, family: Family, case: AnyCase) -> Verdict:
        if self._stop.is_set():
            raise _Stopped
        return self._check(family, case, thoroughly=True)
