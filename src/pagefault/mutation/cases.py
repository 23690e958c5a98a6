"""The cases that mutants are tried on: drawn once, checked once on the original, then shared."""

from __future__ import annotations

import itertools
import resource
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .. import reached
from ..case import MOST_FILLED_ELEMENTS, Case, CaseError
from ..checker import WIDE_TABLE, Checker
from ..family import Family
from ..garbage import EDGE, Garbage, check_garbage, is_refused
from ..stream import derived_seed, draw_cases
from ..target import Target
from ..verdict import Verdict

# Of so many calls one has garbage in its device tensors, where a function promises anything of it.
GARBAGE_ONE_IN = 4

# What ends a call that goes on and on; the limit of a mutant is that of the original many times.
LEAST_SECONDS = 2.0
TIMES_ORIGINAL = 25


@dataclass(frozen=True)
class Item:
    """One call to try.

    Attributes:
        family: The function's family.
        call: A case, or one with garbage.
    """

    family: Family
    call: Case | Garbage

    @property
    def case(self) -> Case:
        """The legal case."""
        return self.call.case if isinstance(self.call, Garbage) else self.call

    @cached_property
    def reserved_bytes(self) -> int:
        """Addresses that both replicas of its wide tables take."""
        spans = [self.case.span_of(name) for name in self.case.tables()]
        return sum(8 * span for span in spans if span > MOST_FILLED_ELEMENTS)

    @cached_property
    def edges(self) -> frozenset[str]:
        """The edges that it has."""
        edges = self.family.edges(self.case)
        return edges | {EDGE} if isinstance(self.call, Garbage) else edges

    def check(self, checker: Checker) -> Verdict:
        """Return what is wrong with the target's answer."""
        if isinstance(self.call, Garbage):
            # A child that takes too long is ended from outside.
            return check_garbage(checker, self.family, self.call, seconds=3600.0)
        return checker.check(self.family, self.call)


@dataclass(frozen=True)
class Cost:
    """What a call took on the original.

    Attributes:
        accesses: Loads and stores, by which calls are put in order.
        seconds: Time of a core.
        fault: What was wrong with the original's answer; "" if nothing.
    """

    accesses: int
    seconds: float
    fault: str = ""

    @property
    def limit_seconds(self) -> float:
        """How long a mutant may take."""
        return max(LEAST_SECONDS, TIMES_ORIGINAL * self.seconds)


def draw_items(target: Target, checker: Checker, family: Family, num: int, seed: int) -> list[Item]:
    """Return different calls of a function, always the same for the same seed.

    Args:
        target: The target.
        checker: Of the target.
        family: The function's family.
        num: How many.
        seed: Of the run.
    """
    from ..strategies.any_bytes import garbage_of

    has_garbage = EDGE not in target.terms_of(family.name).without
    num_garbage = num // GARBAGE_ONE_IN if has_garbage else 0
    domain = checker.domain(family)
    narrow = domain.excluding(WIDE_TABLE)
    legal = _drawn(family.strategy(domain), num - num_garbage, derived_seed(seed, family.name))
    spoilt = _drawn(
        garbage_of(family, narrow), 2 * num_garbage, derived_seed(seed, family.name, EDGE)
    )
    spoilt = [g for g in spoilt if not is_refused(family, g.case)][:num_garbage]
    calls = _mixed(legal, spoilt, GARBAGE_ONE_IN - 1)
    return [Item(family, call) for call in calls]


def _drawn(strategy: Any, num: int, seed: int) -> list[Any]:
    found: list[Any] = []
    draw_cases(strategy, num, seed, found.append)
    return found


def _mixed(many: Sequence[Any], few: Sequence[Any], at_a_time: int) -> Iterator[Any]:
    """Yield so many of one sequence, then one of the other, and so on."""
    rest = iter(few)
    for start in range(0, len(many), at_a_time):
        yield from many[start : start + at_a_time]
        yield from itertools.islice(rest, 1)
    yield from rest


def cost_of(item: Item, checker: Checker) -> Cost:
    """Return what a call takes on the original, and what is wrong with its answer."""
    reached.take()
    started = time.process_time()
    try:
        verdict = item.check(checker)
        fault = "" if verdict.passed else verdict.findings[0].headline
    except CaseError as error:
        fault = str(error)
    return Cost(reached.take()[reached.ACCESSES], time.process_time() - started, fault)


@dataclass(frozen=True)
class Deck:
    """The calls of one family and what they take, in the order in which they were drawn."""

    items: Sequence[Item]
    costs: Sequence[Cost]

    @property
    def num_usable(self) -> int:
        """How many calls the original answers well."""
        return sum(not cost.fault for cost in self.costs)

    def faults(self) -> list[str]:
        """Return a line on what the original does wrong, if it does anything."""
        faults = [(i, c.fault) for i, c in zip(self.items, self.costs) if c.fault]
        if not faults:
            return []
        name = faults[0][0].family.name
        return [
            f"{name}: the original fails in {len(faults)} of {len(self.costs)} cases, "
            f"which are left out: {faults[0][1]}"
        ]

    def best_first(self, num: int) -> list[tuple[Item, Cost]]:
        """Return the first so many calls that the original answers well, reordered.

        First those that have most edges that none before them has, for what they cost; then the
        others, cheap ones first.
        """
        usable = [(i, c) for i, c in zip(self.items, self.costs) if not c.fault][:num]
        edges = [item.edges for item, _ in usable]
        left = set(range(len(usable)))
        covered: set[str] = set()
        order: list[int] = []
        while left:
            gains = {k: len(edges[k] - covered) / (3 + usable[k][1].accesses) for k in left}
            best = max(sorted(left), key=gains.__getitem__)
            if not gains[best]:
                break
            left.remove(best)
            covered |= edges[best]
            order.append(best)
        order += sorted(left, key=lambda k: usable[k][1].accesses)
        return [usable[k] for k in order]


def deal(decks: Mapping[str, Deck], families: Sequence[str], num: int) -> list[tuple[Item, Cost]]:
    """Return the calls to try a mutant on, of its families in turn.

    Args:
        decks: By family.
        families: Those of the mutant.
        num: How many, of all families together.
    """
    share = -(-num // len(families))
    piles = [decks[name].best_first(share) for name in families]
    turns = itertools.zip_longest(*piles)
    return [entry for turn in turns for entry in turn if entry is not None][:num]


class Limits:
    """Limits of this process for one call after the other."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        signal.signal(signal.SIGPROF, signal.SIG_DFL)

    def start(self, item: Item, cost: Cost) -> None:
        """Let the system end this process if the call takes too long, and refuse it memory."""
        allowed = _address_bytes() + item.reserved_bytes + self._memory_bytes
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
        signal.setitimer(signal.ITIMER_PROF, cost.limit_seconds)

    def stop(self) -> None:
        """Take the time limit away."""
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _address_bytes() -> int:
    """Return how many bytes of addresses this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
