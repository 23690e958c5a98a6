"""Which parts of a target a call reaches: a call that does not reach a change can't tell it.

A copy of the target's modules counts on the way. A part is a run of statements of one block with
nothing compound in between, so whoever reaches its first reaches them all, unless one raises.
"""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Iterator

from .operators import Source

# A kernel's globals are its module's, which stays as it is.
PROBE = "_pagefault_reached"

# A module's name, and where in its source a part starts.
Part = tuple[str, int]

_COMPOUND = (ast.If, ast.While, ast.For, ast.With, ast.Try, ast.Match)

_counts = Counter[Part]()


def _count(module: str, start: int) -> None:
    _counts[module, start] += 1


def install() -> None:
    """Let the probes of this process count."""
    setattr(builtins, PROBE, _count)


def take_reached() -> dict[Part, int]:
    """Return how often each part was reached since the last call of this."""
    taken = dict(_counts)
    _counts.clear()
    return taken


class Probes:
    """The probes of one module.

    Args:
        name: The module's.
        source: Its source.
    """

    def __init__(self, name: str, source: Source) -> None:
        self._name = name
        self._source = source
        self._starts: list[int] = []
        # Where a statement or a header starts and ends, and where its part starts.
        self._spans: list[tuple[int, int, int | None]] = []
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef):
                self._add_block(node.body, None)

    def _add_block(self, block: list[ast.stmt], part: int | None) -> None:
        """Note the parts of a block, in a part of which it is reached."""
        is_open = False
        for statement in block:
            start, end = self._source.start(statement), self._source.end(statement)
            if isinstance(statement, _COMPOUND):
                inner = list(_blocks_of(statement))
                self._spans.append((start, self._source.start(inner[0][0]), part))
                for inner_block in inner:
                    self._add_block(inner_block, part)
                is_open = False
            elif not _is_docstring(statement):
                if not is_open:
                    part, is_open = start, True
                    self._starts.append(start)
                self._spans.append((start, end, part))

    def part_of(self, offset: int) -> Part | None:
        """Return the part that a place belongs to; None for one that no probe stands for."""
        for start, end, part in self._spans:
            if start <= offset < end and part is not None:
                return self._name, part
        return None

    def probed(self) -> str:
        """Return the module's text with its probes, every line under its number."""
        text = self._source.text
        for start in sorted(self._starts, reverse=True):
            text = f"{text[:start]}{PROBE}({self._name!r}, {start}); {text[start:]}"
        return text


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _blocks_of(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of a compound statement, in the order of the source."""
    branches = [*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]
    for part in (statement, *branches):
        for name in ("body", "orelse", "finalbody"):
            if getattr(part, name, None):
                yield getattr(part, name)
