"""Engines' lives by the thousand steps: the property, and the report of the life that breaks it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.reporting import with_reporter
from hypothesis.stateful import run_state_machine_as_test

from .. import conformance, interpreter
from ..conformance import session
from ..device import prepare, resolve_device
from ..family import Family, families
from ..isolation import Ended
from ..stream import derived_seed
from ..target import Target
from .engine import Engine
from .machine import DeviceLost, Machine, machine_for
from .model import RETURNS, Broken
from .shorten import End, Program, live, shorten

STEPS_PER_LIFE = 30

# Hypothesis comes to prefer what is like lives that it has seen; so it starts anew now and then.
LIVES_PER_ROUND = 20

SHRINK_SECONDS = 20.0


class OrderFault(AssertionError):
    """An engine, or a function that it calls, has lost somebody's tokens.

    Attributes:
        end: The shortest life found that ends so: its program, its log, and what is broken.
    """

    def __init__(self, end: End, where: str) -> None:
        steps = [f"  {idx:>3}  {line}" for idx, line in enumerate(end.log)]
        shortest = "no step can be left out" if end.is_shortest else "not shortened any further"
        lines = [f"{end.broken.invariant}; but", f"  {end.broken.detail}", *steps]
        super().__init__("\n".join([*lines, f"  {shortest}; {where}"]))
        self.end = end
        self._where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.end, self._where)


def check_scheduler(
    target: Target,
    engine: type[Engine] = Engine,
    *,
    num_steps: int = 600,
    steps_per_life: int = STEPS_PER_LIFE,
    seed: int | None = None,
    device: str | None = None,
    shard: int = 0,
    shrink_seconds: float = SHRINK_SECONDS,
) -> Mapping[str, int]:
    """Let engines live on a target's functions, and return how often what has happened to them.

    Args:
        target: The functions; plain Python takes the place of those that it lacks.
        engine: Decides in which order they are called.
        num_steps: Steps of the state machine, over all lives.
        steps_per_life: Steps of one engine.
        seed: Of the stream of lives, or None for the session's.
        device: "auto", "cpu" or "cuda", or None for the session's.
        shard: Which of several streams.
        shrink_seconds: How long to look for a shorter life that ends in the same way.

    Raises:
        OrderFault: Somebody's tokens are lost; with the life that shows it.
    """
    __tracebackhide__ = True
    resolved = resolve_device(session.device if device is None else device)
    prepare(resolved)
    base = session.seed if seed is None else seed
    base = random.getrandbits(32) if base is None else base
    seeds = [
        derived_seed(base, "scheduler", shard, number)
        for number in range(max(1, num_steps // (LIVES_PER_ROUND * steps_per_life)))
    ]
    settings = hypothesis.settings(
        max_examples=max(1, min(LIVES_PER_ROUND, num_steps // steps_per_life)),
        stateful_step_count=steps_per_life,
        phases=[Phase.generate],  # What fails is shortened here, on what was drawn.
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
    )
    machine = machine_for(target, resolved, engine)
    result = conformance.in_own_process(
        lambda: _live(machine, settings, seeds, shrink_seconds), _any_family(target)
    )
    where = f"seed {base}, shard {shard}, {num_steps} steps, {steps_per_life} a life"
    if isinstance(result, Ended):
        broken = Broken(RETURNS, result.verdict.findings[0].headline)
        result = End((), broken, result.case)
    if isinstance(result, End):
        raise OrderFault(result, where)
    return result


def live_again(
    target: Target, engine: type[Engine], program: Program, device: str | None = None
) -> End | None:
    """Return how a life ends in which a program is carried out, or None if no token is lost.

    Args:
        target: The functions.
        engine: Decides in which order they are called.
        program: Of an `End`.
        device: "auto", "cpu" or "cuda", or None for the session's.
    """
    resolved = resolve_device(session.device if device is None else device)
    prepare(resolved)
    return live(machine_for(target, resolved, engine), program)


def _live(
    machine: type[Machine],
    settings: hypothesis.settings,
    seeds: Sequence[int],
    shrink_seconds: float,
) -> Mapping[str, int] | End:
    """Return what has happened, or how the shortest life ended in which tokens were lost."""
    if machine.device == "cpu":
        interpreter.tune()
    try:
        with with_reporter(lambda text: None):
            for seed in seeds:
                hypothesis.seed(seed)(machine)
                run_state_machine_as_test(machine, settings=settings)
    except Broken:
        assert machine.last_end is not None
        return shorten(machine, machine.last_end, shrink_seconds)
    except DeviceLost as lost:
        return lost.end
    return machine.totals


def _any_family(target: Target) -> Family:
    name = next(iter(target.functions), next(iter(families())))
    return families()[name]
