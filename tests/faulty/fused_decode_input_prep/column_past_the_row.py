"""A position just past the row is looked up."""

import triton
import triton.language as tl


@triton.jit
def prepare_inputs_kernel(
    out_cache_loc_ptr,
    positions_ptr,
    seq_lens_out_ptr,
    req_pool_indices_ptr,
    valid_cache_lengths_ptr,
    req_to_pages_ptr,
    length,
    row_stride,
    num_rows,
    max_pages,
    page_size: tl.constexpr,
    tile_size: tl.constexpr,
):
    req_idx = tl.program_id(0).to(tl.int64)
    row = tl.load(req_pool_indices_ptr + req_idx).to(tl.int64)
    start = tl.load(valid_cache_lengths_ptr + row).to(tl.int64)
    seq_len = (start + length).to(seq_lens_out_ptr.dtype.element_ty)
    tl.store(seq_lens_out_ptr + req_idx, seq_len)
    for tile_start in range(0, length, tile_size):
        k = tile_start + tl.arange(0, tile_size)
        is_token = k < length
        position = start + k
        page_idx = position // page_size
        has_page = (position >= 0) & (page_idx <= max_pages) & (row < num_rows)
        cell = row * row_stride + page_idx
        page_id = tl.load(req_to_pages_ptr + cell, mask=is_token & has_page, other=-1).to(tl.int64)
        slot = page_id * page_size + position % page_size
        slot = tl.where(page_id >= 0, slot, 0)
        slot = slot.to(out_cache_loc_ptr.dtype.element_ty)
        tl.store(out_cache_loc_ptr + req_idx * length + k, slot, mask=is_token)
        position = position.to(positions_ptr.dtype.element_ty)
        tl.store(positions_ptr + req_idx * length + k, position, mask=is_token)


def fused_decode_input_prep(
    out_cache_loc,
    positions,
    seq_lens_out,
    req_pool_indices,
    valid_cache_lengths,
    uniform_input_length,
    req_to_pages,
    page_size,
):
    num_rows, max_pages = req_to_pages.shape
    if len(req_pool_indices):
        prepare_inputs_kernel[(len(req_pool_indices),)](
            out_cache_loc,
            positions,
            seq_lens_out,
            req_pool_indices,
            valid_cache_lengths,
            req_to_pages,
            uniform_input_length,
            req_to_pages.stride(0),
            num_rows,
            max_pages,
            page_size=page_size,
            tile_size=128,
        )
