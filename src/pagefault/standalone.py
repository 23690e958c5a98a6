"""What every `repro.py` brings along: tensors with guards, the call, and what is wrong with it.

The text of this module is copied into each script as it is: it needs torch, NumPy and Triton, and
nothing of pagefault.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import logging
import os
import re
import signal
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

# What lies in every byte that is no input: in the first call one, in the second the other.
POISONS = (-7, 11)
GUARD_ELEMENTS = 32
MOST_LINES = 12

SHOWS, SHOWS_NOT, CAN_NOT_RUN = 1, 0, 2

# Set in the process that makes the call, where that may die: the pipe to the one that waits.
CHILD_VARIABLE = "REPRO_CHILD"


@dataclasses.dataclass
class Expected:
    """What is right; None stands for an element that may hold anything.

    Attributes:
        writes: Per tensor its first elements, or elements by flat index (row * columns + column).
            Everything else keeps its value.
        results: What is returned, by name: the whole, or each item of a tuple.
        returns: By path an int, or (dtype, device, shape, elements) of a tensor with "" for the
            device of the call; None where nothing is returned.
        raises: The exception that is raised, or "".
        warnings: The words that each logged warning has to contain; None where any may be logged.
        rows: Per table the rows that may be read.
    """

    writes: Mapping[str, Any]
    results: Sequence[str] = ("result",)
    returns: Mapping[str, Any] | None = None
    raises: str = ""
    warnings: Sequence[Sequence[str]] | None = None
    rows: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)


def main(
    name: str,
    kernels: Sequence[str],
    call: Callable[..., Any],
    expected: Expected,
    device: str,
    seconds: float,
) -> int:
    """Make the call, print what is wrong with it, and return the exit status.

    Args:
        name: The function's name.
        kernels: Where it may be: files or modules, of which the first that is there is taken.
        call: Makes the call, given the function and where its tensors come from.
        expected: What is right.
        device: "cpu" or "cuda".
        seconds: How long the call may take in a process of its own; 0 makes it in this one.
    """
    channel = os.environ.pop(CHILD_VARIABLE, "")
    if seconds and not channel:
        return _in_a_process_of_its_own(name, seconds)
    device = os.environ.get("DEVICE", device)
    if device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here: through Triton's interpreter instead")
        device = "cpu"
    # Read when a kernel is decorated.
    os.environ["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
    try:
        source, module = _load(sys.argv[1:2] or kernels)
        function = getattr(module, name)
    except Exception as error:
        print(f"the kernel can't be loaded: {type(error).__name__}: {error}")
        return CAN_NOT_RUN
    print(f"{name} of {source} on {device}")
    sys.stdout.flush()
    if channel:
        os.write(int(channel), b"calling")
    runs: list[list[str]] = []
    for poison in POISONS:
        try:
            runs.append(_problems_of(call, function, expected, device, poison))
        except RuntimeError as error:
            if device == "cpu":
                raise
            # Nothing can be launched in this process any more.
            runs = [[f"the device reported: {str(error).strip().splitlines()[0]}"]]
            break
    in_both = [problem for problem in runs[0] if problem in runs[-1]]
    reverse = " and the programs in reverse order" if device == "cpu" else ""
    labels = [f"with {poison} in every byte that is no input" for poison in POISONS]
    lines = in_both + [
        f"{label}: {problem}"
        for label, problems in zip((labels[0], labels[1] + reverse), runs)
        for problem in problems
        if problem not in in_both
    ]
    for line in lines[:MOST_LINES]:
        print(f"  {line}")
    if len(lines) > MOST_LINES:
        print(f"  and {len(lines) - MOST_LINES} more")
    print("the fault shows" if lines else "the fault does not show")
    sys.stdout.flush()
    if channel:
        os.write(int(channel), b"!")
    return SHOWS if lines else SHOWS_NOT


def _load(sources: Sequence[str]) -> tuple[str, Any]:
    """Return the first file or module that is there, and the module that it is."""
    beside = Path(__file__).parent
    for source in sources:
        if not source.endswith(".py"):
            return source, importlib.import_module(source)
        for path in (Path(source), beside / source):
            if path.is_file():
                return str(path), _load_file(path.resolve())
    raise FileNotFoundError(f"none of {', '.join(sources)}")


def _load_file(path: Path) -> Any:
    # What lies beside the file can be imported: by its name, or relative to a package.
    sys.path.append(str(path.parent))
    package: Any = types.ModuleType("under_test")
    package.__path__ = [str(path.parent)]
    sys.modules[package.__name__] = package
    name = f"{package.__name__}.{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _in_a_process_of_its_own(name: str, seconds: float) -> int:
    """Run this script once more, and say how that process ended."""
    reader, writer = os.pipe()
    child = subprocess.Popen(
        [sys.executable, *sys.argv],
        env={**os.environ, CHILD_VARIABLE: str(writer)},
        pass_fds=[writer],
    )
    os.close(writer)
    os.read(reader, 7)  # Ends when the call begins, or when the process is over.
    try:
        status = child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        print(f"  {name} had not returned after {seconds:g} s\nthe fault shows")
        return SHOWS
    has_answered = os.read(reader, 1) == b"!"
    if has_answered or status == CAN_NOT_RUN:
        return status
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    print(f"  {name}: the process died: {how}\nthe fault shows")
    return SHOWS


class Memory:
    """Tensors that lie in a buffer each, with poison around them and in every gap.

    Args:
        poison: What every byte holds that is no input.
        device: Where.
    """

    def __init__(self, poison: int, device: str) -> None:
        self.poison = poison
        self.device = device
        self.tensors: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}

    def output(
        self, name: str, num_elements: int, dtype: torch.dtype, offset: int = 0
    ) -> torch.Tensor:
        """Return a tensor that holds nothing yet."""
        return self._place(name, (num_elements,), dtype, offset, 0, None)

    def tensor(
        self,
        name: str,
        values: Any,
        dtype: torch.dtype,
        offset: int = 0,
        row_stride: int = 0,
        shape: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return a tensor that holds input: numbers, or rows of them.

        Args:
            name: The parameter's name.
            values: What it holds.
            dtype: Its dtype.
            offset: Elements between a boundary of 16 bytes and the first one.
            row_stride: Elements from one row to the next; 0 where there is no gap between them.
            shape: Where the values do not tell.
        """
        wanted = torch.tensor(values, dtype=dtype)
        shape = tuple(wanted.shape if shape is None else shape)
        return self._place(name, shape, dtype, offset, row_stride, wanted.reshape(shape))

    def _place(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        offset: int,
        row_stride: int,
        values: torch.Tensor | None,
    ) -> torch.Tensor:
        strides = (1,) if len(shape) == 1 else (row_stride or shape[1], 1)
        num_elements = _span(shape, strides) + offset + 2 * GUARD_ELEMENTS
        buffer = torch.full((num_elements,), self.poison, dtype=dtype, device=self.device)
        tensor = buffer.as_strided(tuple(shape), strides, GUARD_ELEMENTS + offset)
        if values is not None:
            tensor.copy_(values)
        self.tensors[name] = tensor
        self._buffers[name] = buffer
        self._before[name] = buffer.cpu().clone()
        return tensor

    def problems(self, writes: Mapping[str, Any]) -> Iterator[str]:
        """Yield what is not as it should be in and beside the tensors."""
        for name, tensor in self.tensors.items():
            after, wanted = self._buffers[name].cpu(), self._before[name].clone()
            named = _by_index(writes.get(name, {}))
            first, cells = tensor.storage_offset(), _cells(tensor)
            for offset, index in cells.items():
                if index in named:
                    value = named[index]
                    wanted[first + offset] = after[first + offset] if value is None else value
            for place in (after != wanted).nonzero().flatten().tolist():
                still = "" if cells.get(place - first) in named else " still"
                yield (
                    f"{_place_in(name, tensor, place - first)} = {int(after[place])}, "
                    f"but should{still} be {int(wanted[place])}"
                )


def host_tensor(values: Sequence[int], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """Return a tensor on the CPU whatever the device."""
    return torch.tensor([*[POISONS[0]] * offset, *values], dtype=dtype)[offset:]


def _by_index(writes: Any) -> dict[int, int | None]:
    return dict(writes) if isinstance(writes, dict) else dict(enumerate(writes))


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie between the first and the last of a tensor, both included."""
    if 0 in shape:
        return 0
    return 1 + sum(stride * (size - 1) for size, stride in zip(shape, strides))


def _cells(tensor: Any) -> dict[int, int]:
    """Return the flat index of each element, by how far it lies behind the first."""
    offsets = torch.arange(_span(tensor.shape, tensor.stride()))
    listed = offsets.as_strided(tuple(tensor.shape), tensor.stride()).flatten().tolist()
    return {offset: index for index, offset in enumerate(listed)}


def _place_in(name: str, tensor: Any, offset: int) -> str:
    """Return a place in or beside a tensor, by how far it lies behind the first element."""
    if tensor.dim() != 2 or 0 in tensor.shape:
        return f"{name}[{offset}]"
    row_stride = tensor.stride(0) if tensor.shape[0] > 1 else tensor.shape[1]
    row, column = divmod(offset, max(1, row_stride))
    return f"{name}[{row}][{column}]"


def _problems_of(
    call: Callable[..., Any], function: Any, expected: Expected, device: str, poison: int
) -> list[str]:
    """Return what is wrong with one call."""
    memory = Memory(poison, device)
    accesses = _Accesses(memory, expected, is_backwards=poison == POISONS[1])
    problems: list[str] = accesses.problems

    def watched(*arguments: Any) -> Any:
        with accesses.watched() if device == "cpu" else _unwatched():
            return function(*arguments)

    error: BaseException | None = None
    with _logged_warnings() as warnings:
        try:
            result = call(watched, memory)
        except (Exception, SystemExit) as raised:
            error = raised
    if device == "cuda":
        torch.cuda.synchronize()
    names = [] if error is None else [cls.__name__ for cls in type(error).__mro__]
    wanted = f", but should raise {expected.raises}" if expected.raises else ""
    if error is not None and expected.raises not in names:
        return [*problems, f"raised {type(error).__name__}: {error}{wanted}"]
    if error is None and expected.raises:
        problems.append(f"returned{wanted}")
    problems += memory.problems({} if expected.raises else expected.writes)
    if error is None and not expected.raises:
        problems += _wrong_results(result, expected, device)
        problems += _wrong_warnings(warnings, expected.warnings)
    return problems


def _wrong_results(result: Any, expected: Expected, device: str) -> Iterator[str]:
    """Yield what is not as it should be in what was returned."""
    if expected.returns is None:
        if result is not None:
            yield "returned something, but should return None"
        return
    names = expected.results
    if len(names) > 1 and not isinstance(result, (tuple, list)):
        yield f"returned {result!r}, but should return {', '.join(names)}"
        return
    items = dict(zip(names, [result] if len(names) == 1 else result))
    for name, item in items.items():
        listed = [path for path in expected.returns if path.startswith(f"{name}[")]
        if isinstance(item, list) and len(item) > len(listed):
            yield f"{name} has {len(item)} items, but should have {len(listed)}"
    for path, wanted in expected.returns.items():
        try:
            found = eval(path, {}, items)
        except Exception as error:
            yield f"{path} is missing: {type(error).__name__}: {error}"
            continue
        if isinstance(wanted, int):
            if type(found) is not int or found != wanted:
                yield f"{path} = {found!r}, but should be {wanted}"
            continue
        if not isinstance(found, torch.Tensor):
            yield f"{path} is {found!r}, but should be a tensor"
            continue
        dtype, where, shape, values = wanted
        what = (str(found.dtype).removeprefix("torch."), found.device.type, list(found.shape))
        should = (dtype, where or device, list(shape))
        if what != should:
            yield f"{path} is {what}, but should be {should}"
            continue
        for index, (value, right) in enumerate(zip(found.flatten().tolist(), values)):
            if right is not None and value != right:
                place = "".join(f"[{i}]" for i in np.unravel_index(index, tuple(shape)))
                yield f"{path}{place} = {value}, but should be {right}"


def _wrong_warnings(found: Sequence[str], wanted: Sequence[Sequence[str]] | None) -> Iterator[str]:
    """Yield what is wrong with what was logged."""
    if wanted is None:
        return
    if len(found) != len(wanted):
        yield f"{len(found)} warnings logged, but should be {len(wanted)}: {list(found)}"
        return
    for message, words in zip(found, wanted):
        for word in Counter(words) - Counter(re.findall(r"[\w-]+", message)):
            yield f"a warning does not say {word}: {message!r}"


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def _logged_warnings() -> Iterator[list[str]]:
    collector = _Collector()
    logging.getLogger().addHandler(collector)
    try:
        yield collector.messages
    finally:
        logging.getLogger().removeHandler(collector)


@contextmanager
def _unwatched() -> Iterator[None]:
    yield


class _Accesses:
    """Every access in Triton's interpreter, held against the tensors of its launch.

    The k-th tensor that a kernel is given seems to start at k * 2**48, so that an address says
    which tensor it was made from. An access to no element of that tensor is noted and left out.

    Args:
        memory: The tensors of the call.
        expected: Which rows may be read, and which elements written.
        is_backwards: Whether the programs of a launch run in reverse order.
    """

    WINDOW_BITS = 48

    def __init__(self, memory: Memory, expected: Expected, is_backwards: bool) -> None:
        self.problems: list[str] = []
        self._noted: set[tuple[str, ...]] = set()
        self._memory = memory
        self._expected = expected
        self._is_backwards = is_backwards
        self._given: list[tuple[str, Any, dict[int, int]]] = []
        self._grid = (1, 1, 1)
        self._program = (0, 0, 0)
        # Which program has touched an element last, and whether it has written there.
        self._touched: dict[tuple[int, int], tuple[tuple[int, int, int], bool]] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the launches inside; where Triton's interpreter is another one, say so."""
        from triton.runtime import interpreter

        try:
            real, builder = interpreter._interpreter, interpreter.interpreter_builder
            convert, patch_language = interpreter._implicit_cvt, interpreter._patch_lang
            set_dim, set_idx, options = builder.set_grid_dim, builder.set_grid_idx, builder.options
        except AttributeError as error:
            print(f"  addresses are not checked: {error}")
            yield
            return

        def given(argument: Any) -> Any:
            converted = convert(argument)
            if hasattr(argument, "data_ptr"):
                self._given.append((self._name_of(argument), argument, _cells(argument)))
                start = len(self._given) << self.WINDOW_BITS
                converted.handle.data = np.array([start], dtype=np.uint64)
            return converted

        def launch_begins(*grid: int) -> None:
            self._grid, self._touched = (grid[0], grid[1], grid[2]), {}
            set_dim(*grid)

        def program_begins(*idx: int) -> None:
            if self._is_backwards:
                idx = tuple(size - 1 - i for size, i in zip(self._grid, idx))
            self._program = (idx[0], idx[1], idx[2])
            set_idx(*idx)

        def patched(kernel: Any) -> Any:
            # Some versions turn arrays of one element into numbers, which some of NumPy refuse.
            scope = patch_language(kernel)
            tensor = interpreter.tl.tensor
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
            return scope

        interpreter._interpreter = _WatchedMemory(real, self._admit)
        interpreter._implicit_cvt, interpreter._patch_lang = given, patched
        builder.set_grid_dim, builder.set_grid_idx = launch_begins, program_begins
        # A compiled kernel lets its integers wrap.
        if hasattr(options, "sanitize_overflow"):
            builder.options = dataclasses.replace(options, sanitize_overflow=False)
        try:
            yield
        finally:
            interpreter._interpreter = real
            interpreter._implicit_cvt, interpreter._patch_lang = convert, patch_language
            builder.set_grid_dim, builder.set_grid_idx = set_dim, set_idx
            builder.options = options

    def _name_of(self, tensor: Any) -> str:
        key = (tensor.data_ptr(), tuple(tensor.shape))
        for name, known in self._memory.tensors.items():
            if (known.data_ptr(), tuple(known.shape)) == key:
                return name
        return "a tensor of the launcher"

    def _admit(self, pointers: Any, mask: Any, size: int, verb: str) -> tuple[Any, Any]:
        """Return true addresses, and which lanes of an access are to be carried out."""
        addresses = np.array(pointers, dtype=np.uint64)
        admitted = np.broadcast_to(np.asarray(mask, dtype=np.bool_), addresses.shape).copy()
        for lane in np.argwhere(admitted):
            at = tuple(lane)
            address = self._true_address(int(addresses[at]), size, verb)
            admitted[at] = address is not None
            addresses[at] = address or 0
        return addresses, admitted

    def _true_address(self, address: int, size: int, verb: str) -> int | None:
        half = 1 << (self.WINDOW_BITS - 1)
        number = (address + half) >> self.WINDOW_BITS
        if not 0 < number <= len(self._given):
            self._note(f"{verb} of", f"{address:#x}", "which was made from no tensor of a launch")
            return None
        name, tensor, cells = self._given[number - 1]
        offset, remainder = divmod(address - (number << self.WINDOW_BITS), tensor.element_size())
        what, place = f"{verb} of {name}", _place_in(name, tensor, offset)
        index = cells.get(offset)
        if index is None or remainder or size != tensor.element_size():
            shape = list(tensor.shape)
            self._note(what, place, f"which is no element of it (shape {shape})")
            return None
        if name in self._memory.tensors:
            rows = self._expected.rows.get(name)
            if rows is not None and tensor.dim() == 2 and index // tensor.shape[1] not in rows:
                self._note(what, place, "a row that belongs to no request of the call")
            writes = {} if self._expected.raises else self._expected.writes
            if verb != "read" and index not in _by_index(writes.get(name, {})):
                self._note(what, place, "which the contract does not name")
        if verb != "atomic":
            program, was_written = self._touched.get((number, index), (self._program, False))
            if program != self._program and (was_written or verb == "write"):
                self._note(what, place, "which another program touches")
            self._touched[number, index] = (self._program, was_written or verb == "write")
        return int(tensor.data_ptr() + offset * size)

    def _note(self, what: str, place: str, problem: str) -> None:
        """Note a problem, the first of its sort in each line of the kernel."""
        line = _kernel_line()
        if (what, problem, line) not in self._noted:
            self._noted.add((what, problem, line))
            verb = what.split()[0]
            text = f"{verb} of {place}, {problem}, in {line}, program {self._program}"
            self.problems.append(text)


def _kernel_line() -> str:
    """Return the file and the line of the kernel that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        is_triton = path.parent.name in ("runtime", "language") and "triton" in path.parts
        if not is_triton and frame.f_code.co_filename != __file__:
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


class _WatchedMemory:
    """Stands in for the interpreter's own loads and stores."""

    def __init__(self, real: Any, admit: Callable[..., tuple[Any, Any]]) -> None:
        self._real = real
        self._admit = admit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        pointers, mask = self._admit(pointers, mask, np.dtype(dtype).itemsize, "read")
        return self._real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        pointers, mask = self._admit(pointers, mask, value.dtype.itemsize, "write")
        return self._real.store(pointers, value, mask)

    def atomic_rmw(self, op: Any, pointers: Any, value: Any, mask: Any, sem: Any) -> Any:
        pointers, mask = self._admit(pointers, mask, value.dtype.itemsize, "atomic")
        return self._real.atomic_rmw(op, pointers, value, mask, sem)

    def atomic_cas(self, pointers: Any, compare: Any, value: Any, sem: Any) -> Any:
        every = np.ones(pointers.shape, dtype=np.bool_)
        pointers, admitted = self._admit(pointers, every, value.dtype.itemsize, "atomic")
        if not admitted.all():
            return np.zeros_like(value)
        return self._real.atomic_cas(pointers, compare, value, sem)
