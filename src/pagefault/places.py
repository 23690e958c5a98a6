"""The cells that a verdict's text names: found, expected, and where a wrong value came from.

A finding is kept as its text, so that is what a report of an earlier run has to go by.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_CELL = (
    r"(?P<tensor>[A-Za-z_]\w*)"
    r"(?P<indices>(?:\[-?\d+\])*)"
    r"(?P<beside>: element \d+ (?:before its start|past its end|of the gap behind row \d+))?"
)
_VALUE = re.compile(
    rf"\s*{_CELL} (?:= (?P<found>-?\d+(?: or -?\d+)?)(?:, by what lay in memory)?|was not written)"
    r", but should (?:still )?be (?P<should>-?\d+)$"
)
_ACCESS = re.compile(rf"\s*(?P<access>read|write|atomic) of {_CELL}, (?:which|a row) ")
_SOURCE = re.compile(rf"\s*\S+ is page id -?\d+ at offset -?\d+: {_CELL}, ")
_LINE = re.compile(r"\s*(?P<file>\S+\.py):(?P<line>\d+), in (?P<kernel>\w+), program ")


@dataclass(frozen=True)
class Place:
    """A cell that a verdict names.

    Attributes:
        tensor: Its name.
        indices: As the verdict has them; of something returned, those of its path come first.
        beside: Where it lies outside the tensor, in words, or "".
        found: What it holds, or "".
        should: What it should hold, or "".
        access: "read", "write" or "atomic" where that is what is wrong, or "".
        is_source: Whether it is right itself, and a wrong value is that of this cell.
    """

    tensor: str
    indices: tuple[int, ...]
    beside: str = ""
    found: str = ""
    should: str = ""
    access: str = ""
    is_source: bool = False

    def __str__(self) -> str:
        return self.tensor + "".join(f"[{index}]" for index in self.indices) + self.beside


class KernelLine(NamedTuple):
    """A line of a kernel: the name of the file, the line's number, the kernel's name."""

    file: str
    line: int
    kernel: str


def places_in(verdict: str) -> list[Place]:
    """Return the cells that a verdict's text names, in its order.

    >>> [str(place) for place in places_in("slots[5] = 50, but should be 66")]
    ['slots[5]']
    """
    return list(dict.fromkeys(_places(verdict)))


def _places(verdict: str) -> Iterator[Place]:
    for line in verdict.splitlines():
        for pattern in (_VALUE, _ACCESS, _SOURCE):
            match = pattern.match(line)
            if match:
                said = match.groupdict()
                yield Place(
                    said["tensor"],
                    tuple(int(index) for index in re.findall(r"-?\d+", said["indices"])),
                    said["beside"] or "",
                    said.get("found") or ("not written" if "should" in said else ""),
                    said.get("should") or "",
                    said.get("access") or "",
                    pattern is _SOURCE,
                )


def kernel_line_in(verdict: str) -> KernelLine | None:
    """Return the first line of a kernel that a verdict's text names, or None."""
    for line in verdict.splitlines():
        match = _LINE.match(line)
        if match:
            return KernelLine(match["file"], int(match["line"]), match["kernel"])
    return None
