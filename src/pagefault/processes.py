"""The processes of a campaign: how they are started, heard and ended; here on this machine."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .journal import JournalError, Noted, read_noted, seconds_since_noted

# Time that processes get to stop.
STOP_SECONDS = 60.0

# The kind of the last message of each process; its content is an End.
GONE = "gone"


class Place(NamedTuple):
    """What a process is given by where it runs.

    Attributes:
        journal: The file for what it is about to launch, if it is to note that.
        go: An event: it may begin.
        stop: An event: it is to end early.
        over: A value: when the time is over, on the monotonic clock; 0 until it may begin.
    """

    journal: Path | None
    go: Any
    stop: Any
    over: Any


@dataclass(frozen=True)
class End:
    """How a process has ended.

    Attributes:
        exitcode: As `Process.exitcode` has it, or None where nobody knows.
        noted: What it was launching, if it was.
        trouble: Why that can't be read, or "".
        is_hung: Whether it was killed because a launch took too long.
        is_lost: Whether its machine was lost, which says nothing of what it was launching.
    """

    exitcode: int | None
    noted: Noted | None = None
    trouble: str = ""
    is_hung: bool = False
    is_lost: bool = False


class Processes(Protocol):
    """Where a campaign's processes run. A process is told by the number that it is started with."""

    def start(
        self, number: int, main: Callable[..., None], *arguments: Any, journal: str = ""
    ) -> None:
        """Start a process.

        Args:
            number: The process's.
            main: Called with a channel for messages, which are pairs of a kind and a content, the
                id of the parent process, a Place, and the arguments.
            arguments: What else it is called with.
            journal: The name of its journal, if it has one: it is killed when a launch hangs.
        """

    def listen(self, seconds: float) -> Iterator[tuple[int, str, Any]]:
        """Yield the messages that come within a time, with the number of who sent them.

        The last one of each process is GONE, with its End.
        """

    def is_late(self, number: int) -> bool:
        """Return whether nobody should wait for a process to be ready: it has found no place."""

    def go(self, seconds: float) -> None:
        """Let workers begin, those too that are started later; the time is over in `seconds`."""

    def stop(self) -> None:
        """Have all end early."""

    def close(self) -> None:
        """End what is left."""


@dataclass
class _Process:
    process: BaseProcess
    journal: Path | None
    is_hung: bool = False


class LocalProcesses:
    """Processes of this machine; they end with the one that starts them, see `Processes`.

    Args:
        journal_path: Returns where a journal of a name is to lie.
        case_seconds: How long a launch may take.
        method: How they are started, as multiprocessing calls it.
    """

    def __init__(
        self, journal_path: Callable[[str], Path], case_seconds: float, method: str
    ) -> None:
        self._journal_path = journal_path
        self._case_seconds = case_seconds
        self._context: Any = multiprocessing.get_context(method)
        self._place = Place(
            None,
            self._context.Event(),
            self._context.Event(),
            self._context.Value("d", 0.0, lock=False),
        )
        # A pipe for each process: one that dies while it writes takes no lock of others along.
        self._channels: dict[Connection, int] = {}
        self._processes: dict[int, _Process] = {}

    def start(
        self, number: int, main: Callable[..., None], *arguments: Any, journal: str = ""
    ) -> None:
        place = self._place._replace(journal=self._journal_path(journal) if journal else None)
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=main,
            args=(sender, os.getpid(), place, *arguments),
            name=f"pagefault process {number}",
        )
        # A terminal's Ctrl-C goes to all processes: a worker, which inherits this mask, goes on
        # until it is told to stop, and none is started that nobody knows of.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
            sender.close()
            self._processes[number] = _Process(process, place.journal)
            self._channels[receiver] = number
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def listen(self, seconds: float) -> Iterator[tuple[int, str, Any]]:
        for channel in wait(list(self._channels), timeout=seconds):
            assert isinstance(channel, Connection)
            number = self._channels[channel]
            try:
                kind, content = channel.recv()
            except (EOFError, OSError, pickle.UnpicklingError):
                # Nothing more comes from this process, and all that it said was taken.
                del self._channels[channel]
                channel.close()
                kind, content = GONE, self._end_of(number)
            yield number, kind, content
        self._kill_the_hung()

    def is_late(self, number: int) -> bool:
        return False

    def go(self, seconds: float) -> None:
        self._place.over.value = time.monotonic() + seconds
        self._place.go.set()

    def stop(self) -> None:
        self._place.stop.set()
        self._place.go.set()

    def close(self) -> None:
        for started in self._processes.values():
            started.process.join(timeout=1)
            if started.process.is_alive():
                started.process.kill()
                started.process.join()

    def _kill_the_hung(self) -> None:
        for number in self._channels.values():
            started = self._processes[number]
            if started.journal is None or started.is_hung:
                continue
            if seconds_since_noted(started.journal) > self._case_seconds:
                started.is_hung = True
                started.process.kill()

    def _end_of(self, number: int) -> End:
        started = self._processes[number]
        started.process.join(timeout=STOP_SECONDS)
        noted, trouble = None, ""
        if started.journal is not None:
            try:
                noted = read_noted(started.journal)
            except JournalError as error:
                trouble = str(error)
        return End(started.process.exitcode, noted, trouble, started.is_hung)
