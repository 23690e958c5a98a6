"""Guarded memory: one arena that holds every tensor of a call twice, each time in other poison.

    | guard | tensor | guard | tensor | guard | … the same again, with the other poison

Every byte that is not input is poison: guards, the gap behind each row of a pitched table, outputs
and what lies behind them. The arena goes to the device in one copy and comes back in one copy, and
all of it is compared. A pass says that no byte of the arena changed that the contract does not
name; a write that jumps over the arena is not seen here.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from .case import NUM_IDS, Case, CaseError, PageTable
from .family import Tensor

if TYPE_CHECKING:
    from .mapping import Blocks, Net

GUARD_BYTES = 128
END_GUARD_BYTES = 4096
ALIGNMENT_BYTES = 64

# One negative and one small and positive, so that a stale cell that is taken for a page id, a
# length or an index gives two different answers but seldom an address far away.
POISONS = (-7, 11)

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}
ITEMSIZE_BYTES = {"int32": 4, "int64": 8}
TORCH_DTYPES = {"int32": torch.int32, "int64": torch.int64}

# What is filled beside each touched cell of a table that is only reserved, and beside its ends.
CELLS_BESIDE = 8

MOST_ARENA_BYTES = 1 << 30

Words = np.ndarray[Any, np.dtype[np.int32]]
Offsets = np.ndarray[Any, np.dtype[np.int64]]

# (row, column) of the cells that a call may read or write, by page table.
Touched = Mapping[str, Collection[tuple[int, int]]]
NOTHING_RESERVED: Touched = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Region:
    """Where one tensor lies in a replica of the arena.

    Attributes:
        name: The argument's name.
        is_input: Whether the tensor holds input when the call starts.
        dtype: "int32" or "int64".
        start_bytes: Offset of its first element.
        rows: 1 for a vector.
        columns: Elements in a row.
        row_stride: Elements from one row to the next.
        shape: What the function is given, spare elements included.
        num_elements: Elements from the first to the last, gaps included.
        itemsize_bytes: Size of an element.
        end_bytes: Offset of what follows the last element.
        filled: For a table that is only reserved, which elements, counted from its first one, lie
            in the arena, one behind the other; None for all.
    """

    name: str
    is_input: bool
    dtype: str
    start_bytes: int
    rows: int
    columns: int
    row_stride: int
    shape: tuple[int, ...]
    num_elements: int = field(init=False)
    itemsize_bytes: int = field(init=False)
    end_bytes: int = field(init=False)
    filled: Offsets | None = None

    def __post_init__(self) -> None:
        is_empty = self.rows == 0 or self.columns == 0
        self.num_elements = 0 if is_empty else (self.rows - 1) * self.row_stride + self.columns
        self.itemsize_bytes = ITEMSIZE_BYTES[self.dtype]
        self.move(self.start_bytes)

    def move(self, start_bytes: int) -> None:
        """Let the tensor start somewhere else."""
        self.start_bytes = start_bytes
        num_filled = self.num_elements if self.filled is None else len(self.filled)
        self.end_bytes = start_bytes + num_filled * self.itemsize_bytes

    def fill_only(self, offsets: Offsets) -> None:
        """Let the tensor be reserved, and only these elements of it lie in the arena."""
        self.filled = offsets
        self.move(self.start_bytes)

    def offset_of(self, index: int) -> int:
        """Return where the element of a flat index (row * columns + column) lies, in elements."""
        row, column = divmod(index, self.columns)
        return row * self.row_stride + column

    def positions_of(self, indices: Collection[int]) -> list[int] | Offsets:
        """Return where the elements of flat indices lie among those in the arena."""
        offsets = [self.offset_of(index) for index in indices]
        if self.filled is None:
            return offsets
        positions: Offsets = np.searchsorted(self.filled, offsets)
        return positions


@dataclass(frozen=True, slots=True)
class Cell:
    """A place in the arena, in terms of the tensor that it belongs to or lies next to.

    Attributes:
        region: The tensor.
        offset: Elements from the tensor's first one; negative before it, and what lies behind a
            row or the tensor counts on.
        position: Elements of the tensor's dtype from the start of the arena.
    """

    region: Region
    offset: int
    position: int

    @property
    def index(self) -> int | None:
        """The flat index of the element, or None outside the tensor and in a gap."""
        region = self.region
        if not 0 <= self.offset < region.num_elements:
            return None
        row, column = divmod(self.offset, region.row_stride)
        return row * region.columns + column if column < region.columns else None

    def value(self, words: Words) -> int:
        """Return what the cell holds in a replica."""
        buffer = words if self.region.dtype == "int32" else words.view(np.int64)
        return int(buffer[self.position])

    def __str__(self) -> str:
        region = self.region
        if self.offset < 0:
            return f"{region.name}: element {-self.offset} before its start"
        if self.offset >= region.num_elements:
            return f"{region.name}: element {self.offset - region.num_elements} past its end"
        if len(region.shape) == 1:
            return f"{region.name}[{self.offset}]"
        row, column = divmod(self.offset, region.row_stride)
        if column >= region.columns:
            return f"{region.name}: element {column - region.columns} of the gap behind row {row}"
        return f"{region.name}[{row}][{column}]"


class Plan:
    """Where each tensor of one case lies in a replica: one behind the other, with guards between.

    Args:
        case: The case, for its placements.
        tensors: Its arguments that are device tensors.
        touched: Of the tables that are only reserved.

    Raises:
        CaseError: The tensors take more memory than a case may.
    """

    def __init__(
        self, case: Case, tensors: Sequence[Tensor], touched: Touched = NOTHING_RESERVED
    ) -> None:
        self.regions: list[Region] = []
        cursor = END_GUARD_BYTES
        for tensor in tensors:
            region = _region(case, tensor, cursor)
            if region.name in touched:
                region.fill_only(_offsets_to_fill(region, touched[region.name]))
            region.move(region.start_bytes + self._offset_bytes(case, region))
            self.regions.append(region)
            cursor = _rounded_up(region.end_bytes + GUARD_BYTES)
        self.num_bytes = cursor + END_GUARD_BYTES
        if self.num_bytes > MOST_ARENA_BYTES:
            raise CaseError(f"the tensors take {cursor >> 20} MiB, but should not take 1024")
        # The guard between two tensors is split half-way when a stray write has to be named.
        self._bounds = [region.start_bytes - GUARD_BYTES // 2 for region in self.regions[1:]]

    @staticmethod
    def _offset_bytes(case: Case, region: Region) -> int:
        return case.placement(region.name).offset * region.itemsize_bytes

    def fill(self, words: Words, tensors: Sequence[Tensor]) -> None:
        """Write both replicas: the poison of each everywhere, then the inputs.

        Args:
            words: [2 * num_bytes / 4] int32, one replica behind the other.
            tensors: In the order of the plan.
        """
        num_words = self.num_bytes // 4
        replicas = (words[:num_words], words[num_words:])
        wide_replicas = (replicas[0].view(np.int64), replicas[1].view(np.int64))
        for replica, poison in zip(replicas, POISONS):
            replica.fill(poison)
        for region, tensor in zip(self.regions, tensors):
            buffers: tuple[np.ndarray[Any, Any], ...] = replicas
            start, end = region.start_bytes // 4, region.end_bytes // 4
            if region.dtype == "int64":
                buffers = wide_replicas
                start, end = region.start_bytes // 8, region.end_bytes // 8
                guard = GUARD_BYTES // 16
                for buffer, poison in zip(buffers, POISONS):
                    buffer[max(0, start - guard) : end + guard] = poison
            if tensor.values is None or start == end:
                continue
            if isinstance(tensor.values, PageTable):
                parts = [buffer[start:end] for buffer in buffers]
                if region.filled is None:
                    _fill_table(parts, region, tensor.values)
                else:
                    _fill_cells(parts, region, region.filled, tensor.values)
                continue
            values = np.array(tensor.values, dtype=NUMPY_DTYPES[region.dtype])
            for buffer in buffers:
                buffer[start:end] = values

    def elements(self, words: Words, region: Region) -> np.ndarray[Any, Any]:
        """Return the elements of a tensor that the arena holds, as a view of a replica."""
        buffer = words if region.dtype == "int32" else words.view(np.int64)
        itemsize = region.itemsize_bytes
        return buffer[region.start_bytes // itemsize : region.end_bytes // itemsize]

    def cell_at(self, byte: int) -> Cell:
        """Return the cell that holds a byte of the replica."""
        region = self.regions[bisect_right(self._bounds, byte)]
        position = byte // region.itemsize_bytes
        offset = (byte - region.start_bytes) // region.itemsize_bytes
        if region.filled is not None and 0 <= offset < len(region.filled):
            offset = int(region.filled[offset])
        return Cell(region, offset, position)


class BlockPlan(Plan):
    """Where each tensor lies in a block of its own, at the very end of it or at the very start.

    The offsets of the case do not count here. A replica is made of rows, the used part of a block
    each, as long as the longest needs.

    Args:
        case: The case, for its placements.
        tensors: Its arguments that are device tensors.
        at_end: Whether a tensor's last byte is the block's last, or its first the block's first.
    """

    def __init__(self, case: Case, tensors: Sequence[Tensor], at_end: bool) -> None:
        self.at_end = at_end
        self.regions = [_region(case, tensor, 0) for tensor in tensors]
        longest = max((region.end_bytes for region in self.regions), default=0)
        self.row_bytes = _rounded_up(longest + GUARD_BYTES)
        for number, region in enumerate(self.regions):
            start = number * self.row_bytes
            region.move(start + self.row_bytes - region.end_bytes if at_end else start)
        self.num_bytes = len(self.regions) * self.row_bytes
        self._bounds = [number * self.row_bytes for number in range(1, len(self.regions))]


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _region(case: Case, tensor: Tensor, start_bytes: int) -> Region:
    placement = case.placement(tensor.name)
    shape = tensor.shape
    if tensor.values is None:
        shape = (shape[0] + placement.spare,)
    rows, columns = (1, shape[0]) if len(shape) == 1 else shape
    return Region(
        tensor.name,
        tensor.values is not None,
        placement.dtype,
        start_bytes,
        rows,
        columns,
        columns + placement.pitch if len(shape) == 2 else columns,
        shape,
    )


def _offsets_to_fill(region: Region, touched: Collection[tuple[int, int]]) -> Offsets:
    """Return the elements of a reserved table to fill, those beside what is touched included."""
    ends = {0, region.num_elements - 1}
    ends |= {row * region.row_stride + column for row, column in touched}
    beside = np.arange(-CELLS_BESIDE, CELLS_BESIDE + 1, dtype=np.int64)
    offsets = np.fromiter(ends, np.int64)[:, None] + beside
    filled: Offsets = np.unique(offsets)
    return filled


def _fill_cells(
    buffers: Sequence[np.ndarray[Any, Any]], region: Region, filled: Offsets, table: PageTable
) -> None:
    """Write page ids to the elements that are filled and are cells of the table."""
    rows, columns = np.divmod(filled, region.row_stride)
    is_cell = (filled >= 0) & (filled < region.num_elements) & (columns < region.columns)
    ids = table.first + table.step * ((rows * table.max_pages + columns) % NUM_IDS)
    for row, column, page_id in table.edits:
        ids[(rows == row) & (columns == column)] = page_id
    for elements in buffers:
        elements[is_cell] = ids[is_cell]


def _fill_table(buffers: Sequence[np.ndarray[Any, Any]], region: Region, table: PageTable) -> None:
    ids = np.arange(table.num_cells, dtype=np.int64)
    if table.num_cells > NUM_IDS:
        ids %= NUM_IDS
    ids *= table.step
    ids += table.first
    for row, column, page_id in table.edits:
        ids[row * table.max_pages + column] = page_id
    for elements in buffers:
        if region.row_stride == region.columns:
            elements[:] = ids
            continue
        for row in range(table.num_rows):
            first = row * region.row_stride
            row_ids = ids[row * table.max_pages : (row + 1) * table.max_pages]
            elements[first : first + region.columns] = row_ids


class Replicas(NamedTuple):
    """Both replicas of a case in device memory.

    Attributes:
        tensors: Per replica the tensors in the order of the plan.
        before: [2 * num_bytes / 4], what they held before the call.
    """

    tensors: tuple[list[torch.Tensor], list[torch.Tensor]]
    before: Words


class Memory(Protocol):
    """A kind of guarded memory.

    Attributes:
        name: What reports call it.
        reserves: Whether it holds tables that are reserved, and not filled.
        far_writes: What was written far away from every tensor since the tensors were placed, or
            "" for nothing or where that can't be seen; known once they are read back.
    """

    name: str
    reserves: bool
    far_writes: str

    def plan(self, case: Case, tensors: Sequence[Tensor], touched: Touched) -> Plan | None:
        """Return where the tensors of a case are to lie, or None if they do not fit."""

    def place(self, plan: Any, tensors: Sequence[Tensor]) -> Replicas:
        """Return both replicas of the tensors of a case, by its plan."""

    def read_back(self, plan: Any) -> Words:
        """Return what both replicas hold now, after everything launched has ended."""

    def synchronise(self) -> None:
        """Wait for what was launched; a fault of the device raises here."""


class HostMemory:
    """Arena in host memory, for Triton's interpreter."""

    name = "arena"
    reserves = True
    far_writes = ""

    def __init__(self) -> None:
        self._words: Words = np.empty(0, dtype=np.int32)
        # Each reserved table, its filled elements there, and where the arena has these.
        self._reserved: list[tuple[Words, Offsets, Words]] = []

    def plan(self, case: Case, tensors: Sequence[Tensor], touched: Touched) -> Plan:
        """Return where the tensors of a case are to lie."""
        return Plan(case, tensors, touched)

    def place(self, plan: Plan, tensors: Sequence[Tensor]) -> Replicas:
        """Return both replicas of the tensors of a case."""
        num_words = plan.num_bytes // 4
        # A new array each time: what a call has kept of the last one's is no part of this one.
        raw = np.empty(2 * plan.num_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
        shift = -raw.ctypes.data % ALIGNMENT_BYTES
        self._words = raw[shift : shift + 2 * plan.num_bytes].view(np.int32)
        plan.fill(self._words, tensors)
        narrow = torch.from_numpy(self._words)
        wide = torch.from_numpy(self._words.view(np.int64))
        self._reserved = []
        replicas = []
        for first_word in (0, num_words):
            views = _views(plan, narrow, wide, first_word)
            words = self._words[first_word : first_word + num_words]
            for number, region in enumerate(plan.regions):
                if region.filled is not None:
                    views[number] = self._reserve(
                        region, region.filled, plan.elements(words, region)
                    )
            replicas.append(views)
        return Replicas((replicas[0], replicas[1]), self._words.copy())

    def _reserve(self, region: Region, filled: Offsets, elements: Words) -> torch.Tensor:
        """Return a table in memory of its own, of which only the filled pages are ever used."""
        reserved = _reserved_words(region.num_elements + 2 * CELLS_BESIDE)
        reserved[filled + CELLS_BESIDE] = elements
        self._reserved.append((reserved, filled + CELLS_BESIDE, elements))
        flat = torch.from_numpy(reserved)
        return flat.as_strided(region.shape, (region.row_stride, 1), CELLS_BESIDE)

    def read_back(self, plan: Plan) -> Words:
        """Return what both replicas hold now."""
        for reserved, filled, elements in self._reserved:
            elements[:] = reserved[filled]
        self._reserved = []
        return self._words

    def synchronise(self) -> None:
        """Do nothing: a call on the host has ended when it returns."""


def _reserved_words(num_words: int) -> Words:
    """Return zeros that take memory only where they are used.

    Raises:
        CaseError: The system does not reserve so many addresses.
    """
    try:
        # Python knows the flag's name since 3.13.
        no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
        reserved = mmap.mmap(-1, 4 * num_words, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        gibibytes = 4 * num_words / 2**30
        raise CaseError(f"{gibibytes:.1f} GiB of addresses can't be reserved: {error}") from error
    return np.frombuffer(reserved, dtype=np.int32)


class CudaMemory:
    """Arena in device memory, with pinned host memory to copy from and to."""

    name = "arena"
    reserves = False
    far_writes = ""

    def __init__(self) -> None:
        self._grow(1 << 20)

    def plan(self, case: Case, tensors: Sequence[Tensor], touched: Touched) -> Plan | None:
        """Return where the tensors of a case are to lie, or None if they do not fit."""
        return None if touched else Plan(case, tensors, touched)

    def _grow(self, num_bytes: int) -> None:
        self._device_words = torch.empty(num_bytes // 4, dtype=torch.int32, device="cuda")
        self._device_wide = self._device_words.view(torch.int64)
        self._upload = torch.empty(num_bytes // 4, dtype=torch.int32, pin_memory=True)
        self._download = torch.empty(num_bytes // 4, dtype=torch.int32, pin_memory=True)
        self._upload_words: Words = self._upload.numpy()
        self._download_words: Words = self._download.numpy()

    def place(self, plan: Plan, tensors: Sequence[Tensor]) -> Replicas:
        """Return both replicas of the tensors of a case."""
        num_words = plan.num_bytes // 4
        if 2 * num_words > len(self._upload_words):
            self._grow(2 * 2 * plan.num_bytes)
        words = self._upload_words[: 2 * num_words]
        plan.fill(words, tensors)
        self._device_words[: 2 * num_words].copy_(self._upload[: 2 * num_words], non_blocking=True)
        return Replicas(
            (
                _views(plan, self._device_words, self._device_wide, 0),
                _views(plan, self._device_words, self._device_wide, num_words),
            ),
            words,
        )

    def read_back(self, plan: Plan) -> Words:
        """Return what both replicas hold now, after everything launched has ended."""
        num_words = 2 * plan.num_bytes // 4
        self._download[:num_words].copy_(self._device_words[:num_words], non_blocking=True)
        self.synchronise()
        return self._download_words[:num_words]

    def synchronise(self) -> None:
        """Wait for the current stream; a fault of the device raises here."""
        torch.cuda.current_stream().synchronize()


class GuardMemory:
    """Blocks of device memory with nothing mapped around them: one element too far faults.

    Args:
        at_end: Whether tensors lie at the end of their block, where a step past the last element
            faults, or at the start, where one before the first does.
        blocks: The blocks, which several of these may share.
    """

    def __init__(self, blocks: Blocks, at_end: bool) -> None:
        self.name = "guard after" if at_end else "guard before"
        self.reserves = False
        self.far_writes = ""
        self._at_end = at_end
        self._blocks = blocks
        self._wide = [block.view(torch.int64) for block in blocks.blocks]
        num_words = 1 << 18
        self._upload = torch.empty(num_words, dtype=torch.int32, pin_memory=True)
        self._download = torch.empty(num_words, dtype=torch.int32, pin_memory=True)
        self._upload_words: Words = self._upload.numpy()
        self._download_words: Words = self._download.numpy()
        self._copy_to_device = blocks.copier(self._upload, to_host=False)
        self._copy_to_host = blocks.copier(self._download, to_host=True)

    def plan(self, case: Case, tensors: Sequence[Tensor], touched: Touched) -> BlockPlan | None:
        """Return where the tensors of a case are to lie, or None if they do not fit."""
        if touched:
            return None
        plan = BlockPlan(case, tensors, self._at_end)
        fits = plan.row_bytes <= self._blocks.block_bytes
        fits = fits and 2 * len(tensors) <= len(self._blocks.blocks)
        return plan if fits and plan.num_bytes // 2 <= len(self._upload) else None

    def place(self, plan: BlockPlan, tensors: Sequence[Tensor]) -> Replicas:
        """Return both replicas of the tensors of a case."""
        num_words = 2 * plan.num_bytes // 4
        words = self._upload_words[:num_words]
        plan.fill(words, tensors)
        self._copy_to_device(*self._used(plan))
        num_tensors = len(plan.regions)
        replicas = [
            [self._tensor(plan, number, replica * num_tensors) for number in range(num_tensors)]
            for replica in (0, 1)
        ]
        return Replicas((replicas[0], replicas[1]), words)

    def read_back(self, plan: BlockPlan) -> Words:
        """Return what both replicas hold now, after everything launched has ended."""
        num_words = 2 * plan.num_bytes // 4
        self._copy_to_host(*self._used(plan))
        self.synchronise()
        return self._download_words[:num_words]

    def synchronise(self) -> None:
        """Wait for the current stream; a fault of the device raises here."""
        torch.cuda.current_stream().synchronize()

    def _used(self, plan: BlockPlan) -> tuple[int, int, int]:
        """Return how many blocks both replicas use, how many bytes of each, and from which on."""
        first_byte = self._blocks.block_bytes - plan.row_bytes if plan.at_end else 0
        return 2 * len(plan.regions), plan.row_bytes, first_byte

    def _tensor(self, plan: BlockPlan, number: int, first_block: int) -> torch.Tensor:
        region = plan.regions[number]
        block = (self._blocks.blocks if region.dtype == "int32" else self._wide)[
            first_block + number
        ]
        start = len(block) - region.num_elements if plan.at_end else 0
        stride = (1,) if len(region.shape) == 1 else (region.row_stride, 1)
        return block.as_strided(region.shape, stride, start)


def _pair_of(word: int) -> int:
    """Return two int32 beside each other as an int64."""
    return int(np.array([word, word], dtype=np.int32).view(np.int64)[0])


class NetMemory:
    """Arenas in the middle of tens of GiB of addresses that all lead to one page, which is watched.

    A wild or wrapped address neither faults nor goes unnoticed: a write changes the page, a read
    finds the replica's poison there. A page table that is only reserved lies behind the arena; the
    pages of its filled elements are mapped for the time of the call.

    Args:
        nets: One for each replica.
    """

    name = "net"
    reserves = True

    def __init__(self, nets: Sequence[Net]) -> None:
        self.far_writes = ""
        self._nets = nets
        num_words = nets[0].arena_bytes // 4
        self._wide = [net.arena.view(torch.int64) for net in nets]
        self._upload = torch.empty(2 * num_words, dtype=torch.int32, pin_memory=True)
        self._download = torch.empty(2 * num_words, dtype=torch.int32, pin_memory=True)
        self._upload_words: Words = self._upload.numpy()
        self._download_words: Words = self._download.numpy()
        # Per replica the least and the largest pair of elements that are watched.
        self._extremes = torch.empty((2, 2), dtype=torch.int64, device="cuda")
        self._extremes_on_host = torch.empty((2, 2), dtype=torch.int64, pin_memory=True)
        # Per replica the filled elements of its reserved table, on the device, counted in the net.
        self._filled: list[torch.Tensor | None] = [None, None]
        for net, poison in zip(nets, POISONS):
            net.watched().fill_(poison)

    def plan(self, case: Case, tensors: Sequence[Tensor], touched: Touched) -> Plan | None:
        """Return where the tensors of a case are to lie, or None if they do not fit."""
        plan = Plan(case, tensors, touched)
        reserved = [region for region in plan.regions if region.filled is not None]
        fits = plan.num_bytes <= self._nets[0].arena_bytes and len(reserved) <= 1
        for region in reserved:
            assert region.filled is not None
            fits = fits and self._nets[0].can_show(self._offset(case, region) + region.filled)
        return plan if fits else None

    @staticmethod
    def _offset(case: Case, region: Region) -> int:
        return case.placement(region.name).offset

    def place(self, plan: Plan, tensors: Sequence[Tensor]) -> Replicas:
        """Return both replicas of the tensors of a case."""
        num_words = plan.num_bytes // 4
        words = self._upload_words[: 2 * num_words]
        plan.fill(words, tensors)
        replicas = []
        for number, net in enumerate(self._nets):
            upload = self._upload[number * num_words : (number + 1) * num_words]
            net.arena[:num_words].copy_(upload, non_blocking=True)
            views = _views(plan, net.arena, self._wide[number], 0)
            for i, region in enumerate(plan.regions):
                if region.filled is not None:
                    views[i] = self._reserve(number, region, region.filled)
            replicas.append(views)
        return Replicas((replicas[0], replicas[1]), words)

    def _reserve(self, number: int, region: Region, filled: Offsets) -> torch.Tensor:
        """Map the pages of the filled elements of a replica's table, and fill them."""
        net = self._nets[number]
        # The arena has an alignment of its own, so that this is what the case's offset says.
        first = net.first_reserved + region.start_bytes % ALIGNMENT_BYTES // 4
        net.show(first + filled)
        net.watched().fill_(POISONS[number])
        indices = torch.from_numpy(first + filled).to("cuda")
        net.everything.index_copy_(0, indices, self._elements(number, region))
        self._filled[number] = indices
        return net.everything.as_strided(region.shape, (region.row_stride, 1), first)

    def _elements(self, number: int, region: Region) -> torch.Tensor:
        return self._nets[number].arena[region.start_bytes // 4 : region.end_bytes // 4]

    def read_back(self, plan: Plan) -> Words:
        """Return what both replicas hold now, after everything launched has ended."""
        num_words = plan.num_bytes // 4
        for number, net in enumerate(self._nets):
            indices = self._filled[number]
            if indices is not None:
                (region,) = [region for region in plan.regions if region.filled is not None]
                self._elements(number, region).copy_(net.everything.index_select(0, indices))
                net.everything.index_fill_(0, indices, POISONS[number])
            download = self._download[number * num_words : (number + 1) * num_words]
            download.copy_(net.arena[:num_words], non_blocking=True)
            pairs = net.watched().view(torch.int64)
            torch.aminmax(pairs, out=tuple(self._extremes[number]))
        self._extremes_on_host.copy_(self._extremes, non_blocking=True)
        self.synchronise()
        self._look_for_far_writes()
        for number, net in enumerate(self._nets):
            if self._filled[number] is not None:
                net.hide()
                self._filled[number] = None
        return self._download_words[: 2 * num_words]

    def _look_for_far_writes(self) -> None:
        self.far_writes = ""
        for net, poison, extremes in zip(self._nets, POISONS, self._extremes_on_host.tolist()):
            if extremes != 2 * [_pair_of(poison)]:
                changed = net.watched()[net.watched() != poison]
                self.far_writes = (
                    f"{int(changed[0])} was written to one of {len(changed)} cells far away from "
                    "every tensor"
                )
                net.watched().fill_(poison)

    def synchronise(self) -> None:
        """Wait for the current stream; a fault of the device raises here."""
        torch.cuda.current_stream().synchronize()


def memories_of(device: str, kind: str = "mixed") -> tuple[list[Memory], str]:
    """Return the kinds of memory to try on "cpu" or "cuda", and why some are missing.

    Args:
        device: Where.
        kind: "mixed", "arena", "guard" or "net".
    """
    if device == "cpu":
        return [HostMemory()], ""
    if kind == "arena":
        return [CudaMemory()], ""
    from .mapping import MappingError, blocks_of_process, nets_of_process

    memories: list[Memory] = []
    try:
        if kind in ("mixed", "guard"):
            blocks = blocks_of_process()
            memories += [GuardMemory(blocks, at_end=True), GuardMemory(blocks, at_end=False)]
        if kind in ("mixed", "net"):
            memories.append(NetMemory(nets_of_process()))
    except MappingError as error:
        return [CudaMemory()], f"accesses outside that change nothing are not seen: {error}"
    return ([CudaMemory(), *memories] if kind == "mixed" else memories), ""


def _views(
    plan: Plan, narrow: torch.Tensor, wide: torch.Tensor, first_word: int
) -> list[torch.Tensor]:
    """Return the tensors of a replica; an empty one in the place of a table that is reserved."""
    tensors = []
    for region in plan.regions:
        if region.filled is not None:
            tensors.append(narrow[:0])
            continue
        if region.dtype == "int32":
            base, start = narrow, first_word + region.start_bytes // 4
        else:
            base, start = wide, (4 * first_word + region.start_bytes) // 8
        stride = (1,) if len(region.shape) == 1 else (region.row_stride, 1)
        tensors.append(base.as_strided(region.shape, stride, start))
    return tensors
