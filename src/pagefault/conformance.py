"""One property: a function conforms to its family's contract."""

from __future__ import annotations

import os
import random
import shlex
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .case import Case
from .device import prepare, resolve_device
from .family import Dialect, Domain, Family, family_named
from .isolation import SHRINK_CASE_SECONDS, Ended, checking_in_children, run_in_child
from .journal import Journal
from .minimal import Budget, Minimal, minimise
from .oracle.slots import Holes
from .stream import derived_seed, draw_cases
from .target import pair_of
from .verdict import Signature, Verdict

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

T = TypeVar("T")
C = TypeVar("C")

SHRINK_BUDGET = Budget(seconds=30.0)


class NonConformance(AssertionError):
    """A function does not do what its contract says; the message is the report.

    Attributes:
        case: The smallest case that shows it.
        path: Where its JSON lies.
    """

    def __init__(self, message: str, case: Case, path: Path) -> None:
        super().__init__(message)
        self.case = case
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.case, self.path)


@dataclass
class Session:
    """What all properties of a process share; the pytest plugin sets it from its options.

    Attributes:
        device: "auto", "cpu" or "cuda".
        seed: From which every property's is derived, or None for a new one each time.
        out: Where the cases of findings go.
        is_isolating: Whether properties run in processes of their own, where that is possible.
        case_seconds: How long one case may take there before it counts as a hang.
        journal: Where the process of a property notes what it is about to launch.
    """

    device: str = "auto"
    seed: int | None = None
    out: Path = Path(".pagefault/cases")
    is_isolating: bool = True
    case_seconds: float = 60.0
    journal: Journal | None = None


session = Session()


def write_case(folder: Path, family: Family, signature: Signature, text: str) -> Path:
    """Write a case's JSON under a name that it and its signature give, and return the path.

    Args:
        folder: Made if it is missing.
        family: The case's family.
        signature: The finding's.
        text: The JSON.

    Raises:
        OSError: The folder or the file can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{family.name}-{derived_seed(signature, text):016x}"[: len(family.name) + 9]
    path = path.with_suffix(".json")
    path.write_text(text)
    return path


def first_failure(
    strategy: SearchStrategy[Any],
    check: Callable[[Any], Verdict],
    num_cases: int | None,
    seed: int | None,
    *stream: object,
) -> tuple[Any, Verdict] | None:
    """Return the first case drawn that fails, and what is wrong with it.

    Args:
        strategy: What to draw.
        check: Returns what is wrong with a case.
        num_cases: How many, or None for `max_examples` of Hypothesis's current profile.
        seed: Of the property, or None for the session's.
        stream: What tells this stream of cases from others of the same seed.
    """
    import hypothesis

    base = session.seed if seed is None else seed
    base = random.getrandbits(32) if base is None else base
    failures: list[tuple[Any, Verdict]] = []

    def use(case: Any) -> bool:
        verdict = check(case)
        if not verdict.passed:
            failures.append((case, verdict))
        return bool(failures)

    most = hypothesis.settings().max_examples if num_cases is None else num_cases
    draw_cases(strategy, most, derived_seed(base, *stream), use)
    return failures[0] if failures else None


def replay_line(path: Path, target: str, device: str) -> str:
    """Return the line of a report that says how to run its case again, or where it lies.

    Args:
        path: The case's JSON.
        target: As `load_target` takes it, or "" where no command can find the function.
        device: "cpu" or "cuda".
    """
    if not target:
        return f"case: {path}"
    words = ["pagefault", "repro", str(path)]
    if target != "ours":
        for option, name in zip(("--target", "--against"), pair_of(target)):
            words += [option, name]
    return f"replay: {shlex.join(words)} --device {device}"


def assert_conforms(
    function: Callable[..., Any],
    family: Family | str | None = None,
    *,
    overflow_slot: int = 0,
    holes: Holes = "divert",
    without: Iterable[str] = (),
    num_cases: int | None = None,
    seed: int | None = None,
    device: str | None = None,
) -> None:
    """Hold a function to its family's contract, on as many cases as Hypothesis's profile says.

    Args:
        function: A launcher; called with positional arguments in the contract's order.
        family: Which contract; the function's name says, if this does not.
        overflow_slot: Where overflow and holes go in the function's dialect.
        holes: What a negative page id means in it.
        without: Edges that no case may have, because the function can't do them.
        num_cases: How many cases, or None for `max_examples` of the current profile.
        seed: Of the stream of cases, or None for the session's.
        device: "auto", "cpu" or "cuda", or None for the session's.

    Raises:
        NonConformance: It does not conform; with the smallest case found and how to replay it.
        FamilyError: There is no such family.
        DeviceError: There is no such device.
    """
    __tracebackhide__ = True
    from .target import Target

    if not isinstance(family, Family):
        family = family_named(family or function.__name__)
    target = Target(
        function.__name__,
        {family.name: function},
        dialect=Dialect(overflow_slot, holes),
        without=dict.fromkeys(without, "excluded by the caller"),
    )
    check_family(
        target,
        family,
        num_cases=num_cases,
        seed=seed,
        device=device,
        named="" if target.domain != Domain() else _target_with(function, family),
    )


def check_family(
    target: Any,
    family: Family,
    *,
    num_cases: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    shard: int = 0,
    named: str = "",
) -> None:
    """Check one family of a target; see `assert_conforms`.

    Args:
        target: The `Target`.
        family: The family.
        num_cases: How many cases.
        seed: Of the stream.
        device: Where to run.
        shard: Which of several streams of this property.
        named: What a command has to call the target, or "".

    Raises:
        NonConformance: The target does not conform.
    """
    __tracebackhide__ = True
    resolved = resolve_device(session.device if device is None else device)
    prepare(resolved)

    result = in_own_process(
        lambda: _search(target, family, resolved, num_cases, seed, shard), family
    )
    found, unchecked = (result, "") if isinstance(result, Ended) else result
    if unchecked:
        warnings.warn(f"pagefault: {unchecked}", stacklevel=2)
    if found is None:
        return
    smallest = (
        _smallest_that_ends(found, target, family, resolved) if isinstance(found, Ended) else found
    )
    text = family.to_json(smallest.case)
    path = write_case(session.out, family, smallest.verdict.signature, text)
    raise NonConformance(
        f"{smallest.verdict.text()}\n  {smallest}\n  {replay_line(path, named, resolved)}",
        smallest.case,
        path,
    )


def _search(
    target: Any,
    family: Family,
    device: str,
    num_cases: int | None,
    seed: int | None,
    shard: int,
) -> tuple[Minimal[Case] | Ended | None, str]:
    """Return the smallest case that fails, or one that took the device along; and what could not
    be checked.
    """
    from .checker import Checker

    checker = Checker(target, device)

    def judge(check: Callable[[Family, Case], Verdict], case: Case) -> Verdict:
        if not target.allows(family, case):
            return Verdict(family.name)  # A step of the minimiser to what is never drawn.
        verdict: Verdict
        verdict, _ = target.without_known(family, case, check(family, case))
        return verdict

    check = noting(family, partial(judge, checker.check))
    strategy = family.strategy(checker.domain(family))
    failure = first_failure(strategy, check, num_cases, seed, family.name, shard)
    if failure is None:
        return None, checker.unchecked
    if failure[1].fatal:
        if session.journal is not None:
            return Ended(*failure), checker.unchecked
        return Minimal(*failure, 0, "a device that can be lost"), checker.unchecked
    check_thoroughly = noting(family, partial(judge, checker.check_thoroughly))
    return minimise(family, *failure, check_thoroughly, SHRINK_BUDGET), checker.unchecked


def in_own_process(work: Callable[[], T], family: Family) -> T | Ended:
    """Return what a property's work returns, or how a kernel ended its process.

    The process is a fork. Where CUDA has been used already it can't be, and the work is done here.

    Args:
        work: Notes what it launches, see `noting`.
        family: Whose cases it checks.
    """
    import torch

    is_forkable = hasattr(os, "fork") and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not session.is_isolating or session.journal is not None or not is_forkable:
        return work()

    def work_and_note(journal: Journal) -> T:
        torch.set_num_threads(1)  # The threads that there were have not come along.
        session.journal = journal
        return work()

    with tempfile.TemporaryDirectory(prefix="pagefault-") as folder:
        return run_in_child(work_and_note, family, session.case_seconds, Path(folder))


def noting(family: Family, check: Callable[[C], Verdict]) -> Callable[[C], Verdict]:
    """Return a check that notes each case for whoever has to say what ended the process."""
    journal = session.journal
    if journal is None:
        return check

    def check_noted(case: C) -> Verdict:
        with journal.noting(family.name, case):
            return check(case)

    return check_noted


def _smallest_that_ends(ended: Ended, target: Any, family: Family, device: str) -> Minimal[Case]:
    """Return the smallest case that ends its process as this one did."""
    from .checker import Checker

    check = checking_in_children(
        target,
        family,
        lambda: Checker(target, device),
        min(session.case_seconds, SHRINK_CASE_SECONDS[device]),
    )
    again = check(ended.case)
    if again.passed or again.signature != ended.verdict.signature:
        return Minimal(ended.case, ended.verdict, 1, "one try: it did not happen again")
    return minimise(family, ended.case, ended.verdict, check, SHRINK_BUDGET)


def _target_with(function: Callable[..., Any], family: Family) -> str:
    """Return a module or a file that is a target with this very function, or ""."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    if module is None or getattr(module, family.name, None) is not function:
        return ""
    # A file of a package may import what lies beside it by relative names.
    package = sys.modules.get(module.__name__.partition(".")[0])
    is_in_package = package is not module and getattr(package, "__file__", None)
    return module.__name__ if is_in_package else getattr(module, "__file__", None) or ""
