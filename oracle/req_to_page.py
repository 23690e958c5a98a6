"""Page ids that enter the page table."""

from collections.abc import Sequence
from typing import NamedTuple


class PageWrite(NamedTuple):
    """One cell of the page table and what it gets."""

    req_pool_idx: int
    page_idx: int
    page_id: int


class ClampedRequest(NamedTuple):
    """A request whose pages run past the table, as `update_block_table` warns of it."""

    request_id: object
    begin: int
    size: int
    max_pages: int


def page_writes(
    max_pages: int,
    req_pool_indices: Sequence[int],
    new_occupied_pages: Sequence[int],
    new_occupied_pages_num: Sequence[int],
    pages_copy_starts: Sequence[int],
) -> list[PageWrite]:
    """Return the cells that `update_req_to_page` writes, and nothing else may be.

    >>> page_writes(2, [1], [8, 9], [2], [1])
    [PageWrite(req_pool_idx=1, page_idx=1, page_id=8)]
    """
    writes = []
    first = 0
    for req_pool_idx, num_pages, start in zip(
        req_pool_indices, new_occupied_pages_num, pages_copy_starts, strict=True
    ):
        for k in range(num_pages):
            if start + k < max_pages:
                writes.append(PageWrite(req_pool_idx, start + k, new_occupied_pages[first + k]))
        first += num_pages
    return writes


def update_req_to_page(
    req_to_page: Sequence[Sequence[int]],
    req_pool_indices: Sequence[int],
    new_occupied_pages: Sequence[int],
    new_occupied_pages_num: Sequence[int],
    pages_copy_starts: Sequence[int],
) -> list[list[int]]:
    """Return the page table with every request's new pages in its row.

    Args:
        req_to_page: [req_pool_size + 1, max_pages], page id per page index.
        req_pool_indices: [batch_size], row of each request.
        new_occupied_pages: [sum of new_occupied_pages_num], page ids in batch order.
        new_occupied_pages_num: [batch_size], how many of them each request owns.
        pages_copy_starts: [batch_size], column of each request's first one.

    >>> update_req_to_page([[3, 5], [7, 9]], [1, 0], [8, 9, 4], [2, 1], [1, 0])
    [[4, 5], [7, 8]]
    """
    table = [list(row) for row in req_to_page]
    max_pages = len(table[0]) if table else 0
    for req_pool_idx, page_idx, page_id in page_writes(
        max_pages,
        req_pool_indices,
        new_occupied_pages,
        new_occupied_pages_num,
        pages_copy_starts,
    ):
        table[req_pool_idx][page_idx] = page_id
    return table


def clamped_requests(
    max_pages: int,
    request_ids: Sequence[object],
    sizes: Sequence[int],
    begins: Sequence[int],
) -> list[ClampedRequest]:
    """Return the requests that `update_block_table` clamps, one warning each.

    >>> clamped_requests(4, ["a", "b"], [2, 2], [2, 3])
    [ClampedRequest(request_id='b', begin=3, size=2, max_pages=4)]
    """
    return [
        ClampedRequest(request_id, begin, size, max_pages)
        for request_id, size, begin in zip(request_ids, sizes, begins, strict=True)
        if size > 0 and begin + size > max_pages
    ]


def update_block_table(
    req_to_page: Sequence[Sequence[int]],
    request_pool_indices: Sequence[int],
    begins: Sequence[int],
    new_occupied_pages: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Return the page table after one scheduler step; what does not fit is left out.

    Args:
        req_to_page: [req_pool_size + 1, max_pages], page id per page index.
        request_pool_indices: [batch_size], row of each request.
        begins: [batch_size], column of each request's first new page.
        new_occupied_pages: [batch_size] lists of page ids.

    >>> update_block_table([[3, 5], [7, 9]], [1, 0], [1, 1], [[8, 9], [4]])
    [[3, 4], [7, 8]]
    """
    flat = [page_id for page_ids in new_occupied_pages for page_id in page_ids]
    counts = [len(page_ids) for page_ids in new_occupied_pages]
    return update_req_to_page(req_to_page, request_pool_indices, flat, counts, begins)
