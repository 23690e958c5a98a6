"""Which cells of its page tables a call has to read, and which it may write."""

from __future__ import annotations

from collections.abc import Mapping

from .case import MOST_FILLED_ELEMENTS, Case, Cells, with_recorded_reads
from .family import Dialect, Expected, Family


def needed_reads(family: Family, case: Case, dialect: Dialect) -> dict[str, Cells]:
    """Return by page table the (row, column) of the cells that the oracle looks up.

    Args:
        family: The case's family.
        case: The case.
        dialect: Of the target.
    """
    recorded, reads = with_recorded_reads(case)
    family.expect(recorded, dialect)
    return reads


def touched_cells(
    family: Family, case: Case, expected: Expected, dialect: Dialect
) -> Mapping[str, Cells]:
    """Return what a call may read or write of the tables that are too large to be filled.

    Args:
        family: The case's family.
        case: The case.
        expected: What the oracle says.
        dialect: Of the target.
    """
    names = [name for name in case.tables() if case.span_of(name) > MOST_FILLED_ELEMENTS]
    if not names:
        return {}
    reads = needed_reads(family, case, dialect)
    touched = {}
    for name in names:
        width = getattr(case, name).max_pages
        writes = expected.writes.get(name, {})
        touched[name] = reads[name] | {divmod(index, width) for index in writes}
    return touched
