"""Where a kernel can run, on which device it is launched, and in what shape."""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from triton.runtime.jit import JITFunction

_ON_CURRENT_DEVICE = nullcontext()


class RaggedShape(NamedTuple):
    """How a launch over a ragged batch is cut into programs; each field is compiled in.

    Attributes:
        is_by_request: Whether each request has programs of its own, one a tile; there are no
            groups then.
        looks_first: Whether a program that shares the tiles first looks whether they are anybody's,
            which is soon done and makes what follows later.
        window_size: Requests that a program looks at, at a time.
        has_one_window: Whether no batch has more.
        group_size: Requests whose elements one program handles if they have few. If is_by_request,
            whose lengths are added up at a time: 32 lie in a warp, and that takes no barrier.
        short_len: How many elements are few.
        tile_size: Elements, of requests with more than a few, that one program handles at a time.
        num_warps: Warps of a program.
        max_tile_programs: Programs at most that have tiles; an output may be far longer than its
            batch.
        most_requests: A larger batch is not launched in this shape.
        least_room: Nor is one whose output has room for fewer elements of each request.
    """

    is_by_request: bool
    looks_first: bool
    window_size: int
    has_one_window: bool
    group_size: int
    short_len: int
    tile_size: int
    num_warps: int
    max_tile_programs: int
    most_requests: int = 2**31 - 1
    least_room: int = 0

    @property
    def constants(self) -> tuple[int, ...]:
        """Return the fields that a kernel takes as its last parameters."""
        return self[:7]


class UniformShape(NamedTuple):
    """How a launch over requests of one length is cut into programs; each field is compiled in.

    Attributes:
        tile_size: Elements that one program handles.
        num_warps: Warps of a program.
    """

    tile_size: int
    num_warps: int


RAGGED_SHAPES = {
    "few, long": RaggedShape(True, False, 64, True, 32, 8, 2048, 4, 512, 64, 257),
    "few": RaggedShape(False, True, 64, True, 8, 8, 1024, 4, 512, 64),
    "some, very long": RaggedShape(False, False, 256, True, 16, 4, 2048, 4, 640, 256, 2049),
    "some, long": RaggedShape(True, False, 256, True, 32, 8, 1024, 2, 512, 256, 257),
    "some": RaggedShape(False, True, 256, True, 8, 8, 1024, 4, 512, 256),
    "many, long": RaggedShape(True, False, 1024, True, 1024, 8, 2048, 4, 1024, 1024, 257),
    "many": RaggedShape(False, True, 1024, False, 64, 4, 1024, 8, 512),
}
"""A launch has the first that it fits, and fits the last.

A batch within one window is looked at once. Requests are long where the output has room for many
elements of each, and have programs of their own then, unless there are more than a window holds.
Where it has room for very many of each of some, it is likely that one has most of them, and all
programs share the tiles. `benchmarks/bench_kernels.py --sweep` tries other shapes.
"""

UNIFORM_SHAPES = {
    "any": UniformShape(256, 8),
    "large output": UniformShape(2048, 8),
}

CHUNKING_WINDOW_SIZE = 256
"""Requests of a chunk that one program of `chunking` looks at, at a time."""

LARGE_OUTPUT = 2**18
"""Elements from which the output of requests of one length is large."""


def ragged_shape(batch_size: int, num_elements: int = 0) -> RaggedShape:
    """Return the shape of a launch over a ragged batch.

    Args:
        batch_size: Requests.
        num_elements: Size of the flat output; 0 where the shapes for long requests are no use.
    """
    for shape in RAGGED_SHAPES.values():
        if batch_size <= shape.most_requests and num_elements >= shape.least_room * batch_size:
            break
    return shape


def uniform_shape(num_elements: int) -> UniformShape:
    """Return the shape of a launch over requests of one length."""
    return UNIFORM_SHAPES["any" if num_elements < LARGE_OUTPUT else "large output"]


def ragged_grid(
    batch_size: int, num_elements: int, max_len: int, shape: RaggedShape
) -> tuple[int, int]:
    """Return how many programs a launch over a ragged batch has, and for how many parts of it.

    Args:
        batch_size: Requests.
        num_elements: Size of the flat output or input.
        max_len: Elements that no request has more of.
        shape: Of the launch.
    """
    if shape.is_by_request:
        return programs_of_request(batch_size, num_elements, max_len, shape), batch_size
    num_groups = -(-batch_size // shape.group_size)
    if max_len <= shape.short_len:
        return num_groups, 1
    return num_groups + programs_of_tiles(num_elements, shape), 1


def programs_of_tiles(num_elements: int, shape: RaggedShape) -> int:
    """Return how many programs share the tiles of an output; any number from one on would do.

    Args:
        num_elements, shape: As `ragged_grid` has them.
    """
    return min(-(-num_elements // shape.tile_size), shape.max_tile_programs)


def programs_of_request(
    batch_size: int, num_elements: int, max_len: int, shape: RaggedShape
) -> int:
    """Return how many programs each request has: enough where all have equally many elements.

    Any number from one on would do, as they share the tiles that are left.

    Args:
        batch_size, num_elements, max_len, shape: As `ragged_grid` has them.
    """
    num_tiles = -(-min(num_elements // batch_size, max_len) // shape.tile_size)
    return max(min(num_tiles, shape.max_tile_programs // batch_size), 1)


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
