"""compute_out_cache_loc that looks at lengths on the host, and refuses what it should survive."""

from pagefault.kernels import out_cache_loc as kernels


def compute_out_cache_loc(
    out_cache_loc, req_pool_indices, input_lengths, cache_start, req_to_pages, page_size
):
    if input_lengths.numel() and int(input_lengths.min()) < 0:
        raise ValueError("input_lengths")
    kernels.compute_out_cache_loc(
        out_cache_loc, req_pool_indices, input_lengths, cache_start, req_to_pages, page_size
    )
