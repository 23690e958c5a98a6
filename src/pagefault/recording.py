"""Calls of a live launcher as cases: what an engine really asks of it, written where it runs.

    compute_out_cache_loc = pagefault.record(compute_out_cache_loc, out="cases", one_in=1000)

The engine is left alone: its arguments are only read, and whatever goes wrong in here is counted
and not raised.
"""

from __future__ import annotations

import functools
import inspect
import logging
import operator
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from .case import Case, CaseError, PageTable, Placement
from .family import Dialect, Expected, Family, Tensor, TensorValue, family_named
from .footprint import needed_reads
from .memory import ALIGNMENT_BYTES
from .oracle.slots import Holes
from .stream import derived_seed

# Where the rows of a call's requests have more cells, those are kept that the oracle looks up.
MOST_CELLS = 1 << 12

# Of so many different reasons why calls are left out, each is counted by itself.
MOST_REASONS = 20
OTHER_REASONS = "other reasons"

_log = logging.getLogger("pagefault")


def record(
    function: Callable[..., Any],
    *,
    out: Path | str,
    family: Family | str | None = None,
    one_in: int = 1,
    only_failing: bool = False,
    max_cases: int = 1000,
    max_bytes: int = 100 << 20,
    overflow_slot: int = 0,
    holes: Holes = "divert",
) -> Callable[..., Any]:
    """Return a launcher that does what this one does, and writes calls of it as cases.

    A case is written before its call is made, so that it is there if the call ends the process;
    where only those are wanted that fail, after it. `pagefault repro FILE --target MODULE` runs one
    again. To read its arguments, a call that is recorded waits for the device; one that is not
    costs a random number. While a stream is being captured nothing is recorded.

    Args:
        function: The launcher; its parameters are in the contract's order.
        out: The folder for the cases, made if it is missing; a call that is there already is not
            written again.
        family: Which contract; the function's name says, if this does not.
        one_in: Of so many calls one is recorded, at random.
        only_failing: Whether only calls are written that did not do what the oracle says. All that
            are looked at are held against it, which takes it milliseconds.
        max_cases: How many files the folder may have, those that were there included.
        max_bytes: How large they may be together.
        overflow_slot: Where overflow and holes go in the function's dialect.
        holes: What a negative page id means in it.

    Returns:
        The launcher; its attribute `recorder`, a `Recorder`, says what was written and left out.

    Raises:
        FamilyError: There is no such family.
        ValueError: A number is below 1.
        OSError: The folder can't be made or read.
    """
    for name, value in (("one_in", one_in), ("max_cases", max_cases), ("max_bytes", max_bytes)):
        if value < 1:
            raise ValueError(f"{name}: {value}, but should be at least 1")
    if not isinstance(family, Family):
        family = family_named(family or function.__name__)
    dialect = Dialect(overflow_slot, holes)
    folder = _Folder(Path(out), max_cases, max_bytes)
    recorder = Recorder(function, family, dialect, folder, one_in, only_failing)

    @functools.wraps(function)
    def recorded(*arguments: Any, **named: Any) -> Any:
        call = recorder.begin(arguments, named)
        if call is None:
            return function(*arguments, **named)
        try:
            result = function(*arguments, **named)
        except Exception as error:
            recorder.end(call, None, error)
            raise
        recorder.end(call, result, None)
        return result

    recorded.recorder = recorder  # type: ignore[attr-defined]
    return recorded


class _Call(NamedTuple):
    """A call that is held against the oracle when it has ended.

    Attributes:
        case: What it was.
        values: Its arguments, by parameter.
        before: What its device tensors held; of a table what was kept of it.
    """

    case: Case
    values: Mapping[str, Any]
    before: Mapping[str, _Kept]


@dataclass(frozen=True)
class _Kept:
    """Elements of a tensor: their indices, one list for each dimension, and what they held."""

    indices: tuple[list[int], ...]
    values: list[int]

    def now(self, tensor: torch.Tensor) -> list[int]:
        """Return what they hold now."""
        return _gathered(tensor, self.indices)


class _Left(Exception):
    """Why a call is left out."""


class _Folder:
    """Where cases go, with the limits of it."""

    def __init__(self, path: Path, max_cases: int, max_bytes: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        sizes = [file.stat().st_size for file in path.glob("*.json")]
        self._path = path
        self._cases_left = max_cases - len(sizes)
        self._bytes_left = max_bytes - sum(sizes)
        self._lock = threading.Lock()
        self._failure = ""

    def expect_room(self) -> None:
        """Raise `_Left` where nothing can be written any more."""
        if self._failure:
            raise _Left(self._failure)
        if self._cases_left < 1:
            raise _Left("the folder has as many cases as it may have")

    def write(self, family: Family, case: Case) -> bool:
        """Write a case, and return whether it was not there yet.

        Raises:
            _Left: There is no room for it.
        """
        text = family.to_json(case)
        content = text.encode()
        path = self._path / f"{family.name}-{derived_seed(text):016x}.json"
        with self._lock:
            self.expect_room()
            if path.exists():
                return False
            if len(content) > self._bytes_left:
                raise _Left("the folder has no room for so large a case")
            new = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                new.write_bytes(content)
                new.replace(path)
            except OSError as error:
                # A disk that is full is not asked again at every call.
                self._failure = f"the folder can't be written: {error.strerror}"
                new.unlink(missing_ok=True)
                raise _Left(self._failure) from error
            self._cases_left -= 1
            self._bytes_left -= len(content)
            return True


class Recorder:
    """What `record` does around the calls of one launcher.

    Attributes:
        num_calls: How many calls there were.
        num_written: How many cases were written.
        num_known: How many calls were there already.
        num_right: How many did what the oracle says, where only others are written.
        left_out: How many calls could not be recorded, by the reason.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        family: Family,
        dialect: Dialect,
        folder: _Folder,
        one_in: int,
        only_failing: bool,
    ) -> None:
        self.num_calls = self.num_written = self.num_known = self.num_right = 0
        self.left_out: Counter[str] = Counter()
        self._signature = _signature_of(function)
        self._family = family
        self._dialect = dialect
        self._folder = folder
        self._one_in = one_in
        self._only_failing = only_failing
        # A stream of its own: the engine's random numbers stay as they are.
        self._random = Random()

    def begin(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> _Call | None:
        """Record a call, or return what is needed to hold it against the oracle afterwards."""
        self.num_calls += 1
        if self._one_in > 1 and self._random.random() * self._one_in >= 1:
            return None
        try:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise _Left("a stream was being captured")
            self._folder.expect_room()
            given = [*arguments, *named.values()]
            if self._signature is not None:
                bound = self._signature.bind(*arguments, **named)
                bound.apply_defaults()
                given = [*bound.args, *bound.kwargs.values()]
            if len(given) < len(self._family.parameters):
                wanted = len(self._family.parameters)
                raise _Left(f"{len(given)} arguments, but the contract has {wanted}")
            values = dict(zip(self._family.parameters, given))
            case, before = _case_of(self._family, self._dialect, values)
            if self._only_failing:
                return _Call(case, values, before)
            self._write(case)
        except Exception as error:
            self._leave_out(error)
        return None

    def end(self, call: _Call, result: Any, error: Exception | None) -> None:
        """Write a call down that has not done what the oracle says."""
        try:
            expected = self._family.expect(call.case, self._dialect)
            if _is_right(self._family, expected, call, result, error):
                self.num_right += 1
            else:
                self._write(call.case)
        except Exception as failure:
            self._leave_out(failure)

    def _write(self, case: Case) -> None:
        if self._folder.write(self._family, case):
            self.num_written += 1
        else:
            self.num_known += 1

    def _leave_out(self, error: Exception) -> None:
        reason = str(error) if isinstance(error, _Left) else f"{type(error).__name__}: {error}"
        if not self.left_out:
            _log.warning("a call of %s is not recorded: %s", self._family.name, reason)
        if reason not in self.left_out and len(self.left_out) >= MOST_REASONS:
            reason = OTHER_REASONS
        self.left_out[reason] += 1


def _signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a launcher, or None for one that is not written in Python."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _case_of(
    family: Family, dialect: Dialect, values: Mapping[str, Any]
) -> tuple[Case, dict[str, _Kept]]:
    """Return the case of a call, and what its tensors hold.

    Args:
        family: The function's family.
        dialect: The function's.
        values: The call's arguments, by parameter.

    Raises:
        CaseError: The call is outside the contract's domain.
    """
    case_type = family.case_type
    names = [field.name for field in fields(case_type) if field.name != "layout"]
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    for name in case_type.PLAIN:
        if name not in tensors:
            raise CaseError(f"{name}: {values.get(name)!r}, but should be a tensor")
    host = _OnHost(values)
    found = family.fields_of(host) if family.fields_of else {name: host[name] for name in names}
    layout = tuple((name, _placement(name, tensors[name])) for name in case_type.PLAIN)
    case = case_type(**{name: _frozen(value) for name, value in found.items()}, layout=layout)
    case = case.replace(layout=tuple(_with_spare(family, case, tensors)))
    rows = family.expect(case, dialect).rows
    kept = {name: _Kept(([*range(len(held))],), held) for name, held in host.read.items()}
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            cells = _cells(family, dialect, case, name, sorted(rows.get(name, ())))
            indices = ([row for row, _ in cells], [column for _, column in cells])
            kept[name] = _Kept(indices, _gathered(tensor, indices))
            edits = tuple(zip(*indices, kept[name].values))
            table = getattr(case, name)
            edited = PageTable(table.num_rows, table.max_pages, edits, table.first, table.step)
            case = case.replace(**{name: edited})
    return case, kept


class _OnHost(Mapping[str, Any]):
    """Arguments as cases have them; a tensor that nobody asks for, such as an output, is not read.

    Attributes:
        read: What the vectors held that were asked for.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.read: dict[str, list[int]] = {}

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() == 2:
            # Of the cells that belong to no request nothing is kept: their ids are the smallest.
            num_rows, max_pages = value.shape
            return PageTable(num_rows, max_pages, first=1, step=1)
        if name not in self.read:
            self.read[name] = value.tolist()
        return self.read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _frozen(value: Any) -> Any:
    """Return a value as a case has it: what an engine counts with may be numpy's."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    return value if isinstance(value, PageTable) else operator.index(value)


def _placement(name: str, tensor: torch.Tensor) -> Placement:
    """Return how a tensor lies in memory: its alignment, and not how far into its storage."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    offset = tensor.data_ptr() % ALIGNMENT_BYTES // tensor.element_size()
    pitch = 0
    if tensor.dim() == 2 and tensor.shape[0] > 1:
        pitch = tensor.stride(0) - tensor.shape[1]
    try:
        return Placement(dtype, offset, pitch)
    except CaseError as error:
        raise CaseError(f"{name}: {error}") from error


def _with_spare(
    family: Family, case: Case, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, Placement]]:
    """Yield the placements of a case, with what outputs have behind what is filled of them."""
    needed = {
        argument.name: argument.shape[0]
        for argument in family.arguments(case)
        if isinstance(argument, Tensor) and argument.values is None
    }
    for name in case.PLAIN:
        at = case.placement(name)
        spare = tensors[name].numel() - needed[name] if name in needed else 0
        yield name, Placement(at.dtype, at.offset, at.pitch, spare)


def _cells(
    family: Family, dialect: Dialect, case: Case, table: str, rows: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the cells of a table that a case keeps: all of its rows, or what the oracle reads."""
    max_pages = getattr(case, table).max_pages
    if len(rows) * max_pages <= MOST_CELLS:
        return [(row, column) for row in rows for column in range(max_pages)]
    return sorted(needed_reads(family, case, dialect)[table])


def _gathered(tensor: torch.Tensor, indices: Sequence[Sequence[int]]) -> list[int]:
    """Return elements of a tensor; `indices` has a list for each dimension."""
    if not indices[0]:
        return []
    places = tuple(torch.tensor(of_dimension, device=tensor.device) for of_dimension in indices)
    found: list[int] = tensor[places].tolist()
    return found


def _is_right(
    family: Family, expected: Expected, call: _Call, result: Any, error: Exception | None
) -> bool:
    """Return whether a call has done what the oracle says, as far as its own tensors show."""
    if error is not None or expected.raises is not None:
        return (
            error is not None and expected.raises is not None and isinstance(error, expected.raises)
        )
    for name, writes in expected.writes.items():
        tensor = call.values[name]
        by_index = writes if isinstance(writes, Mapping) else dict(enumerate(writes))
        settled = {index: value for index, value in by_index.items() if value is not None}
        indices = list(zip(*(_unravelled(index, tensor) for index in settled))) or [()]
        if _gathered(tensor, [list(i) for i in indices]) != [*settled.values()]:
            return False
    for name, kept in call.before.items():
        tensor = call.values[name]
        writes = expected.writes.get(name, {})
        by_index = writes if isinstance(writes, Mapping) else dict(enumerate(writes))
        written = {_unravelled(index, tensor) for index in by_index}
        for place, was, now in zip(zip(*kept.indices), kept.values, kept.now(tensor)):
            if was != now and place not in written:
                return False
    return _returned_right(family, expected, result)


def _unravelled(index: int, tensor: torch.Tensor) -> tuple[int, ...]:
    return divmod(index, tensor.shape[1]) if tensor.dim() == 2 else (index,)


def _returned_right(family: Family, expected: Expected, result: Any) -> bool:
    if expected.returns is None:
        return result is None
    returned = family.returned(result)
    if returned.keys() != expected.returns.keys():
        return False
    for path, wanted in expected.returns.items():
        found = returned[path]
        if not isinstance(wanted, TensorValue):
            if type(found) is not int or found != wanted:
                return False
            continue
        if not isinstance(found, torch.Tensor) or found.shape != torch.Size(wanted.shape):
            return False
        if found.dtype is not getattr(torch, wanted.dtype):
            return False
        pairs = zip(found.flatten().tolist(), wanted.values)
        if any(value is not None and value != element for element, value in pairs):
            return False
    return True
