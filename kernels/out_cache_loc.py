"""Where the KV of the new tokens of a batch goes."""

import torch
import triton
import triton.language as tl

from .checks import (
    check_index_vector,
    check_launchable,
    check_number,
    check_output_vector,
    check_page_table,
    is_validating,
    list_tokens,
    validate_not_negative,
    validate_pool_indices,
    validate_slots,
    validate_sum_within,
)
from .launches import on_device_of, ragged_grid, ragged_shape, uniform_shape
from .ragged_slots import write_slots
from .slots import load_slots, load_slots_of_run
from .uniform_batch import (
    count_lane_bits,
    count_uniform_programs,
    find_requests,
    find_tile,
    has_own_tiles,
)


@triton.jit(
    do_not_specialize=["batch_size", "num_elements", "row_stride", "num_rows", "max_pages"],
    do_not_specialize_on_alignment=[
        "out_cache_loc_ptr",
        "req_pool_indices_ptr",
        "input_lengths_ptr",
        "cache_start_ptr",
        "req_to_page_ptr",
    ],
)
def compute_out_cache_loc_kernel(
    out_cache_loc_ptr,
    req_pool_indices_ptr,
    input_lengths_ptr,
    cache_start_ptr,
    req_to_page_ptr,
    batch_size,
    num_elements,
    row_stride,
    num_rows,
    max_pages,
    page_size: tl.constexpr,
    is_by_request: tl.constexpr,
    looks_first: tl.constexpr,
    window_size: tl.constexpr,
    has_one_window: tl.constexpr,
    group_size: tl.constexpr,
    short_len: tl.constexpr,
    tile_size: tl.constexpr,
):
    """Write what one program owes of the slots of a ragged batch."""
    write_slots(
        out_cache_loc_ptr,
        num_elements,
        req_pool_indices_ptr,
        input_lengths_ptr,
        cache_start_ptr,
        None,
        batch_size,
        0,
        num_elements,
        req_to_page_ptr,
        row_stride,
        num_rows,
        max_pages,
        tl.program_id(0),
        tl.num_programs(0),
        tl.program_id(1),
        page_size,
        is_by_request,
        looks_first,
        window_size,
        has_one_window,
        group_size,
        short_len,
        tile_size,
    )


@triton.jit(
    do_not_specialize=[
        "batch_size",
        "uniform_input_length",
        "lane_bits",
        "row_stride",
        "num_rows",
        "max_pages",
    ],
    do_not_specialize_on_alignment=[
        "out_cache_loc_ptr",
        "req_pool_indices_ptr",
        "cache_start_ptr",
        "req_to_page_ptr",
    ],
)
def compute_out_cache_loc_uniform_kernel(
    out_cache_loc_ptr,
    req_pool_indices_ptr,
    cache_start_ptr,
    req_to_page_ptr,
    batch_size,
    uniform_input_length,
    lane_bits,
    row_stride,
    num_rows,
    max_pages,
    page_size: tl.constexpr,
    is_long: tl.constexpr,
    tile_size: tl.constexpr,
):
    """Write the slots of a tile of tokens, of requests that have equally many."""
    if is_long:
        req_idx, first, tile_len = find_tile(uniform_input_length, tile_size)
        lane = tl.arange(0, tile_size)
        is_token = lane < tile_len
        req_pool_idx = tl.load(req_pool_indices_ptr + req_idx).to(tl.int64)
        start = tl.load(cache_start_ptr + req_idx)
        slot = load_slots_of_run(
            req_to_page_ptr,
            row_stride,
            num_rows,
            max_pages,
            req_pool_idx,
            start + first,
            0,
            tile_len,
            tile_size,
            page_size,
            out_cache_loc_ptr.dtype.element_ty,
        )
        token = req_idx * uniform_input_length + first + lane
    else:
        req_idx, idx_in_req, is_request = find_requests(batch_size, lane_bits, tile_size)
        is_token = is_request & (idx_in_req < uniform_input_length)
        req_pool_idx = tl.load(req_pool_indices_ptr + req_idx, mask=is_token)
        start = tl.load(cache_start_ptr + req_idx, mask=is_token).to(tl.int64)
        slot = load_slots(
            req_to_page_ptr,
            row_stride,
            num_rows,
            max_pages,
            req_pool_idx.to(tl.int64),
            start + idx_in_req,
            is_token,
            page_size,
        )
        token = req_idx * uniform_input_length + idx_in_req
    tl.store(out_cache_loc_ptr + token, slot.to(out_cache_loc_ptr.dtype.element_ty), mask=is_token)


def compute_out_cache_loc(
    out_cache_loc: torch.Tensor,
    req_pool_indices: torch.Tensor,
    input_lengths: torch.Tensor,
    cache_start: torch.Tensor,
    req_to_pages: torch.Tensor,
    page_size: int,
) -> None:
    """Write the slots of all new tokens, one request after another, in batch order.

    Overflow and holes give slot 0. Elements past the last token keep their value. One launch,
    spread over tokens and not over requests: a single long one uses the whole chip.

    Args:
        out_cache_loc: [>= sum(input_lengths)], slot per token, written; int32 or int64.
        req_pool_indices: [batch_size], row of req_to_pages; int32 or int64.
        input_lengths: [batch_size], new tokens; int32 or int64.
        cache_start: [batch_size], position of the first new token; int32 or int64.
        req_to_pages: [req_pool_size + 1, max_pages], page id per page index; int32.
        page_size: Tokens per page.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: A shape, stride, device or number is none of these.
    """
    req_to_pages = check_page_table("req_to_pages", req_to_pages)
    device = req_to_pages.device
    req_pool_indices = check_index_vector("req_pool_indices", req_pool_indices, device)
    batch_size = req_pool_indices.numel()
    input_lengths = check_index_vector("input_lengths", input_lengths, device, batch_size)
    cache_start = check_index_vector("cache_start", cache_start, device, batch_size)
    out_cache_loc = check_output_vector("out_cache_loc", out_cache_loc, device)
    page_size = check_number("page_size", page_size, minimum=1)
    num_rows, max_pages = req_to_pages.shape
    num_elements = out_cache_loc.numel()
    if is_validating(req_to_pages):
        validate_pool_indices("req_pool_indices", req_pool_indices, num_rows)
        validate_not_negative("input_lengths", input_lengths)
        validate_not_negative("cache_start", cache_start)
        validate_sum_within("input_lengths", input_lengths, "out_cache_loc", num_elements)
        rows, positions = list_tokens(req_pool_indices, cache_start, input_lengths)
        dtype = out_cache_loc.dtype
        validate_slots("out_cache_loc", dtype, req_to_pages, rows, positions, page_size)
    if 0 in (batch_size, num_elements):
        return
    check_launchable("req_to_pages", req_to_pages, compute_out_cache_loc_kernel)
    shape = ragged_shape(batch_size, num_elements)
    grid = ragged_grid(batch_size, num_elements, num_elements, shape)
    with on_device_of(req_to_pages):
        compute_out_cache_loc_kernel[grid](
            out_cache_loc,
            req_pool_indices,
            input_lengths,
            cache_start,
            req_to_pages,
            batch_size,
            num_elements,
            req_to_pages.stride(0),
            num_rows,
            max_pages,
            page_size,
            *shape.constants,
            num_warps=shape.num_warps,
        )


def compute_out_cache_loc_uniform(
    out_cache_loc: torch.Tensor,
    req_pool_indices: torch.Tensor,
    uniform_input_length: int,
    cache_start: torch.Tensor,
    req_to_pages: torch.Tensor,
    page_size: int,
) -> None:
    """Write the slots of all new tokens of requests that have equally many.

    As `compute_out_cache_loc` with one length for all.

    Args:
        out_cache_loc: [>= batch_size * uniform_input_length], slot per token, written; int32
            or int64.
        req_pool_indices: [batch_size], row of req_to_pages; int32 or int64.
        uniform_input_length: New tokens of every request.
        cache_start: [batch_size], position of the first new token; int32 or int64.
        req_to_pages: [req_pool_size + 1, max_pages], page id per page index; int32.
        page_size: Tokens per page.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: A shape, stride, device or number is none of these.
    """
    req_to_pages = check_page_table("req_to_pages", req_to_pages)
    device = req_to_pages.device
    req_pool_indices = check_index_vector("req_pool_indices", req_pool_indices, device)
    batch_size = req_pool_indices.numel()
    length = check_number("uniform_input_length", uniform_input_length)
    num_tokens = batch_size * length
    cache_start = check_index_vector("cache_start", cache_start, device, batch_size)
    out_cache_loc = check_output_vector("out_cache_loc", out_cache_loc, device, num_tokens)
    page_size = check_number("page_size", page_size, minimum=1)
    num_rows, max_pages = req_to_pages.shape
    if is_validating(req_to_pages):
        validate_pool_indices("req_pool_indices", req_pool_indices, num_rows)
        validate_not_negative("cache_start", cache_start)
        lens = torch.full_like(cache_start, length)
        rows, positions = list_tokens(req_pool_indices, cache_start, lens)
        dtype = out_cache_loc.dtype
        validate_slots("out_cache_loc", dtype, req_to_pages, rows, positions, page_size)
    check_launchable("req_to_pages", req_to_pages, compute_out_cache_loc_uniform_kernel)
    shape = uniform_shape(num_tokens)
    num_programs = count_uniform_programs(batch_size, length, shape.tile_size)
    with on_device_of(req_to_pages):
        compute_out_cache_loc_uniform_kernel[(num_programs,)](
            out_cache_loc,
            req_pool_indices,
            cache_start,
            req_to_pages,
            batch_size,
            length,
            count_lane_bits(length),
            req_to_pages.stride(0),
            num_rows,
            max_pages,
            page_size,
            has_own_tiles(length, shape.tile_size),
            shape.tile_size,
            num_warps=shape.num_warps,
        )
