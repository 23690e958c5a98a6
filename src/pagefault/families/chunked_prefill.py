"""The families of the four functions that cut a cached prefix into chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..case import CaseError, runs_left_out
from ..family import (
    Argument,
    Changes,
    Dialect,
    Expected,
    Explanation,
    Family,
    HostTensor,
    Tensor,
    TensorValue,
    number,
)
from ..oracle import chunked_prefill as oracle
from ..strategies.chunked_prefill import (
    CHUNKING_REFUSALS,
    PREFIX_REFUSALS,
    BuildMetadataCase,
    ChunkingCase,
    ChunkSlotsCase,
    GetChunksCase,
    PrefixCase,
    build_metadata_cases,
    chunk_slots_cases,
    chunking_cases,
    get_chunks_cases,
)
from .any_bytes import (
    expect_build_metadata,
    expect_chunk_slots,
    expect_chunking,
    expect_get_chunks,
)
from .slots import (
    COMMON_SLOT_EDGES,
    MANY_REQUESTS,
    SLOT_EDGES,
    Range,
    all_layout_edges,
    batch_edges,
    explain_slot,
    layout_edges,
    simpler_corner,
    simpler_lengths,
    simpler_pages,
    simpler_rows,
    slot_edges,
    smaller,
)

CHUNK_FIELDS = ("starts", "ends", "len_in_chunk", "cum_seq_lens")

PREFIX_EDGES = frozenset(
    [
        *("no chunks", "one chunk", "several chunks", "no requests", "more than 64 requests"),
        *("prefix 0", "prefix ends at chunk end -1", "prefix ends at chunk end +0"),
        *("prefix ends at chunk end +1", "prefixes differ in chunks"),
    ]
)


def _prefix_edges(prefix_lens: Sequence[int], num_chunks: int, chunk_len: int) -> set[str]:
    edges = {
        "no chunks" if not num_chunks else "one chunk" if num_chunks == 1 else "several chunks"
    }
    if not prefix_lens:
        edges.add("no requests")
    edges |= batch_edges(len(prefix_lens))
    for prefix_len in prefix_lens:
        if not prefix_len:
            edges.add("prefix 0")
            continue
        beside = (prefix_len + 1) % chunk_len - 1
        if chunk_len > 1 and -1 <= beside <= 1:
            edges.add(f"prefix ends at chunk end {beside:+d}")
    if len({-(-prefix_len // chunk_len) for prefix_len in prefix_lens}) > 1:
        edges.add("prefixes differ in chunks")
    return edges


def _chunk_values(
    path: str, chunks: oracle.Chunks, batch_size: int, on_host: bool = False
) -> dict[str, TensorValue]:
    num_chunks = len(chunks.starts)
    return {
        f"{path}{name}": TensorValue(
            (num_chunks, batch_size + (name == "cum_seq_lens")),
            [value for row in getattr(chunks, name) for value in row],
            on_host=on_host,
        )
        for name in CHUNK_FIELDS
    }


def _take_chunks_apart(path: str, chunks: Any) -> dict[str, Any]:
    return {f"{path}{name}": getattr(chunks, name) for name in CHUNK_FIELDS}


def _listed(path: str, items: Sequence[Any]) -> dict[str, Any]:
    return {f"{path}[{i}]": item for i, item in enumerate(items)}


def _slot_values(kv_indices_list: Sequence[Sequence[int]]) -> dict[str, TensorValue]:
    values = [TensorValue((len(slots),), slots) for slots in kv_indices_list]
    return _listed("kv_indices_list", values)


# chunking


def _chunking_arguments(case: ChunkingCase) -> list[Argument]:
    return [
        Tensor("prefix_lens", (case.num_requests,), case.prefix_lens),
        number("num_chunks", case.num_chunks),
        number("batch_size", case.batch_size),
        number("chunk_len", case.chunk_len),
    ]


def _expect_chunking(case: ChunkingCase, dialect: Dialect) -> Expected:
    if case.refusal:
        return Expected(raises=ValueError)
    chunks = oracle.chunking(case.prefix_lens, case.num_chunks, case.batch_size, case.chunk_len)
    return Expected(returns=_chunk_values("chunks.", chunks, case.batch_size))


def _chunking_edges(case: ChunkingCase) -> frozenset[str]:
    if case.refusal:
        return frozenset([f"refused: {case.refusal}"])
    edges = _prefix_edges(case.prefix_lens, case.num_chunks, case.chunk_len)
    covering = -(-max(case.prefix_lens, default=0) // case.chunk_len)
    if case.num_chunks < covering:
        edges.add("chunks do not cover")
    elif case.num_chunks > covering:
        edges.add("chunks past the longest prefix")
    if max(case.prefix_lens, default=0) >= 2**31:
        edges.add("prefix past 2**31 - 1")
    return frozenset(edges | layout_edges(case))


def _explain_chunk(case: Any, where: str, index: int, found: int) -> Explanation:
    """Say which chunk of which request a cell of `Chunks` or a list is about."""
    name = where.split("[")[0].split(".")[-1]
    width = case.num_requests + (name == "cum_seq_lens")
    if name == "max_len_per_chunk":
        return Explanation(name, (f"chunk {where.split('[')[1][:-1]}",))
    if name not in CHUNK_FIELDS:
        return Explanation(name)
    chunk_idx, req_idx = divmod(index, width)
    if name == "cum_seq_lens":
        return Explanation(name, (f"chunk {chunk_idx}, before request {req_idx}",))
    prefix_len = case.prefix_lens[req_idx]
    return Explanation(name, (f"chunk {chunk_idx} of request {req_idx}, prefix {prefix_len}",))


def _simpler_chunking(case: ChunkingCase) -> Iterator[Changes]:
    for chunk_len in smaller(case.chunk_len, 1):
        moved = tuple(max(0, n - case.chunk_len + chunk_len) for n in case.prefix_lens)
        yield {"chunk_len": chunk_len, "prefix_lens": moved}
    for num_chunks in smaller(max(1, case.num_chunks), 1):
        # Longer chunks, which reach about as far.
        chunk_len = -(-case.num_chunks * case.chunk_len // num_chunks)
        yield {"num_chunks": num_chunks, "chunk_len": chunk_len}


# create_chunked_cache_kv_indices_paged


def _chunk_ranges(case: ChunkSlotsCase) -> list[Range]:
    return [*map(Range, case.req_pool_indices, case.chunk_starts, case.chunk_seq_lens)]


def _chunk_slots_arguments(case: ChunkSlotsCase) -> list[Argument]:
    batch_size = case.num_requests
    table = case.req_to_page
    offsets = case.offsets
    return [
        Tensor("req_to_page", (table.num_rows, table.max_pages), table),
        Tensor("req_pool_indices", (batch_size,), case.req_pool_indices),
        Tensor("chunk_starts", (batch_size,), case.chunk_starts),
        Tensor("chunk_seq_lens", (batch_size,), case.chunk_seq_lens),
        Tensor("chunk_cum_seq_lens", (batch_size + 1,), offsets),
        Tensor("chunk_kv_indices", (offsets[-1],), None),
        number("page_size", case.page_size),
    ]


def _chunk_slots_fields(values: Mapping[str, Any]) -> Changes:
    offsets, lengths = values["chunk_cum_seq_lens"], values["chunk_seq_lens"]
    ends = [0, *(offset + length for offset, length in zip(offsets, lengths))]
    gaps = [offset - end for offset, end in zip(offsets, ends)]
    names = ("req_pool_indices", "chunk_starts", "chunk_seq_lens", "req_to_page", "page_size")
    return {**{name: values[name] for name in names}, "gaps": gaps[:-1], "tail": gaps[-1]}


def _expect_chunk_slots(case: ChunkSlotsCase, dialect: Dialect) -> Expected:
    slots = oracle.create_chunked_cache_kv_indices_paged(
        case.req_to_page.rows,
        case.req_pool_indices,
        case.chunk_starts,
        case.chunk_seq_lens,
        case.offsets,
        case.page_size,
        overflow_slot=dialect.overflow_slot,
        holes=dialect.holes,
    )
    return Expected(
        {"chunk_kv_indices": slots}, rows={"req_to_page": frozenset(case.req_pool_indices)}
    )


def _chunk_slots_edges(case: ChunkSlotsCase) -> frozenset[str]:
    edges = slot_edges(_chunk_ranges(case), case.req_to_page, case.page_size)
    if any(case.gaps) or case.tail:
        edges.add("gap")
    return frozenset(edges | layout_edges(case))


def _explain_chunk_slot(case: ChunkSlotsCase, where: str, index: int, found: int) -> Explanation:
    ranges = _chunk_ranges(case)
    num_before = 0
    for offset, token_range in zip(case.offsets, ranges):
        if offset <= index < offset + token_range.length:
            flat = num_before + index - offset
            return explain_slot(
                ranges, "req_to_page", case.req_to_page, case.page_size, flat, found
            )
        num_before += token_range.length
    return Explanation("gap")


def _simpler_chunk_slots(case: ChunkSlotsCase) -> Iterator[Changes]:
    yield from simpler_rows(case, "req_pool_indices", "req_to_page")
    yield from simpler_pages(case, "chunk_starts", "req_to_page")
    yield from simpler_corner(case, "req_pool_indices", "chunk_starts", "req_to_page")
    yield from simpler_lengths(case, "chunk_starts", "chunk_seq_lens")
    # What no request owns may as well lie behind the output.
    at = case.placement("chunk_kv_indices")
    none = (0,) * len(case.gaps)
    for unowned, kept in ((sum(case.gaps) + case.tail, {"gaps": none}), (case.tail, {})):
        if unowned:
            spare = dataclasses.replace(at, spare=at.spare + unowned)
            yield {**kept, "tail": 0, "layout": (*case.layout, ("chunk_kv_indices", spare))}


# get_chunks_paged and build_chunked_prefill_metadata_arrays


def _prefix_arguments(case: PrefixCase) -> list[Argument]:
    device_name, host_name = list(case.PLAIN)[:2]
    table = case.req_to_page
    return [
        Tensor(device_name, (case.num_requests,), case.prefix_lens),
        HostTensor(host_name, case.prefix_lens),
        Tensor("req_to_page", (table.num_rows, table.max_pages), table),
        Tensor("req_pool_indices", (case.num_requests,), case.req_pool_indices),
        number("page_size", case.page_size),
        number("chunk_capacity", case.chunk_capacity),
    ]


def _prefix_fields(on_device: str) -> Callable[[Mapping[str, Any]], Changes]:
    def fields_of(values: Mapping[str, Any]) -> Changes:
        prefix_lens, on_host = values[on_device], values[f"{on_device}_cpu"]
        if prefix_lens != on_host:
            raise CaseError(f"{on_device}: {prefix_lens}, but {on_host} on the CPU")
        names = ("req_pool_indices", "req_to_page", "page_size", "chunk_capacity")
        return {**{name: values[name] for name in names}, "prefix_lens": prefix_lens}

    return fields_of


def _expect_get_chunks(case: GetChunksCase, dialect: Dialect) -> Expected:
    if case.refusal:
        return Expected(raises=ValueError)
    chunks, kv_indices_list = oracle.get_chunks_paged(
        case.prefix_lens,
        case.req_to_page.rows,
        case.req_pool_indices,
        case.page_size,
        case.chunk_capacity,
        overflow_slot=dialect.overflow_slot,
        holes=dialect.holes,
    )
    return Expected(
        returns={
            **_chunk_values("chunks.", chunks, case.num_requests),
            **_slot_values(kv_indices_list),
            **_chunk_values("chunks_cpu.", chunks, case.num_requests, on_host=True),
        },
        rows={"req_to_page": frozenset(case.req_pool_indices)},
    )


def _take_get_chunks_apart(result: Any) -> Mapping[str, Any]:
    chunks, kv_indices_list, chunks_cpu = result
    return {
        **_take_chunks_apart("chunks.", chunks),
        **_listed("kv_indices_list", kv_indices_list),
        **_take_chunks_apart("chunks_cpu.", chunks_cpu),
    }


def _expect_build_metadata(case: BuildMetadataCase, dialect: Dialect) -> Expected:
    if case.refusal:
        return Expected(raises=ValueError)
    metadata = oracle.build_chunked_prefill_metadata_arrays(
        case.prefix_lens,
        case.req_to_page.rows,
        case.req_pool_indices,
        case.page_size,
        case.chunk_capacity,
        overflow_slot=dialect.overflow_slot,
        holes=dialect.holes,
    )
    num_chunks, batch_size = metadata.num_chunks, case.num_requests
    lens = [value for row in metadata.len_in_chunk for value in row]
    sums = [value for row in metadata.cum_seq_lens for value in row]
    return Expected(
        returns={
            "num_chunks": num_chunks,
            **_slot_values(metadata.kv_indices_list),
            "len_in_chunk": TensorValue((num_chunks, batch_size), lens),
            "cum_seq_lens": TensorValue((num_chunks, batch_size + 1), sums),
            **_listed("max_len_per_chunk", metadata.max_len_per_chunk),
        },
        rows={"req_to_page": frozenset(case.req_pool_indices)},
    )


def _take_metadata_apart(result: Any) -> Mapping[str, Any]:
    num_chunks, kv_indices_list, len_in_chunk, cum_seq_lens, max_len_per_chunk = result
    return {
        "num_chunks": num_chunks,
        **_listed("kv_indices_list", kv_indices_list),
        "len_in_chunk": len_in_chunk,
        "cum_seq_lens": cum_seq_lens,
        **_listed("max_len_per_chunk", max_len_per_chunk),
    }


def _chunk_len(case: PrefixCase) -> int:
    return case.chunk_capacity // case.num_requests if case.num_requests else 1


def _prefix_case_edges(case: PrefixCase) -> frozenset[str]:
    if case.refusal:
        return frozenset([f"refused: {case.refusal}"])
    num_chunks = -(-max(case.prefix_lens, default=0) // _chunk_len(case))
    edges = _prefix_edges(case.prefix_lens, num_chunks, _chunk_len(case))
    if case.num_requests and case.chunk_capacity % case.num_requests:
        edges.add("capacity divides nothing")
    ranges = [Range(row, 0, n) for row, n in zip(case.req_pool_indices, case.prefix_lens)]
    return frozenset(
        edges | slot_edges(ranges, case.req_to_page, case.page_size) | layout_edges(case)
    )


def _explain_prefix(case: PrefixCase, where: str, index: int, found: int) -> Explanation:
    if not where.startswith("kv_indices_list"):
        return _explain_chunk(case, where, index, found)
    chunk_idx = int(where.split("[")[1].rstrip("]"))
    start = chunk_idx * _chunk_len(case)
    ranges = [
        Range(row, start, min(max(0, prefix_len - start), _chunk_len(case)))
        for row, prefix_len in zip(case.req_pool_indices, case.prefix_lens)
    ]
    return explain_slot(ranges, "req_to_page", case.req_to_page, case.page_size, index, found)


def _simpler_prefix(case: PrefixCase) -> Iterator[Changes]:
    yield from simpler_rows(case, "req_pool_indices", "req_to_page")
    yield from simpler_pages(case, "prefix_lens", "req_to_page")
    chunk_len = _chunk_len(case)
    for shorter in smaller(chunk_len, 1):
        moved = tuple(max(0, n - chunk_len + shorter) for n in case.prefix_lens)
        rest = case.chunk_capacity - chunk_len * case.num_requests
        yield {"prefix_lens": moved, "chunk_capacity": shorter * case.num_requests + rest}
    for kept in runs_left_out(case.num_requests):
        num_dropped = case.num_requests - len(kept)
        for capacity in (chunk_len * len(kept), case.chunk_capacity - chunk_len * num_dropped):
            yield {**case.keeping(kept), "chunk_capacity": max(1, capacity)}


# Edges that a prefix, which starts at 0 and stays inside its row, can have.
_PREFIX_SLOT_EDGES = frozenset(
    edge
    for edge in SLOT_EDGES
    if not edge.startswith(("overflow: some", "overflow: all", "overflow in", "start at"))
    and edge
    not in (
        "end at row end +1",
        "slot past 2**31 - 1",
        "position past 2**31 - 1",
    )
)
_PREFIX_ALL_EDGES = (
    _PREFIX_SLOT_EDGES
    | PREFIX_EDGES
    | set(MANY_REQUESTS)
    | {"capacity divides nothing", "start at page boundary +0"}
    | {"start at row end -1"}
    | {f"refused: {refusal}" for refusal in PREFIX_REFUSALS}
)
_PREFIX_MUST_REACH = frozenset(
    [
        *("several chunks", "prefix 0", "prefix ends at chunk end +0", "pitched table"),
        *("prefixes differ in chunks", "capacity divides nothing", "end at row end +0"),
        *("hole", "page id 0", "rows permuted", "refused: prefix past the table"),
    ]
)


def _num_prefix_tokens(case: Any) -> int:
    return sum(max(0, prefix_len) for prefix_len in case.prefix_lens)


def _num_tokens_and_chunks(case: ChunkingCase) -> int:
    return _num_prefix_tokens(case) + max(0, case.num_chunks)


FAMILIES = [
    Family(
        name="chunking",
        parameters=("prefix_lens", "num_chunks", "batch_size", "chunk_len"),
        case_type=ChunkingCase,
        cases=chunking_cases,
        arguments=_chunking_arguments,
        expect=_expect_chunking,
        edges=_chunking_edges,
        size=_num_tokens_and_chunks,
        all_edges=PREFIX_EDGES
        | set(MANY_REQUESTS)
        | {"chunks do not cover", "chunks past the longest prefix", "prefix past 2**31 - 1"}
        | {"offset", "offset prefix_lens", "int64 prefix_lens"}
        | {f"refused: {refusal}" for refusal in CHUNKING_REFUSALS},
        must_reach=PREFIX_EDGES
        | {"chunks do not cover", "chunks past the longest prefix", "offset"}
        | {"int64 prefix_lens", "refused: chunk_len", "refused: batch_size"},
        returned=lambda chunks: _take_chunks_apart("chunks.", chunks),
        results=("chunks",),
        explain=_explain_chunk,
        capturable=True,
        simpler=_simpler_chunking,
        expect_any_bytes=expect_chunking,
    ),
    Family(
        name="create_chunked_cache_kv_indices_paged",
        parameters=(
            "req_to_page",
            "req_pool_indices",
            "chunk_starts",
            "chunk_seq_lens",
            "chunk_cum_seq_lens",
            "chunk_kv_indices",
            "page_size",
        ),
        case_type=ChunkSlotsCase,
        cases=chunk_slots_cases,
        arguments=_chunk_slots_arguments,
        fields_of=_chunk_slots_fields,
        expect=_expect_chunk_slots,
        edges=_chunk_slots_edges,
        size=lambda case: sum(case.chunk_seq_lens),
        all_edges=SLOT_EDGES
        | {"gap"}
        | all_layout_edges(ChunkSlotsCase.PLAIN, "req_to_page", ["chunk_kv_indices"]),
        must_reach=COMMON_SLOT_EDGES | {"gap", "pitched table", "offset", "spare output"},
        explain=_explain_chunk_slot,
        capturable=True,
        simpler=_simpler_chunk_slots,
        expect_any_bytes=expect_chunk_slots,
    ),
    Family(
        name="get_chunks_paged",
        parameters=(*GetChunksCase.PLAIN, "page_size", "chunk_capacity"),
        case_type=GetChunksCase,
        cases=get_chunks_cases,
        arguments=_prefix_arguments,
        fields_of=_prefix_fields("prefix_lens"),
        expect=_expect_get_chunks,
        edges=_prefix_case_edges,
        size=_num_prefix_tokens,
        all_edges=_PREFIX_ALL_EDGES | (all_layout_edges(GetChunksCase.PLAIN, "req_to_page", [])),
        must_reach=_PREFIX_MUST_REACH,
        returned=_take_get_chunks_apart,
        results=("chunks", "kv_indices_list", "chunks_cpu"),
        explain=_explain_prefix,
        simpler=_simpler_prefix,
        expect_any_bytes=expect_get_chunks,
    ),
    Family(
        name="build_chunked_prefill_metadata_arrays",
        parameters=(*BuildMetadataCase.PLAIN, "page_size", "chunk_capacity"),
        case_type=BuildMetadataCase,
        cases=build_metadata_cases,
        arguments=_prefix_arguments,
        fields_of=_prefix_fields("extend_prefix_lens"),
        expect=_expect_build_metadata,
        edges=_prefix_case_edges,
        size=_num_prefix_tokens,
        all_edges=_PREFIX_ALL_EDGES
        | (all_layout_edges(BuildMetadataCase.PLAIN, "req_to_page", [])),
        must_reach=_PREFIX_MUST_REACH,
        returned=_take_metadata_apart,
        results=(
            *("num_chunks", "kv_indices_list", "len_in_chunk", "cum_seq_lens"),
            "max_len_per_chunk",
        ),
        explain=_explain_prefix,
        simpler=_simpler_prefix,
        expect_any_bytes=expect_build_metadata,
    ),
]
