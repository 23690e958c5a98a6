"""A check in a child process, so that what the kernel does to the process is an answer too."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from .case import Case
from .family import Family
from .verdict import Finding, Verdict

_CHUNK_BYTES = 1 << 16


def check_in_child(
    check: Callable[[Case], Verdict], family: Family, case: Case, seconds: float
) -> Verdict:
    """Return what a check says of a case, or how the process ended that ran it.

    The child is a fork, so this process must not have touched CUDA.

    Args:
        check: Runs in the child.
        family: The case's family.
        case: The case.
        seconds: How long the child may take.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _answer(check, case, writer)
    os.close(writer)
    deadline = time.monotonic() + seconds
    answer = b""
    is_over = False
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([reader], [], [], left)[0]:
                is_over = True
                break
            chunk = os.read(reader, _CHUNK_BYTES)
            if not chunk:
                break
            answer += chunk
    finally:
        os.close(reader)
        if is_over:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if is_over:
        return hang_verdict(family, seconds)
    exitcode = os.waitstatus_to_exitcode(status)
    if exitcode or not answer:
        return death_verdict(family, exitcode)
    verdict: Verdict = pickle.loads(answer)
    return verdict


def _answer(check: Callable[[Case], Verdict], case: Case, writer: int) -> NoReturn:
    """Check a case, write the verdict to a pipe, and end this process."""
    try:
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(check(case), pipe)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def death_verdict(family: Family, exitcode: int) -> Verdict:
    """Return the verdict on a case whose launch ended the process.

    Args:
        family: The case's family.
        exitcode: The exit status, or a signal's number below 0.
    """
    how = signal.Signals(-exitcode).name if exitcode < 0 else f"exit status {exitcode}"
    return Verdict(family.name, (Finding("died", how, f"{family.name}: the process died: {how}"),))


def hang_verdict(family: Family, seconds: float) -> Verdict:
    """Return the verdict on a case that had not ended after so many seconds."""
    headline = f"{family.name} had not returned after {seconds:g} s"
    return Verdict(family.name, (Finding("hang", "deadline", headline),))
