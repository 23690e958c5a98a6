"""Batches of token ranges in a page table: what every slot function is called with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagefault.case import DTYPE_RANGES, Case, CaseError, PageTable, Placement
from pagefault.family import Domain

from .edges import (
    AROUND,
    INT32_MAX,
    MAX_TOKENS,
    SMALL_BATCH,
    Choices,
    num_requests,
    only_some,
    page_size,
    tile_sizes,
    within_budget,
)
from .layouts import OTHER_DTYPE, dtypes, layout
from .pools import edited_table, holes_of, largest_page_id_for, pool_indices, table_width

LENGTHS = (
    *("one", "one", "few", "few", "few", "few", "none", "page", "page", "pages"),
    *("few", "one", "few", "few", "one", "tile"),
)
# Where a target's sizes are known, a quarter of the requests are as long as a tile.
LENGTHS_NEAR_SIZES = LENGTHS + ("tile",) * 5
# In a batch that is not small, one request may be so much longer than the others.
PREFILLS = (1100, 2100, 4200)
STARTS = (
    *("zero", "page", "inside", "row end", "up to row end", "across row end", "last page"),
    *("page", "inside", "up to row end", "far"),
)


@dataclass(frozen=True)
class Batch:
    """Token ranges of a batch, and the table they are looked up in.

    Attributes:
        rows: [num_requests], the row of each request.
        starts: [num_requests], first position.
        lengths: [num_requests], tokens.
        table: The page table.
        page_size: Tokens per page.
        layout: Placement of every tensor.
    """

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    table: PageTable
    page_size: int
    layout: tuple[tuple[str, Placement], ...]


@dataclass(frozen=True)
class Roles:
    """Which tensors of a function hold what.

    Attributes:
        slots: The output that holds slots.
        table: The page table.
        starts: The tensors that hold a start.
        ends: The outputs that hold a start plus a length.
        uniform: Whether all requests have one length.
    """

    slots: str
    table: str
    starts: tuple[str, ...]
    ends: tuple[str, ...] = ()
    uniform: bool = False


def make_batch(
    choices: Choices, domain: Domain, plain: Mapping[str, Placement], roles: Roles
) -> Batch:
    """Return a batch at the edges.

    Args:
        choices: Where choices come from.
        domain: What may be drawn.
        plain: Production's placement of every tensor.
        roles: What the tensors are for.
    """
    batch_size = num_requests(choices, domain.sizes)
    size = page_size(choices, domain.page_sizes)
    rows, num_rows = pool_indices(choices, batch_size)
    max_pages = table_width(choices, num_rows)

    fixed = frozenset(name for name in plain if f"int64 {name}" in domain.without) | {roles.table}
    changed = dtypes(choices, [name for name in plain if name != roles.table], domain, fixed)
    largest_slot = PageTable(num_rows, max_pages).largest_page_id * size + size
    if largest_slot > INT32_MAX and roles.slots in fixed:
        size = 16
    elif largest_slot > INT32_MAX:
        changed |= {roles.slots}
    dtype_of = {
        name: OTHER_DTYPE[placement.dtype] if name in changed else placement.dtype
        for name, placement in plain.items()
    }

    length_kinds = LENGTHS_NEAR_SIZES if domain.sizes else LENGTHS
    spots = [Spot.of(choices, length_kinds) for _ in range(min(batch_size, 4))]
    spots = [spots[i % 4] for i in range(batch_size)]
    tiles = tile_sizes(domain.sizes)
    wanted = [spot.length(size, tiles) for spot in spots]
    if not roles.uniform:
        wanted = only_some(choices, wanted)
    if batch_size > SMALL_BATCH and choices.one_in(6):
        # A prefill among decodes.
        wanted[choices.below(batch_size)] = choices.pick(PREFILLS)
    lengths = within_budget(choices, wanted, MAX_TOKENS)
    if roles.uniform and lengths:
        lengths = [min(lengths[0], max(1, MAX_TOKENS // batch_size))] * batch_size
    largest_start = min(DTYPE_RANGES[dtype_of[name]][-1] for name in roles.starts + roles.ends)
    if roles.ends or largest_start > INT32_MAX:
        largest_start -= max(lengths, default=0)
    starts = [
        spot.start(length, max_pages * size, size, largest_start)
        for spot, length in zip(spots, lengths)
    ]
    table = edited_table(
        choices,
        num_rows,
        max_pages,
        _outer_cells(rows, starts, lengths, max_pages, size),
        largest_page_id_for(dtype_of[roles.slots], size),
        holes=holes_of(domain, dtype_of[roles.slots], size),
    )
    outputs = (roles.slots, *roles.ends)
    placements = layout(choices, plain, changed, outputs, roles.table, domain, batch_size)
    return Batch(tuple(rows), tuple(starts), tuple(lengths), table, size, placements)


@dataclass(frozen=True)
class Spot:
    """Where in its row a token range lies, before the row is known."""

    length_kind: str
    start_kind: str
    around: int
    any: int

    @classmethod
    def of(cls, choices: Choices, length_kinds: Sequence[str]) -> "Spot":
        return cls(
            choices.pick(length_kinds),
            choices.pick(STARTS),
            choices.pick(AROUND),
            choices.below(2**12),
        )

    def length(self, page_size: int, tiles: Sequence[int]) -> int:
        """Return how many tokens the range has, where a kernel may handle so many at a time."""
        page = page_size if page_size <= 512 else 1 + self.any % 5
        lengths = {
            "one": 1,
            "few": 1 + self.any % 9,
            "none": 0,
            "page": page + self.around,
            "pages": (2 + self.any % 3) * page + self.around,
            "tile": tiles[self.any % len(tiles)] + self.around,
        }
        return max(0, lengths[self.length_kind])

    def start(self, length: int, row_end: int, page_size: int, largest: int) -> int:
        """Return the first position; `row_end` is the first position that has no column."""
        far = (largest, largest - length, 2**32 + self.any % 8, 2**31 + self.around)
        starts = {
            "zero": 0,
            "page": self.any % (row_end // page_size + 1) * page_size + self.around,
            "row end": row_end + self.around,
            "up to row end": row_end - length + self.around,
            "across row end": row_end - length // 2,
            "last page": row_end - page_size + self.around,
            "inside": self.any % (row_end + 1),
            "far": far[self.any % 4],
        }
        return min(max(0, starts[self.start_kind]), largest)


def _outer_cells(
    rows: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    max_pages: int,
    page_size: int,
) -> list[tuple[int, int]]:
    """Return the cells of the first and last token of each range that has them."""
    cells = []
    for row, start, length in zip(rows, starts, lengths):
        for position in (start, start + length - 1) if length else ():
            if position // page_size < max_pages:
                cells.append((row, position // page_size))
    return cells


def check_fits(name: str, dtype: str, values: Sequence[int]) -> None:
    """Raise CaseError where a value does not fit its tensor's dtype."""
    if values:
        for value in (min(values), max(values)):
            if value not in DTYPE_RANGES[dtype]:
                raise CaseError(f"{name}: {value} does not fit {dtype}")


def check_not_negative(name: str, values: Sequence[int]) -> None:
    """Raise CaseError where a value is negative."""
    if values and min(values) < 0:
        raise CaseError(f"{name}: {min(values)}, but should not be negative")


def check_page_ids(case: Case, *names: str) -> None:
    """Raise CaseError where a tensor of page ids has another dtype than the contract's."""
    for name in names:
        if case.placement(name).dtype != "int32":
            raise CaseError(f"layout.{name}: page ids are int32")


def check_rows(rows: Sequence[int], num_rows: int) -> None:
    """Raise CaseError where a request has no row in the table."""
    if rows and not 0 <= min(rows) <= max(rows) < num_rows:
        raise CaseError(
            f"req_pool_indices: {min(rows)} … {max(rows)}, but should be in 0 … {num_rows - 1}"
        )


def check_slots(name: str, dtype: str, table: PageTable, page_size: int) -> None:
    """Raise CaseError where a page has slots that the output can't hold."""
    if page_size < 1:
        raise CaseError(f"page_size: {page_size}, but should be at least 1")
    check_fits(name, dtype, [table.largest_page_id * page_size + page_size - 1])
