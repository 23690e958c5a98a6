"""A position past the context length is clamped to the last one of the row."""

from pagefault.oracle.slots import slot_of_position


def compute_out_cache_loc(
    out_cache_loc, req_pool_indices, input_lengths, cache_start, req_to_pages, page_size
):
    last = req_to_pages.shape[1] * page_size - 1
    table = req_to_pages.tolist()
    slots = [
        slot_of_position(min(start + k, last), table[row], page_size)
        for row, length, start in zip(
            req_pool_indices.tolist(), input_lengths.tolist(), cache_start.tolist()
        )
        for k in range(length)
    ]
    out_cache_loc[: len(slots)] = out_cache_loc.new_tensor(slots)
