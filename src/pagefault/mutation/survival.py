"""How many cases each listed mutant has survived: what a run of hours goes on from.

The file is JSON and is not edited by hand; a mutant whose lines have changed starts again.
"""

from __future__ import annotations

import json
from pathlib import Path

from .. import durable
from .mutants import Key

NAMES = ("file", "function", "operator", "before", "after")


class SurvivalError(ValueError):
    """A file that can't be read; the message is one line that says why."""


class Survival:
    """What mutants have survived.

    Args:
        path: The file; it need not be there.

    Raises:
        SurvivalError: It is there, and is something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._survived: dict[Key, tuple[int, int]] = {}
        if not path.exists():
            return
        try:
            for row in json.loads(path.read_text()):
                file, function, operator, before, after = (str(row[name]) for name in NAMES)
                key = file, function, operator, before, after
                self._survived[key] = int(row["cases"]), int(row["rounds"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise SurvivalError(f"{str(path)!r} can't be read: {error!r}") from error

    def cases(self, key: Key) -> int:
        """Return how many cases of its functions a mutant has survived."""
        return self._survived.get(key, (0, 0))[0]

    def rounds(self, key: Key) -> int:
        """Return in how many rounds; the next has another seed."""
        return self._survived.get(key, (0, 0))[1]

    def add(self, key: Key, num_cases: int) -> None:
        """Note that a mutant has survived one more round of so many cases."""
        cases, rounds = self._survived.get(key, (0, 0))
        self._survived[key] = cases + num_cases, rounds + 1

    def write(self) -> None:
        """Write the file.

        Raises:
            OSError: It can't be written; what was there is there.
        """
        rows = [
            {**dict(zip(NAMES, key)), "cases": cases, "rounds": rounds}
            for key, (cases, rounds) in sorted(self._survived.items())
        ]
        durable.replace(self._path, (json.dumps(rows, indent=1) + "\n").encode())
