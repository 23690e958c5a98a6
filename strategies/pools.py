"""Request pools and page tables: which rows a batch uses, and what they hold."""

from collections.abc import Sequence
from math import gcd

from pagefault.case import PageTable
from pagefault.family import Domain

from .edges import INT32_MAX, MAX_CELLS, MAX_PAGES, Choices

INT32_MIN = -(2**31)


def pool_indices(
    choices: Choices, num_requests: int, distinct: bool = False
) -> tuple[list[int], int]:
    """Return the row of each request of a batch, and how many rows the pool has.

    Args:
        choices: Where choices come from.
        num_requests: Size of the batch.
        distinct: Whether no two requests may share a row.
    """
    order = choices.pick(
        ("production", "production", "reversed", "from row 0", "scattered", "gapped", "repeated")
    )
    slack = choices.pick((0, 0, 1, 3))
    requests = range(num_requests)
    if order == "repeated" and not distinct:
        num_rows = max(1, num_requests // 2) + slack
        return [(3 * i + slack) % num_rows for i in requests], num_rows
    if order == "reversed":
        return [num_requests - i for i in requests], num_requests + 1 + slack
    if order == "from row 0":
        return list(requests), max(1, num_requests) + slack
    if order == "scattered":
        num_rows = num_requests + 1 + slack
        step = next(step for step in (5, 7, 11, 1) if gcd(step, num_rows) == 1)
        return [(step * i + slack) % num_rows for i in requests], num_rows
    if order == "gapped":
        return [2 * i + 1 for i in requests], 2 * num_requests + 1 + slack
    return [i + 1 for i in requests], num_requests + 1 + slack


def table_width(choices: Choices, num_rows: int) -> int:
    """Return a number of columns that keeps the table's size in bounds."""
    max_pages = choices.pick(MAX_PAGES)
    return max_pages if num_rows * max_pages <= MAX_CELLS else 2 + max_pages % 7


def edited_table(
    choices: Choices,
    num_rows: int,
    max_pages: int,
    used: Sequence[tuple[int, int]],
    largest_page_id: int,
    holes: Sequence[int],
) -> PageTable:
    """Return a page table of unique ids, with special ones where they matter.

    Args:
        choices: Where choices come from.
        num_rows: Rows.
        max_pages: Columns.
        used: (row, column) of cells that the case looks up; edits go there.
        largest_page_id: The largest id whose slots the outputs can hold.
        holes: The negative ids that may occur.
    """
    edits = []
    special = [*holes[:1], 0, largest_page_id, *holes, 1]
    for _ in range(choices.pick((0, 0, 1, 1, 2, 3))):
        page_id = choices.pick(special)
        row, column = used[choices.below(len(used))] if used else (0, 0)
        if used and page_id <= largest_page_id:
            edits.append((row, column, page_id))
    return PageTable(num_rows, max_pages, tuple(edits))


def holes_of(domain: Domain, dtype: str, page_size: int) -> list[int]:
    """Return the negative page ids that a domain allows.

    Where holes are multiplied, the output has to hold what comes of them.
    """
    if domain.dialect.holes == "absent" or "hole" in domain.without:
        return []
    if domain.dialect.holes == "multiply" and dtype == "int32":
        return [-1, -(2**31 // page_size)]
    return [-1, INT32_MIN]


def largest_page_id_for(dtype: str, page_size: int) -> int:
    """Return the largest page id all of whose slots an output of a dtype can hold."""
    return INT32_MAX if dtype == "int64" else INT32_MAX // page_size - (page_size > 1)
