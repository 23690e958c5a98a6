"""A check in a child process, so that what the kernel does to the process is an answer too."""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from .family import Family
from .journal import Journal, last_noted, seconds_since_noted
from .lifetime import die_with_parent
from .memory_limit import EXIT_STATUS, limit_memory
from .side_case import AnyCase, check_any, told
from .verdict import Finding, Verdict

if TYPE_CHECKING:
    from .checker import Checker
    from .target import Target

T = TypeVar("T")
C = TypeVar("C", bound=AnyCase)

# How long a case may take whose check costs a process, a start of that included.
SHRINK_CASE_SECONDS = {"cpu": 3.0, "cuda": 15.0}

# How often a parent looks whether its child is still to go on.
POLL_SECONDS = 0.1

_CHUNK_BYTES = 1 << 16


def check_in_child(
    check: Callable[[C], Verdict], family: Family, case: C, seconds: float
) -> Verdict:
    """Return what a check says of a case, or how the process ended that ran it.

    The child is a fork, so this process must not have touched CUDA.

    Args:
        check: Runs in the child.
        family: The case's family.
        case: The case.
        seconds: How long the child may take.
    """
    deadline = time.monotonic() + seconds
    answer, exitcode = _forked(lambda: check(case), lambda: time.monotonic() > deadline)
    if exitcode is None:
        return told(case, hang_verdict(family, seconds))
    if exitcode or not answer:
        return told(case, death_verdict(family, exitcode))
    verdict: Verdict = pickle.loads(answer)
    return verdict


def checking_in_children(
    target: Target, family: Family, make_checker: Callable[[], Checker], seconds: float
) -> Callable[[AnyCase], Verdict]:
    """Return a check for the minimiser whose every case has a child of its own.

    What the target never gets passes, and so do its known faults.

    Args:
        target: The target.
        family: Of the cases.
        make_checker: Called in the child, which may touch the device.
        seconds: How long a child may take.
    """

    def check_here(case: AnyCase) -> Verdict:
        verdict = check_any(make_checker(), family, case)
        if not verdict.fatal:
            verdict, _ = target.without_known(family, case, verdict)
        return verdict

    def check(case: AnyCase) -> Verdict:
        if not target.allows(family, case):
            return Verdict(family.name)
        return check_in_child(check_here, family, case, seconds)

    return check


@dataclass(frozen=True)
class Ended:
    """How a process ended before its work did.

    Attributes:
        case: What it was about to launch.
        verdict: A death or a hang.
    """

    case: Any
    verdict: Verdict


def run_in_child(
    work: Callable[[Journal], T], family: Family, seconds: float, folder: Path
) -> T | Ended:
    """Return what work returns in a forked child, or how the child ended in a case.

    Args:
        work: Gets a journal to note in what it launches; what it raises is raised here.
        family: Whose cases these are.
        seconds: How long one case may take.
        folder: For the journal.

    Raises:
        RuntimeError: The child ended outside any case.
    """
    path = folder / "journal"

    def answer() -> tuple[bool, Any]:
        try:
            return True, work(Journal(path))
        except Exception as error:
            return False, _picklable(error)

    content, exitcode = _forked(answer, lambda: seconds_since_noted(path) > seconds)
    if exitcode == 0 and content:
        has_returned, result = pickle.loads(content)
        if has_returned:
            returned: T = result
            return returned
        raise result
    noted = last_noted(path)
    if noted is None:
        raise RuntimeError(f"a process of pagefault ended outside any case: {exitcode}")
    how = hang_verdict(family, seconds) if exitcode is None else death_verdict(family, exitcode)
    return Ended(noted.case, told(noted.case, how))


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


def _forked(work: Callable[[], object], is_over: Callable[[], bool]) -> tuple[bytes, int | None]:
    """Return what a forked child's work pickles to, and the child's exit code.

    Args:
        work: Runs in the child.
        is_over: Whether to kill the child, whose exit code is None then; asked several times a
            second.
    """
    reader, writer = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        # The child does not go on with what other threads have left half-done.
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        child = os.fork()
    if not child:
        die_with_parent(parent)
        limit_memory()
        os.close(reader)
        _answer(work, writer)
    os.close(writer)
    answer = b""
    exitcode: int | None = None
    try:
        while not is_over():
            if not select.select([reader], [], [], POLL_SECONDS)[0]:
                continue
            chunk = os.read(reader, _CHUNK_BYTES)
            if not chunk:
                exitcode = 0
                break
            answer += chunk
    finally:
        os.close(reader)
        if exitcode is None:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    return answer, None if exitcode is None else os.waitstatus_to_exitcode(status)


def _answer(work: Callable[[], object], writer: int) -> NoReturn:
    """Do the work, write the result to a pipe, and end this process."""
    faulthandler.disable()  # How this process ends is an answer, and no news.
    try:
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(work(), pipe)
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
    if exitcode == EXIT_STATUS:
        headline = f"{family.name}: the process took more memory than its share"
        return Verdict(family.name, (Finding("memory", "host", headline),))
    how = signal.Signals(-exitcode).name if exitcode < 0 else f"exit status {exitcode}"
    return Verdict(family.name, (Finding("died", how, f"{family.name}: the process died: {how}"),))


def hang_verdict(family: Family, seconds: float) -> Verdict:
    """Return the verdict on a case that had not ended after so many seconds."""
    headline = f"{family.name} had not returned after {seconds:g} s"
    return Verdict(family.name, (Finding("hang", "deadline", headline),))
