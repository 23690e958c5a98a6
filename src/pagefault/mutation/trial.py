"""One mutant in a process of its own: loaded from a scratch folder, called until it is found."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ..case import CaseError
from ..checker import Checker
from ..garbage import Garbage
from ..lifetime import die_with_parent
from ..target import REGISTRY, CurrentSource, Target, load_target
from . import probes
from .cases import Cost, Item, Limits
from .checks import GARBAGE, checks_of
from .mutants import Module, Mutant

# A mutant may take so much memory on top of what this process has.
MEMORY_BYTES = 2 << 30

# A mutant that nothing has found is tried for so long at most, for each call that it is to be tried
# on: longer than most take, but one that is right and launches a hundred programs where one is
# enough would go on for minutes.
SECONDS_A_CALL = 0.02

# So many calls more, where values alone have seen a mutant, for other checks to see it too.
CALLS_FOR_OTHERS = 5


@dataclass(frozen=True)
class Setting:
    """What every trial of a run shares.

    Attributes:
        target: As `load_target` takes it.
        modules: The target's, by name.
        strict: As `Checker` takes it.
        scratch: A folder for the mutants.
        is_limited: Whether a mutant that nothing has found is tried for so long at most.
    """

    target: str
    modules: Mapping[str, Module]
    strict: bool
    scratch: Path
    is_limited: bool = True


def write_mutant(setting: Setting, number: int, mutant: Mutant) -> Path:
    """Write a mutant's module into a folder of its own, and return its path."""
    module = setting.modules[mutant.module]
    folder = setting.scratch / f"mutant_{number}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / module.path.name
    path.write_text(module.source.edited(mutant.edit))
    return path


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules in other files than their own."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return how to load the module, or None for any other."""
        if fullname not in self._paths:
            return None
        loader = CurrentSource(fullname, str(self._paths[fullname]))
        return importlib.util.spec_from_file_location(fullname, loader.path, loader=loader)


def load_changed(setting: Setting, paths: Mapping[str, Path]) -> Target:
    """Return the target with modules of other files; for a process that has no other use.

    Args:
        setting: The run's.
        paths: The files, by the name of the module.
    """
    own = REGISTRY.get(setting.target, (setting.target,))
    for name in [*setting.modules, *own]:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _Finder(paths))
    for name, path in paths.items():
        is_file = setting.target.endswith(".py")
        if is_file and Path(setting.target).resolve() == setting.modules[name].path.resolve():
            return load_target(str(path))
    return load_target(setting.target)


def load_probed(setting: Setting) -> Target:
    """Return the target with probes in all its modules; for a process that has no other use."""
    folder = setting.scratch / f"probed_{os.getpid()}"
    folder.mkdir()
    paths = {}
    for name, module in setting.modules.items():
        paths[name] = folder / module.path.name
        paths[name].write_text(module.probes.probed())
    probes.install()
    return load_changed(setting, paths)


def run_trial(
    setting: Setting,
    mutant: Mutant,
    path: Path,
    items: Sequence[tuple[Item, Cost]],
    writer: int,
    parent: int,
) -> NoReturn:
    """Call a mutant on one case after the other, and end this process.

    A line of JSON goes to the parent before each call, one with its findings after it, and one
    when all is said.

    Args:
        setting: The run's.
        mutant: The mutant.
        path: Where it is written.
        items: The calls, and what they take on the original.
        writer: The pipe.
        parent: The parent's process id.
    """
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent says when to end.
    _print_nothing()
    status = 1
    try:
        with os.fdopen(writer, "w", buffering=1) as pipe:
            trial = Trial(setting, lambda said: print(json.dumps(said), file=pipe))
            try:
                trial.run(mutant, path, items)
            except Exception as error:
                trial.say_broken(error)
            print(json.dumps({"done": True}), file=pipe)  # A mutant may end it with status 0.
        status = 0
    finally:
        os._exit(status)


def _print_nothing() -> None:
    """Throw away what a mutant, and what warns of it, prints."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


class Trial:
    """The calls of one mutant, and what is said of them.

    Args:
        setting: The run's.
        say: Takes one message for the parent.
    """

    def __init__(self, setting: Setting, say: Callable[[dict[str, Any]], None]) -> None:
        self._setting = setting
        self._say = say
        self._at = 0
        self._seen: set[str] = set()
        self._num_since = 0

    def run(self, mutant: Mutant, path: Path, items: Sequence[tuple[Item, Cost]]) -> None:
        """Call the mutant until further calls would say no more of it."""
        target = load_changed(self._setting, {mutant.module: path})
        checker = Checker(target, "cpu", strict=self._setting.strict)
        limits = Limits(MEMORY_BYTES)
        end = time.process_time() + SECONDS_A_CALL * len(items)
        for self._at, (item, cost) in enumerate(items):
            self._say({"at": self._at})
            limits.start(item, cost)
            try:
                verdict = item.check(checker)
            except CaseError:
                continue  # The original could be called, so memory was short.
            finally:
                limits.stop()
            self._num_since += bool(self._seen)
            if not verdict.passed:
                first = verdict.findings[0]
                checks = checks_of(verdict.findings, isinstance(item.call, Garbage))
                self._say_found(checks, first.kind, first.headline)
            if is_settled(self._seen, self._num_since):
                return
            is_late = self._setting.is_limited and time.process_time() > end
            if is_late and not self._seen:
                return

    def say_broken(self, error: Exception) -> None:
        """Say that the mutant can't be loaded, or has broken what calls it."""
        self._say_found(["process"], "died", f"{type(error).__name__}: {error}")

    def _say_found(self, checks: list[str], kind: str, headline: str) -> None:
        self._seen.update(checks)
        said = {"number": self._at, "checks": checks, "kind": kind, "headline": headline}
        self._say(said)


def is_settled(checks: set[str], num_since: int) -> bool:
    """Return whether further calls would say no more of which checks see a mutant.

    Args:
        checks: Those that have seen it.
        num_since: Calls since the first that did.
    """
    if len(checks) != 1:
        return len(checks) > 1
    return num_since >= CALLS_FOR_OTHERS and checks in ({"values"}, {GARBAGE})
