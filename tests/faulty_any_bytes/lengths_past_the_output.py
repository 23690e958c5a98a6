"""build_chunked_prefill_metadata_arrays whose kernel trusts the prefixes on the device.

The outputs are as long as the prefixes on the CPU say.
"""

import torch
import triton
import triton.language as tl

from pagefault.kernels import chunked_prefill as kernels


@triton.jit
def write_slots_kernel(
    kv_indices_ptr,
    req_pool_indices_ptr,
    starts_ptr,
    lens_ptr,
    offsets_ptr,
    req_to_page_ptr,
    row_stride,
    num_rows,
    max_pages,
    page_size: tl.constexpr,
    tile_size: tl.constexpr,
):
    req_idx = tl.program_id(0)
    row = tl.load(req_pool_indices_ptr + req_idx).to(tl.int64)
    start = tl.load(starts_ptr + req_idx).to(tl.int64)
    length = tl.load(lens_ptr + req_idx)
    first = tl.load(offsets_ptr + req_idx)
    for tile_start in range(0, length, tile_size):
        k = tile_start + tl.arange(0, tile_size)
        is_token = k < length
        position = start + k
        page_idx = position // page_size
        has_page = (page_idx < max_pages) & (row >= 0) & (row < num_rows)
        cell = row * row_stride + page_idx
        page_id = tl.load(req_to_page_ptr + cell, mask=is_token & has_page, other=-1).to(tl.int64)
        slot = tl.where(page_id >= 0, page_id * page_size + position % page_size, 0)
        tl.store(kv_indices_ptr + first + k, slot.to(tl.int32), mask=is_token)


def build_chunked_prefill_metadata_arrays(
    extend_prefix_lens,
    extend_prefix_lens_cpu,
    req_to_page,
    req_pool_indices,
    page_size,
    chunk_capacity,
):
    num_chunks, kv_indices_list, lens, offsets, longest = (
        kernels.build_chunked_prefill_metadata_arrays(
            extend_prefix_lens,
            extend_prefix_lens_cpu,
            req_to_page,
            req_pool_indices,
            page_size,
            chunk_capacity,
        )
    )
    num_rows, max_pages = req_to_page.shape
    batch_size = len(req_pool_indices)
    for c, kv_indices in enumerate(kv_indices_list):
        starts = torch.full_like(lens[c], c * (chunk_capacity // batch_size))
        write_slots_kernel[(batch_size,)](
            kv_indices,
            req_pool_indices,
            starts,
            lens[c],
            offsets[c],
            req_to_page,
            req_to_page.stride(0),
            num_rows,
            max_pages,
            page_size=page_size,
            tile_size=128,
        )
    return num_chunks, kv_indices_list, lens, offsets, longest
