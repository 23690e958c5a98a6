"""A family: everything that the engine has to know of one function under test.

The engine knows no family by name. Ours and those of other packages come in by the entry point
group `pagefault.families`, whose entries are `Family` objects or lists of them.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

from .case import Case, CaseError, PageTable, read_json
from .oracle.slots import Holes

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

# Fields of a case and what they become.
Changes = Mapping[str, Any]

# Values of elements, by their place or by flat index.
Writes = Sequence[int | None] | Mapping[int, int | None]

# What each device tensor of a call holds when it starts, outputs left out.
Inputs = Mapping[str, Sequence[int] | PageTable]

ENTRY_POINT_GROUP = "pagefault.families"


class FamilyError(ValueError):
    """A family that is not known or can't be loaded."""


@dataclass(frozen=True)
class Dialect:
    """Where a target's contract differs on purpose from ours.

    Attributes:
        overflow_slot: Where overflow and holes go; -1 is the padding slot of some engines.
        holes: What a page id below 0 means, see `oracle/slots.py`.
    """

    overflow_slot: int = 0
    holes: Holes = "divert"

    def __post_init__(self) -> None:
        if isinstance(self.overflow_slot, bool) or not isinstance(self.overflow_slot, int):
            raise ValueError(f"overflow_slot: {self.overflow_slot!r}, but should be an integer")
        if self.holes not in get_args(Holes):
            raise ValueError(f"holes: {self.holes!r}, but should be one of {get_args(Holes)}")


@dataclass(frozen=True)
class Domain:
    """What a strategy may draw.

    Attributes:
        dialect: The target's.
        without: Edges that no case may have, because the target truly can't do them.
        page_sizes: The page sizes to draw from, or None for any. A compiled kernel takes a new
            page size as a compile-time constant, so a campaign on a GPU draws from few at a time.
        dtype_choices: The numbers to draw dtype pairings from, or None for any; for the same
            reason.
        sizes: Numbers near which the target may change what it does, such as those in its source;
            batches and outputs are drawn near them as well.
    """

    dialect: Dialect = Dialect()
    without: frozenset[str] = frozenset()
    page_sizes: tuple[int, ...] | None = None
    dtype_choices: tuple[int, ...] | None = None
    sizes: tuple[int, ...] = ()

    def excluding(self, *edges: str) -> Domain:
        """Return the domain without the cases that have one of some more edges."""
        return replace(self, without=self.without | set(edges))


@dataclass(frozen=True)
class Tensor:
    """An argument that is a tensor on the device.

    Attributes:
        name: The parameter's name in the contract.
        shape: [n] or [rows, columns].
        values: What it holds: ints in row order, a page table, or None for an output.
    """

    name: str
    shape: tuple[int, ...]
    values: Sequence[int] | PageTable | None


@dataclass(frozen=True)
class HostTensor:
    """An argument that is a tensor on the CPU whatever the device."""

    name: str
    values: Sequence[int]


@dataclass(frozen=True)
class Plain:
    """An argument that is no tensor; `make` is called for each launch with the device's name."""

    name: str
    make: Callable[[str], Any]


Argument = Tensor | HostTensor | Plain


def number(name: str, value: int) -> Plain:
    """Return an argument that is a Python int."""
    return Plain(name, lambda device: value)


@dataclass(frozen=True)
class TensorValue:
    """A tensor that a function is expected to return.

    Attributes:
        shape: Its shape.
        values: Its elements in row order; None for one that may be anything.
        dtype: Its dtype.
        on_host: Whether it lies on the CPU whatever the device.
    """

    shape: tuple[int, ...]
    values: Sequence[int | None]
    dtype: str = "int32"
    on_host: bool = False


@dataclass(frozen=True)
class Expected:
    """What a correct implementation does with a case.

    Attributes:
        writes: Per tensor name the elements that it writes: a list of the values of the first
            elements, or a dict by flat index (row * columns + column); None for an element that
            may be written or not, with any value. Everything else in memory keeps its value.
        returns: What it returns, by a path that messages show ("kv_indices_list[1]"): ints and
            `TensorValue`s. None where nothing is returned.
        warnings: The words that one logged warning each has to contain, in order; None where the
            contract says nothing of warnings.
        raises: The exception that it raises, before anything is written.
        rows: Per table the rows that belong to requests of the call; no other may be read.
        may_launch: Whether it may launch anything; seen in the interpreter.
    """

    writes: Mapping[str, Writes] = field(default_factory=dict)
    returns: Mapping[str, int | TensorValue] | None = None
    warnings: Sequence[Sequence[str]] | None = None
    raises: type[Exception] | None = None
    rows: Mapping[str, frozenset[int]] = field(default_factory=dict)
    may_launch: bool = True


@dataclass(frozen=True)
class Explanation:
    """Whose cell a wrong value stands in, in the field's words.

    Attributes:
        role: A short word for the kind of cell, part of a finding's signature.
        lines: What the report says under the cell.
    """

    role: str
    lines: tuple[str, ...] = ()


def no_explanation(case: Any, where: str, index: int, found: int) -> Explanation:
    return Explanation("cell")


@dataclass(frozen=True)
class Family:
    """One function under test: its cases, its meaning, its memory and its words.

    Attributes:
        name: The function's name, which is also the family's.
        parameters: The names of the function's parameters, in order.
        case_type: The `Case` subclass.
        cases: Strategy of cases in a domain.
        arguments: The call's arguments in order.
        expect: What the oracle says of a case, in a dialect.
        returned: Takes what the function returned apart, into the paths of `Expected.returns`.
        results: What those paths call it: one name for the whole, or one for each item of a tuple.
        edges: The edges that a case touches, by name.
        all_edges: Every edge that the strategy can reach.
        must_reach: Edges without which a run of `RUN_THAT_MUST_REACH` cases is void.
        explain: Says whose cell (tensor or path, flat index) holds a wrong value.
        simpler: Yields changes that make a case simpler in the family's own ways; they may lead
            out of the domain.
        expect_any_bytes: What the oracle says of a case whose device tensors hold something else,
            in a dialect; None where it only says what stays inside the tensors.
        fields_of: Returns the fields of the case of a live call, from its arguments by parameter: a
            tensor comes as a list, or as a page table where it has two dimensions. None where each
            field has the name of a parameter.
        size: New tokens, pages or chunks of a case, what "small" means after the number of
            requests.
    """

    name: str
    parameters: tuple[str, ...]
    case_type: type[Case]
    cases: Callable[[Domain], SearchStrategy[Any]]
    arguments: Callable[[Any], Sequence[Argument]]
    expect: Callable[[Any, Dialect], Expected]
    edges: Callable[[Any], frozenset[str]]
    size: Callable[[Any], int]
    all_edges: frozenset[str] = frozenset()
    must_reach: frozenset[str] = frozenset()
    returned: Callable[[Any], Mapping[str, Any]] = lambda result: {"result": result}
    results: tuple[str, ...] = ("result",)
    explain: Callable[[Any, str, int, int], Explanation] = no_explanation
    expect_any_bytes: Callable[[Any, Inputs, Dialect], Expected] | None = None
    simpler: Callable[[Any], Iterator[Changes]] = lambda case: iter(())
    capturable: bool = False
    fields_of: Callable[[Mapping[str, Any]], Changes] | None = None

    def strategy(self, domain: Domain) -> SearchStrategy[Any]:
        """Return the strategy of the cases of a domain."""
        from .strategies.edges import only_where

        cases = self.cases(domain)
        if domain.without:
            return only_where(cases, lambda case: not domain.without & self.edges(case))
        return cases

    def from_json(self, text: str) -> Case:
        """Return the case that JSON text of this family describes."""
        name, fields = read_json(text)
        if name != self.name:
            raise CaseError(f"family: {name!r}, but should be {self.name!r}")
        return self.case_type.from_fields(fields)

    def to_json(self, case: Case) -> str:
        return case.to_json(self.name)


@cache
def families() -> dict[str, Family]:
    """Return every installed family by name, in a fixed order.

    Raises:
        FamilyError: An entry point can't be loaded, or two families share a name.
    """
    found: dict[str, Family] = {}
    entry_points = {
        (point.name, point.value): point
        for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    }
    for (name, value), point in sorted(entry_points.items()):
        try:
            loaded = point.load()
        except Exception as error:
            raise FamilyError(f"families of {value} ({name}) can't be loaded: {error}") from error
        for family in loaded if isinstance(loaded, (list, tuple)) else [loaded]:
            if not isinstance(family, Family):
                raise FamilyError(f"{value} ({name}) is {family!r}, but should be a Family")
            if family.name in found:
                raise FamilyError(f"two families are called {family.name!r}")
            found[family.name] = family
    return found


def family_named(name: str) -> Family:
    """Return a family by name.

    Raises:
        FamilyError: There is none, or the families can't be loaded.
    """
    try:
        return families()[name]
    except KeyError:
        raise FamilyError(
            f"no family {name!r}, but should be one of: {', '.join(families())}"
        ) from None


def case_from_json(text: str) -> tuple[Family, Case]:
    """Return a case and its family from JSON text.

    Raises:
        CaseError: The text describes no case.
        FamilyError: Its family is not installed.
    """
    name, fields = read_json(text)
    family = family_named(name)
    return family, family.case_type.from_fields(fields)
