"""CUDA virtual memory: blocks whose neighbours are not mapped, and nets where everything is.

Uses the driver through `cuda.bindings`, which torch's CUDA builds bring along.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch


class MappingError(RuntimeError):
    """The driver's calls for virtual memory are missing or have failed; the message says which."""


class _Driver:
    """The driver's calls for virtual memory on the current device.

    Args:
        pages_together: How many of the driver's smallest pages are one of ours.

    Raises:
        MappingError: The driver can't do it.

    Attributes:
        page_bytes: The size of a page of ours.
    """

    def __init__(self, pages_together: int = 1) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise MappingError(f"cuda.bindings can't be imported: {error}") from error
        self.driver = driver
        torch.empty(1, device="cuda")  # Makes the context current.
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = torch.cuda.current_device()
        self._properties = properties
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.page_bytes = int(self.call("cuMemGetAllocationGranularity", properties, flag))
        self.page_bytes *= pages_together
        self._access = driver.CUmemAccessDesc()
        self._access.location = properties.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def reserve(self, num_bytes: int) -> int:
        """Return the first of so many addresses that nothing is mapped to."""
        return int(self.call("cuMemAddressReserve", num_bytes, 0, 0, 0))

    def new_page(self) -> Any:
        """Return a handle of a page of memory."""
        return self.call("cuMemCreate", self.page_bytes, self._properties, 0)

    def map(self, address: int, page: Any) -> None:
        """Map a page; nobody can use it there before `allow`."""
        self.call("cuMemMap", address, self.page_bytes, 0, page, 0)

    def allow(self, address: int, num_bytes: int) -> None:
        """Let the device read and write what is mapped."""
        self.call("cuMemSetAccess", address, num_bytes, [self._access], 1)

    def unmap(self, address: int) -> None:
        """Take a page away."""
        self.call("cuMemUnmap", address, self.page_bytes)

    def call(self, name: str, *arguments: Any) -> Any:
        """Return what a function of the driver returns.

        Raises:
            MappingError: It has failed.
        """
        result, *values = getattr(self.driver, name)(*arguments)
        if int(result) != 0:
            raise MappingError(f"{name} failed: {result}")
        return values[0] if values else None


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
        self._driver = _Driver()
        self.block_bytes = self._driver.page_bytes
        window = self._driver.reserve(num_blocks * self.block_bytes)
        addresses = []
        for i in range(num_blocks):
            page = self._driver.new_page()
            alone = self._driver.reserve(3 * self.block_bytes) + self.block_bytes
            for address in (alone, window + i * self.block_bytes):
                self._driver.map(address, page)
                self._driver.allow(address, self.block_bytes)
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
        types = self._driver.driver.CUmemorytype
        copy = self._driver.driver.CUDA_MEMCPY2D()
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
            self._driver.call("cuMemcpy2DAsync", copy, torch.cuda.current_stream().cuda_stream)

        return run


# Both replicas of as many tensors as a function of ours has.
NUM_BLOCKS = 16


@cache
def blocks_of_process() -> Blocks:
    """Return the blocks that this process uses, made on the first call.

    Raises:
        MappingError: The driver can't do it.
    """
    return Blocks(NUM_BLOCKS)


# What 32-bit arithmetic can miss a tensor's elements by is 8 GiB of int32 or 16 GiB of int64.
BELOW_BYTES = 17 << 30
ABOVE_BYTES = 23 << 30
# Larger pages take fewer calls of the driver, which serves one process after the other.
PAGES_TOGETHER = 8
SPARE_PAGES = 40


class Net:
    """Addresses that all lead to one page, but for an arena of one page in their middle.

    Behind the arena, pages of their own can be shown for a while where a table's elements lie that
    are looked at.

    Raises:
        MappingError: The driver can't do it.

    Attributes:
        arena: [arena_bytes / 4] int32, memory of its own.
        arena_bytes: Its size, that of a page.
        everything: [elements] int32, all addresses of the net, the arena's among them.
        first_reserved: Where a reserved table may start in that.
    """

    def __init__(self) -> None:
        self._driver = driver = _Driver(PAGES_TOGETHER)
        page_bytes = driver.page_bytes
        num_pages = (BELOW_BYTES + ABOVE_BYTES) // page_bytes
        self._page_words = page_bytes // 4
        self._start = driver.reserve(num_pages * page_bytes)
        self._page = driver.new_page()
        arena = driver.new_page()
        for i in range(num_pages):
            is_arena = i == BELOW_BYTES // page_bytes
            driver.map(self._start + i * page_bytes, arena if is_arena else self._page)
        driver.allow(self._start, num_pages * page_bytes)
        # The pages in a row: what the addresses lead to, and the spare ones that have been shown.
        self._window = driver.reserve((1 + SPARE_PAGES) * page_bytes)
        driver.map(self._window, self._page)
        driver.allow(self._window, page_bytes)
        self._window_words = _tensor_at(self._window, (1 + SPARE_PAGES) * page_bytes)
        self._spares: list[Any] = []
        self._shown: list[int] = []
        self.arena_bytes = page_bytes
        self.arena = _tensor_at(self._start + BELOW_BYTES, page_bytes)
        self.everything = _tensor_at(self._start, num_pages * page_bytes)
        # Half a page behind the arena: what lies beside the table's first element is the net.
        self.first_reserved = (BELOW_BYTES + page_bytes + page_bytes // 2) // 4
        self._last_reserved = self.first_reserved + (ABOVE_BYTES - (5 << 30)) // 4

    def watched(self) -> torch.Tensor:
        """Return [words] int32: what the addresses lead to, then the pages that are shown."""
        return self._window_words[: (1 + len(self._shown)) * self._page_words]

    def can_show(self, offsets: np.ndarray[Any, Any]) -> bool:
        """Return whether pages can be shown for elements that far behind `first_reserved`."""
        indices = self.first_reserved + offsets
        is_inside = len(indices) == 0 or int(indices[-1]) < self._last_reserved
        # One more than now, should they start some elements later.
        return is_inside and len(np.unique(indices // self._page_words)) < SPARE_PAGES

    def show(self, indices: np.ndarray[Any, Any]) -> None:
        """Map pages of their own to the addresses of some elements of `everything`."""
        for i, number in enumerate(np.unique(indices // self._page_words).tolist()):
            if i == len(self._spares):
                self._add_spare()
            self._replace(number, self._spares[i])
            self._shown.append(number)

    def hide(self) -> None:
        """Undo `show`; nothing that uses the pages may be running."""
        for number in self._shown:
            self._replace(number, self._page)
        self._shown = []

    def _add_spare(self) -> None:
        self._spares.append(self._driver.new_page())
        address = self._window + len(self._spares) * self._driver.page_bytes
        self._driver.map(address, self._spares[-1])
        self._driver.allow(address, self._driver.page_bytes)

    def _replace(self, number: int, page: Any) -> None:
        address = self._start + number * self._driver.page_bytes
        self._driver.unmap(address)
        self._driver.map(address, page)
        self._driver.allow(address, self._driver.page_bytes)


@cache
def nets_of_process() -> tuple[Net, Net]:
    """Return the nets that this process uses, one for each replica, made on the first call.

    Raises:
        MappingError: The driver can't do it.
    """
    return Net(), Net()


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
