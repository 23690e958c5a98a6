"""Cases of `update_req_to_page` and of `update_block_table`, the host's call in front of it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from hypothesis import strategies as st

from pagefault.case import (
    DTYPE_RANGES,
    Case,
    CaseError,
    PageTable,
    PerRequest,
    PerRequestLists,
    Placement,
)
from pagefault.family import Domain

from .batches import check_fits, check_not_negative, check_page_ids, check_rows
from .edges import (
    AROUND,
    INT32_MAX,
    Choices,
    made_from_choices,
    num_requests,
    only_some,
    tile_sizes,
    within_budget,
)
from .layouts import MOST_RESERVED_ROWS, dtypes, layout, widened
from .pools import INT32_MIN, holes_of, pool_indices, table_width

MAX_PAGES_WRITTEN = 1100

NUM_PAGES = (
    *("one", "few", "few", "one", "none", "row", "row", "few", "few", "one"),
    *("few", "few", "row", "few", "one", "tile"),
)
BEGINS = (
    *("zero", "inside", "up to row end", "row end", "last column", "across row end"),
    *("inside", "zero", "inside", "inside", "up to row end", "inside", "inside", "zero", "far"),
)


@dataclass(frozen=True)
class PagesCase(Case):
    """Pages that enter the table: `new_occupied_pages[i]` from column `begins[i]` of a row on."""

    req_pool_indices: PerRequest
    begins: PerRequest
    new_occupied_pages: PerRequestLists
    req_to_page: PageTable

    def check_ranges(self) -> None:
        """Raise CaseError where two requests write one cell."""
        by_row = defaultdict(list)
        for row, begin, page_ids in zip(
            self.req_pool_indices, self.begins, self.new_occupied_pages
        ):
            if page_ids:
                by_row[row].append((begin, begin + len(page_ids)))
        for row, ranges in by_row.items():
            ranges.sort()
            for (_, end), (begin, _) in pairwise(ranges):
                if begin < end:
                    raise CaseError(f"two requests write column {begin} of row {row}")


@dataclass(frozen=True)
class UpdateReqToPageCase(PagesCase):
    """A call of `update_req_to_page`; counts and flat ids follow from `new_occupied_pages`."""

    PLAIN: ClassVar = {
        "req_to_page": Placement(),
        "req_pool_indices": Placement("int64"),
        "new_occupied_pages": Placement(),
        "new_occupied_pages_num": Placement(),
        "pages_copy_starts": Placement(),
    }

    def check(self) -> None:
        check_rows(self.req_pool_indices, self.req_to_page.num_rows)
        dtype = self.placement("req_pool_indices").dtype
        check_fits("req_pool_indices", dtype, self.req_pool_indices)
        check_not_negative("begins", self.begins)
        check_fits("begins", self.placement("pages_copy_starts").dtype, self.begins)
        check_page_ids(self, "req_to_page", "new_occupied_pages")
        for page_ids in self.new_occupied_pages:
            check_fits("new_occupied_pages", "int32", page_ids)
        self.check_ranges()


# The lists of a scheduler step, which have one entry per request each.
STEP_LISTS = ("request_ids", "request_pool_indices", "sizes", "begins", "new_occupied_pages")


@dataclass(frozen=True)
class UpdateBlockTableCase(PagesCase):
    """A call of `update_block_table`; it may be one that has to be refused.

    Attributes:
        sizes: [num_requests], how many pages the scheduler says that each request got.
        short_list: Which list of the step lacks its last entry, as its place in `STEP_LISTS`
            counted from 1; 0 for none.
    """

    PLAIN: ClassVar = {"req_to_page": Placement()}

    sizes: PerRequest
    short_list: int = 0

    def check(self) -> None:
        check_page_ids(self, "req_to_page")
        if not 0 <= self.short_list <= len(STEP_LISTS):
            raise CaseError(f"short_list: {self.short_list}, but a step has {len(STEP_LISTS)}")
        if self.short_list and not self.num_requests:
            raise CaseError(f"short_list: {self.short_list}, but no list has an entry to lack")
        if not self.refusal:
            self.check_ranges()

    @property
    def refusal(self) -> str:
        """What the host has to refuse, or "" where nothing is wrong."""
        if self.short_list:
            return "list length"
        rows = self.req_pool_indices
        if rows and not 0 <= min(rows) <= max(rows) < self.req_to_page.num_rows:
            return "pool index"
        if min(self.begins, default=0) < 0:
            return "begin"
        if self.sizes != tuple(map(len, self.new_occupied_pages)):
            return "size"
        for page_ids in self.new_occupied_pages:
            if any(page_id not in DTYPE_RANGES["int32"] for page_id in page_ids):
                return "page id"
        return ""


REFUSALS = ("pool index", "begin", "size", "page id", "list length")


def _make_pages(
    choices: Choices, domain: Domain, largest_begin: int
) -> tuple[list[int], list[int], list[list[int]], PageTable]:
    """Return rows, begins and page ids of a batch, and the table before it."""
    batch_size = num_requests(choices, domain.sizes)
    shares_rows = choices.one_in(8)
    rows, num_rows = pool_indices(choices, batch_size, distinct=not shares_rows)
    max_pages = table_width(choices, num_rows)
    table = PageTable(num_rows, max_pages)
    kinds = [
        (choices.pick(NUM_PAGES), choices.pick(BEGINS), choices.pick(AROUND), choices.below(2**12))
        for _ in range(min(batch_size, 4))
    ]
    tiles = tile_sizes(domain.sizes)
    wanted = []
    for i in range(batch_size):
        num_kind, _, around, anything = kinds[i % 4]
        num_pages = {
            "one": 1,
            "few": 1 + anything % 6,
            "none": 0,
            "row": max_pages + around,
            "tile": tiles[anything % len(tiles)] + around,
        }[num_kind]
        wanted.append(max(0, num_pages))
    counts = within_budget(choices, only_some(choices, wanted), MAX_PAGES_WRITTEN)
    begins, page_ids = [], []
    next_free: dict[int, int] = {}
    tag = table.rule(max(num_rows, MOST_RESERVED_ROWS), 0)  # A wide table may have as many.
    for i, (row, num_pages) in enumerate(zip(rows, counts)):
        _, begin_kind, around, anything = kinds[i % 4]
        begin = {
            "zero": 0,
            "inside": anything % (max_pages + 1),
            "up to row end": max_pages - num_pages + around,
            "row end": max_pages + around,
            "last column": max_pages - 1,
            "across row end": max_pages - (num_pages + 1) // 2,
            "far": largest_begin - num_pages - anything % 6,
        }[begin_kind]
        begin = max(0, begin, next_free.get(row, 0))
        if begin + num_pages > largest_begin:
            # Nothing fits behind another request's range: this one gets no pages.
            begin, num_pages = min(begin, largest_begin), 0
        next_free[row] = begin + num_pages
        begins.append(begin)
        page_ids.append([tag + table.step * k for k in range(num_pages)])
        tag += table.step * num_pages
    special = [0, INT32_MAX, 1, *holes_of(domain, "int64", 1)]
    for _ in range(choices.pick((0, 0, 1, 2))):
        page_id, where = choices.pick(special), choices.below(2**8)
        if page_ids and page_ids[where % len(page_ids)]:
            edited = page_ids[where % len(page_ids)]
            edited[where % len(edited)] = page_id
    return rows, begins, page_ids, table


def _tuples(page_ids: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, page_ids))


def update_req_to_page_cases(domain: Domain) -> st.SearchStrategy[UpdateReqToPageCase]:
    """Strategy of cases of `update_req_to_page`."""
    plain = UpdateReqToPageCase.PLAIN
    flexible = ["req_pool_indices", "new_occupied_pages_num", "pages_copy_starts"]
    fixed = frozenset(name for name in flexible if f"int64 {name}" in domain.without)

    def make(choices: Choices) -> UpdateReqToPageCase:
        changed = dtypes(choices, flexible, domain, fixed)
        placements = layout(choices, plain, changed, (), "req_to_page", domain)
        wide = "pages_copy_starts" in changed
        largest_begin = 2**32 + 5 if wide else INT32_MAX
        rows, begins, page_ids, table = _make_pages(choices, domain, largest_begin)
        case = UpdateReqToPageCase(
            tuple(rows), tuple(begins), _tuples(page_ids), table, layout=placements
        )
        return widened(choices, domain, case, "req_to_page")

    return made_from_choices(make)


def update_block_table_cases(domain: Domain) -> st.SearchStrategy[UpdateBlockTableCase]:
    """Strategy of cases of `update_block_table`; about one in eight has to be refused."""
    plain = UpdateBlockTableCase.PLAIN
    refusals = [refusal for refusal in REFUSALS if f"refused: {refusal}" not in domain.without]

    def make(choices: Choices) -> UpdateBlockTableCase:
        placements = layout(choices, plain, frozenset(), (), "req_to_page", domain)
        refusal = choices.pick(refusals) if choices.one_in(8) and refusals else ""
        off_by = choices.pick((1, 1, 1, 1, 2, 1000))
        rows, begins, page_ids, table = _make_pages(choices, domain, INT32_MAX)
        sizes = [len(ids) for ids in page_ids]
        short_list = 0
        if rows and refusal:
            at = off_by % len(rows)
            if refusal == "pool index":
                rows[at] = table.num_rows - 1 + off_by if choices.one_in(2) else -off_by
            elif refusal == "begin":
                begins[at] = -off_by
            elif refusal == "size":
                sizes[at] += off_by if choices.one_in(2) else -off_by
            elif refusal == "list length":
                short_list = choices.pick(range(1, len(STEP_LISTS) + 1))
            elif page_ids[at]:
                page_ids[at][-1] = 2**31 if choices.one_in(2) else INT32_MIN - off_by
        case = UpdateBlockTableCase(
            tuple(rows),
            tuple(begins),
            _tuples(page_ids),
            table,
            tuple(sizes),
            short_list,
            layout=placements,
        )
        return widened(choices, domain, case, "req_to_page")

    return made_from_choices(make)
