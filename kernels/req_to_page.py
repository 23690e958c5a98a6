"""The page table learns of pages that requests have been given."""

import logging
import struct
from collections.abc import Sequence
from itertools import chain
from operator import add
from typing import Protocol

import torch
import triton
import triton.language as tl

from .checks import (
    INT32_MAX,
    INT32_MIN,
    check_index_vector,
    check_launchable,
    check_number,
    check_page_ids,
    check_page_table,
    is_validating,
    validate_not_negative,
    validate_pool_indices,
    validate_sum_within,
)
from .launches import TILE_SIZE, can_launch, count_steps, count_tiles, on_device_of
from .ragged_batch import find_requests

_logger = logging.getLogger(__name__)


class ForwardOp(Protocol):
    """What a scheduler step says about new pages, one entry per request.

    Attributes:
        request_ids: Any objects; named in warnings.
        request_pool_indices: Row of the page table.
        sizes: How many pages are new.
        begins: Page index of the first of them.
        new_occupied_pages: Their page ids, one list per request.
    """

    @property
    def request_ids(self) -> Sequence[object]: ...
    @property
    def request_pool_indices(self) -> Sequence[int]: ...
    @property
    def sizes(self) -> Sequence[int]: ...
    @property
    def begins(self) -> Sequence[int]: ...
    @property
    def new_occupied_pages(self) -> Sequence[Sequence[int]]: ...


@triton.jit(
    do_not_specialize=["batch_size", "num_page_ids", "row_stride", "num_rows", "max_pages"],
    do_not_specialize_on_alignment=[
        "req_to_page_ptr",
        "req_pool_indices_ptr",
        "new_occupied_pages_ptr",
        "new_occupied_pages_num_ptr",
        "pages_copy_starts_ptr",
    ],
)
def update_req_to_page_kernel(
    req_to_page_ptr,
    req_pool_indices_ptr,
    new_occupied_pages_ptr,
    new_occupied_pages_num_ptr,
    pages_copy_starts_ptr,
    batch_size,
    num_page_ids,
    row_stride,
    num_rows,
    max_pages,
    tile_size: tl.constexpr,
    num_steps: tl.constexpr,
):
    """Write tile_size page ids to the rows of the requests that own them."""
    tile_start = tl.program_id(0).to(tl.int64) * tile_size
    req_idx, idx_in_req, is_owned = find_requests(
        new_occupied_pages_num_ptr,
        batch_size.to(tl.int64),
        num_page_ids.to(tl.int64),
        tile_start,
        tile_size,
        num_steps,
    )
    req_pool_idx = tl.load(req_pool_indices_ptr + req_idx, mask=is_owned, other=-1).to(tl.int64)
    start = tl.load(pages_copy_starts_ptr + req_idx, mask=is_owned, other=0).to(tl.int64)
    page_id = tl.load(
        new_occupied_pages_ptr + tile_start + tl.arange(0, tile_size), mask=is_owned, other=0
    )
    # A sum past 2^63 - 1 wraps to a negative page index, and is dropped like one.
    page_idx = start + idx_in_req
    is_in_pool = (req_pool_idx >= 0) & (req_pool_idx < num_rows.to(tl.int64))
    has_column = (page_idx >= 0) & (page_idx < max_pages.to(tl.int64))
    tl.store(
        req_to_page_ptr + req_pool_idx * row_stride.to(tl.int64) + page_idx,
        page_id,
        mask=is_owned & is_in_pool & has_column,
    )


def update_req_to_page(
    req_to_page: torch.Tensor,
    req_pool_indices: torch.Tensor,
    new_occupied_pages: torch.Tensor,
    new_occupied_pages_num: torch.Tensor,
    pages_copy_starts: torch.Tensor,
) -> None:
    """Write new page ids into the rows of their requests, in place.

    An id whose page index is past the table's width is dropped; holes are stored as they are;
    all other cells keep their value. The ranges of one call must not overlap.

    Args:
        req_to_page: [req_pool_size + 1, max_pages], page id per page index, written; int32.
        req_pool_indices: [batch_size], row of req_to_page; int32 or int64.
        new_occupied_pages: [sum(new_occupied_pages_num)], page ids, one request after another,
            in batch order; int32.
        new_occupied_pages_num: [batch_size], how many ids each request owns; int32 or int64.
        pages_copy_starts: [batch_size], page index of the first of them; int32 or int64.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: A shape, stride or device is none of these.
    """
    req_to_page = check_page_table("req_to_page", req_to_page)
    device = req_to_page.device
    req_pool_indices = check_index_vector("req_pool_indices", req_pool_indices, device)
    batch_size = req_pool_indices.numel()
    new_occupied_pages = check_page_ids("new_occupied_pages", new_occupied_pages, device)
    new_occupied_pages_num = check_index_vector(
        "new_occupied_pages_num", new_occupied_pages_num, device, batch_size
    )
    pages_copy_starts = check_index_vector(
        "pages_copy_starts", pages_copy_starts, device, batch_size
    )
    if is_validating(req_to_page):
        num_page_ids = new_occupied_pages.numel()
        validate_pool_indices("req_pool_indices", req_pool_indices, req_to_page.shape[0])
        validate_not_negative("new_occupied_pages_num", new_occupied_pages_num)
        validate_not_negative("pages_copy_starts", pages_copy_starts)
        total = validate_sum_within(
            "new_occupied_pages_num", new_occupied_pages_num, "new_occupied_pages", num_page_ids
        )
        if total != num_page_ids:
            raise ValueError(
                f"new_occupied_pages has {num_page_ids} elements, but must have {total}, "
                "the sum of new_occupied_pages_num"
            )
    _launch_update(
        req_to_page,
        req_pool_indices,
        new_occupied_pages,
        new_occupied_pages_num,
        pages_copy_starts,
    )


def update_block_table(
    forward_op: ForwardOp, device: str | torch.device, req_to_page: torch.Tensor
) -> None:
    """Write the new pages of one scheduler step into the page table, in place.

    A request whose pages do not fit its row keeps those that do, and a warning is logged. The
    step goes to the device in one copy from pinned memory that nothing waits for.

    Args:
        forward_op: The step; every number a Python int or numpy integer.
        device: The device of req_to_page; "cuda" means the current one.
        req_to_page: [req_pool_size + 1, max_pages], page id per page index, written; int32.

    Raises:
        TypeError: An argument, or a number in forward_op, has another type or dtype.
        ValueError: The table's shape or stride is none of these, `device` is another one, the
            lists of forward_op do not agree, or one of its numbers is out of range.
    """
    req_to_page = check_page_table("req_to_page", req_to_page)
    _check_same_device(device, req_to_page.device)
    num_rows, max_pages = req_to_page.shape
    batch_size = _check_lengths_agree(forward_op)
    req_pool_indices = _check_numbers("request_pool_indices", forward_op.request_pool_indices)
    sizes = _check_numbers("sizes", forward_op.sizes)
    begins = _check_numbers("begins", forward_op.begins)
    page_ids_of_reqs = forward_op.new_occupied_pages
    if batch_size == 0:
        return
    if max(req_pool_indices) >= num_rows:
        _refuse_pool_index(req_pool_indices, num_rows)
    if list(map(len, page_ids_of_reqs)) != sizes:
        _refuse_size(sizes, page_ids_of_reqs)
    packed_page_ids = _pack_page_ids(page_ids_of_reqs)
    if max(map(add, begins, sizes)) > max_pages:
        sizes, page_ids_of_reqs = _clamp_to_table(
            forward_op.request_ids, begins, sizes, page_ids_of_reqs, max_pages
        )
        packed_page_ids = _pack_page_ids(page_ids_of_reqs)
    if not packed_page_ids:
        return
    vectors = struct.pack(f"{3 * batch_size}i", *req_pool_indices, *sizes, *begins)
    packed = torch.frombuffer(bytearray(vectors + packed_page_ids), dtype=torch.int32)
    with on_device_of(req_to_page):
        if req_to_page.is_cuda:
            # torch hands out this pinned memory again only after the copy from it is done.
            pinned = torch.empty(packed.numel(), dtype=torch.int32, device="cpu", pin_memory=True)
            packed = pinned.copy_(packed).to(req_to_page.device, non_blocking=True)
        rows, counts, starts = packed[: 3 * batch_size].view(3, batch_size)
        new_page_ids = packed[3 * batch_size :]
        if can_launch(update_req_to_page_kernel, req_to_page):
            _launch_update(req_to_page, rows, new_page_ids, counts, starts)
        else:
            _update_on_cpu(req_to_page, rows, new_page_ids, counts, starts)


def _launch_update(
    req_to_page: torch.Tensor,
    req_pool_indices: torch.Tensor,
    new_occupied_pages: torch.Tensor,
    new_occupied_pages_num: torch.Tensor,
    pages_copy_starts: torch.Tensor,
) -> None:
    num_rows, max_pages = req_to_page.shape
    batch_size = req_pool_indices.numel()
    num_page_ids = new_occupied_pages.numel()
    if batch_size == 0 or num_page_ids == 0 or num_rows == 0 or max_pages == 0:
        return
    check_launchable("req_to_page", req_to_page, update_req_to_page_kernel)
    with on_device_of(req_to_page):
        update_req_to_page_kernel[(count_tiles(num_page_ids),)](
            req_to_page,
            req_pool_indices,
            new_occupied_pages,
            new_occupied_pages_num,
            pages_copy_starts,
            batch_size,
            num_page_ids,
            req_to_page.stride(0),
            num_rows,
            max_pages,
            tile_size=TILE_SIZE,
            num_steps=count_steps(batch_size),
        )


def _update_on_cpu(
    req_to_page: torch.Tensor,
    req_pool_indices: torch.Tensor,
    new_occupied_pages: torch.Tensor,
    new_occupied_pages_num: torch.Tensor,
    pages_copy_starts: torch.Tensor,
) -> None:
    """Do what the kernel does for values that are all in range."""
    counts = new_occupied_pages_num.long()
    rows = req_pool_indices.long().repeat_interleave(counts)
    column_of_first = pages_copy_starts.long() - (counts.cumsum(0) - counts)
    columns = column_of_first.repeat_interleave(counts) + torch.arange(
        rows.numel(), device=rows.device
    )
    req_to_page[rows, columns] = new_occupied_pages


def _check_same_device(device: object, table_device: torch.device) -> None:
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device is {device!r}, but must be a str or torch.device")
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}, but must be {table_device}") from error
    if wanted.type == "cuda" and wanted.index is None and table_device.type == "cuda":
        wanted = torch.device("cuda", torch.cuda.current_device())
    is_same = wanted.type == table_device.type and (
        wanted.type == "cpu" or wanted.index == table_device.index
    )
    if not is_same:
        raise ValueError(f"device is {wanted}, but must be {table_device}, that of req_to_page")


def _check_lengths_agree(forward_op: ForwardOp) -> int:
    batch_size = len(forward_op.request_ids)
    for name in ("request_pool_indices", "sizes", "begins", "new_occupied_pages"):
        length = len(getattr(forward_op, name))
        if length != batch_size:
            raise ValueError(
                f"forward_op.{name} has {length} entries, but must have {batch_size}, "
                "one per request id"
            )
    return batch_size


def _check_numbers(name: str, values: Sequence[int]) -> list[int]:
    """Return the numbers as ints that are neither negative nor past 2^31 - 1."""
    # The built-ins look at all values in a fraction of the time that a loop needs.
    is_plain = set(map(type, values)) <= {int}
    if is_plain and min(values, default=0) >= 0 and max(values, default=0) <= INT32_MAX:
        return list(values)
    return [check_number(f"forward_op.{name}[{idx}]", value) for idx, value in enumerate(values)]


def _pack_page_ids(page_ids_of_reqs: Sequence[Sequence[int]]) -> bytes:
    """Return all page ids as int32, one request after another."""
    page_ids = list(chain.from_iterable(page_ids_of_reqs))
    try:
        packed = struct.pack(f"{len(page_ids)}i", *page_ids)
    except (struct.error, TypeError):
        _check_page_ids(page_ids_of_reqs)
        raise
    if not set(map(type, page_ids)) <= {int}:
        _check_page_ids(page_ids_of_reqs)
    return packed


def _check_page_ids(page_ids_of_reqs: Sequence[Sequence[object]]) -> None:
    for req_idx, ids_of_req in enumerate(page_ids_of_reqs):
        for idx, page_id in enumerate(ids_of_req):
            name = f"forward_op.new_occupied_pages[{req_idx}][{idx}]"
            check_number(name, page_id, minimum=INT32_MIN)


def _refuse_pool_index(req_pool_indices: Sequence[int], num_rows: int) -> None:
    for idx, req_pool_idx in enumerate(req_pool_indices):
        if req_pool_idx >= num_rows:
            raise ValueError(
                f"forward_op.request_pool_indices[{idx}] is {req_pool_idx}, "
                f"but must be in 0 ... {num_rows - 1}, the rows of req_to_page"
            )


def _refuse_size(sizes: Sequence[int], page_ids_of_reqs: Sequence[Sequence[int]]) -> None:
    for idx, (size, ids_of_req) in enumerate(zip(sizes, page_ids_of_reqs, strict=True)):
        if size != len(ids_of_req):
            raise ValueError(
                f"forward_op.sizes[{idx}] is {size}, but must be {len(ids_of_req)}, "
                f"the length of forward_op.new_occupied_pages[{idx}]"
            )


def _clamp_to_table(
    request_ids: Sequence[object],
    begins: Sequence[int],
    sizes: Sequence[int],
    page_ids_of_reqs: Sequence[Sequence[int]],
    max_pages: int,
) -> tuple[list[int], list[Sequence[int]]]:
    """Return how many ids each request keeps, and those ids."""
    kept_sizes: list[int] = []
    kept_page_ids: list[Sequence[int]] = []
    for request_id, begin, size, ids_of_req in zip(
        request_ids, begins, sizes, page_ids_of_reqs, strict=True
    ):
        num_kept = size
        if size > 0 and begin + size > max_pages:
            num_kept = max(0, max_pages - begin)
            _logger.warning(
                "request %s: new pages of begin %d and size %d are past max_pages %d; %d kept",
                request_id,
                begin,
                size,
                max_pages,
                num_kept,
            )
        kept_sizes.append(num_kept)
        kept_page_ids.append(ids_of_req[:num_kept])
    return kept_sizes, kept_page_ids
