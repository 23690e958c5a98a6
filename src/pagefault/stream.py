"""A stream of cases from a strategy: seeded, endless as wanted, and cut into rounds."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy

from .strategies.edges import several_at_once


def derived_seed(*parts: object) -> int:
    """Return a seed that no other parts give, such as (campaign seed, worker, round)."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


# Most of what Hypothesis charges for an example does not depend on its size, so an example is
# several cases at once; nothing is shrunk here, so that they need not be told apart later.
CASES_PER_EXAMPLE = 8


def draw_cases(
    strategy: SearchStrategy[Any], num_cases: int, seed: int, use: Callable[[Any], object]
) -> None:
    """Call `use` with different cases that Hypothesis generates, the same ones for the same seed.

    Args:
        strategy: What to draw.
        num_cases: How many; fewer where the strategy has no more.
        seed: Of the whole stream.
        use: Takes one case, and returns True to end the stream; it keeps failures to itself, so
            that nothing is shrunk here.
    """
    seen: set[Any] = set()

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
    @hypothesis.given(several_at_once(strategy, min(num_cases, CASES_PER_EXAMPLE)))
    def take(cases: list[Any]) -> None:
        for case in cases:
            if len(seen) == num_cases:
                raise _Enough
            if case not in seen:
                seen.add(case)
                if use(case) is True:
                    raise _Enough

    # A domain that excludes everything has no cases; who counts them says so.
    with contextlib.suppress(hypothesis.errors.Unsatisfiable, _Enough):
        take()


class _Enough(BaseException):
    """Ends a stream; not an Exception, which Hypothesis would take for a failure to look into."""
