"""The sums come without their leading 0."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Chunks(NamedTuple):
    starts: torch.Tensor
    ends: torch.Tensor
    len_in_chunk: torch.Tensor
    cum_seq_lens: torch.Tensor


@triton.jit
def cut_kernel(
    prefix_lens_ptr,
    starts_ptr,
    ends_ptr,
    len_in_chunk_ptr,
    cum_seq_lens_ptr,
    batch_size,
    chunk_len,
    tile_size: tl.constexpr,
):
    chunk_idx = tl.program_id(0).to(tl.int64)
    start = chunk_idx * chunk_len
    row = chunk_idx * batch_size
    cum_row = row + chunk_idx
    total = tl.full((), 0, tl.int64)
    tl.store(cum_seq_lens_ptr + cum_row, 0)
    for tile_start in range(0, batch_size, tile_size):
        req_idx = tile_start + tl.arange(0, tile_size)
        is_request = req_idx < batch_size
        prefix_len = tl.load(prefix_lens_ptr + req_idx, mask=is_request, other=0).to(tl.int64)
        end = tl.minimum(prefix_len, start + chunk_len)
        len_in_chunk = tl.where(is_request, tl.maximum(end - start, 0), 0)
        cum_seq_len = total + tl.cumsum(len_in_chunk, 0)
        total += tl.sum(len_in_chunk, axis=0)
        starts = tl.full((tile_size,), 0, tl.int32) + start.to(tl.int32)
        tl.store(starts_ptr + row + req_idx, starts, mask=is_request)
        tl.store(ends_ptr + row + req_idx, end.to(tl.int32), mask=is_request)
        tl.store(len_in_chunk_ptr + row + req_idx, len_in_chunk.to(tl.int32), mask=is_request)
        cell = cum_seq_lens_ptr + cum_row + 1 + req_idx
        tl.store(cell, cum_seq_len.to(tl.int32), mask=is_request)


def chunking(prefix_lens, num_chunks, batch_size, chunk_len):
    if chunk_len < 1 or num_chunks < 0 or batch_size != len(prefix_lens):
        raise ValueError(f"{num_chunks} chunks of {chunk_len} for {batch_size} requests")
    if batch_size and (num_chunks - 1) * chunk_len >= 2**31:
        raise ValueError(f"chunk {num_chunks - 1} starts past int32")
    device = prefix_lens.device
    chunks = Chunks(
        *(
            torch.empty((num_chunks, batch_size + more), dtype=torch.int32, device=device)
            for more in (0, 0, 0, 1)
        )
    )
    if num_chunks:
        cut_kernel[(num_chunks,)](prefix_lens, *chunks, batch_size, chunk_len, tile_size=128)
    return chunks._replace(cum_seq_lens=chunks.cum_seq_lens[:, 1:])
