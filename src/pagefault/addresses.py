"""Every address that a kernel uses in Triton's interpreter, held against the tensors of its launch.

The pointers that a kernel gets are not addresses: the k-th tensor of a launch starts at k * 2**48.
An access is translated when it is carried out, so that an address says which tensor it was made
from however far away it lies, and one that lies in no element of that tensor is noted and left
out: a load gives its `other` there, a store nothing. Nothing wild ever reaches memory.

Works on what Triton 3.6 to 3.9 have in `triton.runtime.interpreter`; `install` says so where that
is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from . import reached
from .case import Cells

_WINDOW_BITS = 48
_HALF_WINDOW = 1 << (_WINDOW_BITS - 1)
# Low bits of the true address stay, so that a kernel sees the alignment that there is.
_ALIGNMENT_MASK = 0xFFF

_NEEDED = ("_interpreter", "_implicit_cvt", "interpreter_builder", "GridExecutor")
_NEEDED_OF_MEMORY = ("load", "store", "atomic_cas", "atomic_rmw")

Addresses = np.ndarray[Any, np.dtype[np.uint64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

Writes = Sequence[int | None] | Mapping[int, int | None]

# How the programs of a launch take turns.
ORDERS = FORWARDS, BACKWARDS, SHUFFLED = "forwards", "backwards", "shuffled"


@dataclass(frozen=True)
class Misstep:
    """An access that the contract does not allow, the first of its sort in a call.

    Attributes:
        kind: "address" (in no element of the tensor), "row" (in a row that belongs to no request
            of the call), "footprint" (a write to a cell that the contract does not name), "race"
            (a cell that another program writes) or "needless" (a read of a cell that the result
            does not need).
        access: "read", "write" or "atomic".
        tensor: The contract's name of the tensor, or the kernel's for one that it made itself.
        place: The cell, such as "req_to_page[2][5]".
        program: The program's index in the grid.
        kernel: The kernel's name.
        source: "file.py:12", the kernel's line.
        detail: What else there is to say.
    """

    kind: str
    access: str
    tensor: str
    place: str
    program: tuple[int, int, int]
    kernel: str
    source: str
    detail: str = ""


@dataclass
class Call:
    """What is known of the tensors of one call, and what went wrong in its launches.

    Attributes:
        names: The contract's name of each tensor, by data pointer and shape.
        rows: Rows that belong to requests of the call, by the name of a two-dimensional tensor.
        writes: The elements that may be written, as `Expected.writes` has them; none of a tensor
            that has a name and is not there.
        reads: The (row, column) of the cells that have to be read, by the name of a table; None
            where others may be read too.
        order: One of ORDERS.
        missteps: The first of each kind, access, tensor and line.
        launched: The kernels that were launched; an empty grid is no launch.
    """

    names: Mapping[tuple[int, tuple[int, ...]], str]
    rows: Mapping[str, frozenset[int]]
    writes: Mapping[str, Writes]
    reads: Mapping[str, Cells] | None = None
    order: str = FORWARDS
    missteps: dict[tuple[str, str, str, str], Misstep] = field(default_factory=dict)
    launched: dict[str, None] = field(default_factory=dict)


class Extent:
    """A tensor of a launch: where it lies, and which addresses are elements of it."""

    def __init__(
        self,
        tensor: Any,
        name: str,
        number: int,
        rows: frozenset[int] | None,
        writes: Writes | None,
        reads: Cells | None,
    ) -> None:
        self.name = name
        self._writes = writes
        self._reads = reads
        self._needed: Integers | None = None
        self._writable: Integers | None = None
        self._strides = tensor.stride()
        self.shape = tuple(tensor.shape)
        self.itemsize = tensor.element_size()
        true_start = tensor.data_ptr()
        self.start = (number << _WINDOW_BITS) | (true_start & _ALIGNMENT_MASK)
        self.shift = true_start - self.start
        dimensions = [
            (stride, size) for stride, size in zip(tensor.stride(), self.shape) if size != 1
        ]
        self.num_elements = tensor.numel()
        # From the widest stride down; one of 0 repeats what the others reach.
        self.dimensions = sorted((d for d in dimensions if d[0]), reverse=True)
        self.span = 1 + sum(stride * (size - 1) for stride, size in self.dimensions)
        self.is_dense = not self.num_elements or self.span == self.num_elements
        self.allowed_rows: Mask | None = None
        if rows is not None and len(self.shape) == 2 and self.num_elements:
            self.row_stride = tensor.stride(0)
            self.allowed_rows = np.zeros(self.shape[0], dtype=np.bool_)
            self.allowed_rows[[row for row in rows if row < self.shape[0]]] = True

    def elements(self, addresses: Addresses) -> Integers:
        """Return how many elements behind the first each address lies, rounded down."""
        behind: Integers = self._bytes_behind(addresses) // self.itemsize
        return behind

    def _bytes_behind(self, addresses: Addresses) -> Integers:
        return (addresses - np.uint64(self.start)).view(np.int64)

    def holds(self, addresses: Addresses, size_bytes: int) -> Mask:
        """Return which addresses are those of elements."""
        if not self.num_elements:
            return np.zeros(addresses.shape, dtype=np.bool_)
        bytes_behind = self._bytes_behind(addresses)
        last = self.span * self.itemsize - size_bytes
        held: Mask = (bytes_behind >= 0) & (bytes_behind <= last)
        if self.is_dense and self.itemsize == size_bytes:
            held &= bytes_behind % self.itemsize == 0
            return held
        left = bytes_behind // self.itemsize
        for stride, size in self.dimensions:
            held &= left // stride < size
            left = left % stride
        held &= left == 0
        return held

    def writable(self, addresses: Addresses) -> Mask | None:
        """Return which element addresses the contract lets be written; None for all."""
        if self._writes is None:
            return None
        if self._writable is None:
            self._writable = np.sort(self._offsets(self._writes))
        elements = self.elements(addresses)
        if not len(self._writable):
            return np.zeros(elements.shape, dtype=np.bool_)
        at = np.minimum(np.searchsorted(self._writable, elements), len(self._writable) - 1)
        named: Mask = self._writable[at] == elements
        return named

    def needed(self, addresses: Addresses) -> Mask | None:
        """Return which element addresses the result needs, or are a row's last, or None for all.

        A kernel may clamp a column to its row's last one, and discard what it has read there.
        """
        if self._reads is None or len(self.shape) != 2:
            return None
        row_stride, last_column = self._strides[0], self.shape[1] - 1
        if self._needed is None:
            offsets = [row * row_stride + column for row, column in self._reads]
            self._needed = np.sort(np.array(offsets, dtype=np.int64))
        elements = self.elements(addresses)
        needed: Mask = np.isin(elements, self._needed)
        if row_stride:
            needed |= elements % row_stride == last_column
        return needed

    def _offsets(self, writes: Writes) -> Integers:
        """Return where the elements of flat indices lie, in elements."""
        indices = np.fromiter(writes, np.int64) if isinstance(writes, Mapping) else None
        if indices is None:
            indices = np.arange(len(writes), dtype=np.int64)
        if len(self.shape) != 2:
            return indices
        rows, columns = indices // max(1, self.shape[1]), indices % max(1, self.shape[1])
        offsets: Integers = rows * self._strides[0] + columns
        return offsets

    def in_allowed_row(self, addresses: Addresses) -> Mask | None:
        """Return which element addresses lie in rows of the call's requests; None for all."""
        if self.allowed_rows is None:
            return None
        rows = self.elements(addresses)
        if self.row_stride:
            rows = rows // self.row_stride
        allowed: Mask = self.allowed_rows[rows]
        return allowed

    def place(self, address: int) -> str:
        """Return an address in terms of the tensor."""
        element = (address - self.start) // self.itemsize
        if len(self.shape) == 2:
            # Of one row, what lies behind it counts as its.
            rows_apart = self._strides[0] if self.shape[0] != 1 else 0
            row, column = divmod(element, rows_apart) if rows_apart else (0, element)
            return f"{self.name}[{row}][{column}]"
        return f"{self.name}[{element}]"

    def describe(self) -> str:
        return f"{self.name} has the shape {list(self.shape)}"


class _Launch:
    """One launch: its tensors, the program that runs, and what each program has touched."""

    def __init__(self, call: Call, kernel: str, parameters: Mapping[int, str]) -> None:
        self.call = call
        self.kernel = kernel
        self.extents: list[Extent] = []
        self.program = (0, 0, 0)
        self._parameters = parameters
        self._reads: list[_Touched] = []
        self._writes: list[_Touched] = []
        self._programs: list[tuple[int, int, int]] = []

    def add(self, tensor: Any) -> Extent:
        """Return the extent of a tensor that the kernel is given."""
        key = (tensor.data_ptr(), tuple(tensor.shape))
        name = self.call.names.get(key)
        if name is None:
            parameter = self._parameters.get(key[0], "a tensor")
            extent = Extent(tensor, parameter, len(self.extents) + 1, None, None, None)
        else:
            rows, writes = self.call.rows.get(name), self.call.writes.get(name, ())
            reads = None if self.call.reads is None else self.call.reads.get(name)
            extent = Extent(tensor, name, len(self.extents) + 1, rows, writes, reads)
        self.extents.append(extent)
        return extent

    def begin_program(self, program: tuple[int, int, int]) -> None:
        self.program = program
        self._programs.append(program)
        self.call.launched[self.kernel] = None

    def admit(
        self, pointers: Addresses, mask: Mask, size_bytes: int, access: str
    ) -> tuple[Addresses, Mask]:
        """Return true addresses, and the lanes whose access is to be carried out."""
        if not mask.any():
            return pointers, mask
        reached.count(reached.ACCESSES)
        tags = (pointers + np.uint64(_HALF_WINDOW)) >> np.uint64(_WINDOW_BITS)
        active_tags = tags[mask]
        true_addresses = pointers.copy()
        admitted: Mask = np.zeros(mask.shape, dtype=np.bool_)
        first_tag = active_tags[0]
        is_one_tensor = bool((active_tags == first_tag).all())
        for tag in [first_tag] if is_one_tensor else np.unique(active_tags):
            lanes = mask if is_one_tensor else mask & (tags == tag)
            if not 1 <= tag <= len(self.extents):
                self._note_unknown(pointers, lanes, access)
                continue
            extent = self.extents[int(tag) - 1]
            held = extent.holds(pointers, size_bytes)
            wrong = lanes & ~held
            if wrong.any():
                self._note("address", access, extent, int(pointers[wrong][0]))
            good = lanes & held
            if good.any():
                self._watch_footprint(extent, pointers[good], access)
            admitted |= good
            shifted = pointers + np.uint64(extent.shift % 2**64)
            true_addresses = np.where(good, shifted, true_addresses)
        self._remember(pointers[admitted], access)
        return true_addresses, admitted

    def _watch_footprint(self, extent: Extent, addresses: Addresses, access: str) -> None:
        """Note elements that the contract does not give to the call."""
        allowed = extent.in_allowed_row(addresses)
        reached.count(reached.ROWS, allowed is not None)
        if allowed is not None and not allowed.all():
            self._note("row", access, extent, int(addresses[~allowed][0]))
        if access == "read":
            needed = extent.needed(addresses)
            reached.count(reached.NEEDED_READS, needed is not None)
            if needed is not None and not needed.all():
                self._note("needless", access, extent, int(addresses[~needed][0]))
        else:
            named = extent.writable(addresses)
            reached.count(reached.FOOTPRINTS, named is not None)
            if named is not None and not named.all():
                self._note("footprint", access, extent, int(addresses[~named][0]))

    def _remember(self, addresses: Addresses, access: str) -> None:
        if access != "atomic":
            touched = self._reads if access == "read" else self._writes
            touched.append(_Touched(len(self._programs) - 1, addresses, _kernel_line()))

    def _note(self, kind: str, access: str, extent: Extent, address: int) -> None:
        source = _named(_kernel_line())
        key = (kind, access, extent.name, source)
        if key not in self.call.missteps:
            self.call.missteps[key] = Misstep(
                kind,
                access,
                extent.name,
                extent.place(address),
                self.program,
                self.kernel,
                source,
                extent.describe(),
            )

    def _note_unknown(self, pointers: Addresses, lanes: Mask, access: str) -> None:
        source = _named(_kernel_line())
        key = ("address", access, "no tensor", source)
        if key not in self.call.missteps:
            address = int(pointers[lanes][0])
            self.call.missteps[key] = Misstep(
                "address",
                access,
                "no tensor",
                f"{address:#x}",
                self.program,
                self.kernel,
                source,
                "the address was made from no tensor of the launch",
            )

    def end(self) -> None:
        """Look for cells that one program writes and another reads or writes."""
        if len(self._programs) < 2:
            return
        reached.count(reached.order(self.call.order))
        if not self._writes:
            return
        reached.count(reached.WRITE_RACES)
        written, writers = _gathered(self._writes)
        order = np.argsort(written, kind="stable")
        written, writers = written[order], writers[order]
        program_of = np.array([touched.program for touched in self._writes])
        twice = written[1:] == written[:-1]
        twice &= program_of[writers[1:]] != program_of[writers[:-1]]
        if twice.any():
            at = int(np.flatnonzero(twice)[0])
            pair = (self._writes[writers[at]], self._writes[writers[at + 1]])
            self._note_race(int(written[at]), *pair, "writes")
        if not self._reads:
            return
        reached.count(reached.READ_RACES)
        read, readers = _gathered(self._reads)
        at_write = np.minimum(np.searchsorted(written, read), len(written) - 1)
        reader_of = np.array([touched.program for touched in self._reads])
        clashes = written[at_write] == read
        clashes &= program_of[writers[at_write]] != reader_of[readers]
        if clashes.any():
            at = int(np.flatnonzero(clashes)[0])
            pair = (self._writes[writers[at_write[at]]], self._reads[readers[at]])
            self._note_race(int(read[at]), *pair, "reads")

    def _note_race(self, address: int, first: _Touched, second: _Touched, verb: str) -> None:
        extent = self.extents[((address + _HALF_WINDOW) >> _WINDOW_BITS) - 1]
        source = _named(first.line)
        key = ("race", verb, extent.name, source)
        if key in self.call.missteps:
            return
        programs = (self._programs[first.program], self._programs[second.program])
        detail = f"program {programs[1]} {verb} it too, in {_named(second.line)}"
        place = extent.place(address)
        self.call.missteps[key] = Misstep(
            "race", "write", extent.name, place, programs[0], self.kernel, source, detail
        )


class _Touched(NamedTuple):
    """Elements that one program has read or written in one access."""

    program: int
    addresses: Addresses
    line: Line


def _gathered(accesses: Sequence[_Touched]) -> tuple[Addresses, Integers]:
    """Return all addresses, and which access each belongs to."""
    addresses = np.concatenate([touched.addresses for touched in accesses])
    counts = [len(touched.addresses) for touched in accesses]
    return addresses, np.repeat(np.arange(len(accesses)), counts)


Line = tuple[str, int]

# Whether the code of a file is a kernel's, and not Triton's or ours.
_is_kernel_file: dict[str, bool] = {}


def _kernel_line() -> Line:
    """Return the file and line of the kernel that is running: the innermost frame that is its."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        is_kernel = _is_kernel_file.get(name)
        if is_kernel is None:
            folder = Path(name).parent
            inside_triton = folder.name in ("runtime", "language") and "triton" in folder.parts
            is_kernel = not inside_triton and folder != Path(__file__).parent
            _is_kernel_file[name] = is_kernel
        if is_kernel:
            return name, frame.f_lineno
        frame = frame.f_back
    return "", 0


def _named(line: Line) -> str:
    return f"{Path(line[0]).name}:{line[1]}" if line[1] else "an unknown line"


class _Memory:
    """Stands in for the interpreter's own loads and stores."""

    def __init__(self, real: Any, watch: Watch) -> None:
        self._real = real
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        launch = self._watch.launch
        if launch is not None:
            size = np.dtype(dtype).itemsize
            pointers, mask = launch.admit(pointers, np.asarray(mask, dtype=np.bool_), size, "read")
        return self._real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        launch = self._watch.launch
        if launch is not None:
            size = value.dtype.itemsize
            pointers, mask = launch.admit(pointers, np.asarray(mask, dtype=np.bool_), size, "write")
        return self._real.store(pointers, value, mask)

    def atomic_rmw(self, op: Any, pointers: Any, value: Any, mask: Any, sem: Any) -> Any:
        launch = self._watch.launch
        if launch is not None:
            size = value.dtype.itemsize
            pointers, mask = launch.admit(
                pointers, np.asarray(mask, dtype=np.bool_), size, "atomic"
            )
        return self._real.atomic_rmw(op, pointers, value, mask, sem)

    def atomic_cas(self, pointers: Any, compare: Any, value: Any, sem: Any) -> Any:
        launch = self._watch.launch
        if launch is not None:
            every = np.ones(pointers.shape, dtype=np.bool_)
            pointers, admitted = launch.admit(pointers, every, value.dtype.itemsize, "atomic")
            if not admitted.all():
                return np.zeros_like(value)
        return self._real.atomic_cas(pointers, compare, value, sem)


class Watch:
    """The address oracle of a process.

    Attributes:
        launch: The launch that is running, inside a watched call.
        missing: What the interpreter lacks that this needs, or "".
    """

    def __init__(self) -> None:
        self.launch: _Launch | None = None
        self._call: Call | None = None
        from triton.runtime import interpreter

        self.missing = _what_is_missing(interpreter)
        if not self.missing:
            self._install(interpreter)

    @contextmanager
    def watching(self, call: Call) -> Iterator[Call]:
        """Watch the launches of one call."""
        self._call = call
        try:
            yield call
        finally:
            self._call = None
            self.launch = None

    def _install(self, interpreter: Any) -> None:
        interpreter._interpreter = _Memory(interpreter._interpreter, self)
        convert = interpreter._implicit_cvt

        def convert_watched(argument: Any) -> Any:
            converted = convert(argument)
            if self.launch is not None and hasattr(argument, "data_ptr"):
                start = self.launch.add(argument).start
                converted.handle.data = np.array([start], dtype=np.uint64)
            return converted

        interpreter._implicit_cvt = convert_watched
        execute = interpreter.GridExecutor.__call__

        def execute_watched(executor: Any, *arguments: Any, **named: Any) -> Any:
            call = self._call
            if call is None:
                return execute(executor, *arguments, **named)
            parameters = {
                argument.data_ptr(): name
                for name, argument in [*zip(executor.arg_names, arguments), *named.items()]
                if hasattr(argument, "data_ptr")
            }
            self.launch = _Launch(call, executor.fn.__name__, parameters)
            try:
                result = execute(executor, *arguments, **named)
                self.launch.end()
                return result
            finally:
                self.launch = None

        interpreter.GridExecutor.__call__ = execute_watched
        builder = interpreter.interpreter_builder
        set_grid_idx, set_grid_dim = builder.set_grid_idx, builder.set_grid_dim
        grid = [1, 1, 1]

        def set_watched_grid_dim(*sizes: int) -> None:
            grid[:] = sizes
            set_grid_dim(*sizes)

        def set_watched_grid_idx(*program: int) -> None:
            if self.launch is not None:
                program = _program_at(self.launch.call.order, program, grid)
                self.launch.begin_program((program[0], program[1], program[2]))
            set_grid_idx(*program)

        builder.set_grid_dim = set_watched_grid_dim
        builder.set_grid_idx = set_watched_grid_idx


def _program_at(order: str, program: tuple[int, ...], grid: Sequence[int]) -> tuple[int, ...]:
    """Return the program that runs when a grid that runs forwards has come to another."""
    if order == BACKWARDS:
        return tuple(size - 1 - i for size, i in zip(grid, program))
    if order == FORWARDS:
        return program
    x, y, z = program
    num_programs = grid[0] * grid[1] * grid[2]
    # Steps of three eighths of the grid or a little more come to each program, where they have no
    # divisor in common with it.
    step = 1 + 3 * num_programs // 8
    while gcd(step, num_programs) > 1:
        step += 1
    at = (((x * grid[1] + y) * grid[2] + z) * step + num_programs // 2) % num_programs
    return at // (grid[1] * grid[2]), at // grid[2] % grid[1], at % grid[2]


def _what_is_missing(interpreter: Any) -> str:
    for name in _NEEDED:
        if not hasattr(interpreter, name):
            return f"triton.runtime.interpreter has no {name}"
    for name in _NEEDED_OF_MEMORY:
        if not hasattr(interpreter._interpreter, name):
            return f"triton's interpreter has no {name}"
    return ""


_watch: Watch | None = None


def install() -> Watch:
    """Return the address oracle of this process, made on the first call."""
    global _watch
    if _watch is None:
        _watch = Watch()
    return _watch


def call_of(
    tensors: Mapping[str, torch.Tensor],
    rows: Mapping[str, frozenset[int]],
    writes: Mapping[str, Writes],
    reads: Mapping[str, Cells] | None,
    order: str,
) -> Call:
    """Return what the watch has to know of a call.

    Args:
        tensors: The call's tensors by the contract's names.
        rows: Rows that belong to its requests, by the name of a table.
        writes: The elements that may be written, by the name of a tensor.
        reads: The cells that have to be read, by the name of a table; None for whichever.
        order: How the programs of its launches take turns.
    """
    names = {(tensor.data_ptr(), tuple(tensor.shape)): name for name, tensor in tensors.items()}
    return Call(names, rows, writes, reads, order)
