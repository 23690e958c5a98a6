"""A soak: a long run with every check on, void unless it has reached every edge and every check.

Beside each round of legal cases a worker runs a few calls with garbage in device tensors, and a
case of one of the relations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from . import reached
from .conformance import NonConformance
from .family import Domain, Family, families
from .garbage import EDGE, check_any_bytes
from .relations import RELATIONS, Relation, check_relation, missing_for
from .stream import derived_seed
from .target import Target

if TYPE_CHECKING:
    from .checker import Checker
    from .plan import Plan
    from .result import Result

# Beside a round of so many cases as a campaign has in one.
ANY_BYTES_PER_ROUND = {"cpu": 6, "cuda": 48}
RELATION_CASES_PER_ROUND = {"cpu": 1, "cuda": 8}

# Of what was not reached, so many are named.
MOST_NAMED = 12


class Lanes:
    """Runs what a soak has beside legal cases.

    A lane that has found something stops: it would find the same again.

    Args:
        plan: The campaign's.
        target: Its target.
        checker: The worker's.
        number: The worker's index.
    """

    def __init__(self, plan: Plan, target: Target, checker: Checker, number: int) -> None:
        self._plan = plan
        self._target = target
        self._checker = checker
        self._number = number
        self._stopped: set[str] = set()

    def run(
        self, family: Family, round_number: int, narrowed: Callable[[Domain], Domain]
    ) -> Iterator[str]:
        """Run the lanes of a family beside one of its rounds, and yield what is wrong.

        Args:
            family: The family.
            round_number: Of its round.
            narrowed: Returns what is drawn in that round of what may be.
        """
        seed = derived_seed(*self._plan.stream(self._number, family.name), round_number)
        any_bytes = f"{EDGE}: {family.name}"
        if has_any_bytes(self._target, family) and any_bytes not in self._stopped:
            try:
                check_any_bytes(
                    self._target,
                    family,
                    num_cases=ANY_BYTES_PER_ROUND[self._plan.device],
                    seed=seed,
                    device=self._plan.device,
                    checker=self._checker,
                    narrowed=narrowed,
                )
            except NonConformance as failure:
                self._stopped.add(any_bytes)
                yield str(failure)
        relations = relations_of(self._target, family)
        if relations:
            relation = relations[round_number % len(relations)]
            if relation.name not in self._stopped:
                yield from self._hold(relation, seed, narrowed)

    def _hold(
        self,
        relation: Relation,
        seed: int,
        narrowed: Callable[[Domain], Domain],
    ) -> Iterator[str]:
        try:
            check_relation(
                self._target,
                relation,
                num_cases=RELATION_CASES_PER_ROUND[self._plan.device],
                seed=seed,
                device=self._plan.device,
                narrowed=narrowed,
            )
        except NonConformance as failure:
            self._stopped.add(relation.name)
            yield str(failure)


def has_any_bytes(target: Target, family: Family) -> bool:
    """Return whether a function promises anything of garbage."""
    return EDGE not in target.terms_of(family.name).without


def relations_of(target: Target, family: Family) -> list[Relation]:
    """Return the relations that a family's cases are drawn for and that the target can keep."""
    return [
        relation
        for relation in RELATIONS.values()
        if relation.functions[0] == family.name and not missing_for(relation, target)
    ]


def demanded_checks(plan: Plan, target: Target) -> list[str]:
    """Return the checks without which a soak is void."""
    run = [families()[name] for name in plan.families]
    return reached.demanded(
        plan.device,
        plan.memory,
        strict=plan.strict,
        is_whole=len(run) == len(families()),
        any_bytes=any(has_any_bytes(target, family) for family in run),
        relations=[relation.name for family in run for relation in relations_of(target, family)],
    )


def why_void(plan: Plan, result: Result, target: Target) -> list[str]:
    """Return what a soak has not done that it had to do."""
    reasons = []
    if plan.max_cases and result.cases < plan.max_cases:
        reasons.append(f"the time was over after {result.cases} of {plan.max_cases} cases")
    unreached = result.unreached(lambda name: target.terms_of(name).without, of_all=True)
    reasons += [f"{name} has not reached: {some_of(edges)}" for name, edges in unreached.items()]
    checks = result.checks
    missing = [check for check in demanded_checks(plan, target) if not checks[check]]
    if missing:
        reasons.append(f"not carried out: {some_of(missing)}")
    return reasons


def some_of(names: Sequence[str]) -> str:
    """Return names for a person to read: the first of many."""
    more = len(names) - MOST_NAMED
    named = ", ".join(names[:MOST_NAMED])
    return f"{named}, and {more} more" if more > 0 else named
