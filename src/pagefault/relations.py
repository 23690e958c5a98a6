"""What must hold between calls, whatever the right answers are.

A relation compares answers of the target with other answers of the target, so it needs no oracle:
it stays true where the oracle and the target share a misunderstanding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self

from . import conformance, reached
from .case import Case, CaseError, PageTable
from .conformance import SHRINK_BUDGET, NonConformance, first_failure, session, write_case
from .device import is_device_lost, prepare, resolve_device
from .family import Domain, Family, families, family_named
from .isolation import Ended
from .minimal import Minimal, minimise, simplifications
from .side_case import SideCase
from .verdict import Finding, Verdict

if TYPE_CHECKING:
    from .calls import Calls
    from .checker import Checker
    from .target import Target

# What a call gave: every output and written table by name, and what was returned by its path.
Answer = Mapping[str, Any]
Difference = str

# A longest prefix is cut into no more chunks than this.
MOST_CHUNKS = 6


@dataclass(frozen=True)
class Relation:
    """A statement about several answers of a target.

    Attributes:
        name: Short, for ids and reports.
        statement: What must hold.
        functions: Names of the functions that it calls; the first one's cases are drawn.
        check: Returns how a case breaks the relation, or "" where it holds.
    """

    name: str
    statement: str
    functions: tuple[str, ...]
    check: Callable[[Calls, Any], Difference]


@dataclass(frozen=True)
class Related(SideCase):
    """A legal case of a relation's first function, to be held to the relation.

    Attributes:
        case: The case.
        relation: The relation's name.
    """

    FIELD = "relation"

    case: Case
    relation: str

    def __str__(self) -> str:
        return f"held to the relation {self.relation!r}"

    @property
    def held_to(self) -> str:
        return self.relation

    @property
    def size(self) -> tuple[int, ...]:
        return ()

    @classmethod
    def of(cls, case: Case, value: Any) -> Self:
        """Return the case and the relation that JSON names.

        Raises:
            CaseError: There is no such relation.
        """
        if value not in RELATIONS:
            raise CaseError(f"{cls.FIELD}: {value!r}, but should be one of {', '.join(RELATIONS)}")
        return cls(case, value)

    def value(self) -> str:
        return self.relation

    def simpler(self, family: Family) -> Iterator[Related]:
        return (Related(case, self.relation) for case in simplifications(family, self.case))

    def why_not(self, family: Family, target: Target) -> str:
        return missing_for(RELATIONS[self.relation], target)

    def judge(self, checker: Checker, family: Family, thoroughly: bool) -> Verdict:
        from .calls import Calls

        return self.compare(Calls(checker.target, checker.device), checker.device)

    def as_family(self, family: Family) -> Family:
        raise ValueError(f"the relation {self.relation!r} compares several calls")

    def compare(self, calls: Calls, device: str) -> Verdict:
        """Return how the answers to some calls break the relation.

        Args:
            calls: Calls the target.
            device: Where, "cpu" or "cuda".
        """
        from .calls import Excluded

        relation = RELATIONS[self.relation]
        function = relation.functions[0]
        not_held = Verdict(function, summary=("not checked",))
        if getattr(self.case, "refusal", ""):
            return not_held
        try:
            difference = relation.check(calls, self.case)
        except (Excluded, CaseError):
            # A related case lies outside the domain, such as a start past what its dtype holds.
            return not_held
        except Exception as error:
            # A kernel that has faulted on a GPU takes the process along.
            kind = "device error" if is_device_lost(device) else "raised"
            headline = f"{relation.name}: raised {type(error).__name__}: {error}"
            return Verdict(function, (Finding(kind, relation.name, headline),))
        reached.count(reached.relation(relation.name), not difference)
        if not difference:
            return Verdict(function)
        headline = f"{relation.name}: {relation.statement}; but {difference}"
        return Verdict(function, (Finding("value", relation.name, headline),))


# Permuting and splitting a batch


def _permutations(num_requests: int) -> Iterator[list[int]]:
    """Yield a few orders of a batch: the last first, and the first last."""
    requests = list(range(num_requests))
    if num_requests > 1:
        yield requests[::-1]
    if num_requests > 2:
        yield [*requests[1:], 0]


def _cut(flat: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    ends = [*accumulate(lengths)]
    return [list(flat[end - length : end]) for end, length in zip(ends, lengths)]


def _token_pieces(case: Any, answer: Answer) -> list[Any]:
    """Return what each request got of a call that writes flat outputs."""
    if hasattr(case, "input_lengths"):
        lengths = case.input_lengths
    else:
        lengths = [case.uniform_input_length] * case.num_requests
    pieces = [_cut(answer["out_cache_loc"], lengths)]
    if "positions" in answer:
        pieces += [_cut(answer["positions"], lengths), answer["seq_lens_out"]]
    return [*zip(*pieces)]


def _chunk_slot_pieces(case: Any, answer: Answer) -> list[Any]:
    slots = answer["chunk_kv_indices"]
    return [slots[i : i + n] for i, n in zip(case.offsets, case.chunk_seq_lens)]


def _chunk_pieces(case: Case, answer: Answer) -> list[Any]:
    """Return what each request got of a call that returns chunks."""
    pieces: list[list[Any]] = [[] for _ in range(case.num_requests)]
    lens = next(value for path, value in answer.items() if path.endswith("len_in_chunk"))
    for path, value in answer.items():
        if path.endswith(("starts", "ends", "len_in_chunk")):
            for row in value:
                for piece, number in zip(pieces, row):
                    piece.append(number)
    for chunk_idx, slots in _kv_indices(answer):
        for piece, own in zip(pieces, _cut(slots, lens[chunk_idx])):
            piece.append(own)
    return pieces


def _kv_indices(answer: Answer) -> list[tuple[int, Sequence[int]]]:
    prefix = "kv_indices_list["
    paths = [path for path in answer if path.startswith(prefix)]
    return [(int(path[len(prefix) : -1]), answer[path]) for path in paths]


def _permuted(
    pieces_of: Callable[[Any, Answer], list[Any]],
) -> Callable[[str], Callable[[Calls, Case], Difference]]:
    def of(function: str) -> Callable[[Calls, Case], Difference]:
        def check(calls: Calls, case: Case) -> Difference:
            whole = pieces_of(case, calls.answer(function, case))
            for order in _permutations(case.num_requests):
                other = case.replace(**case.keeping(order))
                pieces = pieces_of(other, calls.answer(function, other))
                for place, req_idx in enumerate(order):
                    if pieces[place] != whole[req_idx]:
                        return (
                            f"request {req_idx} got {_short(whole[req_idx])}, but as request "
                            f"{place} of the order {_short(order)} {_short(pieces[place])}"
                        )
            return ""

        return check

    return of


def _permuted_table(function: str) -> Callable[[Calls, Case], Difference]:
    def check(calls: Calls, case: Case) -> Difference:
        table = calls.answer(function, case)["req_to_page"]
        for order in _permutations(case.num_requests):
            other = calls.answer(function, case.replace(**case.keeping(order)))["req_to_page"]
            if other != table:
                return f"in the order {_short(order)} {_first_cell(table, other)}"
        return ""

    return check


def _split(function: str) -> Callable[[Calls, Case], Difference]:
    def check(calls: Calls, case: Case) -> Difference:
        whole = _token_pieces(case, calls.answer(function, case))
        for at in sorted({1, case.num_requests // 2, case.num_requests - 1}):
            if not 0 < at < case.num_requests:
                continue
            pieces: list[Any] = []
            for part in (range(at), range(at, case.num_requests)):
                half = case.replace(**case.keeping(part))
                pieces += _token_pieces(half, calls.answer(function, half))
            for req_idx, (found, should) in enumerate(zip(pieces, whole)):
                if found != should:
                    return (
                        f"request {req_idx} got {_short(should)}, but {_short(found)} of a batch "
                        f"split before request {at}"
                    )
        return ""

    return check


# One answer, asked for in several ways


def _ragged_equals_uniform(calls: Calls, case: Any) -> Difference:
    fields = {
        "req_pool_indices": case.req_pool_indices,
        "input_lengths": [case.uniform_input_length] * case.num_requests,
        "cache_start": case.cache_start,
        "req_to_pages": case.req_to_pages,
        "page_size": case.page_size,
    }
    ragged = calls.case_of("compute_out_cache_loc", fields, case, {})
    uniform = calls.answer("compute_out_cache_loc_uniform", case)["out_cache_loc"]
    return _first_element(
        uniform, calls.answer("compute_out_cache_loc", ragged)["out_cache_loc"], "ragged"
    )


def _uniform_equals_fused(calls: Calls, case: Any) -> Difference:
    fields = {
        "req_pool_indices": case.req_pool_indices,
        "uniform_input_length": case.uniform_input_length,
        "cache_start": case.starts,
        "req_to_pages": case.req_to_pages,
        "page_size": case.page_size,
    }
    renamed = {"valid_cache_lengths": "cache_start"}
    uniform = calls.case_of("compute_out_cache_loc_uniform", fields, case, renamed)
    fused = calls.answer("fused_decode_input_prep", case)["out_cache_loc"]
    return _first_element(
        fused, calls.answer("compute_out_cache_loc_uniform", uniform)["out_cache_loc"], "uniform"
    )


def _pages_are_found(calls: Calls, case: Any) -> Difference:
    """Compare slots of pages that were written with the pages."""
    max_pages = case.req_to_page.max_pages
    next_id = 1
    page_ids = []
    for old in case.new_occupied_pages:
        page_ids.append(tuple(range(next_id, next_id + 5 * len(old), 5)))
        next_id += 5 * len(old)
    written = calls.answer("update_req_to_page", case.replace(new_occupied_pages=tuple(page_ids)))
    page_size = 1 + next_id % 3
    kept = [ids[: max(0, max_pages - begin)] for ids, begin in zip(page_ids, case.begins)]
    fields = {
        "req_pool_indices": case.req_pool_indices,
        "input_lengths": [len(ids) * page_size for ids in kept],
        "cache_start": [begin * page_size if ids else 0 for begin, ids in zip(case.begins, kept)],
        "req_to_pages": _table_of(written["req_to_page"], case.req_to_page),
        "page_size": page_size,
    }
    renamed = {"req_to_page": "req_to_pages"}
    look_up = calls.case_of("compute_out_cache_loc", fields, case, renamed)
    slots = calls.answer("compute_out_cache_loc", look_up)["out_cache_loc"]
    pages = [page_id for ids in kept for page_id in ids]
    for token, slot in enumerate(slots):
        page_id = pages[token // page_size]
        if not page_id * page_size <= slot < (page_id + 1) * page_size:
            return (
                f"token {token} of the pages {_short(pages)}, each {page_size} long, lies in slot "
                f"{slot}, outside page {page_id}"
            )
    if len(set(slots)) < len(slots):
        twice = next(slot for i, slot in enumerate(slots) if slot in slots[:i])
        return f"two tokens lie in slot {twice} of the pages {_short(pages)}"
    return ""


def _chunks_cover(function: str) -> Callable[[Calls, Any], Difference]:
    def check(calls: Calls, case: Any) -> Difference:
        fields = {
            "req_pool_indices": case.req_pool_indices,
            "input_lengths": case.prefix_lens,
            "cache_start": [0] * case.num_requests,
            "req_to_pages": case.req_to_page,
            "page_size": case.page_size,
        }
        look_up = calls.case_of(
            "compute_out_cache_loc", fields, case, {"req_to_page": "req_to_pages"}
        )
        slots = calls.answer("compute_out_cache_loc", look_up)["out_cache_loc"]
        whole = _cut(slots, case.prefix_lens)
        for capacity in _capacities(case):
            answer = calls.answer(function, case.replace(chunk_capacity=capacity))
            pieces: list[list[int]] = [[] for _ in range(case.num_requests)]
            lens = next(value for path, value in answer.items() if path.endswith("len_in_chunk"))
            for chunk_idx, chunk in _kv_indices(answer):
                for piece, own in zip(pieces, _cut(chunk, lens[chunk_idx])):
                    piece += own
            for req_idx, (found, should) in enumerate(zip(pieces, whole)):
                if found != should:
                    return (
                        f"request {req_idx}: the chunks of capacity {capacity} hold "
                        f"{_short(found)}, but the slots of its {len(should)} positions are "
                        f"{_short(should)}"
                    )
        return ""

    return check


def _capacities(case: Any) -> list[int]:
    """Return capacities with few chunks: the case's, one chunk, and some that divide nothing."""
    if not case.num_requests:
        return [case.chunk_capacity]
    longest = max(case.prefix_lens)
    rest = case.num_requests - 1
    chunk_lens = [longest, -(-longest // 2) + 1, -(-longest // MOST_CHUNKS)]
    return [case.chunk_capacity, *(case.num_requests * max(1, n) + rest for n in chunk_lens)]


def _steps_add_up(calls: Calls, case: Any) -> Difference:
    """Compare one step with two for halves of the batch, and with two for halves of the pages."""
    at_once = calls.answer("update_block_table", case)["req_to_page"]
    half = [len(page_ids) // 2 for page_ids in case.new_occupied_pages]
    firsts = tuple(ids[:n] for ids, n in zip(case.new_occupied_pages, half))
    lasts = tuple(ids[n:] for ids, n in zip(case.new_occupied_pages, half))
    later = tuple(begin + n for begin, n in zip(case.begins, half))
    middle = case.num_requests // 2
    firsts_of_batch, lasts_of_batch = range(middle), range(middle, case.num_requests)
    ways: dict[str, list[Callable[[PageTable], Case]]] = {
        "half of the batch at a time": [
            lambda table: case.replace(**case.keeping(firsts_of_batch), req_to_page=table),
            lambda table: case.replace(**case.keeping(lasts_of_batch), req_to_page=table),
        ],
        "the first half of each request's pages, then the second": [
            lambda table: _with_pages(case, case.begins, firsts, table),
            lambda table: _with_pages(case, later, lasts, table),
        ],
        "the second half of each request's pages, then the first": [
            lambda table: _with_pages(case, later, lasts, table),
            lambda table: _with_pages(case, case.begins, firsts, table),
        ],
    }
    for how, steps in ways.items():
        table = case.req_to_page
        rows = at_once
        for step in steps:
            rows = calls.answer("update_block_table", step(table))["req_to_page"]
            table = _table_of(rows, table)
        if rows != at_once:
            return f"{how}: {_first_cell(at_once, rows)}"
    return ""


def _with_pages(
    case: Any, begins: Sequence[int], page_ids: tuple[tuple[int, ...], ...], table: PageTable
) -> Case:
    changed: Case = case.replace(
        begins=tuple(begins),
        new_occupied_pages=page_ids,
        sizes=tuple(map(len, page_ids)),
        req_to_page=table,
    )
    return changed


# Words and values


def _table_of(rows: Sequence[Sequence[int]], like: PageTable) -> PageTable:
    """Return rows as a table; one without cells keeps its size."""
    return PageTable.from_rows(rows) if like.num_cells else like


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _first_element(should: Sequence[int], found: Sequence[int], which: str) -> Difference:
    for idx, pair in enumerate(zip(should, found, strict=True)):
        if pair[0] != pair[1]:
            return f"out_cache_loc[{idx}] = {pair[0]}, but {pair[1]} in the {which} form"
    return ""


def _first_cell(should: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> Difference:
    row, column = next(
        (row, column)
        for row, ids in enumerate(should)
        for column, page_id in enumerate(ids)
        if page_id != found[row][column]
    )
    return (
        f"req_to_page[{row}][{column}] = {found[row][column]}, but {should[row][column]} in one "
        "step and in the order of the batch"
    )


def _relations() -> Iterator[Relation]:
    permuted = {
        "compute_out_cache_loc": _permuted(_token_pieces),
        "compute_out_cache_loc_uniform": _permuted(_token_pieces),
        "fused_decode_input_prep": _permuted(_token_pieces),
        "create_chunked_cache_kv_indices_paged": _permuted(_chunk_slot_pieces),
        "chunking": _permuted(_chunk_pieces),
        "get_chunks_paged": _permuted(_chunk_pieces),
        "build_chunked_prefill_metadata_arrays": _permuted(_chunk_pieces),
        "update_req_to_page": _permuted_table,
        "update_block_table": _permuted_table,
    }
    for function, check_of in permuted.items():
        statement = "permuting a batch permutes the results"
        yield Relation(f"permuted {function}", statement, (function,), check_of(function))
    for function in [*permuted][:3]:
        statement = "the results of a batch split in two are those of the whole"
        yield Relation(f"split {function}", statement, (function,), _split(function))
    yield Relation(
        "ragged and uniform",
        "with equal lengths the ragged form gives what the uniform one gives",
        ("compute_out_cache_loc_uniform", "compute_out_cache_loc"),
        _ragged_equals_uniform,
    )
    yield Relation(
        "uniform and fused",
        "the uniform form gives the out_cache_loc of the fused one",
        ("fused_decode_input_prep", "compute_out_cache_loc_uniform"),
        _uniform_equals_fused,
    )
    yield Relation(
        "pages and slots",
        "distinct pages that were written give distinct slots, each inside its page",
        ("update_req_to_page", "compute_out_cache_loc"),
        _pages_are_found,
    )
    for function in ("get_chunks_paged", "build_chunked_prefill_metadata_arrays"):
        yield Relation(
            f"chunks of {function}",
            "the chunks of a prefix are the slots of its positions, once and in order",
            (function, "compute_out_cache_loc"),
            _chunks_cover(function),
        )
    yield Relation(
        "steps of update_block_table",
        "one step, or several whose ranges do not overlap, leave the same table",
        ("update_block_table",),
        _steps_add_up,
    )


RELATIONS = {relation.name: relation for relation in _relations()}


def missing_for(relation: Relation, target: Target) -> str:
    """Return why a relation says nothing of a target, or ""."""
    for function in relation.functions:
        if function not in target.functions:
            return target.skipped.get(function, f"the target has no {function}")
    dialects = {target.terms_of(function).dialect for function in relation.functions}
    return "its functions speak different dialects" if len(dialects) > 1 else ""


def check_relation(
    target: Target,
    relation: Relation,
    *,
    num_cases: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    shard: int = 0,
) -> int:
    """Hold a target to a relation, and return on how many cases it held.

    Args:
        target: The target; it has the relation's functions.
        relation: The relation.
        num_cases: How many cases, or None for `max_examples` of Hypothesis's current profile.
        seed: Of the stream, or None for the session's.
        device: "auto", "cpu" or "cuda", or None for the session's.
        shard: Which of several streams of this property.

    Raises:
        NonConformance: The relation does not hold; with the smallest case found.
    """
    __tracebackhide__ = True
    from .calls import Calls

    resolved = resolve_device(session.device if device is None else device)
    prepare(resolved)
    family = family_named(relation.functions[0])

    def search() -> int | Minimal[Related]:
        calls = Calls(target, resolved)
        num_held = 0

        def compare(related: Related) -> Verdict:
            return related.compare(calls, resolved)

        check = conformance.noting(family, compare)

        def check_and_count(case: Case) -> Verdict:
            nonlocal num_held
            verdict = check(Related(case, relation.name))
            num_held += verdict.passed and not verdict.summary
            return verdict

        strategy = family.strategy(domain_of(target, relation))
        failure = first_failure(strategy, check_and_count, num_cases, seed, relation.name, shard)
        if failure is None:
            return num_held
        case, verdict = failure
        related = Related(case, relation.name)
        if verdict.fatal:
            return Minimal(related, verdict, 0, "a device that may be lost")
        return minimise(family, related, verdict, check, SHRINK_BUDGET)

    result = conformance.in_own_process(search, family)
    if isinstance(result, int):
        return result
    if isinstance(result, Ended):
        result = Minimal(result.case, result.verdict, 0, "the process that ended")
    text = result.case.to_json(family.name)
    path = write_case(session.out, family, result.verdict.signature, text)
    raise NonConformance(
        f"{result.verdict.text()}\n  {result}\n  case: {path}\n{text}", result.case.case, path
    )


def domain_of(target: Target, relation: Relation) -> Domain:
    """Return what may be drawn: what no function leaves out, in tables that can be filled."""
    from .checker import WIDE_TABLE

    domain = target.terms_of(relation.functions[0]).domain
    edges = {
        edge
        for function in relation.functions
        for edge in target.terms_of(function).without
        if edge in families()[relation.functions[0]].all_edges
    }
    return domain.excluding(*edges, WIDE_TABLE)
