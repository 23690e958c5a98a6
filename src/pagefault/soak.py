"""A soak: a long run with every check on, void unless it has reached every edge and every check.

Beside each round of legal cases a worker runs a few calls with garbage in device tensors, and a
case of one of the relations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import reached
from .family import Domain, Family, families
from .garbage import EDGE, garbage_in
from .relations import RELATIONS, Related, Relation, domain_of, missing_for
from .side_case import SideCase
from .target import Target

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from .checker import Checker
    from .plan import Plan
    from .result import Result

# Beside a round of so many cases as a campaign has in one.
ANY_BYTES_PER_ROUND = {"cpu": 6, "cuda": 48}
RELATION_CASES_PER_ROUND = {"cpu": 1, "cuda": 8}

# Of what was not reached, so many are named.
MOST_NAMED = 12


@dataclass(frozen=True)
class Side:
    """Cases that a worker runs beside a round.

    Attributes:
        held_to: What they are held to, see `SideCase`.
        num_cases: How many.
        strategy: What they are made from.
        of: Makes one.
    """

    held_to: str
    num_cases: int
    strategy: SearchStrategy[Any]
    of: Callable[[Any], SideCase] = lambda case: case


def sides_of(
    checker: Checker,
    family: Family,
    round_number: int,
    narrowed: Callable[[Domain], Domain],
) -> Iterator[Side]:
    """Yield what is run beside a round of a family.

    Args:
        checker: The worker's.
        family: The family.
        round_number: Of its round; relations take turns.
        narrowed: Returns what is drawn in that round of what may be.
    """
    if has_any_bytes(checker.target, family):
        strategy = garbage_in(family, narrowed(checker.domain(family)))
        yield Side(EDGE, ANY_BYTES_PER_ROUND[checker.device], strategy)
    relations = relations_of(checker.target, family)
    if relations:
        relation = relations[round_number % len(relations)]
        strategy = family.strategy(narrowed(domain_of(checker.target, relation)))
        num_cases = RELATION_CASES_PER_ROUND[checker.device]
        yield Side(relation.name, num_cases, strategy, lambda case: Related(case, relation.name))


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
