"""A stream of cases from a strategy: seeded, endless as wanted, and cut into rounds."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy


def derived_seed(*parts: object) -> int:
    """Return a seed that no other parts give, such as (campaign seed, worker, round)."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def draw_cases(
    strategy: SearchStrategy[Any], num_cases: int, seed: int, use: Callable[[Any], None]
) -> None:
    """Call `use` with cases that Hypothesis generates, the same ones for the same seed.

    Args:
        strategy: What to draw.
        num_cases: How many; fewer where the strategy has no more.
        seed: Of the whole stream.
        use: Takes one case; it keeps failures to itself, so that nothing is shrunk here.
    """

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num_cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=False,
        report_multiple_bugs=False,
        print_blob=False,
    )
    # One case an example: of a tuple of them Hypothesis makes most by copying one to another's
    # place, so that six of seven cases would be repetitions.
    @hypothesis.given(strategy)
    def take(case: Any) -> None:
        use(case)

    # A domain that excludes everything has no cases; who counts them says so.
    with contextlib.suppress(hypothesis.errors.Unsatisfiable):
        take()
