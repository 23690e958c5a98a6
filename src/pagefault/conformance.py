"""One property: a function conforms to its family's contract."""

from __future__ import annotations

import random
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .case import Case
from .device import prepare, resolve_device
from .family import Dialect, Domain, Family, family_named
from .minimal import Budget, Minimal, minimise
from .oracle.slots import Holes
from .stream import derived_seed, draw_cases
from .verdict import Signature, Verdict

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

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


@dataclass
class Session:
    """What all properties of a process share; the pytest plugin sets it from its options.

    Attributes:
        device: "auto", "cpu" or "cuda".
        seed: From which every property's is derived, or None for a new one each time.
        out: Where the cases of findings go.
    """

    device: str = "auto"
    seed: int | None = None
    out: Path = Path(".pagefault/cases")


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
        words += ["--target", target]
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
    from .checker import Checker

    resolved = resolve_device(session.device if device is None else device)
    prepare(resolved)
    checker = Checker(target, resolved)
    if checker.unchecked:
        warnings.warn(f"pagefault: {checker.unchecked}", stacklevel=2)

    def check(case: Case, check: Callable[[Family, Case], Verdict] = checker.check) -> Verdict:
        if not target.allows(family, case):
            return Verdict(family.name)  # A step of the minimiser to what is never drawn.
        verdict: Verdict
        verdict, _ = target.without_known(family, case, check(family, case))
        return verdict

    strategy = family.strategy(checker.domain(family))
    failure = first_failure(strategy, check, num_cases, seed, family.name, shard)
    if failure is None:
        return
    smallest = Minimal(*failure, 0)
    how_small = "not shrunk: the device was lost"
    if not smallest.verdict.fatal:
        smallest = minimise(
            family,
            smallest.case,
            smallest.verdict,
            lambda case: check(case, checker.check_thoroughly),
            SHRINK_BUDGET,
        )
        how_small = str(smallest)
    text = family.to_json(smallest.case)
    path = write_case(session.out, family, smallest.verdict.signature, text)
    raise NonConformance(
        f"{smallest.verdict.text()}\n  {how_small}\n  {replay_line(path, named, resolved)}",
        smallest.case,
        path,
    )


def _target_with(function: Callable[..., Any], family: Family) -> str:
    """Return a module or a file that is a target with this very function, or ""."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    if module is None or getattr(module, family.name, None) is not function:
        return ""
    # A file of a package may import what lies beside it by relative names.
    package = sys.modules.get(module.__name__.partition(".")[0])
    is_in_package = package is not module and getattr(package, "__file__", None)
    return module.__name__ if is_in_package else getattr(module, "__file__", None) or ""
