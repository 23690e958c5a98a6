"""A process that ends before it takes the machine's memory along."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

# How such a process ends: a status that hardly anything else ends with.
EXIT_STATUS = 213

# Of the memory that is free when a process starts, all processes together may take so much.
SHARE = 0.8

# No process has less: what it takes for a start, a GPU's driver included, is no fault of a kernel.
LEAST_BYTES = 2 << 30

# In MiB, what a process may take instead.
VARIABLE = "PAGEFAULT_MEMORY_LIMIT"

POLL_SECONDS = 0.05


def limit_memory() -> None:
    """End this process, with EXIT_STATUS, when it takes more memory than its share.

    The share is that of one core in what is free now; `PAGEFAULT_MEMORY_LIMIT` names another, in
    MiB. Where the system does not say what is free, or what a process takes, there is no limit.
    """
    taken, free = _taken_bytes(), _free_bytes()
    if taken is None or free is None:
        return
    share = int(SHARE * free / len(os.sched_getaffinity(0)))
    limit = _given_bytes() or max(LEAST_BYTES, share)
    threading.Thread(target=_watch, args=(taken + limit,), daemon=True).start()


def _watch(most: int) -> None:
    while (_taken_bytes() or 0) <= most:
        time.sleep(POLL_SECONDS)
    os._exit(EXIT_STATUS)


def _given_bytes() -> int | None:
    text = os.environ.get(VARIABLE, "")
    return int(text) << 20 if text.isdecimal() and int(text) else None


def _taken_bytes() -> int | None:
    """Return what this process takes for itself: pages shared with others do not count."""
    try:
        resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    except (OSError, ValueError):
        return None
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def _free_bytes() -> int | None:
    """Return what the system, or the container that this runs in, has left."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        (available,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError):
        return None
    free = int(available) << 10
    group = Path("/sys/fs/cgroup")
    try:
        most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # What is cached of files is given up when it is needed.
        return min(free, most - used + int(stat["file"]))
    except (OSError, ValueError, KeyError):  # No container, or one without a limit.
        return free
