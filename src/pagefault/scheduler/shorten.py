"""A shorter life that ends as another did: fewer steps, then smaller numbers."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .model import COPY, RETURNS, Broken

if TYPE_CHECKING:
    from .machine import Machine

# Steps that bring an engine back to where it was can only be left out together.
LONGEST_CYCLE = 6

# What was drawn: the rules by name, with their arguments.
Program = tuple[tuple[str, dict[str, int]], ...]


@dataclass(frozen=True)
class End:
    """How a life ended.

    Attributes:
        program: What was drawn.
        broken: The invariant that did not hold.
        log: What had happened.
        is_shortest: Whether no single step can be left out, and no number be lower.
    """

    program: Program
    broken: Broken
    log: tuple[str, ...]
    is_shortest: bool = False


def live(machine_type: type[Machine], program: Program) -> End | None:
    """Return how a life ends in which a program is carried out, or None if all is well."""
    machine = machine_type()
    for idx, (name, arguments) in enumerate(program):
        try:
            getattr(machine, name)(**arguments)
            machine.tokens_are_where_they_were()
        except Broken as broken:
            return End(program[: idx + 1], broken, tuple(machine.model.log))
    return None


def shorten(machine_type: type[Machine], end: End, seconds: float) -> End:
    """Return the shortest life found that breaks an invariant in the same way.

    Args:
        machine_type: The state machine.
        end: A life that breaks it.
        seconds: How long to look.
    """
    search = _Search(machine_type, end, time.monotonic() + seconds)
    before = None
    while before is not search.end and not search.is_over:
        before = search.end
        search.leave_steps_out()
        search.leave_cycles_out()
        search.lower_numbers()
    return replace(search.end, is_shortest=not search.is_over)


def _kind(end: End) -> str:
    """Return what tells faults apart: lost tokens show in one way or another, by what came next."""
    invariant = end.broken.invariant
    return invariant if invariant in (COPY, RETURNS) else "tokens"


class _Search:
    """Looks for a shorter life.

    Args:
        machine_type: The state machine.
        end: The shortest life so far.
        deadline: On the monotonic clock.
    """

    def __init__(self, machine_type: type[Machine], end: End, deadline: float) -> None:
        self.end = end
        self.is_over = False
        self._machine_type = machine_type
        self._deadline = deadline

    def leave_steps_out(self) -> None:
        """Try without many steps in a row, then without fewer, from the last to the first."""
        size = len(self.end.program) // 2
        while size:
            last = len(self.end.program)
            while last > size:
                program = self.end.program
                self._try((*program[: last - size], *program[last:]))
                last = min(last - size, len(self.end.program))
            size //= 2

    def leave_cycles_out(self) -> None:
        """Try without a few steps in a row, wherever they start."""
        for size in range(2, LONGEST_CYCLE + 1):
            first = 0
            while first + size < len(self.end.program):
                program = self.end.program
                if not self._try((*program[:first], *program[first + size :])):
                    first += 1

    def lower_numbers(self) -> None:
        """Try each number of each step at 0, at 1, at half of itself, and one lower."""
        idx = 0
        while idx < len(self.end.program):
            for key in self.end.program[idx][1]:
                self._lower(idx, key)
                if idx >= len(self.end.program):
                    return
            idx += 1

    def _lower(self, idx: int, key: str) -> None:
        name, arguments = self.end.program[idx]
        value = int(arguments[key])
        for lower in sorted({0, 1, value // 2, value - 1}):
            if 0 <= lower < value:
                changed = (name, {**arguments, key: lower})
                if self._try((*self.end.program[:idx], changed, *self.end.program[idx + 1 :])):
                    return

    def _try(self, program: Program) -> bool:
        """Return whether a program ends in the same way; if so it is the shortest so far."""
        self.is_over |= time.monotonic() > self._deadline
        if self.is_over:
            return False
        try:
            found = live(self._machine_type, program)
        except Exception:
            return False  # An engine may refuse what its rules never draw.
        if found is None or _kind(found) != _kind(self.end):
            return False
        self.end = found
        return True
