"""A process that does not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent is gone, however that ended.

    A worker that hangs in a kernel would else keep its device for ever.

    Args:
        parent: The parent's process id; where it is gone already, this process ends.
    """
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return  # Not Linux.
    if os.getppid() != parent:
        os._exit(1)
