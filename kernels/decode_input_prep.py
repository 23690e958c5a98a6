"""Everything a decode step needs to know about its new tokens, in one launch."""

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
    validate_fits,
    validate_not_negative,
    validate_pool_indices,
    validate_slots,
)
from .launches import on_device_of, uniform_shape
from .slots import load_slots, load_slots_of_run
from .uniform_batch import (
    count_lane_bits,
    count_uniform_programs,
    find_requests,
    find_tile,
    has_own_tiles,
)


@triton.jit
def load_starts(req_pool_indices_ptr, valid_cache_lengths_ptr, num_rows, req_idx, is_active):
    """Return the pool index and the cache start of each request; 0 for one not in the pool."""
    req_pool_idx = tl.load(req_pool_indices_ptr + req_idx, mask=is_active, other=-1).to(tl.int64)
    is_in_pool = (req_pool_idx >= 0) & (req_pool_idx < num_rows)
    start = tl.load(valid_cache_lengths_ptr + req_pool_idx, mask=is_in_pool, other=0).to(tl.int64)
    return req_pool_idx, start


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
        "positions_ptr",
        "seq_lens_out_ptr",
        "req_pool_indices_ptr",
        "valid_cache_lengths_ptr",
        "req_to_page_ptr",
    ],
)
def fused_decode_input_prep_kernel(
    out_cache_loc_ptr,
    positions_ptr,
    seq_lens_out_ptr,
    req_pool_indices_ptr,
    valid_cache_lengths_ptr,
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
    """Write positions and slots of a tile of tokens, and the lengths of what starts there."""
    if is_long:
        req_idx, first, tile_len = find_tile(uniform_input_length, tile_size)
        lane = tl.arange(0, tile_size)
        is_token = lane < tile_len
        req_pool_idx, start = load_starts(
            req_pool_indices_ptr, valid_cache_lengths_ptr, num_rows, req_idx, True
        )
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
        idx_in_req = first + lane
        is_first = first == 0
    else:
        req_idx, idx_in_req, is_request = find_requests(batch_size, lane_bits, tile_size)
        is_token = is_request & (idx_in_req < uniform_input_length)
        req_pool_idx, start = load_starts(
            req_pool_indices_ptr, valid_cache_lengths_ptr, num_rows, req_idx, is_request
        )
        slot = load_slots(
            req_to_page_ptr,
            row_stride,
            num_rows,
            max_pages,
            req_pool_idx,
            start + idx_in_req,
            is_token,
            page_size,
        )
        is_first = is_request & (idx_in_req == 0)

    # What needs no page id is written while the page ids are under way.
    seq_len = (start + uniform_input_length).to(seq_lens_out_ptr.dtype.element_ty)
    tl.store(seq_lens_out_ptr + req_idx, seq_len, mask=is_first)
    token = req_idx * uniform_input_length + idx_in_req
    position = (start + idx_in_req).to(positions_ptr.dtype.element_ty)
    tl.store(positions_ptr + token, position, mask=is_token)
    tl.store(out_cache_loc_ptr + token, slot.to(out_cache_loc_ptr.dtype.element_ty), mask=is_token)


def fused_decode_input_prep(
    out_cache_loc: torch.Tensor,
    positions: torch.Tensor,
    seq_lens_out: torch.Tensor,
    req_pool_indices: torch.Tensor,
    valid_cache_lengths: torch.Tensor,
    uniform_input_length: int,
    req_to_pages: torch.Tensor,
    page_size: int,
) -> None:
    """Write position and slot of every new token and the new length of every sequence.

    Positions are not clamped; slots of overflow and holes are 0. One launch. Elements past
    what is named here keep their value.

    Args:
        out_cache_loc: [>= batch_size * uniform_input_length], slot per token, written; int32
            or int64.
        positions: [>= batch_size * uniform_input_length], written; int32 or int64.
        seq_lens_out: [>= batch_size], tokens, cached and new, written; int32 or int64.
        req_pool_indices: [batch_size], row of req_to_pages; int32 or int64.
        valid_cache_lengths: [req_pool_size + 1], cached tokens by request pool index, not by
            batch position; int32 or int64.
        uniform_input_length: New tokens of every request.
        req_to_pages: [req_pool_size + 1, max_pages], page id per page index; int32.
        page_size: Tokens per page.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: A shape, stride, device or number is none of these.
    """
    req_to_pages = check_page_table("req_to_pages", req_to_pages)
    device = req_to_pages.device
    num_rows, max_pages = req_to_pages.shape
    req_pool_indices = check_index_vector("req_pool_indices", req_pool_indices, device)
    batch_size = req_pool_indices.numel()
    valid_cache_lengths = check_index_vector(
        "valid_cache_lengths", valid_cache_lengths, device, num_rows
    )
    length = check_number("uniform_input_length", uniform_input_length)
    num_tokens = batch_size * length
    out_cache_loc = check_output_vector("out_cache_loc", out_cache_loc, device, num_tokens)
    positions = check_output_vector("positions", positions, device, num_tokens)
    seq_lens_out = check_output_vector("seq_lens_out", seq_lens_out, device, batch_size)
    page_size = check_number("page_size", page_size, minimum=1)
    if is_validating(req_to_pages):
        validate_pool_indices("req_pool_indices", req_pool_indices, num_rows)
        validate_not_negative("valid_cache_lengths", valid_cache_lengths)
        starts = valid_cache_lengths[req_pool_indices.long()].long()
        validate_fits("seq_lens_out", starts + length, seq_lens_out.dtype)
        rows, new_positions = list_tokens(req_pool_indices, starts, torch.full_like(starts, length))
        validate_fits("positions", new_positions, positions.dtype)
        dtype = out_cache_loc.dtype
        validate_slots("out_cache_loc", dtype, req_to_pages, rows, new_positions, page_size)
    check_launchable("req_to_pages", req_to_pages, fused_decode_input_prep_kernel)
    shape = uniform_shape(num_tokens)
    num_programs = count_uniform_programs(batch_size, length, shape.tile_size)
    with on_device_of(req_to_pages):
        fused_decode_input_prep_kernel[(num_programs,)](
            out_cache_loc,
            positions,
            seq_lens_out,
            req_pool_indices,
            valid_cache_lengths,
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
