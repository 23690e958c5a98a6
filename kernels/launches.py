"""Where a kernel can run, and on which device it is launched."""

from contextlib import AbstractContextManager, nullcontext

import torch
from triton.runtime.jit import JITFunction

TILE_SIZE = 256
"""Output elements that one program handles at a time."""

FEW_STEPS, MANY_STEPS = 3, 8
"""Steps of the search for the owner of an element among the requests of a window.

Two variants of a kernel: a window of 8 requests for batches no larger, and one of 256.
"""

WINDOW_SIZE = 2**MANY_STEPS
"""Requests that one program looks at, at a time, where the batch may be large."""

_ON_CURRENT_DEVICE = nullcontext()


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


def count_tiles(num_elements: int) -> int:
    """Return how many tiles cover `num_elements` elements."""
    return -(-num_elements // TILE_SIZE)


def count_steps(batch_size: int) -> int:
    """Return the steps of the search in a batch; its window is 2 to the power of that."""
    return FEW_STEPS if batch_size <= 2**FEW_STEPS else MANY_STEPS
