"""`update_block_table` packs every step into one buffer, and copies it without waiting."""

import torch

buffer = torch.zeros(1024, dtype=torch.int32)


def update_block_table(forward_op, device, req_to_page):
    first = 0
    for row, begin, page_ids in zip(
        forward_op.request_pool_indices, forward_op.begins, forward_op.new_occupied_pages
    ):
        kept = page_ids[: max(0, req_to_page.shape[1] - begin)]
        end = first + len(kept)
        buffer[first:end] = torch.tensor(kept, dtype=torch.int32)
        on_device = buffer[first:end].to(device, non_blocking=True)
        req_to_page[row, begin : begin + len(kept)] = on_device
        first = end
