"""update_block_table that lets a hole in the table stand, as if it had been put there for good."""

from pagefault.kernels import req_to_page as kernels


def update_block_table(forward_op, device, req_to_page):
    before = req_to_page.clone()
    kernels.update_block_table(forward_op, device, req_to_page)
    req_to_page.copy_(before.where(before < 0, req_to_page))
