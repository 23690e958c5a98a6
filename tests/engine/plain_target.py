"""A target that is right and plain torch, so that no kernel is in the way of the engine's tests."""

import logging
from types import SimpleNamespace

import torch


def compute_out_cache_loc(
    out_cache_loc, req_pool_indices, input_lengths, cache_start, req_to_pages, page_size
):
    """Write the slots of all new tokens, overflow and holes as slot 0."""
    max_pages = req_to_pages.shape[1]
    out_idx = 0
    requests = zip(req_pool_indices.tolist(), input_lengths.tolist(), cache_start.tolist())
    for req_pool_idx, length, start in requests:
        positions = torch.arange(start, start + length)
        page_indices = positions // page_size
        inside = page_indices < max_pages
        page_ids = req_to_pages[req_pool_idx].long()[page_indices[inside]]
        slots = torch.zeros_like(positions)
        slots[inside] = torch.where(
            page_ids < 0, 0, page_ids * page_size + positions[inside] % page_size
        )
        out_cache_loc[out_idx : out_idx + length] = slots
        out_idx += length


def update_req_to_page(
    req_to_page, req_pool_indices, new_occupied_pages, new_occupied_pages_num, pages_copy_starts
):
    """Write each request's new page ids to its row, without those past the row's end."""
    max_pages = req_to_page.shape[1]
    first = 0
    for req_pool_idx, num_pages, begin in zip(
        req_pool_indices.tolist(), new_occupied_pages_num.tolist(), pages_copy_starts.tolist()
    ):
        kept = max(0, min(num_pages, max_pages - begin))
        if kept:
            page_ids = new_occupied_pages[first : first + kept]
            req_to_page[req_pool_idx, begin : begin + kept] = page_ids
        first += num_pages


def update_block_table(forward_op, device, req_to_page):
    """Check what the scheduler says, then write the new pages, with a warning for each clamp."""
    num_rows, max_pages = req_to_page.shape
    requests = list(
        zip(
            forward_op.request_ids,
            forward_op.request_pool_indices,
            forward_op.sizes,
            forward_op.begins,
            forward_op.new_occupied_pages,
            strict=True,
        )
    )
    for request_id, req_pool_idx, size, begin, page_ids in requests:
        if not 0 <= req_pool_idx < num_rows or begin < 0 or size != len(page_ids):
            raise ValueError(f"request {request_id}")
        if any(not -(2**31) <= page_id < 2**31 for page_id in page_ids):
            raise ValueError(f"a page id of request {request_id}")
    for request_id, req_pool_idx, size, begin, page_ids in requests:
        kept = max(0, min(size, max_pages - begin))
        if size and begin + size > max_pages:
            logging.getLogger(__name__).warning(
                "%s: %d pages at %d do not fit %d", request_id, size, begin, max_pages
            )
        if kept:
            new = torch.tensor(page_ids[:kept], dtype=torch.int32)
            req_to_page[req_pool_idx, begin : begin + kept] = new


def chunking(prefix_lens, num_chunks, batch_size, chunk_len):
    """Return where the chunks of each prefix start and end."""
    if num_chunks < 0 or chunk_len < 1 or batch_size != len(prefix_lens):
        raise ValueError("chunking")
    if batch_size and (num_chunks - 1) * chunk_len >= 2**31:
        raise ValueError("chunk_len")
    starts = (torch.arange(num_chunks) * chunk_len)[:, None].expand(num_chunks, batch_size)
    ends = torch.minimum(prefix_lens[None, :].long(), starts + chunk_len)
    lens = (ends - starts).clamp(min=0)
    sums = torch.zeros(num_chunks, batch_size + 1, dtype=torch.int64)
    sums[:, 1:] = lens.cumsum(1)
    return SimpleNamespace(
        starts=starts.int(), ends=ends.int(), len_in_chunk=lens.int(), cum_seq_lens=sums.int()
    )
