"""Any bytes are safe: a call whose device tensors hold garbage ends, and stays inside them.

What the host sees of a case is legal: shapes, dtypes, plain numbers and tensors on the CPU. Of what
lies on the device, some is garbage. The contract says what then still holds; of what it leaves
open, only that nothing outside the outputs changes.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from . import conformance, reached
from .case import DTYPE_RANGES, Case, CaseError, PageTable
from .conformance import SHRINK_BUDGET, NonConformance, first_failure, session, write_case
from .device import prepare, resolve_device
from .family import (
    Argument,
    Dialect,
    Domain,
    Expected,
    Family,
    Inputs,
    Tensor,
    TensorValue,
    Writes,
    family_named,
    no_explanation,
)
from .isolation import Ended, hang_verdict
from .minimal import minimise
from .verdict import Verdict

if TYPE_CHECKING:
    from .checker import Checker
    from .target import Target

# A call takes milliseconds; one that has not ended by then never would.
CALL_SECONDS = 30.0

# The edge of functions that promise nothing outside their domain, in what a target leaves out.
EDGE = "any bytes"

# What nobody promises outside the domain: garbage may give one cell to two requests, and no oracle
# says which cells a result needs.
_NOT_PROMISED = frozenset(["race", "needless"])


@dataclass(frozen=True)
class Garbage:
    """A legal case, and what some elements of its device tensors hold instead.

    Attributes:
        case: The case.
        spoilt: (tensor, flat index, value) of those elements; one that the case does not have, or
            whose dtype can't hold the value, is passed over.
    """

    case: Case
    spoilt: tuple[tuple[str, int, int], ...]

    def arguments(self, family: Family) -> list[Argument]:
        """Return the call's arguments."""
        return [
            self._with_garbage(argument) if isinstance(argument, Tensor) else argument
            for argument in family.arguments(self.case)
        ]

    def inputs(self, family: Family) -> Inputs:
        """Return what the device tensors hold when the call starts."""
        return {
            argument.name: argument.values
            for argument in self.arguments(family)
            if isinstance(argument, Tensor) and argument.values is not None
        }

    def _with_garbage(self, tensor: Tensor) -> Tensor:
        values = tensor.values
        if values is None:
            return tensor
        num_elements = values.num_cells if isinstance(values, PageTable) else len(values)
        legal = DTYPE_RANGES[self.case.placement(tensor.name).dtype]
        spoilt = {
            idx: value
            for name, idx, value in self.spoilt
            if name == tensor.name and 0 <= idx < num_elements and value in legal
        }
        if isinstance(values, PageTable):
            edits = [(*divmod(idx, values.max_pages), value) for idx, value in spoilt.items()]
            table = dataclasses.replace(values, edits=(*values.edits, *edits))
            return dataclasses.replace(tensor, values=table)
        vector = [spoilt.get(idx, value) for idx, value in enumerate(values)]
        return dataclasses.replace(tensor, values=vector)

    def to_json(self, family: Family) -> str:
        """Return the case as JSON text with one more field, the garbage."""
        text = family.to_json(self.case).rstrip().removesuffix("}").rstrip()
        return f'{text},\n  "spoilt": {json.dumps(self.spoilt)}\n}}\n'


def is_garbage(text: str) -> bool:
    """Return whether JSON text describes a case with garbage, and not a case alone."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "spoilt" in document


def garbage_from_json(text: str) -> tuple[Family, Garbage]:
    """Return a family and the garbage that JSON text describes.

    Raises:
        CaseError: The text describes none.
    """
    try:
        document = json.loads(text)
        spoilt = tuple((str(name), int(idx), int(value)) for name, idx, value in document["spoilt"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CaseError(f"spoilt: not [tensor, index, value] each: {error}") from error
    family = family_named(str(document.get("family")))
    del document["spoilt"]
    return family, Garbage(family.from_json(json.dumps(document)), spoilt)


def check_garbage(
    checker: Checker,
    family: Family,
    garbage: Garbage,
    seconds: float = CALL_SECONDS,
    thoroughly: bool = False,
) -> Verdict:
    """Return what a call with garbage does that it must not do.

    Args:
        checker: Calls the target.
        family: The function's family.
        garbage: The call.
        seconds: How long it may take where Python can interrupt it, which is not on a GPU.
        thoroughly: Whether to try every memory.
    """
    check = checker.check_thoroughly if thoroughly else checker.check

    def expect(case: Case, dialect: Dialect) -> Expected:
        if family.expect_any_bytes is None:
            return contained(family, case, dialect)
        return family.expect_any_bytes(case, garbage.inputs(family), dialect)

    spoilt = dataclasses.replace(
        family,
        arguments=lambda case: garbage.arguments(family),
        expect=expect,
        explain=no_explanation,
        capturable=False,
    )
    try:
        with _time_limit(seconds):
            verdict = check(spoilt, garbage.case)
            reached.count(reached.ANY_BYTES)
    except _Overrun:
        return hang_verdict(family, seconds)
    kept = tuple(finding for finding in verdict.findings if finding.kind not in _NOT_PROMISED)
    return dataclasses.replace(verdict, findings=kept)


def contained(family: Family, case: Case, dialect: Dialect) -> Expected:
    """Return what any function owes: what it returns has its shape, and only outputs change."""
    legal = family.expect(case, dialect)
    writes: dict[str, Writes] = {}
    for argument in family.arguments(case):
        if isinstance(argument, Tensor) and argument.name in legal.writes:
            num_rows, *rest = argument.shape
            spare = 0 if argument.values is not None else case.placement(argument.name).spare
            num_elements = (num_rows + spare) * (rest[0] if rest else 1)
            writes[argument.name] = dict.fromkeys(range(num_elements))
    returns = legal.returns and {
        path: dataclasses.replace(value, values=[None] * len(value.values))
        if isinstance(value, TensorValue)
        else value
        for path, value in legal.returns.items()
    }
    return Expected(writes, returns)


def check_any_bytes(
    target: Target,
    family: Family,
    *,
    num_cases: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    shard: int = 0,
    seconds: float = CALL_SECONDS,
    checker: Checker | None = None,
    narrowed: Callable[[Domain], Domain] = lambda domain: domain,
) -> None:
    """Hold a function of a target to what it owes whatever its device tensors hold.

    Args:
        target: The target.
        family: The function's family.
        num_cases: How many calls, or None for `max_examples` of Hypothesis's current profile.
        seed: Of the stream, or None for the session's.
        device: "auto", "cpu" or "cuda", or None for the session's.
        shard: Which of several streams of this property.
        seconds: How long one call may take, see `check_garbage`.
        checker: Of the target on this device, or None for a new one.
        narrowed: Returns what is to be drawn of what may be.

    Raises:
        NonConformance: It raises, does not end, leaves its tensors, or gives another answer than
            the contract fixes; with the smallest such call found.
    """
    __tracebackhide__ = True
    from .checker import WIDE_TABLE, Checker
    from .strategies.any_bytes import garbage_of

    resolved = resolve_device(session.device if device is None else device)
    prepare(resolved)

    def search() -> tuple[Garbage, Verdict] | None:
        own_checker = checker or Checker(target, resolved)

        def check_here(garbage: Garbage) -> Verdict:
            return check_garbage(own_checker, family, garbage, seconds)

        check = conformance.noting(family, check_here)
        # Garbage is kept out of reserved tables: no oracle says what is touched there.
        domain = own_checker.domain(family)
        domain = domain.excluding(WIDE_TABLE)
        strategy = garbage_of(family, narrowed(domain))
        failure = first_failure(strategy, check, num_cases, seed, family.name, EDGE, shard)
        if failure is None or failure[1].fatal or failure[1].signature.kind == "hang":
            return failure
        return _smallest(family, *failure, check)

    found = conformance.in_own_process(search, family)
    if found is None:
        return
    garbage, verdict = (found.case, found.verdict) if isinstance(found, Ended) else found
    path = write_case(session.out, family, verdict.signature, garbage.to_json(family))
    spoilt = ", ".join(f"{name}[{idx}] = {value}" for name, idx, value in garbage.spoilt)
    raise NonConformance(
        f"{verdict.text()}\n  any bytes are safe: {spoilt}\n  case: {path}\n"
        + garbage.to_json(family),
        garbage.case,
        path,
    )


def _smallest(
    family: Family, garbage: Garbage, verdict: Verdict, check: Callable[[Garbage], Verdict]
) -> tuple[Garbage, Verdict]:
    """Return a call with less garbage, and the smallest case that it shows the same in."""
    garbage, verdict = _less_spoilt(garbage, verdict, check)
    for _ in range(2):
        garbage, verdict = _in_smaller_case(family, garbage, verdict, check)
        garbage, verdict = _less_spoilt(garbage, verdict, check)
        plainer, verdict = _plainer(garbage, verdict, check)
        if plainer == garbage:
            break
        garbage = plainer
    return garbage, verdict


def _in_smaller_case(
    family: Family, garbage: Garbage, verdict: Verdict, check: Callable[[Garbage], Verdict]
) -> tuple[Garbage, Verdict]:
    spoilt = garbage.spoilt

    def check_accepted(case: Case) -> Verdict:
        if is_refused(family, case):
            return Verdict(family.name)  # A step of the minimiser to what says nothing of garbage.
        return check(Garbage(case, spoilt))

    minimal = minimise(family, garbage.case, verdict, check_accepted, SHRINK_BUDGET)
    return Garbage(minimal.case, spoilt), minimal.verdict


def is_refused(family: Family, case: Case) -> bool:
    """Return whether the host has to refuse a case, whatever the device tensors hold."""
    return any(edge.startswith("refused: ") for edge in family.edges(case))


def _plainer(
    garbage: Garbage, verdict: Verdict, check: Callable[[Garbage], Verdict]
) -> tuple[Garbage, Verdict]:
    """Move the garbage to the first element, and make it -1, where that makes no difference."""
    for i in range(len(garbage.spoilt)):
        name, idx, value = garbage.spoilt[i]
        for moved in ((name, 0, -1), (name, 0, value), (name, idx, -1)):
            spoilt = (*garbage.spoilt[:i], moved, *garbage.spoilt[i + 1 :])
            candidate = Garbage(garbage.case, spoilt)
            answer = check(candidate)
            if not answer.passed and answer.signature == verdict.signature:
                garbage, verdict = candidate, answer
                break
    return garbage, verdict


def _less_spoilt(
    garbage: Garbage, verdict: Verdict, check: Callable[[Garbage], Verdict]
) -> tuple[Garbage, Verdict]:
    """Leave out as much of the garbage as makes no difference to the signature."""
    dropped = len(garbage.spoilt)
    while dropped:
        first = 0
        while first < len(garbage.spoilt):
            spoilt = garbage.spoilt[:first] + garbage.spoilt[first + dropped :]
            candidate = Garbage(garbage.case, spoilt)
            answer = check(candidate)
            if not answer.passed and answer.signature == verdict.signature:
                garbage, verdict = candidate, answer
            else:
                first += dropped
        dropped //= 2
    return garbage, verdict


class _Overrun(BaseException):
    """A call has not ended in time; no handler of exceptions inside it may stop this."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `_Overrun` in what runs too long; no limit where there is no alarm to set."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "setitimer"):
        yield
        return

    def end(signum: int, frame: FrameType | None) -> Any:
        raise _Overrun

    handler = signal.signal(signal.SIGALRM, end)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
