"""What the families of slots share: edges, explanations, and simpler page sizes and widths."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..case import MOST_FILLED_ELEMENTS, Case, PageTable, Placement, with_row_stride
from ..family import Changes, Explanation
from ..memory import POISONS
from ..strategies.edges import INT32_MAX, SMALL_BATCH
from ..strategies.edges import TILE_SIZES as DRAWN_TILE_SIZES

# Tokens that one program of our kernels handles; other kernels' tiles are powers of two as well.
TILE_TOKENS = 256
TILE_SIZES = frozenset(DRAWN_TILE_SIZES)


class Range(NamedTuple):
    """The tokens of one request that a call looks up."""

    row: int
    start: int
    length: int


# Beyond this a table keeps its rule and not its ids when rows are dropped.
MOST_CELLS_KEPT = 64
# Of a larger one nobody asks for the ids.
MOST_CELLS_CUT = 2**13

# An output with room for more tokens of each request than this is roomy, in a batch not small.
ROOMY = 256

# The edges of a batch that has more requests than so many.
MANY_REQUESTS = {f"more than {number} requests": number for number in (SMALL_BATCH, 1024)}

PLACES = ("first", "middle", "last")
_ZERO_LENGTH = [f"zero length: {place}" for place in PLACES]
_OVERFLOW = [f"overflow in the {place} request" for place in PLACES]


def _beside(what: str) -> dict[int, str]:
    return {beside: f"{what} {beside:+d}" for beside in (-1, 0, 1)}


_START_AT_PAGE = _beside("start at page boundary")
_START_AT_ROW_END = _beside("start at row end")
_END_AT_PAGE = _beside("end at page boundary")
_END_AT_ROW_END = _beside("end at row end")
_LENGTH_AT_TILE = _beside("length at tile")


SLOT_EDGES = frozenset(
    [
        *(f"overflow: {how}" for how in ("none", "some", "all")),
        *(*_OVERFLOW, *_ZERO_LENGTH),
        *(*_START_AT_PAGE.values(), *_START_AT_ROW_END.values()),
        *(*_END_AT_PAGE.values(), *_END_AT_ROW_END.values(), *_LENGTH_AT_TILE.values()),
        *("no requests", "no tokens", "more than one tile", *MANY_REQUESTS),
        *("row 0", "last row", "rows permuted", "rows gapped", "row repeated"),
        *("hole", "page id 0", "largest page id", "slot past 2**31 - 1", "position past 2**31 - 1"),
        *("page size 1", "page size no power of two", "no pages in the table"),
    ]
)
# What a few hundred cases can't miss.
COMMON_SLOT_EDGES = frozenset(
    [
        *("overflow: none", "overflow: some", "overflow: all", "zero length: first"),
        *("start at page boundary +0", "end at page boundary +0", "end at row end +0"),
        *("more than one tile", "row 0", "rows permuted", "row repeated", "hole", "page id 0"),
    ]
)


def _add_beside(edges: set[str], names: Mapping[int, str], distance: int) -> None:
    if -1 <= distance <= 1:
        edges.add(names[distance])


def _from_boundary(position: int, page_size: int) -> int:
    """Return how far a position is from the nearest page boundary, near boundaries only."""
    offset_in_page = position % page_size
    return offset_in_page if offset_in_page <= 1 else offset_in_page - page_size


def slot_edges(ranges: Sequence[Range], table: PageTable, page_size: int) -> set[str]:
    """Return the edges that a batch of token ranges touches."""
    edges: set[str] = set()
    row_end = table.max_pages * page_size
    last = len(ranges) - 1
    num_tokens = num_overflowing = 0
    for i, (_, start, length) in enumerate(ranges):
        place = 0 if i == 0 else 2 if i == last else 1
        if not length:
            edges.add(_ZERO_LENGTH[place])
            continue
        end = start + length
        num_tokens += length
        if end > row_end:
            num_overflowing += end - max(start, row_end)
            edges.add(_OVERFLOW[place])
        _add_beside(edges, _START_AT_PAGE, _from_boundary(start, page_size))
        _add_beside(edges, _START_AT_ROW_END, start - row_end)
        _add_beside(edges, _END_AT_PAGE, _from_boundary(end, page_size))
        _add_beside(edges, _END_AT_ROW_END, end - row_end)
        for beside in (-1, 0, 1):
            if length - beside in TILE_SIZES:
                edges.add(_LENGTH_AT_TILE[beside])
        if end - 1 > INT32_MAX:
            edges.add("position past 2**31 - 1")
    overflow = "all" if num_overflowing == num_tokens else "some" if num_overflowing else "none"
    edges.add(f"overflow: {overflow}" if num_tokens else "no tokens")
    if num_tokens > TILE_TOKENS:
        edges.add("more than one tile")
    edges |= pool_edges([token_range.row for token_range in ranges], table.num_rows)
    edges |= _page_id_edges(ranges, table, page_size)
    if page_size == 1:
        edges.add("page size 1")
    elif page_size & (page_size - 1):
        edges.add("page size no power of two")
    if not table.max_pages:
        edges.add("no pages in the table")
    return edges


def batch_edges(num_requests: int) -> set[str]:
    """Return the edges of how many requests a batch has, where these are many."""
    return {edge for edge, number in MANY_REQUESTS.items() if num_requests > number}


def pool_edges(rows: Sequence[int], num_rows: int) -> set[str]:
    """Return the edges of a batch's rows in the request pool."""
    edges = set()
    if not rows:
        return {"no requests"}
    edges |= batch_edges(len(rows))
    distinct = sorted(set(rows))
    if distinct[0] == 0:
        edges.add("row 0")
    if distinct[-1] == num_rows - 1:
        edges.add("last row")
    if list(rows) != sorted(rows):
        edges.add("rows permuted")
    if len(distinct) < len(rows):
        edges.add("row repeated")
    if distinct[-1] - distinct[0] >= len(distinct):
        edges.add("rows gapped")
    return edges


def _page_id_edges(ranges: Sequence[Range], table: PageTable, page_size: int) -> set[str]:
    edges = set()
    for row, column, page_id in table.edits:
        used = any(
            r == row
            and length
            and start // page_size <= column <= (start + length - 1) // page_size
            for r, start, length in ranges
        )
        if not used:
            continue
        if page_id < 0:
            edges.add("hole")
        elif page_id == 0:
            edges.add("page id 0")
        elif page_id == INT32_MAX:
            edges.add("largest page id")
        if page_id * page_size + page_size - 1 > INT32_MAX:
            edges.add("slot past 2**31 - 1")
    if table.largest_page_id * page_size > INT32_MAX:
        edges |= _wide_slot_edges(ranges, table, page_size)
    return edges


def _wide_slot_edges(ranges: Sequence[Range], table: PageTable, page_size: int) -> set[str]:
    for row, start, length in ranges:
        if not length:
            continue
        last = min((start + length - 1) // page_size, table.max_pages - 1)
        for column in range(start // page_size, last + 1):
            if table.page_id(row, column) * page_size > INT32_MAX:
                return {"slot past 2**31 - 1"}
    return set()


def layout_edges(case: Case) -> frozenset[str]:
    """Return the edges of how a case lies in memory."""
    case_type: Any = type(case)
    edges = _layout_edges(case_type, case.layout)
    batch_size = len(getattr(case, "req_pool_indices", ()))
    if batch_size > SMALL_BATCH and any(
        placement.spare > ROOMY * batch_size for _, placement in case.layout
    ):
        edges |= {"roomy output"}
    for table in case.tables():
        if case.span_of(table) > 2**31:
            edges |= {"wide table"}
            if getattr(case, table).num_cells > 2**31:
                edges |= {"long rows"}
    return edges


@functools.lru_cache(maxsize=10_000)
def _layout_edges(case_type: Any, layout: tuple[tuple[str, Placement], ...]) -> frozenset[str]:
    edges = set()
    for name, placement in layout:
        if placement.dtype != case_type.PLAIN[name].dtype:
            edges.add(f"{placement.dtype} {name}")
        if placement.offset:
            edges |= {"offset", f"offset {name}"}
        if placement.spare:
            edges |= {"spare output", f"spare {name}"}
        if placement.pitch:
            edges.add("pitched table")
    return frozenset(edges)


def all_layout_edges(
    plain: Mapping[str, Placement], table: str, outputs: Sequence[str]
) -> frozenset[str]:
    """Return every edge that `layout_edges` can name for these tensors."""
    other = {"int32": "int64", "int64": "int32"}
    return frozenset(
        [
            *(f"{other[p.dtype]} {name}" for name, p in plain.items() if name != table),
            *(f"offset {name}" for name in plain),
            *(f"spare {name}" for name in outputs),
            *("offset", "pitched table"),
            *(("spare output", "roomy output") if outputs else ()),
            *(("wide table", "long rows") if table else ()),
        ]
    )


def locate(ranges: Sequence[Range], index: int) -> tuple[int, int]:
    """Return the request and the token of it that an index of the flat output belongs to."""
    for req_idx, token_range in enumerate(ranges):
        if index < token_range.length:
            return req_idx, index
        index -= token_range.length
    raise IndexError(index)


def explain_slot(
    ranges: Sequence[Range],
    table_name: str,
    table: PageTable,
    page_size: int,
    index: int,
    found: int,
) -> Explanation:
    """Say whose slot stands at an index of the flat output, and where a wrong one came from."""
    req_idx, k = locate(ranges, index)
    row, start, length = ranges[req_idx]
    position = start + k
    page_idx, offset_in_page = divmod(position, page_size)
    whose = f"request {req_idx} (pool row {row}), token {k} of {length}: position {position}"
    if page_idx >= table.max_pages:
        role = "overflow token"
        where = f"past the row, which ends at {table.max_pages * page_size}"
    else:
        page_id = table.page_id(row, page_idx)
        role = "token" if page_id > 0 else "dummy page token" if page_id == 0 else "hole token"
        where = f"page index {page_idx}, offset {offset_in_page}, page id {page_id}"
    lines = [f"{whose} = {where}"]
    origin = _origin(table_name, table, page_size, found, row, page_idx)
    return Explanation(role, (*lines, *((origin,) if origin else ())))


def _origin(
    table_name: str, table: PageTable, page_size: int, found: int, row: int, page_idx: int
) -> str:
    """Say which cell of the page table a wrong slot was made from."""
    if found in POISONS:
        return f"{found} is what lay there, or beside a tensor, before the call"
    page_id, offset_in_page = divmod(found, page_size)
    for other_row, column in table.cells_holding(page_id):
        if other_row != row:
            beside = f"row {other_row}, not row {row}"
        elif column == page_idx:
            beside = "the right page"
        else:
            steps = abs(column - page_idx)
            beside = "one column" if steps == 1 else f"{steps} columns"
            beside += " to the left" if column < page_idx else " to the right"
        return (
            f"{found} is page id {page_id} at offset {offset_in_page}: "
            f"{table_name}[{other_row}][{column}], {beside}"
        )
    wrapped = [w for w in (found + 2**32, found - 2**32) if _holds(table, w, page_size)]
    if wrapped:
        return f"{found} is {wrapped[0]} in 32 bits"
    return ""


def _holds(table: PageTable, slot: int, page_size: int) -> bool:
    return next(table.cells_holding(slot // page_size), None) is not None


def simpler_rows(case: Any, rows: str, table: str, per_row: str = "") -> Iterator[Changes]:
    """Yield changes to fewer rows in the pool: without those that nobody uses.

    Args:
        case: The case.
        rows: The field that holds each request's row.
        table: The field that holds the page table.
        per_row: A field that has one entry per row, if there is one.
    """
    used = set(getattr(case, rows))
    every = range(getattr(case, table).num_rows)
    unused = [row for row in every if row not in used]
    all_but = [unused[num_kept:] for num_kept in smaller(len(unused), 0)]
    for dropped in [*all_but, *([row] for row in unused)]:
        kept = [row for row in every if row not in set(dropped)]
        yield from _with_rows(case, kept, rows, table, per_row)
    in_order = sorted(used)
    if list(getattr(case, rows)) != in_order and len(in_order) == case.num_requests:
        yield {rows: tuple(in_order)}


def _with_rows(
    case: Any, kept: Sequence[int], rows: str, table: str, per_row: str
) -> Iterator[Changes]:
    """Yield changes to some rows of the pool, the ids by rule, then the ids as they were."""
    old: PageTable = getattr(case, table)
    new_row = {row: i for i, row in enumerate(kept)}
    edits = tuple((new_row[r], c, page_id) for r, c, page_id in old.edits if r in new_row)
    changes: dict[str, Any] = {rows: tuple(new_row.get(row, row) for row in getattr(case, rows))}
    if per_row:
        changes[per_row] = tuple(getattr(case, per_row)[row] for row in kept)
    fewer = PageTable(len(kept), old.max_pages, edits)
    yield {**changes, table: fewer}
    span = case.span_of(table)
    if span > MOST_FILLED_ELEMENTS and len(kept) > 1:
        # Rows farther apart, so that the last one lies about where it did.
        yield {
            **changes,
            table: fewer,
            "layout": with_row_stride(case, table, old.max_pages, -(-span // (len(kept) - 1))),
        }
    if old.num_cells <= MOST_CELLS_KEPT:
        yield {**changes, table: PageTable.from_rows([old.rows[row] for row in kept])}


def simpler_pages(case: Any, starts: str, table: str) -> Iterator[Changes]:
    """Yield changes to smaller pages or fewer columns, the starts or the slots moved along.

    Args:
        case: The case.
        starts: The field that holds positions, one per request or per row.
        table: The field that holds the page table.
    """
    old: PageTable = getattr(case, table)
    positions: tuple[int, ...] = getattr(case, starts)
    size = case.page_size
    row_end = old.max_pages * size
    for new_size in smaller(size, 1):
        yield {"page_size": new_size}
        for new_positions in (
            _moved(positions, row_end, old.max_pages * new_size),
            tuple(p // size * new_size + min(p % size, new_size - 1) for p in positions),
            tuple(p // size * new_size + max(0, new_size - size + p % size) for p in positions),
        ):
            yield {"page_size": new_size, starts: new_positions}
        if 0 < old.num_cells <= MOST_CELLS_KEPT:
            # Larger page ids, for slots about where they were; a hole has none.
            ids = [
                [-(-page_id * size // new_size) if page_id > 0 else page_id for page_id in row]
                for row in old.rows
            ]
            if max(map(max, ids)) <= INT32_MAX:
                yield {"page_size": new_size, table: PageTable.from_rows(ids)}
    for width in smaller(old.max_pages, 0):
        moved = _moved(positions, row_end, width * size)
        narrower = old.resized(old.num_rows, width)
        yield {table: narrower}
        yield {table: narrower, starts: moved}
        if width:
            # Larger pages, for a row that ends about where it did.
            yield {table: narrower, "page_size": -(-row_end // width)}
        dropped = old.max_pages - width
        shifted = tuple((r, c - dropped, page_id) for r, c, page_id in old.edits if c >= dropped)
        if shifted:
            yield {table: PageTable(old.num_rows, width, shifted), starts: moved}
        if 0 < old.num_rows * width <= MOST_CELLS_KEPT and old.num_cells <= MOST_CELLS_CUT:
            # The last columns, with the ids that they have.
            cut = PageTable.from_rows([row[dropped:] for row in old.rows])
            yield {table: cut, starts: moved}


def simpler_corner(
    case: Any, rows: str, starts: str, table: str, per_row: str = ""
) -> Iterator[Changes]:
    """Yield changes to a row and a column fewer at once, for what either alone would hide.

    Args:
        case: The case.
        rows: The field that holds each request's row.
        starts: The field that holds positions, one per request or per row.
        table: The field that holds the page table.
        per_row: A field that has one entry per row, if there is one.
    """
    old: PageTable = getattr(case, table)
    unused = sorted(set(range(old.num_rows)) - set(getattr(case, rows)))
    if not unused or old.max_pages < 2:
        return
    kept = [row for row in range(old.num_rows) if row != unused[0]]
    for changes in _with_rows(case, kept, rows, table, per_row):
        positions = changes.get(starts, getattr(case, starts))
        row_end = old.max_pages * case.page_size
        yield {
            **changes,
            table: changes[table].resized(len(kept), old.max_pages - 1),
            starts: _moved(positions, row_end, row_end - case.page_size),
        }


def simpler_lengths(case: Any, starts: str, lengths: str) -> Iterator[Changes]:
    """Yield changes to one request for several, and to fewer tokens of one request.

    A request that loses tokens keeps its start or its end.

    Args:
        case: The case.
        starts: The field that holds each request's first position.
        lengths: The field that holds each request's tokens.
    """
    old_starts, old_lengths = getattr(case, starts), getattr(case, lengths)
    yield from joined_requests(case, [lengths])
    for req_idx, length in enumerate(old_lengths):
        for fewer in smaller(length, 0):
            later = list(old_starts)
            later[req_idx] += length - fewer
            shorter = list(old_lengths)
            shorter[req_idx] = fewer
            yield {lengths: tuple(shorter)}
            yield {starts: tuple(later), lengths: tuple(shorter)}


def joined_requests(case: Case, added: Sequence[str]) -> Iterator[Changes]:
    """Yield changes to one request for a run of them, the longest runs first.

    Args:
        case: The case.
        added: The fields that hold tokens or pages, which the request gets of all in the run; the
            rest it has of the first.
    """
    count = case.num_requests
    while count > 1:
        for first in range(0, case.num_requests - 1, count // 2):
            changes = {}
            for name in case.per_request_fields():
                entries = getattr(case, name)
                run = entries[first : first + count]
                entry = functools.reduce(operator.add, run) if name in added else run[0]
                changes[name] = (*entries[:first], entry, *entries[first + count :])
            yield changes
        count //= 2


def _moved(starts: Sequence[int], old_end: int, new_end: int) -> tuple[int, ...]:
    return tuple(max(0, start - old_end + new_end) for start in starts)


def smaller(value: int, least: int) -> Iterator[int]:
    """Yield smaller numbers, the smallest first: a few, and ever smaller steps down."""
    yield from range(least, min(least + 3, value))
    for exponent in reversed(range(max(0, value - least - 3).bit_length())):
        yield value - 2**exponent
