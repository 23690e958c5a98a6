"""The comparison: one case, called on both replicas of guarded memory, against the oracle."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from . import addresses, interpreter
from .case import Case
from .comparison import Comparison, Outcome
from .family import Argument, Expected, Family, HostTensor, Plain, Tensor
from .memory import POISONS, TORCH_DTYPES, Memory, memories_of
from .target import Target
from .verdict import Finding, Verdict


class Checker:
    """Checks cases of one target on one device.

    Args:
        target: The functions under test.
        device: "cpu", where kernels run through Triton's interpreter, or "cuda".
        memory: Where tensors lie on a GPU: "arena", "guard" (blocks with nothing mapped around
            them), or "mixed", which takes turns.

    Attributes:
        unchecked: What this checker can't see that others can, and why, or "".
    """

    def __init__(self, target: Target, device: str, memory: str = "mixed") -> None:
        self.target = target
        self.device = device
        self._memories, self.unchecked = memories_of(device, memory)
        self._turn = 0
        self._watch: addresses.Watch | None = None
        if device == "cpu":
            interpreter.tune()
            self._watch = addresses.install()
            if self._watch.missing:
                self.unchecked = f"addresses are not checked: {self._watch.missing}"

    def check(self, family: Family, case: Case) -> Verdict:
        """Return what is wrong with the target's answer to a case, in one kind of memory."""
        self._turn = (self._turn + 1) % len(self._memories)
        return self._check_in(self._memories[self._turn], family, case)

    def check_thoroughly(self, family: Family, case: Case) -> Verdict:
        """Return what is wrong with the target's answer to a case, in the first kind that shows."""
        for memory in self._memories:
            verdict = self._check_in(memory, family, case)
            if not verdict.passed:
                return verdict
        return verdict

    def _check_in(self, memory: Memory, family: Family, case: Case) -> Verdict:
        terms = self.target.terms_of(family.name)
        expected = family.expect(case, terms.dialect)
        arguments = family.arguments(case)
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        plan = memory.plan(case, tensors)
        if plan is None:
            memory = self._memories[0]
            plan = memory.plan(case, tensors)
            assert plan is not None
        replicas = None
        try:
            replicas = memory.place(plan, tensors)
            # In one replica the programs of a launch take turns backwards: no answer may tell.
            outcomes = [
                self._watched_call(family, arguments, placed, case, expected, order)
                for placed, order in zip(replicas.tensors, addresses.ORDERS)
            ]
            fetched = [outcome.fetched() for outcome in outcomes]
            after = memory.read_back(plan)  # Waits for all that was queued.
        except DeviceFault as fault:
            _lost.append((self, replicas))
            return _device_error(family, fault, memory)
        except RuntimeError as error:
            # Nothing of ours raises here: an earlier launch has faulted.
            _lost.append((self, replicas))
            return _device_error(family, DeviceFault(error), memory)
        comparison = Comparison(family, case, plan, expected, self.device)
        verdict = comparison.verdict(replicas.before, after, outcomes, fetched)
        _poison_returned(outcomes)
        return verdict

    def _watched_call(
        self,
        family: Family,
        arguments: Sequence[Argument],
        placed: Sequence[torch.Tensor],
        case: Case,
        expected: Expected,
        order: str,
    ) -> Outcome:
        if self._watch is None:
            return self._call(family, arguments, placed, case)
        names = [argument.name for argument in arguments if isinstance(argument, Tensor)]
        writes = {} if expected.raises else expected.writes
        call = addresses.call_of(dict(zip(names, placed)), expected.rows, writes, order)
        with self._watch.watching(call):
            outcome = self._call(family, arguments, placed, case)
        return dataclasses.replace(outcome, missteps=tuple(call.missteps.values()))

    def _call(
        self,
        family: Family,
        arguments: Sequence[Argument],
        placed: Sequence[torch.Tensor],
        case: Case,
    ) -> Outcome:
        function = self.target.functions[family.name]
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
        except Exception:  # What the target returned is not what is taken apart here.
            returned = {"result": result}
        return Outcome(returned, None, tuple(warnings))

    def _rethrow_device_fault(self, error: BaseException) -> None:
        try:
            self._memories[0].synchronise()
        except RuntimeError as sticky:
            raise DeviceFault(sticky) from error


# What can't be freed any more: after a fault, to free pinned memory ends the process.
_lost: list[object] = []


class DeviceFault(Exception):
    """The device reported an error that no later call in this process survives."""


def _device_error(family: Family, fault: DeviceFault, memory: Memory) -> Verdict:
    first_line = str(fault.args[0]).strip().splitlines()[0]
    headline = f"{family.name}: the device reported: {first_line}"
    lines = (f"memory: {memory.name}",)
    return Verdict(family.name, (Finding("device error", "device", headline, lines),))


def _host_tensor(argument: HostTensor, case: Case) -> torch.Tensor:
    placement = case.placement(argument.name)
    before = [POISONS[0]] * placement.offset
    tensor = torch.tensor([*before, *argument.values], dtype=TORCH_DTYPES[placement.dtype])
    return tensor[placement.offset :]


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
    messages: list[str] = []
    _collector.messages = messages
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
