"""The page table learns of pages that requests have been given."""

import functools
import logging
import marshal
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
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
from .launches import RaggedShape, can_launch, on_device_of, ragged_shape
from .ragged_batch import add_lens_before, clip_to_tile, find_owners, has_long_requests, load_lens

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


@triton.jit
def store_page_ids(
    req_to_page_ptr,
    row_stride,
    num_rows,
    max_pages,
    new_occupied_pages_ptr,
    element,
    req_pool_idx,
    page_idx,
    is_active,
):
    """Write a page id of the flat list into a cell of each lane.

    Args:
        req_to_page_ptr: [num_rows, max_pages], page ids, written; int32.
        row_stride: Scalar, elements from one row to the next.
        num_rows: Scalar.
        max_pages: Scalar.
        new_occupied_pages_ptr: Page ids; int32.
        element: [lanes], which of the page ids.
        req_pool_idx: [lanes] int64, any values; nothing is written outside the pool.
        page_idx: [lanes], any values; nothing is written outside the row. Negative where a sum
            has wrapped.
        is_active: [lanes] bool.
    """
    page_id = tl.load(new_occupied_pages_ptr + element, mask=is_active)
    is_in_pool = (req_pool_idx >= 0) & (req_pool_idx < num_rows)
    has_column = (page_idx >= 0) & (page_idx < max_pages)
    tl.store(
        req_to_page_ptr + req_pool_idx * row_stride + page_idx,
        page_id,
        mask=is_active & is_in_pool & has_column,
    )


@triton.jit
def update_short_requests(
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
    first_req_idx,
    window_size: tl.constexpr,
    has_one_window: tl.constexpr,
    group_size: tl.constexpr,
    short_len: tl.constexpr,
):
    """Write the page ids of those requests of a group that have short_len at most."""
    lane = tl.arange(0, group_size * short_len)
    req_idx = first_req_idx + lane // short_len
    idx_in_req = lane % short_len
    is_request = req_idx < batch_size
    count = load_lens(new_occupied_pages_num_ptr, req_idx, is_request, 0, num_page_ids)
    req_pool_idx = tl.load(req_pool_indices_ptr + req_idx, mask=is_request).to(tl.int64)
    start = tl.load(pages_copy_starts_ptr + req_idx, mask=is_request)
    counts_before = add_lens_before(
        new_occupied_pages_num_ptr, first_req_idx, 0, num_page_ids, window_size, has_one_window
    )
    summed_once = tl.where(idx_in_req == 0, count, 0)
    first_element = tl.sum(counts_before, axis=0) + tl.cumsum(summed_once, 0) - count
    element = first_element + idx_in_req
    is_owned = (idx_in_req < count) & (count <= short_len)
    store_page_ids(
        req_to_page_ptr,
        row_stride,
        num_rows,
        max_pages,
        new_occupied_pages_ptr,
        element,
        req_pool_idx,
        start + idx_in_req,
        is_owned & (element >= 0) & (element < num_page_ids),
    )


@triton.jit
def update_tile(
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
    tile_start,
    window_size: tl.constexpr,
    short_len: tl.constexpr,
    tile_size: tl.constexpr,
):
    """Write a tile of the page ids, those of requests that have more than short_len."""
    tile_len = tl.minimum(num_page_ids - tile_start, tile_size)
    walked = 0
    walked_end = tl.full((), 0, tl.int64)
    while walked < batch_size:
        req_idx = walked + tl.arange(0, window_size)
        is_request = req_idx < batch_size
        counts = load_lens(new_occupied_pages_num_ptr, req_idx, is_request, 0, num_page_ids)
        rows = tl.load(req_pool_indices_ptr + req_idx, mask=is_request)
        starts = tl.load(pages_copy_starts_ptr + req_idx, mask=is_request).to(tl.int64)
        ends = walked_end.to(counts.dtype) + tl.cumsum(counts, 0)
        begins = ends - counts
        first, end = clip_to_tile(begins, counts, tile_start, tile_len)
        is_here = (counts > short_len) & (first < end)
        if tl.max(is_here.to(tl.int32), axis=0) > 0:
            owner, has_owner = find_owners(first, tile_size)
            lane = tl.arange(0, tile_size)
            # Of lane 0 of the tile, as if it belonged to the request.
            page_idx = starts - begins + tile_start
            store_page_ids(
                req_to_page_ptr,
                row_stride,
                num_rows,
                max_pages,
                new_occupied_pages_ptr,
                tile_start + lane,
                tl.gather(rows, owner, axis=0).to(tl.int64),
                tl.gather(page_idx, owner, axis=0) + lane,
                has_owner & (lane < tl.gather(tl.where(is_here, end, 0), owner, axis=0)),
            )
        walked_end = tl.max(ends, axis=0).to(tl.int64)
        walked += window_size


@triton.jit
def write_page_ids(
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
    window_size: tl.constexpr,
    has_one_window: tl.constexpr,
    group_size: tl.constexpr,
    short_len: tl.constexpr,
    tile_size: tl.constexpr,
):
    """Write the page ids of a group of requests that have few, or a tile of the others'."""
    program = tl.program_id(0).to(tl.int64)
    num_groups = tl.cdiv(batch_size, group_size)
    if program < num_groups:
        update_short_requests(
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
            program * group_size,
            window_size,
            has_one_window,
            group_size,
            short_len,
        )
    else:
        has_long = has_long_requests(
            new_occupied_pages_num_ptr,
            batch_size,
            0,
            num_page_ids,
            short_len,
            window_size,
            has_one_window,
        )
        if has_long:
            update_tile(
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
                (program - num_groups) * tile_size,
                window_size,
                short_len,
                tile_size,
            )


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
    window_size: tl.constexpr,
    has_one_window: tl.constexpr,
    group_size: tl.constexpr,
    short_len: tl.constexpr,
    tile_size: tl.constexpr,
):
    """Write the page ids of a group of requests that have few, or a tile of the others'."""
    write_page_ids(
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
        window_size,
        has_one_window,
        group_size,
        short_len,
        tile_size,
    )


@triton.jit(
    do_not_specialize=["batch_size", "num_page_ids", "row_stride", "num_rows", "max_pages"],
    do_not_specialize_on_alignment=["req_to_page_ptr", "packed_ptr"],
)
def update_from_packed_kernel(
    req_to_page_ptr,
    packed_ptr,
    batch_size,
    num_page_ids,
    row_stride,
    num_rows,
    max_pages,
    window_size: tl.constexpr,
    has_one_window: tl.constexpr,
    group_size: tl.constexpr,
    short_len: tl.constexpr,
    tile_size: tl.constexpr,
):
    """Do what `update_req_to_page_kernel` does, with rows, counts, starts and ids in one tensor."""
    write_page_ids(
        req_to_page_ptr,
        packed_ptr,
        packed_ptr + 3 * batch_size,
        packed_ptr + batch_size,
        packed_ptr + 2 * batch_size,
        batch_size,
        num_page_ids,
        row_stride,
        num_rows,
        max_pages,
        window_size,
        has_one_window,
        group_size,
        short_len,
        tile_size,
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
    step = _Step.of(forward_op)
    if len(step.sizes) == 0:
        return
    num_rows, max_pages = req_to_page.shape
    packed = _pack(step, req_to_page.is_cuda) or _pack(_checked(step), req_to_page.is_cuda)
    assert packed is not None
    # The numbers are looked at as arrays: built-ins would take several times as long. A negative
    # one is among the largest where there is no sign.
    vectors = packed.vectors.view(np.uint32)
    _, sizes, begins = vectors
    max_row, max_size, max_begin = np.maximum.reduce(vectors, axis=1).tolist()
    if max_row >= num_rows or max(max_row, max_size, max_begin) > INT32_MAX:
        _refuse_numbers(step, num_rows)
    if packed.num_page_ids_of_reqs != [*step.sizes]:
        _refuse_sizes(step)
    if max_begin + max_size > max_pages and (begins + sizes).max() > max_pages:
        packed = _pack(_clamped(_checked(step), max_pages), req_to_page.is_cuda)
        assert packed is not None
    _update_from_packed(req_to_page, packed.numbers, len(step.sizes))


def _update_from_packed(req_to_page: torch.Tensor, packed: torch.Tensor, batch_size: int) -> None:
    """Update from rows, counts, starts and page ids that lie one behind the other on the CPU."""
    num_page_ids = packed.numel() - 3 * batch_size
    num_rows, max_pages = req_to_page.shape
    if 0 in (num_page_ids, num_rows, max_pages):
        return
    if not can_launch(update_from_packed_kernel, req_to_page):
        sizes = (batch_size, batch_size, batch_size, num_page_ids)
        rows, counts, starts, page_ids = packed.split(sizes)
        _update_on_cpu(req_to_page, rows, page_ids, counts, starts)
        return
    shape = ragged_shape(batch_size)
    grid = _grid(batch_size, num_page_ids, shape)
    with on_device_of(req_to_page):
        update_from_packed_kernel[grid](
            req_to_page,
            # torch hands out pinned memory again only when the copies from it are done.
            packed.to(req_to_page.device, non_blocking=True),
            batch_size,
            num_page_ids,
            req_to_page.stride(0),
            num_rows,
            max_pages,
            *shape.constants[2:],
            num_warps=shape.num_warps,
        )


def _grid(batch_size: int, num_page_ids: int, shape: RaggedShape) -> tuple[int]:
    """Return the grid of a launch: a program for each group of requests, and one for each tile."""
    num_groups = -(-batch_size // shape.group_size)
    return (num_groups + -(-num_page_ids // shape.tile_size),)


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
    if 0 in (batch_size, num_page_ids, num_rows, max_pages):
        return
    check_launchable("req_to_page", req_to_page, update_req_to_page_kernel)
    # The shapes for long requests are for runs of consecutive slots, which page ids don't make.
    shape = ragged_shape(batch_size)
    grid = _grid(batch_size, num_page_ids, shape)
    with on_device_of(req_to_page):
        update_req_to_page_kernel[grid](
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
            *shape.constants[2:],
            num_warps=shape.num_warps,
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
        wanted = _device_of(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}, but must be {table_device}") from error
    kind, index = wanted.type, wanted.index
    if kind == "cuda" and index is None and table_device.type == "cuda":
        index = torch.cuda.current_device()
    if kind != table_device.type or (kind != "cpu" and index != table_device.index):
        name = kind if index is None else f"{kind}:{index}"
        raise ValueError(f"device is {name}, but must be {table_device}, that of req_to_page")


_device_of = functools.lru_cache(maxsize=16)(torch.device)


class _Step(NamedTuple):
    """The lists of a scheduler step, one entry per request."""

    request_ids: Sequence[object]
    rows: Sequence[int]
    sizes: Sequence[int]
    begins: Sequence[int]
    page_ids_of_reqs: Sequence[Sequence[int]]

    @classmethod
    def of(cls, forward_op: ForwardOp) -> "_Step":
        """Return the lists of `forward_op`, which have equally many entries."""
        lists = _get_lists(forward_op)
        batch_size = len(lists[0])
        for name, entries in zip(_LISTS, lists, strict=True):
            if len(entries) != batch_size:
                raise ValueError(
                    f"forward_op.{name} has {len(entries)} entries, but must have {batch_size}, "
                    "one per request id"
                )
        return cls(*lists)


_NUMBERS = ("request_pool_indices", "sizes", "begins")
_LISTS = ("request_ids", *_NUMBERS, "new_occupied_pages")
_get_lists = operator.attrgetter(*_LISTS)


class _Packed(NamedTuple):
    """The numbers of a step in one place.

    Attributes:
        numbers: Rows, sizes, begins and all page ids, on the CPU; int32.
        vectors: numpy array, a view of the first three of them, one in each row.
        num_page_ids_of_reqs: How many page ids the list of each request has.
    """

    numbers: torch.Tensor
    vectors: Any
    num_page_ids_of_reqs: list[int]


# In version 2 of marshal's format a 32-bit int takes a tag and four bytes, and so does what stands
# in front of the entries of a list or a tuple: tag and length.
_ENTRY_BYTES = 5
_IS_INT, _IS_LIST, _IS_OTHER = 1, 0, 2
_KIND_OF_TAG = bytes(
    {ord("i"): _IS_INT, ord("["): _IS_LIST, ord("("): _IS_LIST}.get(tag, _IS_OTHER)
    for tag in range(256)
)


def _pack(step: _Step, is_pinned: bool) -> _Packed | None:
    """Return the numbers of a step, or None if it has others than ints of 32 bits.

    Of all that walks lists of ints marshal is the fastest. It tells ints from bools on the way:
    if every fifth byte is one of the tags above, there is nothing else. If there are as many lists
    as there should be, and each request has one, none lies in another.
    """
    lists: Any = step[1:]
    try:
        stream = marshal.dumps(lists, 2)
        num_page_ids_of_reqs = [*map(len, step.page_ids_of_reqs)]
    except (TypeError, ValueError):
        return None
    kinds = stream[::_ENTRY_BYTES].translate(_KIND_OF_TAG)
    if len(stream) % _ENTRY_BYTES or _IS_OTHER in kinds:
        return None
    is_int = np.frombuffer(kinds, np.bool_)
    num_ints = int(np.count_nonzero(is_int))
    batch_size = len(step.sizes)
    if len(kinds) - num_ints != 5 + batch_size:
        return None
    values: Any = np.ndarray(len(kinds), "<i4", stream, offset=1, strides=(_ENTRY_BYTES,))
    numbers = torch.empty(num_ints, dtype=torch.int32, device="cpu", pin_memory=is_pinned)
    array = numbers.numpy()
    array[:] = values[is_int]
    vectors = array[: 3 * batch_size].reshape(3, batch_size)
    return _Packed(numbers, vectors, num_page_ids_of_reqs)


def _checked(step: _Step) -> _Step:
    """Return a step of ints from one of numbers of any type, or refuse it."""
    rows, sizes, begins = (
        [check_number(f"forward_op.{name}[{idx}]", number) for idx, number in enumerate(numbers)]
        for name, numbers in zip(_NUMBERS, step[1:4], strict=True)
    )
    for req_idx, page_ids in enumerate(step.page_ids_of_reqs):
        if not hasattr(page_ids, "__len__"):
            raise TypeError(
                f"forward_op.new_occupied_pages[{req_idx}] is {page_ids!r}, but must be a list of "
                "page ids"
            )
    page_ids_of_reqs = [
        [
            check_number(f"forward_op.new_occupied_pages[{req_idx}][{idx}]", page_id, INT32_MIN)
            for idx, page_id in enumerate(page_ids)
        ]
        for req_idx, page_ids in enumerate(step.page_ids_of_reqs)
    ]
    return _Step(step.request_ids, rows, sizes, begins, page_ids_of_reqs)


def _refuse_numbers(step: _Step, num_rows: int) -> None:
    _checked(step)
    for idx, req_pool_idx in enumerate(step.rows):
        if req_pool_idx >= num_rows:
            raise ValueError(
                f"forward_op.request_pool_indices[{idx}] is {req_pool_idx}, "
                f"but must be in 0 ... {num_rows - 1}, the rows of req_to_page"
            )


def _refuse_sizes(step: _Step) -> None:
    for idx, (size, page_ids) in enumerate(zip(step.sizes, step.page_ids_of_reqs, strict=True)):
        if size != len(page_ids):
            raise ValueError(
                f"forward_op.sizes[{idx}] is {size}, but must be {len(page_ids)}, "
                f"the length of forward_op.new_occupied_pages[{idx}]"
            )


def _clamped(step: _Step, max_pages: int) -> _Step:
    """Return a step of the page ids that the rows of the table have room for."""
    sizes: list[int] = []
    page_ids_of_reqs: list[Sequence[int]] = []
    for request_id, begin, size, page_ids in zip(
        step.request_ids, step.begins, step.sizes, step.page_ids_of_reqs, strict=True
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
        sizes.append(num_kept)
        page_ids_of_reqs.append(page_ids[:num_kept])
    return _Step(step.request_ids, step.rows, sizes, step.begins, page_ids_of_reqs)
