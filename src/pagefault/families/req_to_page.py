"""The families of `update_req_to_page` and `update_block_table`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

from ..case import CaseError
from ..family import Argument, Changes, Dialect, Expected, Explanation, Family, Plain, Tensor
from ..oracle import req_to_page as oracle
from ..strategies.edges import INT32_MAX
from ..strategies.req_to_page import (
    REFUSALS,
    STEP_LISTS,
    PagesCase,
    UpdateBlockTableCase,
    UpdateReqToPageCase,
    update_block_table_cases,
    update_req_to_page_cases,
)
from .any_bytes import expect_update
from .slots import (
    MANY_REQUESTS,
    TILE_TOKENS,
    all_layout_edges,
    joined_requests,
    layout_edges,
    pool_edges,
    simpler_rows,
    smaller,
)

T = TypeVar("T")

# In a batch of more requests none is moved to the row of another.
MOST_MOVED = 8

PAGE_EDGES = frozenset(
    [
        *("begin before the row end", "begin at the row end", "begin past the row end"),
        *("clamped: one", "clamped: several", "everything clamped away", "row filled"),
        *(f"no pages: {place} request" for place in ("first", "middle", "last")),
        *("no requests", "no new pages", "more than one tile", *MANY_REQUESTS),
        *("row 0", "last row", "rows permuted", "rows gapped", "row repeated"),
        *("hole", "page id 0", "largest page id", "no pages in the table", "far begin"),
    ]
)
COMMON_PAGE_EDGES = frozenset(
    [
        *("begin before the row end", "begin at the row end", "begin past the row end"),
        *("clamped: one", "clamped: several", "everything clamped away", "row filled"),
        *("row 0", "rows permuted", "hole", "page id 0", "pitched table", "more than one tile"),
    ]
)


def _num_pages(case: PagesCase) -> int:
    return sum(map(len, case.new_occupied_pages))


def _table(case: PagesCase) -> Tensor:
    table = case.req_to_page
    return Tensor("req_to_page", (table.num_rows, table.max_pages), table)


def _update_arguments(case: UpdateReqToPageCase) -> list[Argument]:
    batch_size = case.num_requests
    flat = [page_id for page_ids in case.new_occupied_pages for page_id in page_ids]
    counts = [len(page_ids) for page_ids in case.new_occupied_pages]
    return [
        _table(case),
        Tensor("req_pool_indices", (batch_size,), case.req_pool_indices),
        Tensor("new_occupied_pages", (len(flat),), flat),
        Tensor("new_occupied_pages_num", (batch_size,), counts),
        Tensor("pages_copy_starts", (batch_size,), case.begins),
    ]


def _update_fields(values: Mapping[str, Any]) -> Changes:
    ends = [0, *itertools.accumulate(values["new_occupied_pages_num"])]
    flat = values["new_occupied_pages"]
    if ends[-1] != len(flat):
        raise CaseError(f"new_occupied_pages: {len(flat)} ids, but the counts add up to {ends[-1]}")
    return {
        "req_pool_indices": values["req_pool_indices"],
        "begins": values["pages_copy_starts"],
        "new_occupied_pages": [flat[first:end] for first, end in itertools.pairwise(ends)],
        "req_to_page": values["req_to_page"],
    }


def _block_table_fields(values: Mapping[str, Any]) -> Changes:
    forward_op = values["forward_op"]
    lists = {name: list(getattr(forward_op, name)) for name in STEP_LISTS}
    lens = {name: len(entries) for name, entries in lists.items()}
    num_requests = max(lens.values())
    short = [name for name in STEP_LISTS if lens[name] < num_requests]
    if len(short) > 1 or any(lens[name] < num_requests - 1 for name in short):
        raise CaseError(f"a case can lack one entry of one list, but the lists have {lens} entries")
    page_ids = [list(ids) for ids in lists["new_occupied_pages"]]
    # What is lacking is not seen, so that any entry does.
    for name in short:
        if name == "new_occupied_pages":
            page_ids.append([])
        else:
            lists[name].append(len(page_ids[-1]) if name == "sizes" else 0)
    return {
        "req_pool_indices": lists["request_pool_indices"],
        "begins": lists["begins"],
        "new_occupied_pages": page_ids,
        "sizes": lists["sizes"],
        "short_list": 1 + STEP_LISTS.index(short[0]) if short else 0,
        "req_to_page": values["req_to_page"],
    }


def _block_table_arguments(case: UpdateBlockTableCase) -> list[Argument]:
    def forward_op(device: str) -> SimpleNamespace:
        lists: tuple[list[Any], ...] = (
            _request_ids(case),
            list(case.req_pool_indices),
            list(case.sizes),
            list(case.begins),
            [list(page_ids) for page_ids in case.new_occupied_pages],
        )
        if case.short_list:
            lists[case.short_list - 1].pop()
        return SimpleNamespace(**dict(zip(STEP_LISTS, lists, strict=True)))

    return [Plain("forward_op", forward_op), Plain("device", lambda device: device), _table(case)]


def _request_ids(case: UpdateBlockTableCase) -> list[str]:
    return [f"request-{req_idx}" for req_idx in range(case.num_requests)]


def _written(case: PagesCase) -> dict[int, int]:
    max_pages = case.req_to_page.max_pages
    writes = oracle.page_writes(
        max_pages,
        case.req_pool_indices,
        [page_id for page_ids in case.new_occupied_pages for page_id in page_ids],
        [len(page_ids) for page_ids in case.new_occupied_pages],
        case.begins,
    )
    return {row * max_pages + column: page_id for row, column, page_id in writes}


def _expect_update(case: UpdateReqToPageCase, dialect: Dialect) -> Expected:
    return Expected(
        {"req_to_page": _written(case)},
        rows={"req_to_page": frozenset(case.req_pool_indices)},
        may_launch=any(case.new_occupied_pages),
    )


def _expect_block_table(case: UpdateBlockTableCase, dialect: Dialect) -> Expected:
    if case.refusal:
        return Expected({"req_to_page": {}}, raises=ValueError)
    max_pages = case.req_to_page.max_pages
    clamped = oracle.clamped_requests(max_pages, _request_ids(case), case.sizes, case.begins)
    warnings = [[str(word) for word in request] for request in clamped]
    written = _written(case)
    return Expected(
        {"req_to_page": written},
        warnings=warnings,
        rows={"req_to_page": frozenset(case.req_pool_indices)},
        may_launch=bool(written),
    )


def _edges(case: PagesCase) -> frozenset[str]:
    edges = pool_edges(case.req_pool_indices, case.req_to_page.num_rows) | layout_edges(case)
    max_pages = case.req_to_page.max_pages
    num_clamped = num_written = 0
    last = case.num_requests - 1
    for i, (begin, page_ids) in enumerate(zip(case.begins, case.new_occupied_pages)):
        if not page_ids:
            place = "first" if i == 0 else "last" if i == last else "middle"
            edges.add(f"no pages: {place} request")
            continue
        end = begin + len(page_ids)
        num_written += max(0, min(end, max_pages) - begin)
        num_clamped += end > max_pages
        where = "before" if begin < max_pages else "at" if begin == max_pages else "past"
        edges.add(f"begin {where} the row end")
        if end == max_pages:
            edges.add("row filled")
        if begin > 2**30:
            edges.add("far begin")
        if min(page_ids) < 0:
            edges.add("hole")
        if 0 in page_ids:
            edges.add("page id 0")
        if max(page_ids) == INT32_MAX:
            edges.add("largest page id")
    num_pages = _num_pages(case)
    if num_clamped:
        edges.add("clamped: several" if num_clamped > 1 else "clamped: one")
    if not num_pages:
        edges.add("no new pages")
    elif not num_written:
        edges.add("everything clamped away")
    if num_pages > TILE_TOKENS:
        edges.add("more than one tile")
    if not max_pages:
        edges.add("no pages in the table")
    return frozenset(edges)


def _block_table_edges(case: UpdateBlockTableCase) -> frozenset[str]:
    if case.refusal:
        return frozenset([f"refused: {case.refusal}"])
    return _edges(case)


def _explain(case: PagesCase, where: str, index: int, found: int) -> Explanation:
    row, column = divmod(index, case.req_to_page.max_pages)
    for req_idx, (req_pool_idx, begin, page_ids) in enumerate(
        zip(case.req_pool_indices, case.begins, case.new_occupied_pages)
    ):
        if req_pool_idx == row and begin <= column < begin + len(page_ids):
            whose = (
                f"request {req_idx} (pool row {row}), page {column - begin} of {len(page_ids)}, "
                f"which begin at column {begin}"
            )
            return Explanation("new page", (whose, *_origin(case, found, row, column)))
    return Explanation("old page")


def _origin(case: PagesCase, found: int, row: int, column: int) -> list[str]:
    """Say where a wrong page id came from."""
    for other, page_ids in enumerate(case.new_occupied_pages):
        if found in page_ids:
            return [f"{found} is page {page_ids.index(found)} of request {other}"]
    for cell in case.req_to_page.cells_holding(found):
        beside = "what the cell held before" if cell == (row, column) else "another cell's id"
        return [f"{found} was in req_to_page[{cell[0]}][{cell[1]}]: {beside}"]
    return []


def _simpler_update(case: UpdateReqToPageCase) -> Iterator[Changes]:
    yield from simpler_rows(case, "req_pool_indices", "req_to_page")
    yield from _past_another_row(case)
    yield from _fewer_pages(case)
    yield from _simpler_width(case)


def _simpler_block_table(case: UpdateBlockTableCase) -> Iterator[Changes]:
    if case.refusal != "pool index":
        yield from simpler_rows(case, "req_pool_indices", "req_to_page")
        yield from _past_another_row(case)
    yield from _fewer_pages(case)
    yield from _simpler_width(case)


def _past_another_row(case: PagesCase) -> Iterator[Changes]:
    """Yield a small batch without the row of one request, whose pages go past the end of another's.

    There they change nothing, but the request is still there for the others.
    """
    rows, max_pages = case.req_pool_indices, case.req_to_page.max_pages
    if len(rows) > MOST_MOVED:
        return
    for i, row in enumerate(rows):
        for other in sorted({*rows} - {row}):
            moved = {
                "req_pool_indices": _with(rows, i, other),
                "begins": _with(case.begins, i, max_pages),
            }
            try:
                moved_case = case.replace(**moved)
            except CaseError:
                continue  # There it meets pages of the other request.
            for changes in simpler_rows(moved_case, "req_pool_indices", "req_to_page"):
                yield {**moved, **changes}


def _fewer_pages(case: PagesCase) -> Iterator[Changes]:
    """Yield changes to one request for several, and to fewer pages of one request.

    A request that loses pages keeps its begin or its end.
    """
    yield from joined_requests(case, ["new_occupied_pages", "sizes"])
    for i, page_ids in enumerate(case.new_occupied_pages):
        for fewer in smaller(len(page_ids), 0):
            dropped = len(page_ids) - fewer
            sizes: Changes = {}
            if isinstance(case, UpdateBlockTableCase):
                sizes = {"sizes": _with(case.sizes, i, case.sizes[i] - dropped)}
            first = _with(case.new_occupied_pages, i, page_ids[:fewer])
            yield {**sizes, "new_occupied_pages": first}
            last = _with(case.new_occupied_pages, i, page_ids[dropped:])
            begins = _with(case.begins, i, case.begins[i] + dropped)
            yield {**sizes, "new_occupied_pages": last, "begins": begins}


def _with(items: tuple[T, ...], at: int, item: T) -> tuple[T, ...]:
    return (*items[:at], item, *items[at + 1 :])


def _simpler_width(case: PagesCase) -> Iterator[Changes]:
    """Yield the case with fewer columns, the begins where they were or moved along."""
    table = case.req_to_page
    for width in smaller(table.max_pages, 0):
        narrower = table.resized(table.num_rows, width)
        begins = tuple(max(0, begin - table.max_pages + width) for begin in case.begins)
        yield {"req_to_page": narrower}
        yield {"req_to_page": narrower, "begins": begins}


FAMILIES = [
    Family(
        name="update_req_to_page",
        parameters=(
            "req_to_page",
            "req_pool_indices",
            "new_occupied_pages",
            "new_occupied_pages_num",
            "pages_copy_starts",
        ),
        case_type=UpdateReqToPageCase,
        cases=update_req_to_page_cases,
        arguments=_update_arguments,
        fields_of=_update_fields,
        expect=_expect_update,
        edges=_edges,
        size=_num_pages,
        all_edges=(PAGE_EDGES | all_layout_edges(UpdateReqToPageCase.PLAIN, "req_to_page", []))
        - {"int64 new_occupied_pages"},
        must_reach=COMMON_PAGE_EDGES | {"row repeated", "offset"},
        explain=_explain,
        capturable=True,
        simpler=_simpler_update,
        expect_any_bytes=expect_update,
    ),
    Family(
        name="update_block_table",
        parameters=("forward_op", "device", "req_to_page"),
        case_type=UpdateBlockTableCase,
        cases=update_block_table_cases,
        arguments=_block_table_arguments,
        fields_of=_block_table_fields,
        expect=_expect_block_table,
        edges=_block_table_edges,
        size=_num_pages,
        all_edges=PAGE_EDGES
        | all_layout_edges(UpdateBlockTableCase.PLAIN, "req_to_page", [])
        | {f"refused: {refusal}" for refusal in REFUSALS},
        must_reach=COMMON_PAGE_EDGES | {f"refused: {refusal}" for refusal in REFUSALS},
        explain=_explain,
        simpler=_simpler_block_table,
        # What the table holds is never looked at.
        expect_any_bytes=lambda case, inputs, dialect: _expect_block_table(case, dialect),
    ),
]
