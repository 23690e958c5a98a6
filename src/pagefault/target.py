"""A target: the functions under test, and how their contract differs from ours."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from .case import Case, CaseError
from .family import Dialect, Domain, Family, families
from .side_case import AnyCase, SideCase, legal_part
from .verdict import Finding, Signature, Verdict

DECLARATION = "pagefault_target"

# Targets that can be named; the values are modules.
REGISTRY = {
    "ours": (
        "pagefault.kernels.req_to_page",
        "pagefault.kernels.out_cache_loc",
        "pagefault.kernels.decode_input_prep",
        "pagefault.kernels.chunked_prefill",
        "pagefault.targets.ours",
    ),
    "tokenspeed": ("pagefault.targets.tokenspeed",),
}

DESCRIPTIONS = {
    "ours": "the kernels of pagefault itself",
    "tokenspeed": "the kernels of the released tokenspeed package (make peers)",
}


Launch = Callable[[], AbstractContextManager[object]]


class TargetError(ValueError):
    """A target that can't be loaded; the message is one line that says why."""


@dataclass(frozen=True)
class KnownFault:
    """A fault that a target is known to have.

    Attributes:
        signature: The finding's signature, as text.
        case: The fields of a minimal case that must still fail, as JSON has them.
        reason: Why it is known, with a source.
        applies: Whether a case is one that the fault can show in; in any other case a finding of
            the same signature is another fault.
    """

    signature: str
    case: Mapping[str, Any]
    reason: str
    applies: Callable[[Any], bool] = lambda case: True

    @property
    def family(self) -> str:
        """The name of the function that has the fault."""
        return self.signature.split(":")[0]

    def is_shown_by(self, signature: Signature, case: Case) -> bool:
        """Return whether a finding in a case is this fault."""
        return str(signature) == self.signature and self.applies(case)


@dataclass(frozen=True)
class Terms:
    """On what terms a function is tested.

    Attributes:
        dialect: Where its contract differs on purpose.
        without: Edges that it truly can't do, with the reason.
    """

    dialect: Dialect = Dialect()
    without: Mapping[str, str] = field(default_factory=dict)

    @property
    def domain(self) -> Domain:
        """What a strategy may draw."""
        return Domain(self.dialect, frozenset(self.without))


@dataclass(frozen=True)
class Target:
    """The functions under test.

    Attributes:
        name: How it was asked for.
        functions: By name.
        skipped: The functions of families that it lacks, with the reason.
        dialect: Where its contract differs on purpose.
        without: Edges that it truly can't do, with the reason.
        known_faults: What it is known to do wrong.
        functions_terms: Terms of the functions that have some of their own.
        against: Another target, whose answers these are held against in place of the oracle's.
        launches: By name, what makes a context in which the functions launch their kernels in
            another shape than they would choose; the contract is the same in any.
    """

    name: str
    functions: Mapping[str, Callable[..., Any]]
    skipped: Mapping[str, str] = field(default_factory=dict)
    dialect: Dialect = Dialect()
    without: Mapping[str, str] = field(default_factory=dict)
    known_faults: tuple[KnownFault, ...] = ()
    functions_terms: Mapping[str, Terms] = field(default_factory=dict)
    against: Target | None = None
    launches: Mapping[str, Launch] = field(default_factory=dict)

    @property
    def domain(self) -> Domain:
        """What a strategy may draw for a function that has no terms of its own."""
        return Terms(self.dialect, self.without).domain

    def terms_of(self, function: str) -> Terms:
        """Return the terms of a function."""
        return self.functions_terms.get(function, Terms(self.dialect, self.without))

    def launched(self, name: str) -> AbstractContextManager[object]:
        """Return a context of `launches`, or one that changes nothing if the name is ""."""
        return self.launches[name]() if name else nullcontext()

    def allows(self, family: Family, case: AnyCase) -> bool:
        """Return whether a case has none of the edges that the function can't do."""
        without = self.terms_of(family.name).without
        return not without or family.edges(legal_part(case)).isdisjoint(without)

    def without_known(
        self, family: Family, case: AnyCase, verdict: Verdict
    ) -> tuple[Verdict, tuple[int, ...]]:
        """Return a verdict without the faults that are known, and which of those it had.

        Known faults are those of legal cases that are held to the contract.

        Args:
            family: The case's family.
            case: The case.
            verdict: What is wrong with it.

        Returns:
            The verdict, and indices into `known_faults`.
        """
        faults = [(i, f) for i, f in enumerate(self.known_faults) if f.family == family.name]
        if verdict.passed or not faults or isinstance(case, SideCase):
            return verdict, ()
        new: list[Finding] = []
        known: list[int] = []
        for finding in verdict.findings:
            signature = Signature(family.name, finding.kind, finding.role)
            shown = [i for i, fault in faults if fault.is_shown_by(signature, case)]
            known.extend(shown)
            if not shown:
                new.append(finding)
        return replace(verdict, findings=tuple(new)), tuple(known)

    def families(self) -> list[Family]:
        """Return the families that this target has a function for."""
        return [family for name, family in families().items() if name in self.functions]


def load_target(name: str) -> Target:
    """Return a target by its name in the registry, by module, or by the path of a `.py` file.

    "A against B" names two targets, of which the second takes the oracle's place.

    Raises:
        TargetError: It can't be found or imported, has none of the functions, or declares
            something that is not understood; or two have no function that can be compared.
    """
    first, *others = pair_of(name)
    if len(others) > 1:
        raise TargetError(f"target {name!r}: two can be held against each other, and not more")
    target = _load(first, "target")
    return _held_against(target, _load(others[0], "against")) if others else target


def pair_name(target: str, against: str) -> str:
    """Return the name of a target that is held against another; its own name if that is ""."""
    return f"{target}{_AGAINST}{against}" if against else target


def pair_of(name: str) -> list[str]:
    """Return the names of two targets that are held against each other, or that of the one.

    >>> pair_of("ours"), pair_of("mine.py against ours")
    (['ours'], ['mine.py', 'ours'])
    """
    return name.split(_AGAINST)


_AGAINST = " against "


def _load(name: str, role: str) -> Target:
    if name in REGISTRY:
        modules = [_import(name, module) for module in REGISTRY[name]]
    elif name.endswith(".py"):
        modules = [_import_file(Path(name), role)]
    else:
        modules = [_import(name, name)]
    return _target_of(name, modules)


def _held_against(a: Target, b: Target) -> Target:
    """Return a target of the functions that both have, on terms that both can keep."""
    _expect_modules_of_their_own(a.name, b.name)
    skipped = {}
    terms = {}
    for name in families():
        mine, theirs = a.terms_of(name), b.terms_of(name)
        if name not in a.functions and name not in b.functions:
            skipped[name] = f"neither has it: {a.skipped[name]}; {b.skipped[name]}"
        elif name not in a.functions:
            skipped[name] = f"A, {a.name}, lacks it: {a.skipped[name]}"
        elif name not in b.functions:
            skipped[name] = f"B, {b.name}, lacks it: {b.skipped[name]}"
        elif mine.dialect != theirs.dialect:
            skipped[name] = f"they differ on purpose: A has {mine.dialect}, B has {theirs.dialect}"
        else:
            terms[name] = Terms(mine.dialect, {**mine.without, **theirs.without})
    pair = pair_name(a.name, b.name)
    if not terms:
        said = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise TargetError(f"target {pair!r} has no function that can be compared: {said}")
    functions = {name: a.functions[name] for name in terms}
    return Target(pair, functions, skipped, functions_terms=terms, against=b)


def _expect_modules_of_their_own(a: str, b: str) -> None:
    """Refuse two files beside which modules of one name lie: the second would get the first's."""
    if not (a.endswith(".py") and b.endswith(".py")):
        return
    first, second = Path(a).resolve().parent, Path(b).resolve().parent
    if first == second:
        return
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or ".")
        is_beside_first = path.parent == first and module.__name__ == path.stem
        if is_beside_first and (second / path.name).is_file():
            raise TargetError(
                f"targets {a!r} and {b!r}: {path.name} lies beside both, and one Python process "
                "imports only one; give one of them another name"
            )


def file_of(name: str, function: str) -> Path:
    """Return the file of a target that has a function.

    Args:
        name: Of a target that is loaded, as `load_target` took it.
        function: The function's name.

    Raises:
        TargetError: There is none.
    """
    name = pair_of(name)[0]
    if name.endswith(".py"):
        return Path(name).resolve()
    for module_name in REGISTRY.get(name, (name,)):
        module = sys.modules.get(module_name)
        path = getattr(module, "__file__", None)
        if path and hasattr(module, function):
            return Path(path).resolve()
    raise TargetError(f"target {name!r} has no file with {function}")


def _import(name: str, module: str) -> ModuleType:
    # As with `python -m`: what lies in the current folder can be imported.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"target {name!r} can't be imported: {_one_line(error)}"
            + ("" if "/" not in name else " (a file's path ends in .py)")
        ) from error


class CurrentSource(SourceFileLoader):
    """Compiles a file as it is now: cached bytecode may be of a version one edit older.

    Python takes the cache for current if the file's size and the second of its last change agree.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def _import_file(path: Path, role: str) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"target {str(path)!r}: no such file")
    path = path.resolve()
    name = f"pagefault_{role}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=CurrentSource(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # As when the file is run: what lies beside it can be imported.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise TargetError(f"target {str(path)!r} can't be imported: {_one_line(error)}") from error
    return module


def _target_of(name: str, modules: list[ModuleType]) -> Target:
    functions: dict[str, Callable[..., Any]] = {}
    skipped: dict[str, str] = {}
    for family in families().values():
        candidates = [m for m in modules if hasattr(m, family.name)]
        if not candidates:
            skipped[family.name] = "the target has no function of this name"
            continue
        function = getattr(candidates[0], family.name)
        misfit = _misfit(function, family)
        if misfit:
            skipped[family.name] = misfit
        else:
            functions[family.name] = function
    declaration: dict[str, Any] = {}
    for module in modules:
        declared = getattr(module, DECLARATION, {})
        _expect_keys(name, DECLARATION, declared, _TARGET_KEYS)
        declaration.update(declared)
    for key in ("skipped", "without", "functions", "launches"):
        _expect_dict(name, f"{DECLARATION}, {key}", declaration.get(key, {}))
    for family_name, reason in declaration.get("skipped", {}).items():
        skipped[family_name] = reason
        functions.pop(family_name, None)
    if not functions:
        raise TargetError(
            f"target {name!r} has none of the functions: "
            + "; ".join(f"{family}: {reason}" for family, reason in skipped.items())
        )
    by_function = declaration.get("functions", {})
    for function in by_function:
        if function not in families():
            raise TargetError(f"target {name!r}: {DECLARATION} has no function {function!r}")
        _expect_keys(name, f"{DECLARATION}, {function}", by_function[function], _TERMS_KEYS)
    try:
        terms = _terms(declaration, Terms())
        return Target(
            name,
            functions,
            skipped,
            terms.dialect,
            terms.without,
            tuple(KnownFault(**fault) for fault in declaration.get("known_faults", ())),
            {function: _terms(own, terms) for function, own in by_function.items()},
            launches=declaration.get("launches", {}),
        )
    except (TypeError, ValueError, CaseError) as error:
        raise TargetError(f"target {name!r}: {DECLARATION}: {error}") from error


_TERMS_KEYS = {"overflow_slot", "holes", "without"}
_TARGET_KEYS = _TERMS_KEYS | {"known_faults", "skipped", "functions", "launches"}


def _expect_dict(name: str, where: str, declared: object) -> None:
    if not isinstance(declared, Mapping):
        raise TargetError(f"target {name!r}: {where} is {declared!r}, but should be a dict")


def _expect_keys(name: str, where: str, declared: Mapping[str, Any], allowed: set[str]) -> None:
    _expect_dict(name, where, declared)
    unknown = sorted(set(declared) - allowed)
    if unknown:
        raise TargetError(f"target {name!r}: {where} has an unknown key {unknown[0]!r}")


def _terms(declared: Mapping[str, Any], default: Terms) -> Terms:
    """Return declared terms; what they leave open is the default's."""
    dialect = {key: declared[key] for key in ("overflow_slot", "holes") if key in declared}
    return Terms(
        replace(default.dialect, **dialect), {**default.without, **declared.get("without", {})}
    )


def _misfit(function: Any, family: Family) -> str | None:
    """Return why an object can't be called as the contract says, or None if it can."""
    if not callable(function):
        return f"{family.name} is no function"
    if hasattr(function, "fn") and hasattr(function, "run"):
        return f"{family.name} is a Triton kernel, and a launcher is needed"
    try:
        inspect.signature(function).bind(*family.parameters)
    except TypeError:
        return (
            f"{family.name} can't be called with the contract's {len(family.parameters)} "
            f"arguments ({', '.join(family.parameters)})"
        )
    except ValueError:
        return None  # No signature to look at: let it be called.
    return None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
