"""A target: the functions under test, and how their contract differs from ours."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from .case import CaseError
from .family import Dialect, Domain, Family, families

DECLARATION = "pagefault_target"

# Targets that can be named; the values are modules.
REGISTRY = {
    "ours": (
        "pagefault.kernels.req_to_page",
        "pagefault.kernels.out_cache_loc",
        "pagefault.kernels.decode_input_prep",
        "pagefault.kernels.chunked_prefill",
    ),
    "tokenspeed": ("pagefault.targets.tokenspeed",),
}

DESCRIPTIONS = {
    "ours": "the kernels of pagefault itself",
    "tokenspeed": "the kernels of the released tokenspeed package (make peers)",
}


class TargetError(ValueError):
    """A target that can't be loaded; the message is one line that says why."""


@dataclass(frozen=True)
class KnownFault:
    """A fault that a target is known to have.

    Attributes:
        signature: The finding's signature, as text.
        case: The fields of a minimal case that must still fail, as JSON has them.
        reason: Why it is known, with a source.
    """

    signature: str
    case: Mapping[str, Any]
    reason: str


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
    """

    name: str
    functions: Mapping[str, Callable[..., Any]]
    skipped: Mapping[str, str] = field(default_factory=dict)
    dialect: Dialect = Dialect()
    without: Mapping[str, str] = field(default_factory=dict)
    known_faults: tuple[KnownFault, ...] = ()

    @property
    def domain(self) -> Domain:
        """What a strategy may draw for this target."""
        return Domain(self.dialect, frozenset(self.without))

    def families(self) -> list[Family]:
        """Return the families that this target has a function for."""
        return [family for name, family in families().items() if name in self.functions]


def load_target(name: str) -> Target:
    """Return a target by its name in the registry, by module, or by the path of a `.py` file.

    Raises:
        TargetError: It can't be found or imported, has none of the functions, or declares
            something that is not understood.
    """
    if name in REGISTRY:
        modules = [_import(name, module) for module in REGISTRY[name]]
    elif name.endswith(".py"):
        modules = [_import_file(Path(name))]
    else:
        modules = [_import(name, name)]
    return _target_of(name, modules)


def target_of_function(function: Callable[..., Any], family: Family, dialect: Dialect) -> Target:
    """Return the target that consists of one function."""
    name = getattr(function, "__name__", repr(function))
    return Target(name, {family.name: function}, dialect=dialect)


def _import(name: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"target {name!r} can't be imported: {_one_line(error)}"
            + ("" if "/" not in name else " (a file's path ends in .py)")
        ) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"target {str(path)!r}: no such file")
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(f"pagefault_target_{path.stem}", path)
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
        declaration.update(getattr(module, DECLARATION, {}))
    unknown = sorted(
        set(declaration) - {"overflow_slot", "holes", "without", "known_faults", "skipped"}
    )
    if unknown:
        raise TargetError(f"target {name!r}: {DECLARATION} has an unknown key {unknown[0]!r}")
    for family_name, reason in declaration.get("skipped", {}).items():
        skipped[family_name] = reason
        functions.pop(family_name, None)
    if not functions:
        raise TargetError(
            f"target {name!r} has none of the functions: "
            + "; ".join(f"{family}: {reason}" for family, reason in skipped.items())
        )
    try:
        return Target(
            name,
            functions,
            skipped,
            Dialect(
                **{
                    key: declaration[key]
                    for key in ("overflow_slot", "holes")
                    if key in declaration
                }
            ),
            dict(declaration.get("without", {})),
            tuple(KnownFault(**fault) for fault in declaration.get("known_faults", ())),
        )
    except (TypeError, ValueError, CaseError) as error:
        raise TargetError(f"target {name!r}: {DECLARATION}: {error}") from error


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
