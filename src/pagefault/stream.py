"""A stream of cases from a strategy: seeded, endless as wanted, and cut into rounds."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from random import Random
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy

from .strategies.edges import sampler_of


def derived_seed(*parts: object) -> int:
    """Return a seed that no other parts give, such as (campaign seed, worker, round)."""
    text = "/".join(str(part).replace("\\", "\\\\").replace("/", "\\/") for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def draw_cases(
    strategy: SearchStrategy[Any], num_cases: int, seed: int, use: Callable[[Any], object]
) -> None:
    """Call `use` with different cases of a strategy, the same ones for the same seed.

    Args:
        strategy: What to draw; one that is made from choices is sampled, others are left to
            Hypothesis.
        num_cases: How many; fewer where the strategy has no more.
        seed: Of the whole stream.
        use: Takes one case, and returns True to end the stream; it keeps failures to itself, so
            that nothing is shrunk here.
    """
    seen: set[Any] = set()

    def take(case: Any) -> None:
        if case not in seen:
            seen.add(case)
            if use(case) is True or len(seen) == num_cases:
                raise _Enough

    with contextlib.suppress(_Enough):
        if num_cases > 0:
            _draw(strategy, num_cases, seed, take)


def _draw(
    strategy: SearchStrategy[Any], num_cases: int, seed: int, take: Callable[[Any], None]
) -> None:
    sample = sampler_of(strategy)
    if sample is None:
        _draw_by_hypothesis(strategy, num_cases, seed, take)
        return
    random = Random(seed)
    # More than enough: some cases come several times over, and some are not accepted.
    for _ in range(1000 + 10 * num_cases):
        case = sample(random)
        if case is not None:
            take(case)


def _draw_by_hypothesis(
    strategy: SearchStrategy[Any], num_cases: int, seed: int, take: Callable[[Any], None]
) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        # More than enough: the first examples are plain cases, and some come several times over.
        max_examples=10 + 2 * num_cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=False,
        report_multiple_bugs=False,
        print_blob=False,
    )
    @hypothesis.given(strategy)
    def draw(case: Any) -> None:
        take(case)

    # A domain that excludes everything has no cases; who counts them says so.
    with contextlib.suppress(hypothesis.errors.Unsatisfiable):
        draw()


class _Enough(BaseException):
    """Ends a stream; not an Exception, which Hypothesis would take for a failure to look into."""
