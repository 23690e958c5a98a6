"""The mutants of a target: which functions a launcher reaches, and their single-step changes."""

from __future__ import annotations

import ast
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType

from ..target import Target
from .operators import Edit, Source, edits_of, is_jit
from .probes import Part, Probes
from .reviewed import LeftOut

# A mutant's file, function, operator, and line before and after.
Key = tuple[str, str, str, str, str]

# A function by its module's name and its own, with its class's in front.
Place = tuple[str, str]


@dataclass(frozen=True)
class Mutant:
    """One change of one function.

    Attributes:
        module: The name of the function's module.
        file: The name of its file.
        function: The function's name.
        line: The number of the first line that changes.
        operator: What sort of change it is.
        before: The changed line, without indentation; of an edit over several lines all of them.
        after: The same with the change.
        edit: The edit.
        families: The names of the families whose launcher reaches the function.
        part: The part of its module that a call has to reach to tell; None if any call may.
    """

    module: str
    file: str
    function: str
    line: int
    operator: str
    before: str
    after: str
    edit: Edit
    families: tuple[str, ...]
    part: Part | None = None

    @property
    def key(self) -> Key:
        """What tells it from others, whatever the numbers of the lines."""
        return self.file, self.function, self.operator, self.before, self.after

    def diff(self) -> list[str]:
        """Return the change as lines for people."""
        return [
            f"{self.file}:{self.line}, in {self.function}: {self.operator}",
            f"- {self.before}",
            f"+ {self.after}",
        ]


class Module:
    """One module of a target: its source, its functions and what they name."""

    def __init__(self, module: ModuleType) -> None:
        assert module.__file__ is not None
        self.name = module.__name__
        self.path = Path(module.__file__)
        self.source = Source(self.path.read_text())
        self.probes = Probes(self.name, self.source)
        self._package = module.__package__ or ""

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        """Every function by name; of a class's functions, with the class's name in front."""
        found = {}
        for node in self.source.tree.body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = node
            elif isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef):
                        found[f"{node.name}.{inner.name}"] = inner
        return found

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """What a name stands for that was imported: a module's name, and a name in it or ""."""
        found = {}
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.asname or alias.name] = (alias.name, "")
            elif isinstance(node, ast.ImportFrom):
                relative = "." * node.level + (node.module or "")
                try:
                    base = resolve_name(relative, self._package) if node.level else relative
                except ImportError:
                    continue
                for alias in node.names:
                    found[alias.asname or alias.name] = (base, alias.name)
        return found

    def imported_modules(self) -> Iterator[str]:
        """Yield the names of the modules that may be meant by the imports."""
        for base, name in self.imports.values():
            yield base
            if name:
                yield f"{base}.{name}"


def modules_of(target: Target) -> dict[str, Module]:
    """Return the modules of a target's functions, and those beside them that they import."""
    roots = {inspect.unwrap(function).__module__ for function in target.functions.values()}
    found: dict[str, Module] = {}
    pending = sorted(roots)
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found[name] = module = Module(sys.modules[name])
        for imported in module.imported_modules():
            other = getattr(sys.modules.get(imported), "__file__", None)
            if other and Path(other).parent == module.path.parent:
                pending.append(imported)
    return dict(sorted(found.items()))


# What is compared with a smaller number is seldom a size; what passes this is no number of lanes.
LEAST_SIZE, LARGEST_SIZE = 8, 2**20


def sizes_in(modules: Mapping[str, Module]) -> tuple[int, ...]:
    """Return the numbers in the source of modules that may be the size of something."""
    found = set()
    for module in modules.values():
        for node in ast.walk(module.source.tree):
            match node:
                case ast.Constant(value=int(value)):
                    found.add(value)
                case ast.BinOp(ast.Constant(int(base)), ast.Pow(), ast.Constant(int(power))):
                    found.add(base**power)
    return tuple(sorted(size for size in found if LEAST_SIZE <= size <= LARGEST_SIZE))


def reached_from(modules: Mapping[str, Module], start: Place) -> set[Place]:
    """Return the functions that a function may call, itself included, by the names that it uses."""
    methods: dict[str, list[Place]] = defaultdict(list)
    for module in modules.values():
        for name in module.functions:
            if "." in name:
                methods[name.split(".")[1]].append((module.name, name))
    reached: set[Place] = set()
    pending = [start]
    while pending:
        place = pending.pop()
        if place in reached or place[1] not in modules[place[0]].functions:
            continue
        reached.add(place)
        pending += _named_by(modules, methods, place)
    return reached


def _named_by(
    modules: Mapping[str, Module], methods: Mapping[str, list[Place]], place: Place
) -> Iterator[Place]:
    module = modules[place[0]]
    for node in ast.walk(module.functions[place[1]]):
        if isinstance(node, ast.Attribute):
            yield from methods.get(node.attr, ())
            base = getattr(node.value, "id", "")
            imported = ".".join(filter(None, module.imports.get(base, ())))
            if imported in modules:
                yield imported, node.attr
        elif isinstance(node, ast.Name):
            base, name = module.imports.get(node.id, (module.name, node.id))
            if base in modules:
                yield base, name


def mutants_of(
    modules: Mapping[str, Module],
    target: Target,
    families: Iterable[str],
    left_out: Sequence[LeftOut] = (),
) -> list[Mutant]:
    """Return every mutant of what the launchers of some families reach.

    Args:
        modules: The target's.
        target: The target.
        families: The names of families that the target has a function for.
        left_out: What is not changed.
    """
    families_of: dict[Place, list[str]] = defaultdict(list)
    for family in families:
        function = inspect.unwrap(target.functions[family])
        for place in reached_from(modules, (function.__module__, function.__qualname__)):
            families_of[place].append(family)
    device_functions = _called_by_kernels(modules)
    mutants: list[Mutant] = []
    for module in modules.values():
        for name, node in module.functions.items():
            if (module.name, name) in families_of:
                reach = tuple(families_of[module.name, name])
                is_device = (module.name, name) in device_functions
                handed_on = frozenset(a.arg for a in node.args.args if is_device)
                mutants += _mutants_of_function(module, name, node, reach, left_out, handed_on)
    return mutants


def _called_by_kernels(modules: Mapping[str, Module]) -> set[Place]:
    """Return the functions that Triton compiles into others."""
    found: set[Place] = set()
    for module in modules.values():
        for name, node in module.functions.items():
            if is_jit(node):
                found |= set(_named_by(modules, {}, (module.name, name)))
    return {
        (module, name)
        for module, name in found
        if name in modules[module].functions and is_jit(modules[module].functions[name])
    }


def _mutants_of_function(
    module: Module,
    name: str,
    node: ast.FunctionDef,
    families: tuple[str, ...],
    left_out: Sequence[LeftOut],
    handed_on: frozenset[str],
) -> Iterator[Mutant]:
    source = module.source
    kept = [rule for rule in left_out if rule.names(module.path.name, name)]
    skipped = [
        (source.start(statement), source.end(statement))
        for statement in ast.walk(node)
        if isinstance(statement, ast.stmt) and statement is not node
        for rule in kept
        if fnmatchcase(" ".join(source.of(statement).split()), rule.statement)
    ]
    for edit in edits_of(source, node, handed_on):
        if any(start <= edit.start and edit.end <= end for start, end in skipped):
            continue
        yield Mutant(
            module.name,
            module.path.name,
            name,
            source.line_number(edit.start),
            edit.operator,
            *source.lines_at(edit),
            edit,
            families,
            module.probes.part_of(edit.start),
        )
