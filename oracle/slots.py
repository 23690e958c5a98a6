"""Where one token's KV lies: the meaning that the slot functions share."""

from collections.abc import Sequence
from typing import Literal

Holes = Literal["divert", "divert page 0 too", "multiply", "absent"]


def slot_of_position(
    position: int,
    page_ids: Sequence[int],
    page_size: int,
    overflow_slot: int = 0,
    holes: Holes = "divert",
) -> int:
    """Return the slot of one token position, diverted where it has no page.

    Args:
        position: Token index inside its request.
        page_ids: [max_pages], the request's row of the page table.
        page_size: Tokens per page.
        overflow_slot: Where overflow and holes go.
        holes: What a page id below 0 means: diverted, or multiplied like any other
            ("absent" promises that there is none); "divert page 0 too" counts the dummy page
            as a hole.

    >>> slot_of_position(6, [5, 3], page_size=4)
    14
    >>> slot_of_position(8, [5, 3], page_size=4)
    0
    >>> slot_of_position(1, [-1], page_size=4), slot_of_position(1, [-1], 4, holes="multiply")
    (0, -3)
    """
    page_idx, offset_in_page = divmod(position, page_size)
    if not 0 <= page_idx < len(page_ids):
        return overflow_slot
    page_id = page_ids[page_idx]
    is_hole = page_id < 0 and holes != "multiply"
    if is_hole or (page_id == 0 and holes == "divert page 0 too"):
        return overflow_slot
    return page_id * page_size + offset_in_page
