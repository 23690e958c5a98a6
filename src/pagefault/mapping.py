"""CUDA virtual memory: blocks whose neighbours are not mapped, so that one step too far faults.

Uses the driver through `cuda.bindings`, which torch's CUDA builds bring along.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


class MappingError(RuntimeError):
    """The driver's calls for virtual memory are missing or have failed; the message says which."""


class Blocks:
    """Blocks of device memory, each alone between unmapped addresses, and all of them in a row.

    Each block is mapped twice: at an address of its own with nothing mapped before and behind it,
    and in one window where the blocks follow one another, for copies.

    Args:
        num_blocks: How many.

    Raises:
        MappingError: The driver can't do it.

    Attributes:
        block_bytes: Size of a block, the driver's granularity.
        blocks: [block_bytes / 4] int32, one tensor for each block.
        window_address: Where the same memory lies in a row.
    """

    def __init__(self, num_blocks: int) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise MappingError(f"cuda.bindings can't be imported: {error}") from error
        self._driver = driver
        torch.empty(1, device="cuda")  # Makes the context current.
        device = torch.cuda.current_device()
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = self._call("cuMemGetAllocationGranularity", properties, flag)
        self.block_bytes = int(granularity)
        access = driver.CUmemAccessDesc()
        access.location = properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        window = self._reserve(num_blocks * self.block_bytes)
        addresses = []
        for i in range(num_blocks):
            handle = self._call("cuMemCreate", self.block_bytes, properties, 0)
            alone = self._reserve(3 * self.block_bytes) + self.block_bytes
            for address in (alone, window + i * self.block_bytes):
                self._call("cuMemMap", address, self.block_bytes, 0, handle, 0)
                self._call("cuMemSetAccess", address, self.block_bytes, [access], 1)
            addresses.append(alone)
        self.blocks = [_tensor_at(address, self.block_bytes) for address in addresses]
        self.window_address = window

    def copier(self, host: torch.Tensor, to_host: bool) -> Callable[[int, int, int], None]:
        """Return a function that copies between pinned host memory and a part of each block.

        It takes how many blocks, how many bytes of each, and where in the block these begin; on
        the host they lie one behind the other. It queues the copy on the current stream.

        Args:
            host: Contiguous pinned memory.
            to_host: Whether to copy from the device to the host, or the other way round.
        """
        types = self._driver.CUmemorytype
        copy = self._driver.CUDA_MEMCPY2D()
        source, destination = ("src", "dst") if not to_host else ("dst", "src")
        setattr(copy, f"{source}MemoryType", types.CU_MEMORYTYPE_HOST)
        setattr(copy, f"{source}Host", host.data_ptr())
        setattr(copy, f"{destination}MemoryType", types.CU_MEMORYTYPE_DEVICE)
        setattr(copy, f"{destination}Device", self.window_address)
        setattr(copy, f"{destination}Pitch", self.block_bytes)

        def run(num_blocks: int, num_bytes: int, first_byte: int) -> None:
            copy.WidthInBytes = num_bytes
            copy.Height = num_blocks
            setattr(copy, f"{source}Pitch", num_bytes)
            setattr(copy, f"{destination}XInBytes", first_byte)
            self._call("cuMemcpy2DAsync", copy, torch.cuda.current_stream().cuda_stream)

        return run

    def _reserve(self, num_bytes: int) -> int:
        return int(self._call("cuMemAddressReserve", num_bytes, 0, 0, 0))

    def _call(self, name: str, *arguments: Any) -> Any:
        result, *values = getattr(self._driver, name)(*arguments)
        if int(result) != 0:
            raise MappingError(f"{name} failed: {result}")
        return values[0] if values else None


# Both replicas of as many tensors as a function of ours has.
NUM_BLOCKS = 16


@cache
def blocks_of_process() -> Blocks:
    """Return the blocks that this process uses, made on the first call.

    Raises:
        MappingError: The driver can't do it.
    """
    return Blocks(NUM_BLOCKS)


class _Memory:
    """Memory that torch makes a tensor of."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes // 4,),
            "typestr": "<i4",
            "data": (address, False),
            "version": 3,
        }


def _tensor_at(address: int, num_bytes: int) -> torch.Tensor:
    return torch.as_tensor(_Memory(address, num_bytes), device="cuda")
