"""Cases of the four functions that cut a cached prefix into chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st

from pagefault.case import Case, PageTable, PerRequest, Placement
from pagefault.family import Domain

from .batches import (
    Roles,
    check_fits,
    check_not_negative,
    check_page_ids,
    check_rows,
    check_slots,
    make_batch,
)
from .edges import (
    AROUND,
    INT32_MAX,
    TILE_SIZES,
    Choices,
    made_from_choices,
    num_requests,
    only_some,
    page_size,
    tile_sizes,
    within_budget,
)
from .layouts import dtypes, layout, widened
from .pools import edited_table, holes_of, largest_page_id_for, pool_indices, table_width

MAX_CHUNK_CELLS = 1000
MAX_PREFIX_TOKENS = 800
# Of one that ends at the boundary of a tile.
MOST_PREFIX_TOKENS = max(TILE_SIZES) + 1
MOST_CHUNKS = 5

C = TypeVar("C", bound="PrefixCase")

CHUNK_LENS = (4, 1, 2, 3, 5, 7, 8, 16, 100, 128, 1000, 2**20, 2**30, INT32_MAX)


@dataclass(frozen=True)
class ChunkingCase(Case):
    """A call of `chunking`; it may be one that has to be refused."""

    PLAIN: ClassVar = {"prefix_lens": Placement()}

    prefix_lens: PerRequest
    num_chunks: int
    batch_size: int
    chunk_len: int

    def check(self) -> None:
        check_not_negative("prefix_lens", self.prefix_lens)
        check_fits("prefix_lens", self.placement("prefix_lens").dtype, self.prefix_lens)
        if self.refusal or not self.num_chunks:
            return
        reach = self.num_chunks * self.chunk_len
        check_fits("an end", "int32", [min(n, reach) for n in self.prefix_lens])
        total = sum(min(n, self.chunk_len) for n in self.prefix_lens)
        check_fits("cum_seq_lens", "int32", [total])

    def keeping(self, requests: Sequence[int]) -> dict[str, Any]:
        changes = super().keeping(requests)
        if self.batch_size == self.num_requests:
            changes["batch_size"] = len(requests)
        return changes

    @property
    def refusal(self) -> str:
        """What the host has to refuse, or "" where nothing is wrong."""
        if self.chunk_len < 1:
            return "chunk_len"
        if self.batch_size != len(self.prefix_lens):
            return "batch_size"
        if self.num_chunks < 0:
            return "num_chunks"
        if self.prefix_lens and (self.num_chunks - 1) * self.chunk_len > INT32_MAX:
            return "start past int32"
        return ""


CHUNKING_REFUSALS = ("chunk_len", "batch_size", "num_chunks", "start past int32")


@dataclass(frozen=True)
class ChunkSlotsCase(Case):
    """A call of `create_chunked_cache_kv_indices_paged`.

    Attributes:
        gaps: [num_requests], elements that the offsets leave before each request's slots.
        tail: Elements that the last offset leaves behind them.
    """

    PLAIN: ClassVar = {
        "req_to_page": Placement(),
        "req_pool_indices": Placement("int64"),
        "chunk_starts": Placement(),
        "chunk_seq_lens": Placement(),
        "chunk_cum_seq_lens": Placement(),
        "chunk_kv_indices": Placement(),
    }

    req_pool_indices: PerRequest
    chunk_starts: PerRequest
    chunk_seq_lens: PerRequest
    gaps: PerRequest
    tail: int
    req_to_page: PageTable
    page_size: int

    def check(self) -> None:
        check_rows(self.req_pool_indices, self.req_to_page.num_rows)
        check_page_ids(self, "req_to_page")
        for name in ("req_pool_indices", "chunk_starts", "chunk_seq_lens"):
            check_not_negative(name, getattr(self, name))
            check_fits(name, self.placement(name).dtype, getattr(self, name))
        check_not_negative("gaps and tail", [*self.gaps, self.tail])
        check_fits("chunk_cum_seq_lens", self.placement("chunk_cum_seq_lens").dtype, self.offsets)
        dtype = self.placement("chunk_kv_indices").dtype
        check_slots("chunk_kv_indices", dtype, self.req_to_page, self.page_size)

    @property
    def offsets(self) -> list[int]:
        """[num_requests + 1], what `chunk_cum_seq_lens` holds."""
        offsets, end = [], 0
        for gap, length in zip(self.gaps, self.chunk_seq_lens):
            offsets.append(end + gap)
            end += gap + length
        return [*offsets, end + self.tail]


@dataclass(frozen=True)
class PrefixCase(Case):
    """A call of one of the two functions that chunk whole prefixes; it may have to be refused."""

    req_pool_indices: PerRequest
    prefix_lens: PerRequest
    req_to_page: PageTable
    page_size: int
    chunk_capacity: int

    def check(self) -> None:
        check_rows(self.req_pool_indices, self.req_to_page.num_rows)
        check_page_ids(self, "req_to_page")
        dtype = self.placement("req_pool_indices").dtype
        check_fits("req_pool_indices", dtype, self.req_pool_indices)
        for name in self.PLAIN:
            if name.endswith(("prefix_lens", "prefix_lens_cpu")):
                check_fits(name, self.placement(name).dtype, self.prefix_lens)
        check_slots("kv_indices_list", "int32", self.req_to_page, self.page_size)

    @property
    def refusal(self) -> str:
        """What the host has to refuse, or "" where nothing is wrong."""
        if self.chunk_capacity < 1:
            return "chunk_capacity"
        if self.num_requests > self.chunk_capacity:
            return "more requests than capacity"
        if min(self.prefix_lens, default=0) < 0:
            return "negative prefix"
        if max(self.prefix_lens, default=0) > self.req_to_page.max_pages * self.page_size:
            return "prefix past the table"
        return ""


PREFIX_REFUSALS = (
    "chunk_capacity",
    "more requests than capacity",
    "negative prefix",
    "prefix past the table",
)


@dataclass(frozen=True)
class GetChunksCase(PrefixCase):
    """A call of `get_chunks_paged`."""

    PLAIN: ClassVar = {
        "prefix_lens": Placement(),
        "prefix_lens_cpu": Placement(),
        "req_to_page": Placement(),
        "req_pool_indices": Placement("int64"),
    }


@dataclass(frozen=True)
class BuildMetadataCase(PrefixCase):
    """A call of `build_chunked_prefill_metadata_arrays`."""

    PLAIN: ClassVar = {
        "extend_prefix_lens": Placement(),
        "extend_prefix_lens_cpu": Placement(),
        "req_to_page": Placement(),
        "req_pool_indices": Placement("int64"),
    }


def chunking_cases(domain: Domain) -> st.SearchStrategy[ChunkingCase]:
    """Strategy of cases of `chunking`; about one in twelve has to be refused."""
    plain = ChunkingCase.PLAIN
    refusals = [refusal for refusal in CHUNKING_REFUSALS if _allowed(refusal, domain)]
    fixed = frozenset(name for name in plain if f"int64 {name}" in domain.without)

    def make(choices: Choices) -> ChunkingCase:
        changed = dtypes(choices, list(plain), domain, fixed)
        placements = layout(choices, plain, changed, (), "", domain)
        batch_size = num_requests(choices, domain.sizes)
        chunk_len = choices.pick(CHUNK_LENS)
        longest = INT32_MAX // max(1, batch_size)
        if batch_size * chunk_len > INT32_MAX:
            chunk_len = min(chunk_len, longest)
        prefixes = []
        kinds = [(choices.below(5), choices.pick(AROUND), choices.below(2**8)) for _ in range(4)]
        for i in range(batch_size):
            kind, around, anything = kinds[i % 4]
            chunks = anything % (MOST_CHUNKS + 1)
            length = (
                chunk_len * chunks + around,
                anything % 20,
                0,
                chunk_len + around,
                INT32_MAX - anything % 2,
            )[kind]
            prefixes.append(min(max(0, length), INT32_MAX))
        covering = -(-max(prefixes, default=0) // chunk_len)
        num_chunks = covering + choices.pick((0, 0, 0, 1, -1, 2))
        num_chunks = choices.pick((num_chunks,) * 7 + (1, 0))
        most = MAX_CHUNK_CELLS // max(1, batch_size) if choices.one_in(20) else 2 * MOST_CHUNKS
        most = min(most, INT32_MAX // chunk_len + 1)
        num_chunks = min(max(0, num_chunks), most)
        said = batch_size
        if choices.one_in(16):
            # The last chunk starts at the last place that an int32 can name.
            chunk_len, num_chunks = INT32_MAX, 2
            prefixes = [n % 20 for n in prefixes]
        if "prefix_lens" in changed and choices.one_in(4):
            prefixes = _stretched(prefixes, num_chunks * chunk_len)
        refusal = choices.pick(refusals) if choices.one_in(8) and refusals else ""
        if refusal == "chunk_len":
            chunk_len = choices.pick((0, -1))
        elif refusal == "batch_size":
            said += choices.pick((1, -1))
        elif refusal == "num_chunks":
            num_chunks = -1 - choices.below(3)
        elif refusal == "start past int32" or (not batch_size and choices.one_in(2)):
            # With no requests there is no start to be past it.
            chunk_len = 2**31 // 2 + choices.below(2)
            num_chunks = 3
        return ChunkingCase(tuple(prefixes), num_chunks, said, chunk_len, layout=placements)

    return made_from_choices(make)


def _stretched(prefixes: Sequence[int], reach: int) -> list[int]:
    """Return prefixes of which the longest pass 2**31 where no chunk reaches that far."""
    if reach > INT32_MAX:
        return list(prefixes)
    return [n + 2**32 if n > reach else n for n in prefixes]


def chunk_slots_cases(domain: Domain) -> st.SearchStrategy[ChunkSlotsCase]:
    """Strategy of cases of `create_chunked_cache_kv_indices_paged`."""
    roles = Roles("chunk_kv_indices", "req_to_page", ("chunk_starts",))

    def make(choices: Choices) -> ChunkSlotsCase:
        batch = make_batch(choices, domain, ChunkSlotsCase.PLAIN, roles)
        gaps = [0] * len(batch.rows)
        tail = 0
        if choices.one_in(3) and "gap" not in domain.without:
            pattern = [choices.pick((0, 0, 1, 3, 40)) for _ in range(3)]
            gaps = [pattern[i % 3] for i in range(len(gaps))]
            tail = choices.pick((0, 1, 3))
        case = ChunkSlotsCase(
            batch.rows,
            batch.starts,
            batch.lengths,
            tuple(gaps),
            tail,
            batch.table,
            batch.page_size,
            layout=batch.layout,
        )
        return widened(choices, domain, case, "req_to_page")

    return made_from_choices(make)


def get_chunks_cases(domain: Domain) -> st.SearchStrategy[GetChunksCase]:
    """Strategy of cases of `get_chunks_paged`; about one in twelve has to be refused."""
    return made_from_choices(lambda choices: _make_prefixes(choices, domain, GetChunksCase))


def build_metadata_cases(domain: Domain) -> st.SearchStrategy[BuildMetadataCase]:
    """Strategy of cases of `build_chunked_prefill_metadata_arrays`; as `get_chunks_cases`."""
    return made_from_choices(lambda choices: _make_prefixes(choices, domain, BuildMetadataCase))


def _allowed(refusal: str, domain: Domain) -> bool:
    return f"refused: {refusal}" not in domain.without


def _make_prefixes(choices: Choices, domain: Domain, case_type: type[C]) -> C:
    plain = case_type.PLAIN
    refusals = [refusal for refusal in PREFIX_REFUSALS if _allowed(refusal, domain)]
    # Each chunk has every request, so the largest batches would take all the time.
    batch_size = num_requests(choices, [size for size in domain.sizes if size <= MAX_CHUNK_CELLS])
    size = page_size(choices, domain.page_sizes, huge=False)
    if size > MAX_PREFIX_TOKENS:
        size = 16  # Slots are int32 here, and a prefix has to fill a page now and then.
    rows, num_rows = pool_indices(choices, batch_size)
    max_pages = table_width(choices, num_rows)
    fixed = frozenset(name for name in plain if f"int64 {name}" in domain.without)
    flexible = [name for name in plain if name != "req_to_page"]
    changed = dtypes(choices, flexible, domain, fixed)
    placements = layout(choices, plain, changed, (), "req_to_page", domain)

    row_end = max_pages * size
    kinds = [(choices.below(7), choices.pick(AROUND), choices.below(2**12)) for _ in range(4)]
    tiles = tile_sizes(domain.sizes)
    wanted = []
    for i in range(batch_size):
        kind, around, anything = kinds[i % 4]
        prefix_len = (
            anything % 12,
            min(anything % (max_pages + 1) * size + around, MAX_PREFIX_TOKENS),
            min(row_end - anything % 2, MAX_PREFIX_TOKENS),
            0,
            1,
            min(anything % (row_end + 1), MAX_PREFIX_TOKENS),
            tiles[anything % len(tiles)] + around,
        )[kind]
        wanted.append(min(max(0, prefix_len), row_end, MOST_PREFIX_TOKENS))
    prefixes = within_budget(choices, only_some(choices, wanted), MAX_PREFIX_TOKENS)
    longest = max(prefixes, default=0)
    # Capacities that divide nothing: a chunk length at which the longest prefix ends in, at or
    # one past a chunk, and a rest that no request gets.
    num_chunks = choices.pick((1, 2, 2, 3, 1, 2, 3, 4))
    chunk_len = max(1, -(-longest // num_chunks) + choices.pick((0, 0, 1, -1, 7)))
    chunk_len = max(chunk_len, -(-longest // MOST_CHUNKS))
    capacity = max(1, batch_size * chunk_len + choices.below(max(1, batch_size)))
    refusal = choices.pick(refusals) if choices.one_in(8) and refusals else ""
    if refusal == "chunk_capacity":
        capacity = choices.pick((0, -1))
    elif refusal == "more requests than capacity" and batch_size > 1:
        capacity = batch_size - 1
    elif refusal == "negative prefix" and prefixes:
        prefixes[choices.below(len(prefixes))] = -1
    elif refusal == "prefix past the table" and prefixes:
        prefixes[choices.below(len(prefixes))] = row_end + 1 + choices.pick((0, 0, 100))
    used = [(row, (n - 1) // size) for row, n in zip(rows, prefixes) if 0 < n <= row_end]
    table = edited_table(
        choices,
        num_rows,
        max_pages,
        used,
        largest_page_id_for("int32", size),
        holes=holes_of(domain, "int32", size),
    )
    case = case_type(
        tuple(rows), tuple(prefixes), table, size, max(-1, capacity), layout=placements
    )
    return widened(choices, domain, case, "req_to_page")
