"""What a process is about to launch, written down where its death does not take it along."""

from __future__ import annotations

import mmap
import pickle
from pathlib import Path
from typing import Any

from .case import Case

_SIZE_BYTES = 1 << 20
_LENGTH_BYTES = 8


class Journal:
    """One case, in a file that is mapped into memory: the kernel keeps what a dead process wrote.

    Args:
        path: The file; made if it is missing.
    """

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(_SIZE_BYTES)
            self._map = mmap.mmap(file.fileno(), _SIZE_BYTES)

    def note(self, family: str, case: Case) -> None:
        """Write down the case that is launched next."""
        entry = pickle.dumps((family, case), protocol=pickle.HIGHEST_PROTOCOL)
        if len(entry) > _SIZE_BYTES - _LENGTH_BYTES:
            self.clear()
            return
        self._map[_LENGTH_BYTES : _LENGTH_BYTES + len(entry)] = entry
        self._map[:_LENGTH_BYTES] = len(entry).to_bytes(_LENGTH_BYTES, "little")

    def clear(self) -> None:
        """Write down that nothing is being launched."""
        self._map[:_LENGTH_BYTES] = bytes(_LENGTH_BYTES)


def last_noted(path: Path) -> tuple[str, Any] | None:
    """Return the family and case that a dead process was launching, if it was."""
    try:
        content = path.read_bytes()
        length = int.from_bytes(content[:_LENGTH_BYTES], "little")
        if not length:
            return None
        noted: tuple[str, Any] = pickle.loads(content[_LENGTH_BYTES : _LENGTH_BYTES + length])
        return noted
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError):
        return None
