"""The reviewed file: mutants that no legal input tells from the original, and what is left out.

[[left_out]]
file = "checks.py"          # all three with * and ? as in file names
function = "*"
statement = "*"             # the text of a statement, its lines joined
reason = "…"

[[equivalent]]
file = "slots.py"
function = "load_slots"
operator = "comparison"
before = "has_column = (position >= 0) & (page_idx < max_pages)"
after = "…"
reason = "…"
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar


class ReviewedError(ValueError):
    """A reviewed file that can't be read; the message is one line that says why."""


@dataclass(frozen=True)
class LeftOut:
    """Statements that are not changed.

    Attributes:
        file: Pattern of the file's name.
        function: Pattern of the function's name.
        statement: Pattern of the statement's text, its lines joined by blanks.
        reason: Why.
    """

    file: str
    function: str
    statement: str
    reason: str

    def names(self, file: str, function: str) -> bool:
        """Return whether it is about a function."""
        return fnmatchcase(file, self.file) and fnmatchcase(function, self.function)


@dataclass(frozen=True)
class Equivalent:
    """A mutant that no legal input tells from the original.

    Attributes:
        file: The file's name.
        function: The function's name.
        operator: What sort of change it is.
        before: The line, without indentation.
        after: The same with the change.
        reason: Why nothing can tell it apart.
    """

    file: str
    function: str
    operator: str
    before: str
    after: str
    reason: str

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """As `Mutant.key`."""
        return self.file, self.function, self.operator, self.before, self.after


@dataclass(frozen=True)
class Reviewed:
    """What people have said of the mutants of a target."""

    left_out: tuple[LeftOut, ...] = ()
    equivalent: tuple[Equivalent, ...] = ()


Entry = TypeVar("Entry", LeftOut, Equivalent)


def read_reviewed(path: Path) -> Reviewed:
    """Return what a reviewed file says.

    Raises:
        ReviewedError: It can't be read, or an entry lacks something, a reason above all.
    """
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ReviewedError(f"{str(path)!r} can't be read: {error}") from error
    unknown = set(document) - {"left_out", "equivalent"}
    if unknown:
        raise ReviewedError(f"{str(path)!r} has an unknown key {min(unknown)!r}")
    return Reviewed(
        _entries(path, document, "left_out", LeftOut),
        _entries(path, document, "equivalent", Equivalent),
    )


def _entries(
    path: Path, document: dict[str, Any], key: str, kind: type[Entry]
) -> tuple[Entry, ...]:
    names = {field.name for field in fields(kind)}
    entries = document.get(key, [])
    if not isinstance(entries, list):
        raise ReviewedError(f"{str(path)!r}: {key} is {entries!r}, but should be a list")
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or set(entry) != names:
            raise ReviewedError(f"{str(path)!r}: {key} {number} should have {', '.join(names)}")
        for name, value in entry.items():
            if not isinstance(value, str) or not value.strip():
                raise ReviewedError(
                    f"{str(path)!r}: {key} {number}: {name} is {value!r}, but should be a text"
                )
    return tuple(kind(**entry) for entry in entries)
