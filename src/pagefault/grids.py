"""Grids: the cells of a tensor around those that matter, with what a call does to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .case import Case, Cells, PageTable
from .family import Dialect, Expected, Family, HostTensor, Tensor, TensorValue, Writes
from .footprint import needed_reads
from .places import Place

# More rows and columns than these are not drawn.
MOST_ROWS, MOST_COLUMNS = 12, 12
MOST_GRIDS = 4

# What a cell can be, with the word that stands in it; in the order in which the legend has them.
MARKS = {
    "read": "the result needs it",
    "written": "the call writes it",
    "source": "where the wrong value came from",
    "outside": "no cell of the tensor",
    "wrong": "what is wrong",
}


@dataclass(frozen=True)
class GridCell:
    """One cell of a grid.

    Attributes:
        text: What it holds, or should hold where the call writes it; "" where nobody knows.
        marks: Keys of `MARKS`.
        found: What it holds where that is wrong, or "".
        access: The access that is wrong, or "".
    """

    text: str = ""
    marks: tuple[str, ...] = ()
    found: str = ""
    access: str = ""


@dataclass(frozen=True)
class Grid:
    """A part of a tensor.

    Attributes:
        name: The tensor's.
        shape: The tensor's.
        columns: Indices, None where some are left out.
        rows: Index (None where some are left out) and cells, of which a row left out has none.
        left_out: How many cells that are read or written are not drawn.
    """

    name: str
    shape: tuple[int, ...]
    columns: tuple[int | None, ...]
    rows: tuple[tuple[int | None, tuple[GridCell | None, ...]], ...]
    left_out: int = 0

    @property
    def marks(self) -> list[str]:
        """The marks of its cells, in the legend's order."""
        there = {m for _, cells in self.rows for cell in cells if cell for m in cell.marks}
        return [mark for mark in MARKS if mark in there]

    def text(self) -> str:
        """Return the grid as lines of text, each mark as its first letter."""
        is_table = len(self.shape) > 1
        header = ["", *("…" if column is None else str(column) for column in self.columns)]
        lines = [header]
        for row, cells in self.rows:
            label = "…" if row is None else f"row {row}" if is_table else ""
            lines.append([label, *(_plain(cell) for cell in cells)])
        lines = [[*line, *[""] * (len(header) - len(line))] for line in lines]
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        return "\n".join(
            "  ".join(text.rjust(width) for text, width in zip(line, widths)).rstrip()
            for line in lines
        )


def _plain(cell: GridCell | None) -> str:
    if cell is None:
        return "…"
    letters = "".join(mark[0] for mark in cell.marks if mark != "wrong")
    held = f"{cell.found}≠{cell.text}" if cell.found else cell.text or "·"
    return held + (f" {letters}" if letters else "") + (" !" if "wrong" in cell.marks else "")


@dataclass
class _Sheet:
    """A tensor to be drawn.

    Attributes:
        name: Its name.
        shape: [n] or [rows, columns].
        look_up: Returns what a cell inside holds, by row and column, or None.
        reads: Cells that a correct call looks up.
        writes: Cells that it writes.
        places: What the verdict says of cells, by row and column.
    """

    name: str
    shape: tuple[int, ...]
    look_up: Callable[[int, int], int | None]
    reads: Cells = field(default_factory=set)
    writes: Cells = field(default_factory=set)
    places: dict[tuple[int, int], Place] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns."""
        return (1, self.shape[0]) if len(self.shape) == 1 else (self.shape[0], self.shape[1])

    def cell_of(self, indices: Sequence[int], beside: str) -> tuple[int, int] | None:
        """Return the row and column of a place, which may lie outside; None where that is open."""
        num_rows, num_columns = self.size
        if not beside:
            full = (0, *indices) if len(self.shape) == 1 else tuple(indices)
            return (full[0], full[1]) if len(full) == 2 else None
        distance = int(beside.split()[2])
        if "before" in beside:
            return 0, -distance
        row = int(beside.split()[-1]) if "gap" in beside else max(0, num_rows - 1)
        return row, num_columns + distance

    def drawn(self) -> Grid:
        """Return what matters of it."""
        urgent, touched = set(self.places), self.reads | self.writes
        num_rows, num_columns = self.size
        rows = _window([r for r, _ in urgent], [r for r, _ in touched], num_rows, MOST_ROWS)
        columns = _window(
            [c for _, c in urgent],
            # What is drawn of other rows says nothing of these.
            [c for r, c in touched if r in rows],
            num_columns,
            MOST_COLUMNS,
        )
        shown_rows, shown_columns = set(rows), set(columns)
        return Grid(
            self.name,
            self.shape,
            tuple(columns),
            tuple(
                (row, () if row is None else tuple(self._cell(row, column) for column in columns))
                for row in rows
            ),
            sum(row not in shown_rows or column not in shown_columns for row, column in touched),
        )

    def _cell(self, row: int, column: int | None) -> GridCell | None:
        if column is None:
            return None
        num_rows, num_columns = self.size
        is_inside = 0 <= row < num_rows and 0 <= column < num_columns
        place = self.places.get((row, column))
        marks = {
            "read": (row, column) in self.reads,
            "written": (row, column) in self.writes,
            "source": place is not None and place.is_source,
            "outside": not is_inside,
            "wrong": place is not None and not place.is_source,
        }
        held = self.look_up(row, column) if is_inside else None
        text = "" if held is None else str(held)
        return GridCell(
            (place.should if place else "") or text,
            tuple(mark for mark, is_so in marks.items() if is_so),
            place.found if place else "",
            place.access if place else "",
        )


def _window(
    urgent: Iterable[int], touched: Iterable[int], size: int, most: int
) -> list[int | None]:
    """Return the indices to draw in order, None for a gap: urgent ones, and what is near them."""
    first = sorted(set(urgent))
    others = sorted(set(touched), key=lambda i: (min((abs(i - u) for u in first), default=0), i))
    wanted = [*first, *_beside(first, size), *others, *_beside(others, size)] or [0][:size]
    chosen = sorted(list(dict.fromkeys(wanted))[:most])
    if not chosen:
        return []
    drawn: list[int | None] = [None] if chosen[0] > 0 else []
    for index, following in zip(chosen, [*chosen[1:], None]):
        drawn.append(index)
        if following is not None and following != index + 1:
            drawn.append(None)
    return [*drawn, None] if chosen[-1] < size - 1 else drawn


def _beside(indices: Iterable[int], size: int) -> list[int]:
    return [i + step for i in indices for step in (-1, 1) if 0 <= i + step < size]


def grids_of(family: Family, case: Case, places: Sequence[Place], dialect: Dialect) -> list[Grid]:
    """Return the page tables of a case, and the other tensors in which something is wrong.

    Args:
        family: The case's family.
        case: The case.
        places: What is wrong in it.
        dialect: Of the target.
    """
    expected = family.expect(case, dialect)
    reads = needed_reads(family, case, dialect)
    sheets = _sheets(family, case, expected)
    for name, cells in reads.items():
        if name in sheets:
            sheets[name].reads = cells
    for place in places:
        _put(place, sheets)
    wanted = [s for name, s in sheets.items() if s.places or name in case.tables()]
    # Tensors in which something is wrong stand beside the table that it comes from.
    wanted.sort(key=lambda sheet: sheet.name not in case.tables())
    grids = (sheet.drawn() for sheet in wanted[:MOST_GRIDS])
    return [grid for grid in grids if any(column is not None for column in grid.columns)]


def _put(place: Place, sheets: Mapping[str, _Sheet]) -> None:
    """Note a place at its tensor; of what is returned, the path is a part of the indices."""
    for cut in range(len(place.indices) + 1):
        path = place.tensor + "".join(f"[{index}]" for index in place.indices[:cut])
        if path in sheets:
            cell = sheets[path].cell_of(place.indices[cut:], place.beside)
            if cell is not None:
                sheets[path].places.setdefault(cell, place)
                return


def _sheets(family: Family, case: Case, expected: Expected) -> dict[str, _Sheet]:
    """Return every tensor of a call and of what it returns, by name."""
    sheets = {}
    for argument in family.arguments(case):
        if isinstance(argument, Tensor):
            sheets[argument.name] = _argument(argument, expected.writes.get(argument.name, ()))
        elif isinstance(argument, HostTensor):
            shape = (len(argument.values),)
            sheets[argument.name] = _sheet(argument.name, shape, argument.values, {})
    for path, value in (expected.returns or {}).items():
        if isinstance(value, TensorValue) and len(value.shape) in (1, 2):
            sheets[path] = _sheet(path, value.shape, None, value.values)
    return sheets


def _argument(tensor: Tensor, writes: Writes) -> _Sheet:
    return _sheet(tensor.name, tensor.shape, tensor.values, writes)


def _sheet(
    name: str, shape: tuple[int, ...], values: Sequence[int] | PageTable | None, writes: Writes
) -> _Sheet:
    """Return a tensor with what it holds once a correct call is done.

    Args:
        name: Its name.
        shape: [n] or [rows, columns].
        values: What it holds before, or None for an output.
        writes: What the call writes, as `Expected.writes` has it.
    """
    width = shape[-1]
    by_index: Mapping[int, int | None] = (
        writes if isinstance(writes, Mapping) else dict(enumerate(writes))
    )

    def look_up(row: int, column: int) -> int | None:
        index = row * width + column
        if index in by_index:
            return by_index[index]
        if values is None:
            return None
        return values.page_id(row, column) if isinstance(values, PageTable) else values[index]

    written = {divmod(index, max(1, width)) for index in by_index}
    return _Sheet(name, shape, look_up, writes=written)
