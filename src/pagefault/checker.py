"""The comparison: one case, called on both replicas of guarded memory, against the oracle."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from . import interpreter
from .case import Case
from .comparison import Comparison, Outcome
from .family import Argument, Family, HostTensor, Plain, Tensor
from .memory import POISONS, TORCH_DTYPES, Memory, Plan, memory_of
from .target import Target
from .verdict import Finding, Verdict


class Checker:
    """Checks cases of one target on one device.

    Args:
        target: The functions under test.
        device: "cpu", where kernels run through Triton's interpreter, or "cuda".
    """

    def __init__(self, target: Target, device: str) -> None:
        self.target = target
        self.device = device
        self._memory: Memory = memory_of(device)
        if device == "cpu":
            interpreter.tune()

    def check(self, family: Family, case: Case) -> Verdict:
        """Return what is wrong with the target's answer to a case."""
        expected = family.expect(case, self.target.dialect)
        arguments = family.arguments(case)
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        plan = Plan(case, tensors)
        replicas = self._memory.place(plan, tensors)
        function = self.target.functions[family.name]
        try:
            outcomes = [
                self._call(function, family, arguments, placed, case) for placed in replicas.tensors
            ]
            after = self._memory.read_back(plan)
            fetched = [outcome.fetched() for outcome in outcomes]
        except DeviceFault as fault:
            return _device_error(family, fault)
        except RuntimeError as error:
            # Nothing of ours raises here: an earlier launch has faulted.
            return _device_error(family, DeviceFault(error))
        comparison = Comparison(family, case, plan, expected, self.device)
        verdict = comparison.verdict(replicas.before, after, outcomes, fetched)
        _poison_returned(outcomes)
        return verdict

    def _call(
        self,
        function: Callable[..., object],
        family: Family,
        arguments: Sequence[Argument],
        placed: Sequence[torch.Tensor],
        case: Case,
    ) -> Outcome:
        tensors = iter(placed)
        values = [
            next(tensors)
            if isinstance(argument, Tensor)
            else argument.make(self.device)
            if isinstance(argument, Plain)
            else _host_tensor(argument, case)
            for argument in arguments
        ]
        with _captured_warnings() as warnings:
            try:
                result = function(*values)
            except (Exception, SystemExit) as error:
                if self.device == "cuda":
                    self._rethrow_device_fault(error)
                return Outcome({}, error, tuple(warnings))
        try:
            returned = family.returned(result)
        except (TypeError, ValueError, AttributeError, IndexError, KeyError):
            returned = {"result": result}
        return Outcome(returned, None, tuple(warnings))

    def _rethrow_device_fault(self, error: BaseException) -> None:
        try:
            self._memory.synchronise()
        except RuntimeError as sticky:
            raise DeviceFault(sticky) from error


class DeviceFault(Exception):
    """The device reported an error that no later call in this process survives."""


def _device_error(family: Family, fault: DeviceFault) -> Verdict:
    first_line = str(fault.args[0]).strip().splitlines()[0]
    return Verdict(
        family.name,
        (Finding("device error", "device", f"{family.name}: the device reported: {first_line}"),),
    )


def _host_tensor(argument: HostTensor, case: Case) -> torch.Tensor:
    dtype = TORCH_DTYPES[case.placement(argument.name).dtype]
    return torch.tensor(list(argument.values), dtype=dtype)


class _WarningCollector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.messages is not None:
            self.messages.append(record.getMessage())


_collector = _WarningCollector()


@contextmanager
def _captured_warnings() -> Iterator[list[str]]:
    root = logging.getLogger()
    if _collector not in root.handlers:
        root.addHandler(_collector)
    _collector.messages = messages = []
    try:
        yield messages
    finally:
        _collector.messages = None


def _poison_returned(outcomes: Sequence[Outcome]) -> None:
    """Spoil what a call returned, so that the next one does not find it in recycled memory."""
    for outcome in outcomes:
        for value in outcome.returned.values():
            if isinstance(value, torch.Tensor) and value.numel() and not value.is_inference():
                try:
                    value.fill_(POISONS[0])
                except RuntimeError:
                    continue  # An expanded tensor can't be filled; its memory holds one element.
