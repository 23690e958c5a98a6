"""Files that are there whole or not at all, whatever happens to the process or the machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# How the name of a file starts that is not yet in its place.
NEW = ".new-"


def write(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        while content:
            content = content[os.write(descriptor, content) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, content: bytes) -> None:
    """Write a file so that at any moment the old content is there, or the new.

    Raises:
        OSError: It can't be written; the old content is there.
    """
    new = path.with_name(f"{NEW}{path.name}")
    try:
        write(new, content)
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    sync(path.parent)


def sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(path: Path) -> Path:
    """Give what can't be read another name, so that nobody reads it again, and return that."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside
