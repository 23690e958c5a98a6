"""A case: every input of one call and how it lies in memory, as a value.

A case holds plain ints and tuples, can be hashed and compared, and reads and writes as JSON that
a person can type. It knows nothing of torch.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self, TypeVar

T = TypeVar("T")
C = TypeVar("C", bound="Case")

SCHEMA = 1
DTYPE_RANGES = {"int32": range(-(2**31), 2**31), "int64": range(-(2**63), 2**63)}

# Cells of a larger table share their ids with the cells so far behind them: a prime number, so that
# neither rows nor powers of 2 are such a distance.
NUM_IDS = 1_000_003

# A table this small is written as rows of page ids, which is what a person would type.
MAX_CELLS_WRITTEN_AS_ROWS = 64


# A page table that spans more elements is reserved, and only the cells are filled that a call
# touches, those beside them and those beside its ends.
MOST_FILLED_ELEMENTS = 1 << 22

# Elements that a placement may leave out.
MOST_PITCH = 2**31


class CaseError(ValueError):
    """A case that is not what its family asks for; the message says where."""


@dataclass(frozen=True)
class Placement:
    """How one tensor lies in memory.

    Attributes:
        dtype: "int32" or "int64".
        offset: Elements between a 16-byte boundary and the first element.
        pitch: Elements between the end of one row and the start of the next (tables).
        spare: Elements that an output has beyond those that the contract fills.
    """

    dtype: str = "int32"
    offset: int = 0
    pitch: int = 0
    spare: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_RANGES:
            raise CaseError(f"dtype: {self.dtype!r}, but should be one of {list(DTYPE_RANGES)}")
        for name in ("offset", "pitch", "spare"):
            _expect_int(name, getattr(self, name), minimum=0, maximum=MOST_PITCH)


@dataclass(frozen=True)
class PageTable:
    """A page table by rule: cell i, in row order, holds `first + step * (i % NUM_IDS)`, then edits.

    The rule gives every cell an id of its own, never 0 and never its own index, and no two
    neighbours are consecutive, so that a wrong index always shows as a wrong page id and the id
    says which cell it came from.

    Attributes:
        num_rows: Rows, one per request pool index.
        max_pages: Columns.
        edits: (row, column, page id) of the cells that differ from the rule, sorted.
        first: Page id of cell 0.
        step: Difference between the ids of neighbouring cells, at least 1.
    """

    num_rows: int
    max_pages: int
    edits: tuple[tuple[int, int, int], ...] = ()
    first: int = 3
    step: int = 7

    def __post_init__(self) -> None:
        _expect_int("num_rows", self.num_rows, minimum=0, maximum=2**31)
        _expect_int("max_pages", self.max_pages, minimum=0, maximum=2**31)
        _expect_int("step", self.step, minimum=1, maximum=2**31)
        if self.step < 1:
            raise CaseError(f"step: {self.step}, but should be at least 1")
        last = max(0, min(self.num_cells, NUM_IDS) - 1)
        for page_id in (self.first, self.first + self.step * last):
            if page_id not in DTYPE_RANGES["int32"]:
                raise CaseError(f"page id {page_id} of the table's rule does not fit int32")
        for row, column, page_id in self.edits:
            if not (0 <= row < self.num_rows and 0 <= column < self.max_pages):
                raise CaseError(
                    f"edit of cell [{row}][{column}], but the table is "
                    f"{self.num_rows} x {self.max_pages}"
                )
            if page_id not in DTYPE_RANGES["int32"]:
                raise CaseError(f"page id {page_id} of cell [{row}][{column}] does not fit int32")
        edited = {(row, column): page_id for row, column, page_id in self.edits}
        edits = tuple(
            (row, column, page_id)
            for (row, column), page_id in sorted(edited.items())
            if page_id != self.rule(row, column)
        )
        object.__setattr__(self, "edits", edits)

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> PageTable:
        """Return the table that holds these rows of page ids."""
        width = len(rows[0]) if rows else 0
        if any(len(row) != width for row in rows):
            raise CaseError("rows of a table differ in length")
        edits = tuple(
            (row_idx, column, page_id)
            for row_idx, row in enumerate(rows)
            for column, page_id in enumerate(row)
        )
        return cls(len(rows), width, edits)

    @property
    def num_cells(self) -> int:
        return self.num_rows * self.max_pages

    def rule(self, row: int, column: int) -> int:
        """Return the page id that the rule gives to a cell."""
        return self.first + self.step * ((row * self.max_pages + column) % NUM_IDS)

    def page_id(self, row: int, column: int) -> int:
        return self.rows[row][column]

    @cached_property
    def rows(self) -> Rows:
        """The rows as lists of page ids, each made when it is first asked for."""
        return Rows(self)

    @property
    def largest_page_id(self) -> int:
        """The largest page id of the table, 0 where it has none that is larger."""
        edited = {row * self.max_pages + column for row, column, _ in self.edits}
        last = min(self.num_cells, NUM_IDS) - 1
        while last in edited:
            last -= 1
        rule = self.first + self.step * last if last >= 0 else 0
        return max([rule, *(page_id for _, _, page_id in self.edits)])

    def cells_holding(self, page_id: int) -> Iterator[tuple[int, int]]:
        """Yield the (row, column) of each cell that holds a page id."""
        edited = {(row, column) for row, column, _ in self.edits}
        cell, remainder = divmod(page_id - self.first, self.step)
        if remainder == 0 and 0 <= cell < NUM_IDS:
            for same in range(cell, self.num_cells, NUM_IDS):
                row_and_column = divmod(same, self.max_pages)
                if row_and_column not in edited:
                    yield row_and_column
        yield from ((row, column) for row, column, edit in self.edits if edit == page_id)

    def resized(self, num_rows: int, max_pages: int) -> PageTable:
        """Return a table of another size by the same rule, with the edits that still fit."""
        edits = tuple(edit for edit in self.edits if edit[0] < num_rows and edit[1] < max_pages)
        return PageTable(num_rows, max_pages, edits, self.first, self.step)


class Rows(Sequence[Sequence[int]]):
    """The rows of a `PageTable`, each made when it is asked for."""

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._edited: dict[int, Sequence[int]] = {}
        self._with_edits = {row for row, _, _ in table.edits}

    def __len__(self) -> int:
        return self._table.num_rows

    @typing.overload
    def __getitem__(self, row: int) -> Sequence[int]: ...
    @typing.overload
    def __getitem__(self, row: slice) -> list[Sequence[int]]: ...
    def __getitem__(self, row: int | slice) -> Sequence[int] | list[Sequence[int]]:
        if isinstance(row, slice):
            return [self[r] for r in range(*row.indices(len(self)))]
        table = self._table
        if not -table.num_rows <= row < table.num_rows:
            raise IndexError(f"row {row} of a table with {table.num_rows} rows")
        row %= table.num_rows
        if table.num_cells > NUM_IDS:
            return _LongRow(table, row)
        start = table.rule(row, 0)
        by_rule = range(start, start + table.step * table.max_pages, table.step)
        if row not in self._with_edits:
            return by_rule
        if row not in self._edited:
            made = list(by_rule)
            for edited_row, column, page_id in table.edits:
                if edited_row == row:
                    made[column] = page_id
            self._edited[row] = made
        return self._edited[row]


class _Row(Sequence[int]):
    """A row of page ids that are looked up one by one."""

    def __init__(self, num_columns: int, page_id: Callable[[int], int]) -> None:
        self._columns = range(num_columns)
        self._page_id = page_id

    def __len__(self) -> int:
        return len(self._columns)

    @typing.overload
    def __getitem__(self, column: int) -> int: ...
    @typing.overload
    def __getitem__(self, column: slice) -> list[int]: ...
    def __getitem__(self, column: int | slice) -> int | list[int]:
        if isinstance(column, slice):
            return [self._page_id(each) for each in self._columns[column]]
        return self._page_id(self._columns[column])


class _LongRow(_Row):
    """A row of a table that is too large to be written out."""

    def __init__(self, table: PageTable, row: int) -> None:
        edits = {column: page_id for r, column, page_id in table.edits if r == row}
        super().__init__(table.max_pages, lambda c: edits[c] if c in edits else table.rule(row, c))


# Fields that have one entry per request of the batch.
_PER_REQUEST = "per request"
PerRequest = Annotated[tuple[int, ...], _PER_REQUEST]
PerRequestLists = Annotated[tuple[tuple[int, ...], ...], _PER_REQUEST]


def runs_left_out(num_requests: int) -> Iterator[list[int]]:
    """Yield the requests that are left without all, without a half, …, and without any one."""
    requests = range(num_requests)
    dropped = num_requests
    while dropped:
        for first in range(0, num_requests, dropped):
            yield [*requests[:first], *requests[first + dropped :]]
        dropped //= 2


@dataclass(frozen=True)
class Case:
    """Base of every family's case: its fields are the arguments, `layout` is the memory.

    A subclass adds fields of type `int`, `tuple[int, ...]`, `PerRequest`, `PerRequestLists` or
    `PageTable`, and says in `PLAIN` how production lays out each tensor.

    Attributes:
        layout: (tensor name, placement) of the tensors that lie other than production's, sorted.
    """

    PLAIN: ClassVar[Mapping[str, Placement]] = {}
    layout: tuple[tuple[str, Placement], ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        placements = dict(self.layout)
        for name in placements:
            if name not in self.PLAIN:
                raise CaseError(f"layout: no tensor {name!r}, but {sorted(self.PLAIN)}")
        kept = {name: at for name, at in placements.items() if at != self.PLAIN[name]}
        object.__setattr__(self, "layout", tuple(sorted(kept.items())))
        lengths = {name: len(getattr(self, name)) for name in self.per_request_fields()}
        if len(set(lengths.values())) > 1:
            raise CaseError(f"one entry per request each, but there are {lengths}")
        for name in _shape_of(type(self)).numbers:
            if getattr(self, name) >= 2**31:
                raise CaseError(f"{name}: {getattr(self, name)}, but should be below 2**31")
        self.check()

    def check(self) -> None:
        """Raise CaseError where the case lies outside the contract's domain."""

    @classmethod
    def per_request_fields(cls) -> tuple[str, ...]:
        """Return the names of the fields that have one entry per request."""
        return _shape_of(cls).per_request

    def keeping(self, requests: Sequence[int]) -> dict[str, Any]:
        """Return the changes after which only some of the requests are left, in their order."""
        return {
            name: tuple(getattr(self, name)[req_idx] for req_idx in requests)
            for name in self.per_request_fields()
        }

    @classmethod
    def tables(cls) -> tuple[str, ...]:
        """Return the names of the fields that are page tables."""
        return _shape_of(cls).tables

    def span_of(self, table: str) -> int:
        """Return the elements from a page table's first to its last, gaps included."""
        page_table: PageTable = getattr(self, table)
        row_stride = page_table.max_pages + self.placement(table).pitch
        rows_before = max(0, page_table.num_rows - 1)
        return rows_before * row_stride + page_table.max_pages if page_table.num_cells else 0

    @property
    def num_requests(self) -> int:
        return len(getattr(self, self.per_request_fields()[0]))

    @cached_property
    def _placements(self) -> dict[str, Placement]:
        return {**self.PLAIN, **dict(self.layout)}

    def placement(self, name: str) -> Placement:
        return self._placements[name]

    def replace(self, **changes: Any) -> Self:
        """Return the case with other values for some fields."""
        return dataclasses.replace(self, **changes)

    def to_json(self, family: str) -> str:
        """Return the case as JSON text; `pagefault repro` reads it back."""
        fields = {
            field_.name: _encode(getattr(self, field_.name))
            for field_ in dataclasses.fields(self)
            if field_.name != "layout"
        }
        layout = {
            name: {
                key: value
                for key, value in dataclasses.asdict(placement).items()
                if value != getattr(self.PLAIN[name], key)
            }
            for name, placement in self.layout
        }
        lines = [
            f"  {json.dumps(key)}: {json.dumps(value)}"
            for key, value in {
                "schema": SCHEMA,
                "family": family,
                **fields,
                **({"layout": layout} if layout else {}),
            }.items()
        ]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Return the case that decoded JSON describes.

        Args:
            fields: JSON's object, without `schema` and `family`.

        Raises:
            CaseError: A field is missing, unknown, of another type or out of the domain.
        """
        types = _shape_of(cls).types
        unknown = sorted(set(fields) - set(types))
        if unknown:
            raise CaseError(f"unknown field {unknown[0]!r}, but should be one of {sorted(types)}")
        required = _shape_of(cls).required
        missing = [name for name in required if name not in fields]
        if missing:
            raise CaseError(f"field {missing[0]!r} is missing")
        values: dict[str, Any] = {
            name: _decode(name, value, types[name])
            for name, value in fields.items()
            if name != "layout"
        }
        return cls(**values, layout=_decode_layout(fields.get("layout", {}), cls.PLAIN))


def with_row_stride(
    case: Case, table: str, max_pages: int, row_stride: int
) -> tuple[tuple[str, Placement], ...]:
    """Return the layout of a case whose table has rows so many elements apart, or nearly so.

    Args:
        case: The case.
        table: The name of its table.
        max_pages: Columns that the table is to have.
        row_stride: Elements from one row to the next, as far as a placement goes.
    """
    pitch = min(max(0, row_stride - max_pages), MOST_PITCH)
    pitched = dataclasses.replace(case.placement(table), pitch=pitch)
    return (*case.layout, (table, pitched))


Cells = set[tuple[int, int]]


def with_recorded_reads(case: C) -> tuple[C, dict[str, Cells]]:
    """Return the case, and by table the (row, column) of the cells that are looked up in it."""
    copied = copy.copy(case)
    reads: dict[str, Cells] = {}
    for name in case.tables():
        table = copy.copy(getattr(case, name))
        reads[name] = set()
        table.__dict__["rows"] = _RecordedRows(table, reads[name])
        object.__setattr__(copied, name, table)
    return copied, reads


class _RecordedRows(Rows):
    """The rows of a table, which remember which cells were looked up."""

    def __init__(self, table: PageTable, reads: Cells) -> None:
        super().__init__(table)
        self._reads = reads

    def __getitem__(self, row: Any) -> Any:
        page_ids = super().__getitem__(row)

        def look_up(column: int) -> int:
            self._reads.add((row % len(self), column))
            page_id: int = page_ids[column]
            return page_id

        return _Row(len(page_ids), look_up)


@dataclass(frozen=True)
class _Shape:
    """What the annotations of a case class say.

    Attributes:
        types: By field.
        required: Fields without a value of their own.
        per_request: Fields that have one entry per request.
        numbers: Fields that are a plain number.
        tables: Fields that are a page table.
    """

    types: dict[str, Any]
    required: tuple[str, ...]
    per_request: tuple[str, ...]
    numbers: tuple[str, ...]
    tables: tuple[str, ...]


_shapes: dict[type, _Shape] = {}


def _shape_of(cls: type[Case]) -> _Shape:
    shape = _shapes.get(cls)
    if shape is None:
        names = [field_.name for field_ in dataclasses.fields(cls)]
        plain = typing.get_type_hints(cls)
        annotated = typing.get_type_hints(cls, include_extras=True)
        shape = _Shape(
            {name: plain[name] for name in names},
            tuple(f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING),
            tuple(n for n in names if _PER_REQUEST in getattr(annotated[n], "__metadata__", ())),
            tuple(name for name in names if plain[name] is int),
            tuple(name for name in names if plain[name] is PageTable),
        )
        _shapes[cls] = shape
    return shape


def _expect_int(name: str, value: object, minimum: int = -(2**63), maximum: int = 2**63 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise CaseError(f"{name}: {value!r}, but should be an integer")
    if not minimum <= value <= maximum:
        raise CaseError(f"{name}: {value}, but should be in {minimum} … {maximum}")
    return value


def _expect_list(name: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise CaseError(f"{name}: {value!r}, but should be a list")
    return value


def _expect_object(name: str, value: object, allowed: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CaseError(f"{name}: {value!r}, but should be an object")
    for key in value:
        if key not in allowed:
            raise CaseError(f"{name}: unknown field {key!r}, but should be one of {list(allowed)}")
    return value


def _decode(name: str, value: object, type_: Any) -> Any:
    """Return a JSON value as the field's type, or say what it should have been."""
    if type_ is int:
        return _expect_int(name, value)
    if type_ is PageTable:
        return _decode_table(name, value)
    items = _expect_list(name, value)
    item_type = typing.get_args(type_)[0]
    return tuple(_decode(f"{name}[{i}]", item, item_type) for i, item in enumerate(items))


def _placed(name: str, make: Callable[[], T]) -> T:
    """Return what is made; a refusal says which field it is about."""
    try:
        return make()
    except CaseError as error:
        raise CaseError(f"{name}: {error}") from error


def _decode_table(name: str, value: object) -> PageTable:
    if isinstance(value, list):
        rows = [
            [_expect_int(f"{name}[{r}][{c}]", page_id) for c, page_id in enumerate(row)]
            for r, row in enumerate(_expect_list(f"{name}[{i}]", v) for i, v in enumerate(value))
        ]
        return _placed(name, lambda: PageTable.from_rows(rows))
    fields = _expect_object(name, value, [f.name for f in dataclasses.fields(PageTable)])
    for required in ("num_rows", "max_pages"):
        if required not in fields:
            raise CaseError(f"{name}: field {required!r} is missing")
    numbers = {
        key: _expect_int(f"{name}.{key}", number)
        for key, number in fields.items()
        if key != "edits"
    }
    edits = [
        tuple(
            _expect_int(f"{name}.edits[{i}]", number)
            for number in _expect_list(f"{name}.edits[{i}]", edit)
        )
        for i, edit in enumerate(_expect_list(f"{name}.edits", fields.get("edits", [])))
    ]
    if any(len(edit) != 3 for edit in edits):
        raise CaseError(f"{name}.edits: each is [row, column, page id]")
    return _placed(name, lambda: PageTable(edits=typing.cast(Any, tuple(edits)), **numbers))


def _decode_layout(
    value: object, plain: Mapping[str, Placement]
) -> tuple[tuple[str, Placement], ...]:
    choices = [field_.name for field_ in dataclasses.fields(Placement)]

    def decode(name: str, value: object) -> Placement:
        changes = _expect_object(f"layout.{name}", value, choices)
        return _placed(f"layout.{name}", lambda: dataclasses.replace(plain[name], **changes))

    placements = _expect_object("layout", value, list(plain))
    return tuple((name, decode(name, placement)) for name, placement in placements.items())


def _encode(value: Any) -> Any:
    if not isinstance(value, PageTable):
        return value
    plain_rule = (value.first, value.step) == (PageTable.first, PageTable.step)
    if plain_rule and 0 < value.num_cells <= MAX_CELLS_WRITTEN_AS_ROWS:
        return [list(row) for row in value.rows]
    fields = dataclasses.asdict(value)
    if plain_rule:
        del fields["first"], fields["step"]
    return fields


def read_json(text: str) -> tuple[str, dict[str, Any]]:
    """Return the family and the fields of a case's JSON.

    Raises:
        CaseError: The text is no JSON object, or of another schema, or names no family.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CaseError(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CaseError("a case is a JSON object")
    schema = document.pop("schema", None)
    if isinstance(schema, bool) or schema != SCHEMA:
        raise CaseError(f"schema: {schema!r}, but this version of pagefault reads {SCHEMA}")
    family = document.pop("family", None)
    if not isinstance(family, str):
        raise CaseError(f"family: {family!r}, but should be the name of a family")
    return family, document
