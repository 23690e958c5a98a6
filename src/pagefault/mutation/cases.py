"""The cases that mutants are tried on: drawn once, checked once on the original, then shared."""

from __future__ import annotations

import heapq
import itertools
import math
import resource
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from .. import reached
from ..case import MOST_FILLED_ELEMENTS, Case, CaseError
from ..checker import WIDE_TABLE, Checker
from ..family import Family, Tensor
from ..garbage import EDGE, Garbage, check_garbage, is_refused
from ..stream import derived_seed, draw_cases
from ..target import Target
from ..verdict import Verdict
from .probes import Part, take_reached

# Of so many calls one has garbage in its device tensors, where a function promises anything of it.
GARBAGE_ONE_IN = 2

# So many calls have each feature, where there are so many, before any is taken for being cheap.
ROUNDS = 1

# A call with more of anything is launched as its function chooses.
MOST_SMALL = 500

# What has more is a place far outside, and no size.
MOST_BITS = 14

# What ends a call that goes on and on; the limit of a mutant is that of the original many times:
# one that is only slow, because it launches a program for each request, is not found.
LEAST_SECONDS = 2.0
TIMES_ORIGINAL = 40


@dataclass(frozen=True)
class Item:
    """One call to try.

    Attributes:
        family: The function's family.
        call: A case, or one with garbage.
        launch: In which of the target's launches it is made; "" for what its functions choose.
    """

    family: Family
    call: Case | Garbage
    launch: str = ""

    @property
    def case(self) -> Case:
        """The legal case."""
        return self.call.case if isinstance(self.call, Garbage) else self.call

    @cached_property
    def reserved_bytes(self) -> int:
        """Addresses that both replicas of its wide tables take."""
        spans = [self.case.span_of(name) for name in self.case.tables()]
        return sum(8 * span for span in spans if span > MOST_FILLED_ELEMENTS)

    @property
    def is_small(self) -> bool:
        """Whether it has few requests, tokens and elements: other launches may be slow."""
        tables = self.case.tables()
        sizes = [
            math.prod(argument.shape)
            for argument in self.family.arguments(self.case)
            if isinstance(argument, Tensor) and argument.name not in tables
        ]
        return max(*sizes, self.family.size(self.case), self.case.num_requests) <= MOST_SMALL

    @cached_property
    def edges(self) -> frozenset[str]:
        """The edges that it has."""
        edges = self.family.edges(self.case)
        if not isinstance(self.call, Garbage):
            return edges
        return edges | {EDGE} | _kinds_of_garbage(self.family, self.call)

    @cached_property
    def sizes(self) -> frozenset[str]:
        """How many requests there are and how much the largest has of each field, in bits."""
        found = {f"{self.case.num_requests.bit_length()} bits of requests"}
        for name in self.case.per_request_fields():
            entries = getattr(self.case, name)
            sizes = [entry if isinstance(entry, int) else len(entry) for entry in entries]
            num_bits = max(sizes, default=0).bit_length()
            if num_bits <= MOST_BITS:
                found.add(f"{num_bits} bits of {name}")
        return frozenset(found)

    def check(self, checker: Checker) -> Verdict:
        """Return what is wrong with the target's answer."""
        with checker.target.launched(self.launch):
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
        reached: How often it reached each part of the target that it did reach.
    """

    accesses: int
    seconds: float
    fault: str = ""
    reached: Mapping[Part, int] = field(default_factory=dict)

    @property
    def limit_seconds(self) -> float:
        """How long a mutant may take."""
        return max(LEAST_SECONDS, TIMES_ORIGINAL * self.seconds)


def _kinds_of_garbage(family: Family, garbage: Garbage) -> set[str]:
    """Return which tensors hold what, as far as a kernel may treat it in a way of its own."""
    sizes = {
        size: f"as {argument.name} has in dimension {dimension}"
        for argument in family.arguments(garbage.case)
        if isinstance(argument, Tensor)
        for dimension, size in enumerate(argument.shape)
    }
    return {f"{name} {_kind_of_value(value, sizes)}" for name, _, value in garbage.spoilt}


def _kind_of_value(value: int, sizes: Mapping[int, str]) -> str:
    if value in (-1, 0):
        return str(value)
    if value < 0:
        return "just negative" if value >= -2 * max(sizes) else "far negative"
    if value in sizes:
        return sizes[value]
    return "past 32 bits" if value >= 2**31 else "another"


def draw_items(
    target: Target,
    checker: Checker,
    family: Family,
    num: int,
    seed: int,
    sizes: tuple[int, ...] = (),
) -> list[Item]:
    """Return different calls of a function, always the same for the same seed.

    Args:
        target: The target.
        checker: Of the target.
        family: The function's family.
        num: How many.
        seed: Of the run.
        sizes: As `Domain` has them.
    """
    from ..strategies.any_bytes import garbage_of

    has_garbage = EDGE not in target.terms_of(family.name).without
    num_garbage = num // GARBAGE_ONE_IN if has_garbage else 0
    domain = replace(checker.domain(family), sizes=sizes)
    narrow = domain.excluding(WIDE_TABLE)
    legal = _drawn(family.strategy(domain), num - num_garbage, derived_seed(seed, family.name))
    spoilt = _drawn(
        garbage_of(family, narrow), 2 * num_garbage, derived_seed(seed, family.name, EDGE)
    )
    spoilt = [g for g in spoilt if not is_refused(family, g.case)][:num_garbage]
    items = [Item(family, call) for call in _mixed(legal, spoilt, GARBAGE_ONE_IN - 1)]
    # Two calls in turn for each way to launch: one of them has garbage.
    launches = ["", *target.launches]
    return [
        replace(item, launch=launches[k // GARBAGE_ONE_IN % len(launches)] if item.is_small else "")
        for k, item in enumerate(items)
    ]


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
    """Return what a call takes on the original, with probes, and what is wrong with its answer."""
    reached.take()
    take_reached()
    started = time.process_time()
    try:
        verdict = item.check(checker)
        fault = "" if verdict.passed else verdict.findings[0].headline
    except CaseError as error:
        fault = str(error)
    seconds = time.process_time() - started
    return Cost(reached.take()[reached.ACCESSES], seconds, fault, take_reached())


@dataclass(frozen=True)
class Deck:
    """The calls of one family and what they take, in the order in which they were drawn."""

    items: Sequence[Item]
    costs: Sequence[Cost]

    @cached_property
    def features(self) -> list[frozenset[str]]:
        """What tells each call from others: its edges, and how often it reaches each part."""
        return [
            item.edges
            | item.sizes
            | {
                f"{item.launch} {module}:{start} {min(count.bit_length(), 3)}"
                for (module, start), count in cost.reached.items()
            }
            for item, cost in zip(self.items, self.costs)
        ]

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

    def usable(self, part: Part | None) -> list[tuple[Item, Cost, frozenset[str]]]:
        """Return the calls that the original answers well and that reach a part, or any."""
        return [
            call
            for call in zip(self.items, self.costs, self.features)
            if not call[1].fault and (part is None or part in call[1].reached)
        ]


def deal(
    decks: Mapping[str, Deck], families: Sequence[str], part: Part | None, num: int
) -> list[tuple[Item, Cost]]:
    """Return the calls to try a mutant on.

    First those that have most features that none before them has, for what they cost, until every
    feature is there a few times; then others of its families in turn, cheap ones first.

    Args:
        decks: By family.
        families: Those of the mutant.
        part: What a call has to reach, or None.
        num: How many, of all families together.
    """
    turns = itertools.zip_longest(*(decks[name].usable(part) for name in families))
    calls = [call for turn in turns for call in turn if call is not None]
    costs = [3 + cost.accesses for _, cost, _ in calls]
    left = {k: features for k, (_, _, features) in enumerate(calls)}
    first: list[int] = []
    for _ in range(ROUNDS):
        order = _cover(left, costs)
        first += order
        for k in order:
            del left[k]
    others = sorted(left)[: max(0, num - len(first))]
    others.sort(key=costs.__getitem__)
    return [calls[k][:2] for k in (*first, *others)][:num]


def _cover(sets: Mapping[int, frozenset[str]], costs: Sequence[int]) -> list[int]:
    """Return which sets have all elements between them, those with most new ones a cost first."""
    covered: set[str] = set()
    order: list[int] = []
    waiting = [(-len(elements) / costs[k], k) for k, elements in sets.items()]
    heapq.heapify(waiting)
    while waiting:
        _, k = heapq.heappop(waiting)
        gain = len(sets[k] - covered) / costs[k]
        if gain and waiting and -gain > waiting[0][0]:
            heapq.heappush(waiting, (-gain, k))  # It was worth more than it is by now.
        elif gain:
            order.append(k)
            covered |= sets[k]
    return order


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
