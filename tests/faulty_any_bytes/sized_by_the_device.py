"""get_chunks_paged that makes its lists as long as the prefixes on the device say."""

from pagefault.kernels import chunked_prefill as kernels


def get_chunks_paged(
    prefix_lens, prefix_lens_cpu, req_to_page, req_pool_indices, page_size, chunk_capacity
):
    longest = req_to_page.shape[1] * page_size
    legal = prefix_lens.clamp(0, longest).to(prefix_lens_cpu.dtype).cpu()
    # What the host has to refuse is refused by its own prefixes.
    is_legal = prefix_lens_cpu.numel() and prefix_lens_cpu.min() >= 0
    is_legal = is_legal and prefix_lens_cpu.max() <= longest
    return kernels.get_chunks_paged(
        prefix_lens,
        legal if is_legal else prefix_lens_cpu,
        req_to_page,
        req_pool_indices,
        page_size,
        chunk_capacity,
    )
