"""What a process is about to launch, written down where its death does not take it along."""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

SIZE_BYTES = 1 << 20
# Size of the entry, and when it was written, on the clock that all processes share.
_HEADER = struct.Struct("<qd")


class Noted(NamedTuple):
    """What a process was about to launch.

    Attributes:
        family: The family's name.
        case: The case, or what else was to be launched with one inside.
        worker: The index of the worker, or None outside a campaign.
        round_number: Of the family's round in which it was.
    """

    family: str
    case: Any
    worker: int | None = None
    round_number: int = 0


class JournalError(Exception):
    """A journal that can't be read; the message is one line that says why."""


class Journal:
    """One case, in a file that is mapped into memory: the kernel keeps what a dead process wrote.

    Args:
        path: The file; made anew.
        worker: The index of the worker whose it is, or None outside a campaign.

    Raises:
        OSError: There is no room for it.

    Attributes:
        round_number: Of the family's round that is under way.
    """

    def __init__(self, path: Path, worker: int | None = None) -> None:
        self.round_number = 0
        self._worker = worker
        with path.open("w+b") as file:
            # Where a full disk has no block for a page, to write to the page ends the process.
            os.posix_fallocate(file.fileno(), 0, SIZE_BYTES)
            self._map = mmap.mmap(file.fileno(), SIZE_BYTES)

    @contextmanager
    def noting(self, family: str, case: object) -> Iterator[None]:
        """Write down a case for the time of its launches."""
        self.note(family, case)
        try:
            yield
        finally:
            self.clear()

    def note(self, family: str, case: object) -> None:
        """Write down the case that is launched next."""
        noted = (family, case, self._worker, self.round_number)
        entry = pickle.dumps(noted, protocol=pickle.HIGHEST_PROTOCOL)
        if len(entry) > SIZE_BYTES - _HEADER.size:
            entry = b""
        self._map[_HEADER.size : _HEADER.size + len(entry)] = entry
        _HEADER.pack_into(self._map, 0, len(entry), time.monotonic())

    def clear(self) -> None:
        """Write down that nothing is being launched."""
        _HEADER.pack_into(self._map, 0, 0, 0.0)


def last_noted(path: Path) -> Noted | None:
    """Return what a dead process was launching, if it was and its journal can be read."""
    try:
        return read_noted(path)
    except JournalError:
        return None


def read_noted(path: Path) -> Noted | None:
    """Return what a dead process was launching, or None where it was between launches.

    Raises:
        JournalError: The journal can't be read, is cut off, or holds something else.
    """
    try:
        content = path.read_bytes()
        size, _ = _HEADER.unpack_from(content)
        if not size:
            return None
        # A process that has written anywhere may have written here: any exception may come.
        return Noted(*pickle.loads(content[_HEADER.size : _HEADER.size + size]))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise JournalError(f"journal {str(path)!r} can't be read: {reason}") from error


def seconds_since_noted(path: Path) -> float:
    """Return how long a process has been in the launch that it noted; 0 between launches."""
    try:
        with path.open("rb") as file:
            _, noted_at = _HEADER.unpack(file.read(_HEADER.size))
    except (OSError, struct.error):
        return 0.0
    return time.monotonic() - noted_at if noted_at else 0.0
