"""Guarded memory: one arena that holds every tensor of a call twice, each time in other poison.

    | guard | tensor | guard | tensor | guard | … the same again, with the other poison

Every byte that is not input is poison: guards, the gap behind each row of a pitched table, outputs
and what lies behind them. The arena goes to the device in one copy and comes back in one copy, and
all of it is compared. A pass says that no byte of the arena changed that the contract does not
name; a write that jumps over the arena is not seen here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from .case import Case, PageTable
from .family import Tensor

if TYPE_CHECKING:
    from .mapping import Blocks

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

Words = np.ndarray[Any, np.dtype[np.int32]]


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

    def __post_init__(self) -> None:
        is_empty = self.rows == 0 or self.columns == 0
        self.num_elements = 0 if is_empty else (self.rows - 1) * self.row_stride + self.columns
        self.itemsize_bytes = ITEMSIZE_BYTES[self.dtype]
        self.move(self.start_bytes)

    def move(self, start_bytes: int) -> None:
        """Let the tensor start somewhere else."""
        self.start_bytes = start_bytes
        self.end_bytes = start_bytes + self.num_elements * self.itemsize_bytes

    def offset_of(self, index: int) -> int:
        """Return where the element of a flat index (row * columns + column) lies, in elements."""
        row, column = divmod(index, self.columns)
        return row * self.row_stride + column


@dataclass(frozen=True, slots=True)
class Cell:
    """A place in the arena, in terms of the tensor that it belongs to or lies next to.

    Attributes:
        region: The tensor.
        offset: Elements from the tensor's first one; negative before it, and what lies behind a
            row or the tensor counts on.
    """

    region: Region
    offset: int

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
        return int(buffer[self.region.start_bytes // self.region.itemsize_bytes + self.offset])

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
    """

    def __init__(self, case: Case, tensors: Sequence[Tensor]) -> None:
        self.regions: list[Region] = []
        cursor = END_GUARD_BYTES
        for tensor in tensors:
            region = _region(case, tensor, cursor)
            region.move(region.start_bytes + self._offset_bytes(case, region))
            self.regions.append(region)
            cursor = _rounded_up(region.end_bytes + GUARD_BYTES)
        self.num_bytes = cursor + END_GUARD_BYTES
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
                _fill_table([buffer[start:end] for buffer in buffers], region, tensor.values)
                continue
            values = np.array(tensor.values, dtype=NUMPY_DTYPES[region.dtype])
            for buffer in buffers:
                buffer[start:end] = values

    def elements(self, words: Words, region: Region) -> np.ndarray[Any, Any]:
        """Return the elements of a tensor, gaps included, as a view of a replica."""
        buffer = words if region.dtype == "int32" else words.view(np.int64)
        start = region.start_bytes // region.itemsize_bytes
        return buffer[start : start + region.num_elements]

    def cell_at(self, byte: int) -> Cell:
        """Return the cell that holds a byte of the replica."""
        region = self.regions[bisect_right(self._bounds, byte)]
        return Cell(region, (byte - region.start_bytes) // region.itemsize_bytes)


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


def _fill_table(buffers: Sequence[np.ndarray[Any, Any]], region: Region, table: PageTable) -> None:
    ids = np.arange(table.num_cells, dtype=np.int64)
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
    """

    name: str

    def plan(self, case: Case, tensors: Sequence[Tensor]) -> Plan | None:
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

    def __init__(self) -> None:
        self._words: Words = np.empty(0, dtype=np.int32)

    def plan(self, case: Case, tensors: Sequence[Tensor]) -> Plan:
        """Return where the tensors of a case are to lie."""
        return Plan(case, tensors)

    def place(self, plan: Plan, tensors: Sequence[Tensor]) -> Replicas:
        """Return both replicas of the tensors of a case."""
        num_words = plan.num_bytes // 4
        # A new array each time: the interpreter copies the whole storage of what it is given.
        raw = np.empty(2 * plan.num_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
        shift = -raw.ctypes.data % ALIGNMENT_BYTES
        self._words = raw[shift : shift + 2 * plan.num_bytes].view(np.int32)
        plan.fill(self._words, tensors)
        narrow = torch.from_numpy(self._words)
        wide = torch.from_numpy(self._words.view(np.int64))
        return Replicas(
            (
                _views(plan, narrow, wide, 0),
                _views(plan, narrow, wide, num_words),
            ),
            self._words.copy(),
        )

    def read_back(self, plan: Plan) -> Words:
        """Return what both replicas hold now."""
        return self._words

    def synchronise(self) -> None:
        """Do nothing: a call on the host has ended when it returns."""


class CudaMemory:
    """Arena in device memory, with pinned host memory to copy from and to."""

    name = "arena"

    def __init__(self) -> None:
        self._grow(1 << 20)

    def plan(self, case: Case, tensors: Sequence[Tensor]) -> Plan:
        """Return where the tensors of a case are to lie."""
        return Plan(case, tensors)

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

    def plan(self, case: Case, tensors: Sequence[Tensor]) -> BlockPlan | None:
        """Return where the tensors of a case are to lie, or None if they do not fit."""
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


def memories_of(device: str, kind: str = "mixed") -> tuple[list[Memory], str]:
    """Return the kinds of memory to try on "cpu" or "cuda", and why some are missing.

    Args:
        device: Where.
        kind: "mixed", "arena" or "guard".
    """
    if device == "cpu":
        return [HostMemory()], ""
    if kind == "arena":
        return [CudaMemory()], ""
    from .mapping import MappingError, blocks_of_process

    try:
        blocks = blocks_of_process()
    except MappingError as error:
        return [CudaMemory()], f"reads outside are not seen: {error}"
    guards: list[Memory] = [GuardMemory(blocks, at_end=True), GuardMemory(blocks, at_end=False)]
    return guards if kind == "guard" else [CudaMemory(), *guards], ""


def _views(
    plan: Plan, narrow: torch.Tensor, wide: torch.Tensor, first_word: int
) -> list[torch.Tensor]:
    tensors = []
    for region in plan.regions:
        if region.dtype == "int32":
            base, start = narrow, first_word + region.start_bytes // 4
        else:
            base, start = wide, (4 * first_word + region.start_bytes) // 8
        stride = (1,) if len(region.shape) == 1 else (region.row_stride, 1)
        tensors.append(base.as_strided(region.shape, stride, start))
    return tensors
