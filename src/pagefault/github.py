"""Annotations that GitHub shows beside the lines of a pull request, for what a job prints."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .places import kernel_line_in

# GitHub shows so much of a message.
MOST_CHARACTERS = 4000


class Spot(NamedTuple):
    """A line of a file, counted from 1."""

    file: str
    line: int


def are_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether somebody reads them: in a job of GitHub's, and nowhere else."""
    return environment.get("GITHUB_ACTIONS") == "true"


def annotation(message: str, title: str, spot: Spot | None) -> str:
    """Return the line that makes GitHub show an error.

    Args:
        message: What is wrong, in any number of lines.
        title: What stands above it.
        spot: Where it shows, or None for nowhere in particular.

    >>> annotation("one\\ntwo", "a: b", Spot("k.py", 3))
    '::error file=k.py,line=3,title=a%3A b::one%0Atwo'
    """
    properties = {"file": _in_workspace(spot.file), "line": str(spot.line)} if spot else {}
    listed = ",".join(
        f"{name}={_escaped(value, also=':,')}"
        for name, value in {**properties, "title": title}.items()
    )
    return f"::error {listed}::{_escaped(message[:MOST_CHARACTERS])}"


def _escaped(text: str, also: str = "") -> str:
    for character in "%\r\n" + also:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def _in_workspace(file: str) -> str:
    """Return a file's path as GitHub knows it: from the root of the checkout."""
    workspace = Path(os.environ.get("GITHUB_WORKSPACE", ".")).resolve()
    path = Path(file).resolve()
    return path.relative_to(workspace).as_posix() if path.is_relative_to(workspace) else file


def kernel_spot(verdict: str) -> Spot | None:
    """Return the line of a kernel that a verdict names, where its module is loaded."""
    named = kernel_line_in(verdict)
    if named is None:
        return None
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        if Path(file).name == named.file and named.kernel in getattr(module, "__dict__", {}):
            return Spot(file, named.line)
    return None


def function_spot(function: Callable[..., Any]) -> Spot | None:
    """Return where a function is defined, or None where that can't be known."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
        _, line = inspect.getsourcelines(inspect.unwrap(function))
    except (TypeError, OSError, ValueError):
        return None
    return Spot(file, line) if file else None
