"""A mutation run: every mutant in a forked child, a few at a time."""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from .cases import Cost, Deck, Item, deal
from .interrupts import Interrupts
from .mutants import Mutant
from .trial import Setting, run_trial, write_mutant

KILLED, TIMED_OUT, SURVIVED = "killed", "timed out", "survived"

# A child that says nothing for so long, though the system has not ended it, waits for something.
SILENT_SECONDS = 120.0
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant.

    Attributes:
        mutant: The mutant.
        status: KILLED, TIMED_OUT or SURVIVED.
        num_cases: Calls until it was found, or all that were tried.
        checks: The checks that saw it, those of the first call that was wrong in front.
        first_checks: Those that saw it in that call.
        kind: The kind of that call's first finding; "" for a survivor.
        headline: What was found.
        family: The function that was called then.
        seconds: Time of a core that it took.
    """

    mutant: Mutant
    status: str
    num_cases: int
    checks: tuple[str, ...] = ()
    first_checks: tuple[str, ...] = ()
    kind: str = ""
    headline: str = ""
    family: str = ""
    seconds: float = 0.0


@dataclass
class _Child:
    """A trial that is under way."""

    mutant: Mutant
    items: Sequence[tuple[Item, Cost]]
    pid: int
    heard: float
    text: bytes = b""
    at: int = 0
    first: dict[str, object] = field(default_factory=dict)
    checks: dict[str, None] = field(default_factory=dict)
    is_done: bool = False
    was_silent: bool = False

    def hear(self, chunk: bytes) -> None:
        """Take in what the child says."""
        self.heard = time.monotonic()
        *lines, self.text = (self.text + chunk).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "at" in said:
                self.at = said["at"]
            elif "done" in said:
                self.is_done = True
            else:
                self.first = self.first or said
                self.checks.update(dict.fromkeys(said["checks"]))

    def outcome(self, exitcode: int, seconds: float) -> Outcome:
        """Return what became of the mutant, once its process has ended after so much work."""
        if not self.is_done and not self.first:
            # The call that it was in took too long, or ended it.
            is_hang = self.was_silent or exitcode == -signal.SIGPROF
            kind = "hang" if is_hang else "died"
            how = signal.Signals(-exitcode).name if exitcode < 0 else f"exit status {exitcode}"
            said: dict[str, object] = {
                "number": self.at,
                "checks": ["process"],
                "kind": kind,
                "headline": how,
            }
            self.first, self.checks = said, {"process": None}
        if not self.first:
            num_cases = self.at + 1 if self.items else 0
            return Outcome(self.mutant, SURVIVED, num_cases, seconds=seconds)
        first: dict[str, object] = self.first
        number = first["number"]
        checks = first["checks"]
        assert isinstance(number, int)
        assert isinstance(checks, list)
        return Outcome(
            self.mutant,
            TIMED_OUT if first["kind"] == "hang" else KILLED,
            number + 1,
            tuple(self.checks),
            tuple(checks),
            str(first["kind"]),
            str(first["headline"]),
            self.items[number][0].family.name,
            seconds,
        )


class Run:
    """Trials of mutants, some at a time.

    Args:
        setting: What they share.
        decks: The calls, by family.
        num_cases: Returns on how many calls a mutant is tried at most.
        num_workers: Processes at a time.
        progress: Takes what is under way, and how many of how many are done.
        interrupts: Say when to end the run early.

    Attributes:
        outcomes: By the mutant's place in what is tried.
    """

    def __init__(
        self,
        setting: Setting,
        decks: Mapping[str, Deck],
        num_cases: Callable[[Mutant], int],
        num_workers: int,
        progress: Callable[[str, int, int], None],
        interrupts: Interrupts,
    ) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self._interrupts = interrupts
        self._setting = setting
        self._decks = decks
        self._num_cases = num_cases
        self._num_workers = num_workers
        self._progress = progress
        self._num_mutants = 0
        self._dealt: dict[tuple[object, ...], Sequence[tuple[Item, Cost]]] = {}
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, tuple[int, _Child]] = {}

    def run(self, mutants: Sequence[Mutant]) -> None:
        """Try all mutants, in an order that makes the remaining time known early."""
        self._num_mutants = len(mutants)
        numbers = list(range(len(mutants)))
        Random(0).shuffle(numbers)
        gc.freeze()
        try:
            while (numbers or self._children) and not self._interrupts.asked:
                while numbers and len(self._children) < self._num_workers:
                    number = numbers.pop()
                    self._start(number, mutants[number])
                self._listen()
        finally:
            for reader in list(self._children):
                _, child = self._children[reader]
                os.kill(child.pid, signal.SIGKILL)
                self._end(reader, is_wanted=False)
            self._selector.close()
            gc.unfreeze()

    def _start(self, number: int, mutant: Mutant) -> None:
        items = self._calls(mutant)
        path = write_mutant(self._setting, number, mutant)
        reader, writer = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            pid = os.fork()
        if not pid:
            os.close(reader)
            run_trial(self._setting, mutant, path, items, writer, parent)
        os.close(writer)
        now = time.monotonic()
        self._children[reader] = number, _Child(mutant, items, pid, now)
        self._selector.register(reader, selectors.EVENT_READ)

    def _calls(self, mutant: Mutant) -> Sequence[tuple[Item, Cost]]:
        key = mutant.families, mutant.part, self._num_cases(mutant)
        if key not in self._dealt:
            self._dealt[key] = deal(self._decks, *key)
        return self._dealt[key]

    def _listen(self) -> None:
        for key, _ in self._selector.select(POLL_SECONDS):
            chunk = os.read(key.fd, 1 << 16)
            if chunk:
                self._children[key.fd][1].hear(chunk)
            else:
                self._end(key.fd)
        now = time.monotonic()
        for _, child in self._children.values():
            if now - child.heard > SILENT_SECONDS and not child.was_silent:
                child.was_silent = True
                os.kill(child.pid, signal.SIGKILL)

    def _end(self, reader: int, is_wanted: bool = True) -> None:
        number, child = self._children.pop(reader)
        self._selector.unregister(reader)
        os.close(reader)
        _, status, usage = os.wait4(child.pid, 0)
        if is_wanted:
            seconds = usage.ru_utime + usage.ru_stime
            self.outcomes[number] = child.outcome(os.waitstatus_to_exitcode(status), seconds)
            self._progress("mutants", len(self.outcomes), self._num_mutants)
