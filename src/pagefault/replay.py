"""CUDA graphs: a call is captured with some values and replayed with others in its tensors."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from .case import Case, CaseError, PageTable
from .family import Family, Tensor
from .verdict import Finding

C = TypeVar("C", bound=Case)
T = TypeVar("T")


class CaptureError(RuntimeError):
    """A call could not be captured; the message is CUDA's."""

    def finding(self, family: str) -> Finding:
        """Return this as a finding about a function."""
        first_line = str(self).strip().splitlines()[0]
        headline = f"{family} can't be captured in a CUDA graph: {first_line}"
        return Finding("capture", "capture", headline)


def capture(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return a graph of what a call launches, and what it came back with.

    The call runs once before, so that kernels are compiled.

    Raises:
        CaptureError: It does what can't be captured, such as to wait for the device.
    """
    call()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(_capture_stream()):
        graph.capture_begin()
        try:
            result = call()
        except BaseException:
            _end(graph)
            raise
        failure = _end(graph)
    if failure is not None:
        raise CaptureError(str(failure)) from failure
    return graph, result


_streams: list[torch.cuda.Stream] = []


def _capture_stream() -> torch.cuda.Stream:
    """Return this process's stream for captures: the default one can't be captured."""
    if not _streams:
        _streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    return _streams[0]


def _end(graph: torch.cuda.CUDAGraph) -> RuntimeError | None:
    """End a capture, and return why it failed."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            graph.capture_end()
    except RuntimeError as error:
        return error
    return None


def other_values(family: Family, case: C) -> C:
    """Return a case whose tensors have the same shapes and hold as much else as is legal.

    Requests change places, those of the second half lose their tokens or pages and become rows of
    a padded batch, and the table holds other ids; what is not legal together is left out.
    """
    names = case.per_request_fields()
    steps: list[tuple[Callable[[Any], Any], Sequence[str]]] = [
        (_rotated, names),
        *((_with_other_ids, [table]) for table in case.tables()),
        *((_half_zeroed, [name]) for name in names),
    ]
    other = case
    for change, fields in steps:
        try:
            changed = other.replace(**{name: change(getattr(other, name)) for name in fields})
            other = _in_same_shape(family, case, changed)
        except CaseError:
            continue
    return other


def _rotated(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return values[1:] + values[:1]


def _half_zeroed(values: tuple[Any, ...]) -> tuple[Any, ...]:
    kept = (len(values) + 1) // 2
    return values[:kept] + tuple(() if isinstance(v, tuple) else 0 for v in values[kept:])


def _with_other_ids(table: PageTable) -> PageTable:
    return dataclasses.replace(table, edits=(), first=table.first + 1)


def _in_same_shape(family: Family, case: C, other: C) -> C:
    """Return the other case with outputs as long as the case's.

    Raises:
        CaseError: Its tensors have other shapes.
    """
    layout = dict(case.layout)
    for mine, its in zip(family.arguments(case), family.arguments(other)):
        if not isinstance(mine, Tensor) or not isinstance(its, Tensor) or mine.shape == its.shape:
            continue
        spare = case.placement(mine.name).spare + mine.shape[0] - its.shape[0]
        if mine.values is not None or spare < 0 or mine.shape[1:] != its.shape[1:]:
            raise CaseError(f"{mine.name}: another shape")
        layout[mine.name] = dataclasses.replace(case.placement(mine.name), spare=spare)
    return other.replace(layout=tuple(layout.items()))
