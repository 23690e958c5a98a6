"""Where a kernel can run, on which device it is launched, and in what shape."""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from triton.runtime.jit import JITFunction

_ON_CURRENT_DEVICE = nullcontext()


class RaggedShape(NamedTuple):
    """How a launch over a ragged batch is cut into programs; each field is compiled in.

    Attributes:
        window_size: Requests that a program looks at, at a time.
        has_one_window: Whether no batch has more.
        group_size: Requests whose elements one program handles if they have few.
        short_len: How many elements are few.
        tile_size: Elements, of requests with more than a few, that one program handles at a time.
        num_warps: Warps of a program.
    """

    window_size: int
    has_one_window: bool
    group_size: int
    short_len: int
    tile_size: int
    num_warps: int

    @property
    def constants(self) -> tuple[int, ...]:
        """Return the fields that a kernel takes as its last parameters."""
        return self[:5]


class UniformShape(NamedTuple):
    """How a launch over requests of one length is cut into programs; each field is compiled in.

    Attributes:
        tile_size: Elements that one program handles.
        num_warps: Warps of a program.
    """

    tile_size: int
    num_warps: int


RAGGED_SHAPES = {
    "few": RaggedShape(256, True, 8, 32, 1024, 4),
    "some": RaggedShape(256, True, 32, 4, 1024, 4),
    "some, large output": RaggedShape(256, True, 32, 4, 4096, 8),
    "many": RaggedShape(2048, False, 64, 4, 1024, 8),
    "many, large output": RaggedShape(1024, False, 64, 4, 4096, 8),
}
"""Few requests are 32 at most, some are 256, many may be any number.

A batch within one window is looked at once. A small output takes many small programs, to spread it
over the chip, and a large one programs that have much under way. `benchmarks/bench_kernels.py
--sweep` tries other shapes.
"""

UNIFORM_SHAPES = {
    "any": UniformShape(256, 8),
    "large output": UniformShape(2048, 8),
}

CHUNKING_WINDOW_SIZE = 256
"""Requests of a chunk that one program of `chunking` looks at, at a time."""

LARGE_OUTPUT = 2**18
"""Elements from which an output is large."""

MAX_TILE_PROGRAMS = 512
"""Programs that share the tiles of a launch; an output may be far longer than its batch."""


def ragged_shape(batch_size: int, num_elements: int) -> RaggedShape:
    """Return the shape of a launch over a ragged batch.

    Args:
        batch_size: Requests.
        num_elements: Size of the flat output or input.
    """
    if num_elements >= LARGE_OUTPUT:
        return RAGGED_SHAPES["some, large output" if batch_size <= 256 else "many, large output"]
    return RAGGED_SHAPES["few" if batch_size <= 32 else "some" if batch_size <= 256 else "many"]


def uniform_shape(num_elements: int) -> UniformShape:
    """Return the shape of a launch over requests of one length."""
    return UNIFORM_SHAPES["any" if num_elements < LARGE_OUTPUT else "large output"]


def count_programs(batch_size: int, num_elements: int, max_len: int, shape: RaggedShape) -> int:
    """Return how many programs a launch over a ragged batch has.

    Args:
        batch_size: Requests.
        num_elements: Size of the flat output or input.
        max_len: Elements that no request has more of.
        shape: Of the launch.
    """
    num_groups = -(-batch_size // shape.group_size)
    if max_len <= shape.short_len:
        return num_groups
    return num_groups + min(-(-num_elements // shape.tile_size), MAX_TILE_PROGRAMS)


def can_launch(kernel: object, tensor: torch.Tensor) -> bool:
    """Return whether Triton can run `kernel` on the memory of `tensor`.

    Without TRITON_INTERPRET=1 a kernel is compiled, for a GPU alone. With it, what the
    decorator made is not a JITFunction, and runs on any memory.
    """
    return tensor.is_cuda or not isinstance(kernel, JITFunction)


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context in which the device of `tensor` is the current one.

    Triton launches on the current device and its current stream, wherever the tensors lie.
    """
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _ON_CURRENT_DEVICE
