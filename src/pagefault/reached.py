"""How often each check was carried out in this process, counted where that happens.

A run that finds nothing says something only of what it has checked. So nothing here is assumed from
options or from what was drawn: a check counts itself, once it has what it compares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

# Everywhere.
MEMORY = "replicas compared, guards and inputs included"
VALUES = "elements of outputs and written tables held against the oracle"

# Of two implementations.
PAIRS = "cases in which two implementations were held against each other"

# Where a function of the run has them.
RETURNED_TENSORS = "returned tensors held against the oracle"
RETURNED_NUMBERS = "returned numbers held against the oracle"
EXCEPTIONS = "calls that had to raise"
WARNINGS = "logged warnings held against the oracle"

# In Triton's interpreter.
ACCESSES = "accesses held against the extents of their tensor"
ROWS = "accesses held against the rows of the call"
FOOTPRINTS = "writes held against the cells that the contract names"
WRITE_RACES = "launches whose programs' writes were compared with each other"
READ_RACES = "launches whose programs' reads were compared with others' writes"

NEEDED_READS = "reads held against the cells that the result needs"

# On a GPU.
REPLAYS = "calls captured with other values and replayed"
MEMORIES = {
    "mixed": ("arena", "guard after", "guard before", "net"),
    "arena": ("arena",),
    "guard": ("guard after", "guard before"),
    "net": ("net",),
}

# Of a soak.
ANY_BYTES = "calls with garbage in device tensors"


def poison(value: int) -> str:
    """Return the name of the check that nothing depends on memory full of a poison."""
    return f"replicas poisoned with {value} compared"


def order(name: str) -> str:
    """Return the name of the check that nothing depends on an order of programs."""
    return f"launches of several programs run {name}"


def memory(name: str) -> str:
    """Return the name of the check in a kind of memory."""
    return f"cases in memory of the kind {name!r}"


def relation(name: str) -> str:
    """Return the name of the check of a relation."""
    return f"cases of the relation {name!r}"


_counts: Counter[str] = Counter()


def count(check: str, times: int = 1) -> None:
    """Note that a check was carried out."""
    _counts[check] += times


def take() -> Counter[str]:
    """Return what was counted since the last call."""
    taken = Counter(_counts)
    _counts.clear()
    return taken


def demanded(
    device: str,
    memory_kind: str,
    *,
    strict: bool,
    is_whole: bool,
    any_bytes: bool,
    relations: Iterable[str],
) -> list[str]:
    """Return the checks without which a soak is void.

    Args:
        device: "cpu" or "cuda".
        memory_kind: As `Checker` takes it.
        strict: As `Checker` takes it.
        is_whole: Whether every family is run: what some functions return, raise or log is not
            demanded of the others.
        any_bytes: Whether a function promises anything of garbage.
        relations: The names of those that the functions can be held to.
    """
    from .memory import POISONS

    checks = [MEMORY, VALUES, *map(poison, POISONS)]
    if is_whole:
        checks += [RETURNED_TENSORS, RETURNED_NUMBERS, EXCEPTIONS, WARNINGS]
    if device == "cpu":
        from .addresses import ORDERS

        checks += [ACCESSES, ROWS, FOOTPRINTS, WRITE_RACES, READ_RACES, *map(order, ORDERS[1:])]
        checks += [NEEDED_READS] * strict
    else:
        checks += [memory(name) for name in MEMORIES[memory_kind]]
        checks += [REPLAYS] * is_whole
    checks += [ANY_BYTES] * any_bytes
    return [*checks, *map(relation, relations)]
