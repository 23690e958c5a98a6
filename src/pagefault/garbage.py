"""Any bytes are safe: a call whose device tensors hold garbage ends, and stays inside them.

What the host sees of a case is legal: shapes, dtypes, plain numbers and tensors on the CPU. Of what
lies on the device, some is garbage. The contract says what then still holds; of what it leaves
open, only that nothing outside the outputs changes.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from . import conformance, reached
from .case import DTYPE_RANGES, Case, CaseError, PageTable, runs_left_out
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
    no_explanation,
)
from .isolation import Ended, hang_verdict
from .minimal import Minimal, minimise, simplifications
from .side_case import SideCase
from .verdict import Verdict

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

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
class Garbage(SideCase):
    """A legal case, and what some elements of its device tensors hold instead.

    Attributes:
        case: The case.
        spoilt: (tensor, flat index, value) of those elements; one that the case does not have, or
            whose dtype can't hold the value, is passed over.
    """

    FIELD = "spoilt"

    case: Case
    spoilt: tuple[tuple[str, int, int], ...]

    def __str__(self) -> str:
        spoilt = ", ".join(f"{name}[{idx}] = {value}" for name, idx, value in self.spoilt)
        return f"{EDGE} are safe: {spoilt}"

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

    @property
    def held_to(self) -> str:
        return EDGE

    @property
    def size(self) -> tuple[int, ...]:
        far = sum(idx for _, idx, _ in self.spoilt)
        odd = sum(value != -1 for _, _, value in self.spoilt)
        return len(self.spoilt), far, odd

    @classmethod
    def of(cls, case: Case, value: Any) -> Self:
        """Return the case with the garbage that JSON says.

        Raises:
            CaseError: It says none.
        """
        try:
            return cls(
                case, tuple((str(name), int(idx), int(spoilt)) for name, idx, spoilt in value)
            )
        except (ValueError, TypeError) as error:
            raise CaseError(
                f"{cls.FIELD}: {value!r}, but should be [tensor, index, value] each"
            ) from error

    def value(self) -> Any:
        return self.spoilt

    def simpler(self, family: Family) -> Iterator[Garbage]:
        """Yield cases with less garbage, smaller cases, and plainer garbage."""
        spoilt = self.spoilt
        for kept in runs_left_out(len(spoilt)):
            yield Garbage(self.case, tuple(spoilt[i] for i in kept))
        for case in simplifications(family, self.case):
            # What has to be refused says nothing of garbage.
            if not is_refused(family, case):
                yield Garbage(case, spoilt)
        for i, (name, idx, value) in enumerate(spoilt):
            for plainer in ((name, 0, -1), (name, 0, value), (name, idx, -1)):
                yield Garbage(self.case, (*spoilt[:i], plainer, *spoilt[i + 1 :]))

    def why_not(self, family: Family, target: Target) -> str:
        return target.terms_of(family.name).without.get(EDGE, "")

    def judge(self, checker: Checker, family: Family, thoroughly: bool) -> Verdict:
        return check_garbage(checker, family, self, None, thoroughly)

    def as_family(self, family: Family) -> Family:
        def expect(case: Case, dialect: Dialect) -> Expected:
            if family.expect_any_bytes is None:
                return contained(family, case, dialect)
            return family.expect_any_bytes(case, self.inputs(family), dialect)

        return dataclasses.replace(
            family,
            arguments=lambda case: self.arguments(family),
            expect=expect,
            explain=no_explanation,
            capturable=False,
        )


def check_garbage(
    checker: Checker,
    family: Family,
    garbage: Garbage,
    seconds: float | None = CALL_SECONDS,
    thoroughly: bool = False,
) -> Verdict:
    """Return what a call with garbage does that it must not do.

    Args:
        checker: Calls the target.
        family: The function's family.
        garbage: The call.
        seconds: How long it may take where Python can interrupt it, which is not on a GPU; None
            where somebody else ends a process that takes too long.
        thoroughly: Whether to try every memory.
    """
    check = checker.check_thoroughly if thoroughly else checker.check
    spoilt = garbage.as_family(family)
    try:
        with _time_limit(seconds):
            verdict = check(spoilt, garbage.case)
            reached.count(reached.ANY_BYTES)
    except _Overrun:
        assert seconds is not None
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

    Raises:
        NonConformance: It raises, does not end, leaves its tensors, or gives another answer than
            the contract fixes; with the smallest such call found.
    """
    __tracebackhide__ = True
    from .checker import Checker

    resolved = resolve_device(session.device if device is None else device)
    prepare(resolved)

    def search() -> Minimal[Garbage] | None:
        checker = Checker(target, resolved)

        def check_here(garbage: Garbage) -> Verdict:
            return garbage.told(check_garbage(checker, family, garbage, seconds))

        check = conformance.noting(family, check_here)
        strategy = garbage_in(family, checker.domain(family))
        failure = first_failure(strategy, check, num_cases, seed, family.name, EDGE, shard)
        if failure is None:
            return None
        if failure[1].fatal:
            return Minimal(*failure, 0, "a device that may be lost")
        if failure[1].signature.kind == "hang":
            return Minimal(*failure, 0, "a call that does not end")
        return minimise(family, *failure, check, SHRINK_BUDGET)

    found = conformance.in_own_process(search, family)
    if found is None:
        return
    if isinstance(found, Ended):
        found = Minimal(found.case, found.verdict, 0, "the process that ended")
    garbage = found.case
    text = garbage.to_json(family.name)
    path = write_case(session.out, family, found.verdict.signature, text)
    raise NonConformance(
        f"{found.verdict.text()}\n  {garbage}\n  {found}\n  case: {path}\n{text}",
        garbage.case,
        path,
    )


def garbage_in(family: Family, domain: Domain) -> SearchStrategy[Garbage]:
    """Return the strategy of calls with garbage, from legal cases of a domain.

    Garbage is kept out of reserved tables: no oracle says what is touched there.
    """
    from .checker import WIDE_TABLE
    from .strategies.any_bytes import garbage_of

    return garbage_of(family, domain.excluding(WIDE_TABLE))


def is_refused(family: Family, case: Case) -> bool:
    """Return whether the host has to refuse a case, whatever the device tensors hold."""
    return any(edge.startswith("refused: ") for edge in family.edges(case))


class _Overrun(BaseException):
    """A call has not ended in time; no handler of exceptions inside it may stop this."""


@contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `_Overrun` in what runs too long; no limit where there is no alarm to set."""
    is_main = threading.current_thread() is threading.main_thread()
    if seconds is None or not is_main or not hasattr(signal, "setitimer"):
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
