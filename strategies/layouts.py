"""How the tensors of a case lie in memory."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeVar

from pagefault.case import Case, CaseError, PageTable, Placement, with_row_stride
from pagefault.family import Domain

from .edges import AROUND, SMALL_BATCH, Choices

C = TypeVar("C", bound=Case)

# A reserved table takes up to so many elements' addresses for each replica.
MOST_RESERVED_ELEMENTS = 5 * 2**29
# On a GPU each place that is looked at takes a page of its own.
MOST_RESERVED_ROWS = 8
WIDE_ONE_IN = 32

# An output may be longer than what a kernel handles at a time, with few tokens in it.
SPARES = (0, 1, 5, 300, 0, 1, 5, 1100)

# It may also have room for so many tokens of each request, as where it was allocated for the
# longest step: a launcher that does not know the lengths goes by the sizes of batch and output.
ROOMS = (260, 260, 260, 1000, 2100)
MOST_ROOM = 2**19
# In a small batch, and in a larger one, which comes seldom.
ROOMY_ONE_IN = (30, 12)

OTHER_DTYPE = {"int32": "int64", "int64": "int32"}


def dtypes(
    choices: Choices, names: Sequence[str], domain: Domain, fixed: frozenset[str]
) -> frozenset[str]:
    """Return which tensors have the dtype that production does not give them.

    Half of the draws are production's dtypes; the others change one, any, or all.

    Args:
        choices: Where choices come from.
        names: Tensors that may be int32 or int64.
        domain: Its `dtype_choices`, where it has any, are numbers whose bits say which change.
        fixed: Tensors that must keep production's.
    """
    if domain.dtype_choices is not None:
        bits = choices.pick(domain.dtype_choices) % 2 ** len(names)
    else:
        how = choices.below(6)
        any_bits = choices.below(2 ** len(names))
        bits = (0, 0, 0, 1 << any_bits % len(names), any_bits, 2 ** len(names) - 1)[how]
    return frozenset(name for i, name in enumerate(names) if bits >> i & 1 and name not in fixed)


def layout(
    choices: Choices,
    plain: Mapping[str, Placement],
    changed: frozenset[str],
    outputs: Sequence[str],
    table: str,
    domain: Domain,
    batch_size: int = 0,
) -> tuple[tuple[str, Placement], ...]:
    """Return placements: half of the draws are plain but for the dtypes.

    Args:
        choices: Where choices come from.
        plain: Production's placements, by tensor.
        changed: Tensors of the other dtype.
        outputs: Tensors that may have spare elements.
        table: The page table, which may be pitched.
        domain: Its `without` may name "offset", "spare output" and "pitched table".
        batch_size: Requests in the batch; 0 where the outputs do not grow with it.
    """
    fancy = choices.one_in(2)
    placements = []
    for name, placement in plain.items():
        dtype = OTHER_DTYPE[placement.dtype] if name in changed else placement.dtype
        offset = pitch = spare = 0
        if fancy and "offset" not in domain.without:
            offset = choices.pick((0, 0, 1, 2, 3))
        if fancy and name in outputs and "spare output" not in domain.without:
            spare = choices.pick(SPARES)
            if domain.sizes and choices.one_in(8):
                size = choices.pick((max(domain.sizes), choices.pick(domain.sizes)))
                spare = size + choices.pick(AROUND)
            elif choices.one_in(ROOMY_ONE_IN[batch_size > SMALL_BATCH]):
                room = choices.pick(ROOMS) * batch_size
                spare = room if room <= MOST_ROOM else spare
        if fancy and name == table and "pitched table" not in domain.without:
            pitch = choices.pick((0, 1, 2, 14))
        placements.append((name, _placement(dtype, offset, pitch, spare)))
    return tuple(placements)


_placement = cache(Placement)


def _in_last_rows(choices: Choices, case: C, table: str, by_row: str) -> C:
    """Return the case in a table that ends with its last used row, one of the last reserved.

    The distance of the rows is smallest there, and so is what has to be reserved.
    """
    rows: Sequence[int] = getattr(case, "req_pool_indices")  # noqa: B009
    page_table: PageTable = getattr(case, table)
    last = max(rows, default=0)
    new_last = max(last, MOST_RESERVED_ROWS - 1 - choices.below(MOST_RESERVED_ROWS // 2))
    shift = new_last - last
    edits = tuple(
        (row + shift, column, page_id) for row, column, page_id in page_table.edits if row <= last
    )
    moved: dict[str, object] = {
        "req_pool_indices": tuple(row + shift for row in rows),
        table: dataclasses.replace(page_table, num_rows=new_last + 1, edits=edits),
    }
    if by_row:
        moved[by_row] = (0,) * shift + getattr(case, by_row)[: last + 1]
    return case.replace(**moved)


def widened(choices: Choices, domain: Domain, case: C, table: str, by_row: str = "") -> C:
    """Return the case, now and then with a table whose last used row lies past 2**31 elements.

    Its rows are that long, or that far apart. A table whose last row nobody uses stays as it is.

    Args:
        choices: Where choices come from.
        domain: Its `without` may name "wide table" and "pitched table".
        case: A case with `req_pool_indices`.
        table: The name of its page table.
        by_row: The name of what else it has one of for each row.
    """
    if not choices.one_in(WIDE_ONE_IN) or "wide table" in domain.without:
        return case
    rows: Sequence[int] = getattr(case, "req_pool_indices")  # noqa: B009
    page_table = getattr(case, table)
    last = max(rows, default=0)
    if not 0 <= min(rows, default=0) <= last < page_table.num_rows or not page_table.num_cells:
        return case
    if last >= MOST_RESERVED_ROWS or len(rows) > 2 * MOST_RESERVED_ROWS:
        return case
    case = _in_last_rows(choices, case, table, by_row)
    page_table = getattr(case, table)
    last = page_table.num_rows - 1
    row_stride = max(2**31 // last + choices.pick((1, 16, 5)), page_table.max_pages)
    if row_stride * page_table.num_rows > MOST_RESERVED_ELEMENTS:
        return case
    at = case.placement(table)
    fixed = domain.dtype_choices is not None or "int64 req_pool_indices" in domain.without
    if "req_pool_indices" in case.PLAIN and not fixed and choices.one_in(2):
        # An index of 32 bits wraps where it is multiplied with the distance of the rows.
        narrow = dataclasses.replace(case.placement("req_pool_indices"), dtype="int32")
        case = case.replace(layout=(*case.layout, ("req_pool_indices", narrow)))
    try:
        if choices.one_in(2) and "pitched table" not in domain.without:
            layout = with_row_stride(case, table, page_table.max_pages, row_stride)
            return case.replace(layout=layout)
        if "long rows" in domain.without:
            return case
        longer = page_table.resized(page_table.num_rows, min(row_stride, 2**31))
        unpitched = dataclasses.replace(at, pitch=0)
        return case.replace(**{table: longer, "layout": (*case.layout, (table, unpitched))})
    except CaseError:
        return case  # Slots of so many pages do not fit the output.
