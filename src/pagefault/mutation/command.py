"""What `pagefault mutate` does, once its options are understood."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ..checker import Checker
from ..family import family_named
from ..lifetime import die_with_parent
from ..stream import derived_seed
from ..target import Target
from .campaign import POLL_SECONDS, SURVIVED, Outcome, Run
from .cases import Cost, Deck, Item, cost_of, draw_items
from .interrupts import Interrupts
from .mutants import Key, Mutant, modules_of, mutants_of, sizes_in
from .reviewed import Reviewed
from .survival import Survival
from .tables import Report
from .trial import Setting, load_probed

Progress = Callable[[str, int, int], None]

# Of so many times the calls that a mutant is tried on, those are taken that can tell it.
DRAWN_FOR_EACH = 2

# A listed mutant is tried on so many calls where others are tried too: it has survived far more.
LISTED_CASES = 30

# Cases of each function in a round of `try_listed`, which ends early only between two rounds.
ROUND_CASES = 500


@dataclass(frozen=True)
class Wanted:
    """What is asked for.

    Attributes:
        target: As `load_target` takes it.
        families: Names.
        num_cases: Calls that a mutant is tried on at most.
        seed: Of the cases.
        num_workers: Processes.
        strict: As `Checker` takes it.
        reviewed: What people have said.
        functions: Whose mutants to try; of all if empty.
        only_listed: Whether to try those that are listed as equivalent, and no others, on every
            case that is drawn.
        every: Of so many mutants one is tried.
    """

    target: str
    families: Sequence[str]
    num_cases: int
    seed: int
    num_workers: int
    strict: bool
    reviewed: Reviewed
    functions: Sequence[str] = ()
    only_listed: bool = False
    every: int = 1

    @cached_property
    def listed(self) -> frozenset[Key]:
        """The keys of the mutants that are listed as equivalent."""
        return frozenset(entry.key for entry in self.reviewed.equivalent)


def mutate(wanted: Wanted, target: Target, progress: Progress) -> Report:
    """Return what became of every mutant, or of those that were tried before an interrupt.

    Args:
        wanted: What is asked for.
        target: The target, loaded.
        progress: Takes what is under way, and how many of how many are done.
    """
    import torch

    torch.set_num_threads(1)  # Threads do not survive a fork.
    modules = modules_of(target)
    every = mutants_of(modules, target, wanted.families, wanted.reviewed.left_out)
    mutants = _chosen(wanted, every)
    checker = Checker(target, "cpu", strict=wanted.strict)
    outcomes: dict[int, Outcome] = {}
    with (
        Interrupts() as interrupts,
        tempfile.TemporaryDirectory(prefix="pagefault-mutants-") as folder,
    ):
        setting = Setting(
            wanted.target, modules, wanted.strict, Path(folder), not wanted.only_listed
        )
        decks = _decks(wanted, setting, target, checker, mutants, progress, interrupts)
        if decks and all(deck.num_usable for deck in decks.values()):
            listed = wanted.listed

            def num_cases(mutant: Mutant) -> int:
                if wanted.only_listed:
                    return wanted.num_cases * len(mutant.families)
                few = min(LISTED_CASES, wanted.num_cases)
                return few if mutant.key in listed else wanted.num_cases

            run = Run(setting, decks, num_cases, wanted.num_workers, progress, interrupts)
            run.run(mutants)
            outcomes = run.outcomes
    return Report(
        wanted.target,
        wanted.seed,
        wanted.num_cases,
        wanted.strict,
        len(mutants),
        [outcome for _, outcome in sorted(outcomes.items())],
        wanted.reviewed,
        len(mutants) == len(every) and set(wanted.families) == set(target.functions),
        interrupts.asked,
        [fault for deck in decks.values() for fault in deck.faults()],
    )


def try_listed(wanted: Wanted, target: Target, progress: Progress, survival: Survival) -> Report:
    """Return what became of the listed mutants that have not survived all cases yet.

    In rounds, after each of which the survival is written; who ends the run goes on from there.

    Args:
        wanted: What is asked for; `num_cases` are those of its families that each is to survive.
        target: The target, loaded.
        progress: Takes what is under way, and how many of how many are done.
        survival: What they have survived so far.
    """
    last: dict[Key, Outcome] = {}
    while True:
        left = [
            entry
            for entry in wanted.reviewed.equivalent
            if survival.cases(entry.key) < wanted.num_cases
            and (entry.key not in last or last[entry.key].status == SURVIVED)
        ]
        number = min((survival.rounds(entry.key) for entry in left), default=0)
        in_round = [entry for entry in left if survival.rounds(entry.key) == number]
        report = mutate(
            replace(
                wanted,
                num_cases=ROUND_CASES,
                seed=derived_seed(wanted.seed, "listed", number),
                only_listed=True,
                reviewed=replace(wanted.reviewed, equivalent=tuple(in_round)),
            ),
            target,
            progress,
        )
        for outcome in report.outcomes:
            last[outcome.mutant.key] = outcome
            if outcome.status == SURVIVED:
                survival.add(outcome.mutant.key, ROUND_CASES * len(outcome.mutant.families))
        survival.write()
        if not report.outcomes or report.interrupted:
            return replace(report, outcomes=list(last.values()), reviewed=wanted.reviewed)


def _chosen(wanted: Wanted, mutants: Sequence[Mutant]) -> list[Mutant]:
    chosen = [
        mutant
        for mutant in mutants
        if (not wanted.functions or mutant.function in wanted.functions)
        and (not wanted.only_listed or mutant.key in wanted.listed)
    ]
    return chosen[:: wanted.every]


def _decks(
    wanted: Wanted,
    setting: Setting,
    target: Target,
    checker: Checker,
    mutants: Sequence[Mutant],
    progress: Progress,
    interrupts: Interrupts,
) -> dict[str, Deck]:
    """Return the calls of each family, as many as any mutant needs, checked on the original.

    None, if somebody ended the run.
    """
    names = sorted({name for mutant in mutants for name in mutant.families})
    num = wanted.num_cases * (1 if wanted.only_listed else DRAWN_FOR_EACH)
    sizes = sizes_in(setting.modules)
    items = {
        name: draw_items(target, checker, family_named(name), num, wanted.seed, sizes)
        for name in names
    }
    flat = [item for name in items for item in items[name]]
    checked = _costs(flat, setting, wanted.num_workers, progress, interrupts)
    if len(checked) < len(flat):
        return {}
    costs = iter(checked)
    return {name: Deck(items[name], [next(costs) for _ in items[name]]) for name in items}


# What a forked process of `_costs` works on.
_items: Sequence[Item] = ()
_checker: Checker | None = None


def _costs(
    items: Sequence[Item],
    setting: Setting,
    num_workers: int,
    progress: Progress,
    interrupts: Interrupts,
) -> list[Cost]:
    """Return what the calls take, or the first of them if somebody ended the run."""
    global _items
    _items = items
    costs: list[Cost] = []
    pool = multiprocessing.get_context("fork").Pool(num_workers, _start_worker, (setting,))
    try:
        results = pool.imap(_cost, range(len(items)))
        while len(costs) < len(items) and not interrupts.asked:
            with suppress(multiprocessing.TimeoutError):
                costs.append(results.next(timeout=POLL_SECONDS))
                progress("cases on the original", len(costs), len(items))
    finally:
        pool.terminate()
        pool.join()
    return costs


def _start_worker(setting: Setting) -> None:
    """Load the original with probes; leave it to the parent to end this process."""
    global _checker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(os.getppid())
    _checker = Checker(load_probed(setting), "cpu", strict=setting.strict)


def _cost(number: int) -> Cost:
    assert _checker is not None
    return cost_of(_items[number], _checker)


class Pace:
    """How long a stage still takes, from how long it has taken."""

    def __init__(self) -> None:
        self._stage = ""
        self._started = 0.0

    def line(self, stage: str, done: int, total: int) -> str:
        """Return what there is to say of a stage of which so much is done."""
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._started = stage, now
        elapsed = now - self._started
        left = elapsed / done * (total - done) if done else 0.0
        return f"{stage}: {done} of {total}, {elapsed:.0f} s, {left:.0f} s to go"
