"""A right function in plain Python whose helpers have few mutants, of which all is known."""

import os

from planted_beside import shifted

from pagefault.oracle import out_cache_loc as oracle


def count_down(number):
    """Count down to 0; what it returns is used by nobody."""
    while number > 0:
        number -= 1


def end_if(code):
    """End the process, unless code is 0."""
    if code != 0:
        os._exit(code)


def hold():
    """Hold some memory for a moment."""
    return len(bytes(1 << 34 >> 33))


def compute_out_cache_loc_uniform(
    out_cache_loc, req_pool_indices, uniform_input_length, cache_start, req_to_pages, page_size
):
    """Write the slots of all new tokens."""
    count_down(3)
    end_if(0)
    hold()
    slots = oracle.compute_out_cache_loc_uniform(
        req_pool_indices.tolist(),
        uniform_input_length,
        cache_start.tolist(),
        req_to_pages.tolist(),
        page_size,
    )
    for idx, slot in enumerate(slots):
        out_cache_loc[idx] = shifted(slot)


pagefault_target = {"without": {"wide table": "it lists the table", "any bytes": "it checks none"}}
