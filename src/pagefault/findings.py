"""What was found, kept on disk: one folder for each signature of a target.

    compute_out_cache_loc-value-3f1a9c2b/
        finding.json    all that is known of it; the other files follow from this one
        case.json       the smallest case, as `pagefault repro` reads it
        verdict.txt     what is wrong with it, how often it was seen and where
        repro.py        the same without pagefault
        kernel/         the target's file, and what it imports from beside it

Whoever writes holds a lock; each file is written beside its place and then put there, so that a
process that is killed at any moment leaves the old file or the new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import platform
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from . import durable
from .device import device_name, driver_version, versions
from .finding_record import Passed, Rate, Record, Run, Smallest, as_lines
from .result import PASSES
from .side_case import AnyCase, SideCase, any_case_from_json, legal_part
from .target import Target, TargetError, file_of, pair_name, pair_of
from .verdict import Signature, Verdict

if TYPE_CHECKING:
    from .plan import Plan
    from .result import Found, Result

C = TypeVar("C", bound=AnyCase)

NUM_RUNS = 10

# How long to wait before a finding that could not be written is tried again.
RETRY_SECONDS = 10.0

_RECORD = "finding.json"
_SCRIPT, _NO_SCRIPT = "repro.py", "no-repro.txt"
_DAMAGED = re.compile(r"\.damaged-\d+$")

Files = Mapping[str, bytes]


class FindingsError(Exception):
    """A folder that can't be read or written; the message is one line that says why."""


def reproduce_rate(
    check: Callable[[C], Verdict],
    case: C,
    signature: Signature,
    num_runs: int = NUM_RUNS,
    seconds: float = 60.0,
) -> Rate:
    """Return how often a check of a case gives a signature again.

    Args:
        check: Returns what is wrong with a case; in a child process where that may die.
        case: The case.
        signature: The finding's.
        num_runs: How often to check.
        seconds: After so long no other run is started, but there is one at least.
    """
    deadline = time.monotonic() + seconds
    shown = done = 0
    while done < num_runs and (not done or time.monotonic() < deadline):
        verdict = check(case)
        shown += not verdict.passed and verdict.signature == signature
        done += 1
    return Rate(shown, done)


@dataclass(frozen=True)
class Context:
    """What is known of a run before it finds anything.

    Attributes:
        run: Its id; of two runs the later one's is the larger.
        target: As `load_target` took it.
        commit: Of the repository that the target lies in, or "".
        seed: Of the run.
        machine: Its name.
        device: "cpu" or "cuda".
        device_name: Its name for people.
        driver: Version of the GPU's driver, or "".
        memory: Where tensors lie on a GPU.
        versions: Of what an answer may depend on.
    """

    run: str
    target: str
    commit: str
    seed: int
    machine: str
    device: str
    device_name: str
    driver: str
    memory: str
    versions: Mapping[str, str]

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return the context of a campaign that starts now in this process."""
        started = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        machine = plan.machine or platform.node()
        return cls(
            run=f"{started}-{machine}-{secrets.token_hex(4)}",
            target=plan.target,
            commit=_commit_of(plan.target, plan.families[0]),
            seed=plan.seed,
            machine=machine,
            device=plan.device,
            device_name=device_name(plan.device),
            driver=driver_version() if plan.device == "cuda" else "",
            memory=plan.memory if plan.device == "cuda" else "arena",
            versions=versions(),
        )

    def record(self, found: Found, count: int, files: Files) -> Record:
        """Return what this run knows now of something that it has found."""
        now = _now()
        kept = ("target", "commit", "seed", "machine", "driver", "memory", "versions")
        run = Run(
            **{name: getattr(self, name) for name in kept},
            count=count,
            first_seen=now,
            last_seen=now,
            device=self.device_name,
        )
        smallest = Smallest(
            tuple(found.size),
            as_lines(json.loads(found.case)) + "\n",
            found.how_small,
            found.verdict,
            self.device,
            self.run,
            {name: _digest(content) for name, content in files.items()},
        )
        rate = found.reproduced
        return Record(
            target_name(self.target),
            found.signature,
            smallest,
            {} if rate is None else {self.device_name: {self.run: rate}},
            {self.run: run},
        )

    def passed(self) -> Passed:
        """Return that a case has passed in this run, now."""
        return Passed(_now(), self.commit, self.machine, self.device_name)


def target_name(target: str) -> str:
    """Return what findings call a target: the same kernel in two checkouts is one."""
    a, *b = (Path(name).name if name.endswith(".py") else name for name in pair_of(target))
    return pair_name(a, *b) if b else a


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _commit_of(target: str, function: str) -> str:
    """Return the commit of the repository that a target lies in, or "" where there is none."""
    try:
        path = file_of(target, function)
        git = ["git", "-C", str(path.parent)]
        head, changes = (
            subprocess.run([*git, *words], capture_output=True, text=True, timeout=10, check=True)
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", path.name])
        )
    except (OSError, subprocess.SubprocessError, TargetError):
        return ""
    return head.stdout.strip() + (" (the file has changed since)" if changes.stdout else "")


class FindingsFolder:
    """A folder of findings.

    Args:
        path: Made if it is missing.

    Attributes:
        set_aside: What could not be read so far, a line each.

    Raises:
        FindingsError: It can't be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set_aside: list[str] = []
        with self._locked():
            pass

    def add(self, found: Found, context: Context, count: int, files: Files) -> Path:
        """Keep what a run has found, and return its folder.

        Args:
            found: What.
            context: The run.
            count: How often the run has seen it by now.
            files: What is kept beside the case, by name.

        Raises:
            FindingsError: It can't be written; what was there before still is.
        """
        finding = context.record(found, count, files)
        with self._locked():
            known = self._read(finding.name)
            if known is not None:
                finding = known.joined(finding)
            _write_entry(self.path, finding, _files_for(finding, [files]))
        return self.path / finding.name

    def add_pass(self, name: str, context: Context) -> None:
        """Keep that the case of a finding has passed when a run checked it again.

        Args:
            name: The finding's; nothing is kept where it is no longer there.
            context: The run.

        Raises:
            FindingsError: It can't be written; what was there before still is.
        """
        with self._locked():
            known = self._read(name)
            if known is not None:
                passed = {**known.passed, context.run: context.passed()}
                _write_entry(self.path, dataclasses.replace(known, passed=passed), {})

    def load(self) -> dict[str, Record]:
        """Return what is there, by the name of its folder.

        What can't be read is set aside under another name.

        Raises:
            FindingsError: The folder can't be read or written.
        """
        with self._locked():
            return self._load()

    def _load(self) -> dict[str, Record]:
        found = {name: self._read(name) for name in _entries(self.path)}
        return {name: finding for name, finding in found.items() if finding is not None}

    def _read(self, name: str) -> Record | None:
        """Return a finding by its name, or None where there is none that can be read."""
        path = self.path / name
        if not path.is_dir():
            return None
        try:
            return _read_entry(self.path, name)
        except FindingsError as error:
            aside = durable.set_aside(path)
            self.set_aside.append(f"{error}; set aside as {aside.name}")
            return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock; an error of the system becomes one line."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / ".lock").open("a") as lock:
                # Some network file systems have no locks.
                with contextlib.suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_EX)
                _sweep(self.path)
                yield
        except OSError as error:
            raise FindingsError(
                f"findings {str(self.path)!r} can't be written: {error.strerror or error}"
            ) from error


def merge(folders: Iterable[Path], into: Path) -> tuple[dict[str, Record], list[str]]:
    """Join folders of findings into one, which keeps what it has.

    The same folders in any order and any number of times give the same files.

    Returns:
        What is in the folder then, by name; and what could not be read, a line each.

    Raises:
        FindingsError: One is no folder of findings, or can't be read or written.
    """
    findings: dict[str, Record] = {}
    copies: dict[str, list[dict[str, bytes]]] = {}

    def join(folder: Path, name: str, finding: Record) -> None:
        known = findings.get(name)
        findings[name] = finding if known is None else known.joined(finding)
        copies.setdefault(name, []).append(_files_of(folder / name, finding))

    damaged: list[str] = []
    for folder in folders:
        if not folder.is_dir() or (folder / _RECORD).exists():
            raise FindingsError(f"{str(folder)!r} is no folder of findings")
        for name in _entries(folder):
            try:
                join(folder, name, _read_entry(folder, name))
            except FindingsError as error:
                damaged.append(f"{error}; left out")
    target = FindingsFolder(into)
    with target._locked():
        for name, finding in target._load().items():
            join(into, name, finding)
        for name, finding in sorted(findings.items()):
            _write_entry(into, finding, _files_for(finding, copies[name]))
    return findings, damaged + target.set_aside


def read_finding(path: Path) -> Record:
    """Return the finding of one folder.

    Raises:
        FindingsError: There is none, or it can't be read.
    """
    try:
        return Record.from_json((path / _RECORD).read_text(encoding="utf-8"))
    except OSError as error:
        raise FindingsError(f"{path}: no {_RECORD}: {error.strerror}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise FindingsError(f"{path}: {_RECORD} is damaged: {error}") from error


def _read_entry(folder: Path, name: str) -> Record:
    finding = read_finding(folder / name)
    if finding.name != name:
        raise FindingsError(f"{folder / name}: {_RECORD} is that of {finding.name}")
    return finding


def _entries(folder: Path) -> list[str]:
    """Return the names of the findings in a folder, without those that were set aside."""
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise FindingsError(f"{str(folder)!r} can't be read: {error.strerror}") from error
    return [
        path.name
        for path in paths
        if path.is_dir() and not path.name.startswith(".") and not _DAMAGED.search(path.name)
    ]


def _files_of(folder: Path, finding: Record) -> dict[str, bytes]:
    """Return what is kept beside a case, as far as it is there."""
    files = {}
    for name in finding.smallest.files:
        with contextlib.suppress(OSError):
            files[name] = (folder / name).read_bytes()
    return files


def _files_for(finding: Record, copies: Iterable[Mapping[str, bytes]]) -> dict[str, bytes]:
    """Return the files that belong to a finding, from wherever they are."""
    return {
        name: content
        for copy in copies
        for name, content in copy.items()
        if finding.smallest.files.get(name) == _digest(content)
    }


def _write_entry(folder: Path, finding: Record, files: Files) -> None:
    """Write a finding; what is new appears at once or not at all.

    Args:
        folder: Where all findings lie.
        finding: The finding.
        files: What is new beside its case.
    """
    contents = {
        _RECORD: finding.to_json().encode(),
        "case.json": finding.smallest.case.encode(),
        "verdict.txt": finding.text().encode(),
        **files,
    }
    path = folder / finding.name
    if not path.exists():
        new = folder / f".new-{finding.name}"
        try:
            for name, content in contents.items():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                durable.write(new / name, content)
            new.rename(path)
        except OSError:
            shutil.rmtree(new, ignore_errors=True)
            raise
        durable.sync(folder)
        return
    # The record first: what else there is follows from it, and is written again with the next.
    for name, content in contents.items():
        place = path / name
        if not place.is_file() or place.read_bytes() != content:
            place.parent.mkdir(parents=True, exist_ok=True)
            durable.replace(place, content)
    for old in (path / _SCRIPT, path / _NO_SCRIPT, *path.glob("kernel/*.py")):
        if old.relative_to(path).as_posix() not in finding.smallest.files:
            old.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove what a process has left half-written that was killed; under the lock nobody writes."""
    for new in (*folder.glob(".new-*"), *folder.glob("*/.new-*"), *folder.glob("*/*/.new-*")):
        if new.is_dir():
            shutil.rmtree(new, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                new.unlink()


class Filing:
    """Writes down what a campaign finds, as soon as it is known.

    An error is kept and not raised: the campaign goes on, and what could not be written is tried
    again.

    Args:
        folder: Where findings lie.
        context: The campaign's.
        target: Its target.

    Attributes:
        paths: The folder of each finding that was written.
        failures: Why others could not be, a line each.
        pass_failures: Why it could not be written that a case passes, by the finding's name.
    """

    def __init__(self, folder: FindingsFolder, context: Context, target: Target) -> None:
        self.paths: dict[Signature, Path] = {}
        self.failures: dict[Signature, str] = {}
        self.pass_failures: dict[str, str] = {}
        self._folder = folder
        self._context = context
        self._target = target
        self._written: dict[Signature, tuple[Found, int]] = {}
        self._passes_written: set[str] = set()
        self._tried_at = 0.0

    def take(self, result: Result, is_over: bool = False) -> None:
        """Write what is new in a result; counts alone are written when the campaign is over.

        Args:
            result: What the campaign has found so far.
            is_over: Whether nothing more will come.
        """
        has_failed = self.failures or self.pass_failures
        if has_failed and not is_over and time.monotonic() < self._tried_at + RETRY_SECONDS:
            return
        self._take_passes(result)
        for signature, found in result.findings.items():
            count = max(1, result.counts[signature])
            written, written_count = self._written.get(signature, (None, 0))
            if written is found and (not is_over or count == written_count):
                continue
            self._tried_at = time.monotonic()
            try:
                files = self._files(found)
                path = self._folder.add(found, self._context, count, files)
            except FindingsError as error:
                self.failures[signature] = str(error)
                continue
            self.failures.pop(signature, None)
            self.paths[signature] = path
            self._written[signature] = (found, count)

    def _take_passes(self, result: Result) -> None:
        for name, outcome in result.rechecked.items():
            if outcome != PASSES or name in self._passes_written:
                continue
            self._tried_at = time.monotonic()
            try:
                self._folder.add_pass(name, self._context)
            except FindingsError as error:
                self.pass_failures[name] = str(error)
                continue
            self.pass_failures.pop(name, None)
            self._passes_written.add(name)

    def _files(self, found: Found) -> dict[str, bytes]:
        """Return `repro.py` and the target's files, or why there are none."""
        from .repro_script import KERNEL_FOLDER, kernel_of, script_of

        try:
            family, case = any_case_from_json(found.case)
            if isinstance(case, SideCase):
                family = case.as_family(family)
            kernel = kernel_of(self._target, family.name)
            script = script_of(
                self._target,
                family,
                found.signature,
                legal_part(case),
                f"{found.verdict}\n  {found.how_small}",
                self._context.device,
                kernel,
            )
        except Exception as error:  # Nothing of the script's may cost the finding.
            return {_NO_SCRIPT: f"There is no {_SCRIPT}: {error}\n".encode()}
        copies = {f"{KERNEL_FOLDER}/{name}": text for name, text in kernel.files.items()}
        return {_SCRIPT: script.encode(), **copies}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
