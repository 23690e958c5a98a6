"""The comparison: one case, called on both replicas of guarded memory, against the oracle."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from . import addresses, interpreter, reached, replay
from .against import Answer, held_against
from .case import Case, CaseError, Cells
from .comparison import Comparison, Outcome
from .family import Argument, Domain, Expected, Family, HostTensor, Plain, Tensor
from .footprint import needed_reads, touched_cells
from .memory import POISONS, TORCH_DTYPES, CudaMemory, Memory, Plan, Replicas, Touched, memories_of
from .target import Target, pair_of
from .verdict import Finding, Verdict


@dataclass(frozen=True)
class Way:
    """One way to carry out a check.

    Attributes:
        memory: Where the tensors lie.
        order: How the programs of a launch take turns in the second replica, in the interpreter;
            in the first they run forwards.
        is_replay: Whether the call is captured with other values and replayed, on a GPU.
    """

    memory: Memory
    order: str = addresses.BACKWARDS
    is_replay: bool = False


# Edges that no case has where memory or target can't do it.
WIDE_TABLE = "wide table"
LONG_ROWS = "long rows"
REPLAY = "graph replay"

# On a GPU, of so many cases of a function that can be captured one is replayed.
REPLAY_ONE_IN = 32
# And of so many one lies in a net, which takes as long as four elsewhere where workers share a GPU.
NET_ONE_IN = 9


class Checker:
    """Checks cases of one target on one device.

    Args:
        target: The functions under test.
        device: "cpu", where kernels run through Triton's interpreter, or "cuda".
        memory: Where tensors lie on a GPU: "arena", "guard" (blocks with nothing mapped around
            them), "net" (far addresses all lead to one block, which is watched), or "mixed",
            which takes turns.
        strict: Whether to report reads of cells of a page table that the result does not need,
            in the interpreter.

    Attributes:
        unchecked: What this checker can't see that others can, and why, or "".
    """

    def __init__(
        self, target: Target, device: str, memory: str = "mixed", strict: bool = False
    ) -> None:
        self.target = target
        self.device = device
        self._strict = strict
        self._memories, self.unchecked = memories_of(device, memory)
        self._turn = 0
        self._replays: list[Way] = []
        self._watch: addresses.Watch | None = None
        if device == "cpu":
            self._ways = [
                Way(self._memories[0], order) for order in (addresses.BACKWARDS, addresses.SHUFFLED)
            ]
            interpreter.tune()
            self._watch = addresses.install()
            if self._watch.missing:
                self.unchecked = f"addresses are not checked: {self._watch.missing}"
        else:
            self._ways = [Way(memory) for memory in self._memories]
            if not any(isinstance(memory, CudaMemory) for memory in self._memories):
                # For cases whose tensors are too large for blocks and nets.
                self._memories = [*self._memories, CudaMemory()]
            self._replays = [Way(self._memories[0], is_replay=True)]
        nets = [way for way in self._ways if device == "cuda" and way.memory.reserves]
        others = [way for way in self._ways if way not in nets]
        # Where there are only nets, they are what is usual.
        self._usual, self._seldom = (others, nets) if others else (nets, [])

    def domain(self, family: Family) -> Domain:
        """Return which cases of a family the target can do and the memory can hold."""
        domain = self.target.terms_of(family.name).domain
        other = self.target.against
        # Where no oracle says what is touched of a table, it can't be reserved.
        if other is not None or not any(memory.reserves for memory in self._memories):
            domain = domain.excluding(WIDE_TABLE)
        functions = [target.functions[family.name] for target in (self.target, other) if target]
        if not all(map(_uses_triton, functions)):
            domain = domain.excluding(LONG_ROWS)
        return domain

    def check(self, family: Family, case: Case) -> Verdict:
        """Return what is wrong with the target's answer to a case, in one way."""
        self._turn += 1
        return self._check(self._next_way(family), family, case)

    def _next_way(self, family: Family) -> Way:
        replays = self._replays_of(family)
        if replays and self._turn % REPLAY_ONE_IN == 0:
            return replays[0]
        ways = self._seldom if self._seldom and self._turn % NET_ONE_IN == 0 else self._usual
        return ways[self._turn % len(ways)]

    def check_thoroughly(self, family: Family, case: Case) -> Verdict:
        """Return what is wrong with the target's answer to a case, in the first way that shows."""
        for way in [*self._ways, *self._replays_of(family)]:
            verdict = self._check(way, family, case)
            if not verdict.passed:
                return verdict
        return verdict

    def _replays_of(self, family: Family) -> list[Way]:
        """Return the ways to replay a call, none where the target or the device has none."""
        without = self.target.terms_of(family.name).without
        is_replayed = family.capturable and REPLAY not in without and self.target.against is None
        return self._replays if is_replayed else []

    def _check(self, way: Way, family: Family, case: Case) -> Verdict:
        if self.target.against is not None:
            return self._check_against(way, family, case, self.target.against)
        dialect = self.target.terms_of(family.name).dialect
        expected = family.expect(case, dialect)
        arguments = family.arguments(case)
        tensors = _tensors_of(arguments)
        touched = touched_cells(family, case, expected, dialect)
        memory, plan = self._planned(way.memory, case, tensors, touched)
        replicas = None
        try:
            # A reserved table has other pages mapped for other values.
            can_replay = memory is way.memory and not touched and not expected.raises
            if way.is_replay and can_replay:
                replicas, outcomes = self._replayed(family, case, arguments, memory, plan)
            else:
                replicas = memory.place(plan, tensors)
                reads = needed_reads(family, case, dialect) if self._strict else None
                outcomes = [
                    self._watched_call(family, arguments, placed, case, expected, reads, order)
                    for placed, order in zip(replicas.tensors, (addresses.FORWARDS, way.order))
                ]
            fetched = [outcome.fetched() for outcome in outcomes]
            after = memory.read_back(plan)  # Waits for all that was queued.
        except replay.CaptureError as error:
            return Verdict(family.name, (error.finding(family.name),))
        except DeviceFault as fault:
            _lost.append((self, replicas))
            return _device_error(family, fault, memory)
        except RuntimeError as error:
            # Nothing of ours raises here: an earlier launch has faulted.
            _lost.append((self, replicas))
            return _device_error(family, DeviceFault(error), memory)
        comparison = Comparison(family, case, plan, expected, self.device)
        verdict = comparison.verdict(replicas.before, after, outcomes, fetched)
        reached.count(reached.memory(memory.name))
        _poison_returned(outcomes)
        return verdict.with_more(*_far_writes(memory))

    def _check_against(self, way: Way, family: Family, case: Case, other: Target) -> Verdict:
        """Return in what the target's answer differs from another's, in the same memory."""
        arguments = family.arguments(case)
        tensors = _tensors_of(arguments)
        memory, plan = self._planned(way.memory, case, tensors, {})
        answers = []
        names = pair_of(self.target.name)
        for target, name in ((self.target, names[0]), (other, names[1])):
            function = target.functions[family.name]
            replicas = None
            try:
                replicas = memory.place(plan, tensors)
                outcomes = [
                    self._unheld_call(family, function, arguments, placed, case, order)
                    for placed, order in zip(replicas.tensors, (addresses.FORWARDS, way.order))
                ]
                fetched = [outcome.fetched() for outcome in outcomes]
                after = memory.read_back(plan).copy()
            except (DeviceFault, RuntimeError) as error:
                _lost.append((self, replicas))
                fault = error if isinstance(error, DeviceFault) else DeviceFault(error)
                return _device_error(family, fault, memory, f"{name}: ")
            # What was returned may lie in the memory that the next call gets.
            returned = [
                {
                    path: value.clone() if isinstance(value, torch.Tensor) else value
                    for path, value in values.items()
                }
                for values in fetched
            ]
            answers.append(Answer(name, after, outcomes, returned, memory.far_writes))
        verdict = held_against(family, case, plan, *answers)
        reached.count(reached.memory(memory.name))
        for answer in answers:
            _poison_returned(answer.outcomes)
        return verdict

    def _unheld_call(
        self,
        family: Family,
        function: Callable[..., Any],
        arguments: Sequence[Argument],
        placed: Sequence[torch.Tensor],
        case: Case,
        order: str,
    ) -> Outcome:
        """Make a call of which no contract says what it may touch."""
        if self._watch is None:
            return self._call(family, arguments, placed, case, function)
        named = dict(zip([tensor.name for tensor in _tensors_of(arguments)], placed))
        anything = {name: range(tensor.numel()) for name, tensor in named.items()}
        call = addresses.call_of(named, {}, anything, None, order)
        with self._watch.watching(call):
            outcome = self._call(family, arguments, placed, case, function)
        return dataclasses.replace(outcome, missteps=tuple(call.missteps.values()))

    def _planned(
        self, memory: Memory, case: Case, tensors: Sequence[Tensor], touched: Touched
    ) -> tuple[Memory, Plan]:
        """Return where the tensors are to lie, in this memory or the first other that holds them.

        Raises:
            CaseError: No memory holds them.
        """
        for candidate in [memory, *self._memories]:
            plan = candidate.plan(case, tensors, touched)
            if plan is not None:
                return candidate, plan
        names = ", ".join(memory.name for memory in self._memories)
        raise CaseError(f"the tensors of this case do not fit the memory: {names}")

    def _replayed(
        self,
        family: Family,
        case: Case,
        arguments: Sequence[Argument],
        memory: Memory,
        plan: Plan,
    ) -> tuple[Replicas, list[Outcome]]:
        """Capture the call with other values in its tensors, place the case's, and replay it."""
        other = replay.other_values(family, case)
        other_arguments = family.arguments(other)
        replicas = memory.place(plan, _tensors_of(other_arguments))
        graph, outcomes = replay.capture(
            lambda: [self._call(family, other_arguments, t, other) for t in replicas.tensors]
        )
        replicas = memory.place(plan, _tensors_of(arguments))
        graph.replay()
        reached.count(reached.REPLAYS)
        return replicas, outcomes

    def _watched_call(
        self,
        family: Family,
        arguments: Sequence[Argument],
        placed: Sequence[torch.Tensor],
        case: Case,
        expected: Expected,
        reads: Mapping[str, Cells] | None,
        order: str,
    ) -> Outcome:
        if self._watch is None:
            return self._call(family, arguments, placed, case)
        names = [tensor.name for tensor in _tensors_of(arguments)]
        writes = {} if expected.raises else expected.writes
        call = addresses.call_of(dict(zip(names, placed)), expected.rows, writes, reads, order)
        with self._watch.watching(call):
            outcome = self._call(family, arguments, placed, case)
        return dataclasses.replace(
            outcome, missteps=tuple(call.missteps.values()), launched=tuple(call.launched)
        )

    def _call(
        self,
        family: Family,
        arguments: Sequence[Argument],
        placed: Sequence[torch.Tensor],
        case: Case,
        function: Callable[..., Any] | None = None,
    ) -> Outcome:
        function = function or self.target.functions[family.name]
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
                    if torch.cuda.is_current_stream_capturing():
                        raise replay.CaptureError(str(error)) from error
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


def _uses_triton(function: Callable[..., object]) -> bool:
    """Return whether a function comes from a module that names Triton or a kernel of its.

    What computes with torch alone may copy whole rows, which no memory holds where rows are long.
    """
    module = inspect.getmodule(inspect.unwrap(function))
    return any(
        getattr(value, "__name__", "").partition(".")[0] == "triton"
        or type(value).__module__.partition(".")[0] == "triton"
        for value in (vars(module).values() if module else ())
    )


def _tensors_of(arguments: Sequence[Argument]) -> list[Tensor]:
    return [argument for argument in arguments if isinstance(argument, Tensor)]


def _device_error(family: Family, fault: DeviceFault, memory: Memory, who: str = "") -> Verdict:
    first_line = str(fault.args[0]).strip().splitlines()[0]
    headline = f"{who}{family.name}: the device reported: {first_line}"
    lines = (f"memory: {memory.name}",)
    return Verdict(family.name, (Finding("device error", "device", headline, lines),))


def _far_writes(memory: Memory) -> list[Finding]:
    if not memory.far_writes:
        return []
    return [Finding("outside", "far away", memory.far_writes, (f"memory: {memory.name}",))]


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
