"""What our families expect of a call whose device tensors hold anything at all.

Where the contract fixes the whole answer it is compared; elsewhere the outputs, and the rows that
pool indices name, may hold anything, and nothing else may change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..case import DTYPE_RANGES, Case, PageTable
from ..family import Dialect, Expected, Inputs, TensorValue, Writes
from ..oracle import any_bytes as oracle
from ..oracle.chunked_prefill import Chunks
from ..strategies.chunked_prefill import (
    BuildMetadataCase,
    ChunkingCase,
    ChunkSlotsCase,
    GetChunksCase,
    PrefixCase,
)
from ..strategies.decode_input_prep import FusedDecodeCase
from ..strategies.out_cache_loc import OutCacheLocCase, UniformOutCacheLocCase
from ..strategies.req_to_page import UpdateReqToPageCase


def expect_out_cache_loc(
    case: OutCacheLocCase | UniformOutCacheLocCase, inputs: Inputs, dialect: Dialect
) -> Expected:
    """Return what `compute_out_cache_loc` or its uniform form owes."""
    if isinstance(case, OutCacheLocCase):
        lengths, num_tokens = _vector(inputs, "input_lengths"), sum(case.input_lengths)
    else:
        lengths = [case.uniform_input_length] * case.num_requests
        num_tokens = sum(lengths)
    num_elements = num_tokens + case.placement("out_cache_loc").spare
    rows = _vector(inputs, "req_pool_indices")
    table = _table(inputs, "req_to_pages")
    slots = oracle.compute_out_cache_loc(
        num_elements,
        rows,
        lengths,
        _vector(inputs, "cache_start"),
        table.rows,
        case.page_size,
        overflow_slot=dialect.overflow_slot,
        holes=dialect.holes,
    )
    return Expected(
        {"out_cache_loc": _fitting(case, "out_cache_loc", slots, num_elements)},
        rows={"req_to_pages": _in_pool(rows, table)},
    )


def expect_fused_decode(case: FusedDecodeCase, inputs: Inputs, dialect: Dialect) -> Expected:
    """Return what `fused_decode_input_prep` owes."""
    rows = _vector(inputs, "req_pool_indices")
    table = _table(inputs, "req_to_pages")
    outputs = oracle.fused_decode_input_prep(
        rows,
        _vector(inputs, "valid_cache_lengths"),
        case.uniform_input_length,
        table.rows,
        case.page_size,
        overflow_slot=dialect.overflow_slot,
        holes=dialect.holes,
    )
    return Expected(
        {name: _fitting(case, name, values) for name, values in outputs._asdict().items()},
        rows={"req_to_pages": _in_pool(rows, table)},
    )


def expect_update(case: UpdateReqToPageCase, inputs: Inputs, dialect: Dialect) -> Expected:
    """Return what `update_req_to_page` owes."""
    rows = _vector(inputs, "req_pool_indices")
    table = _table(inputs, "req_to_page")
    named = _in_pool(rows, table)
    page_ids = oracle.page_writes(
        table.num_rows,
        table.max_pages,
        rows,
        _vector(inputs, "new_occupied_pages"),
        _vector(inputs, "new_occupied_pages_num"),
        _vector(inputs, "pages_copy_starts"),
    )
    if page_ids is None:
        page_ids = dict.fromkeys((row, c) for row in named for c in range(table.max_pages))
    writes = {row * table.max_pages + column: id_ for (row, column), id_ in page_ids.items()}
    return Expected({"req_to_page": writes}, rows={"req_to_page": named})


def expect_chunk_slots(case: ChunkSlotsCase, inputs: Inputs, dialect: Dialect) -> Expected:
    """Return what `create_chunked_cache_kv_indices_paged` owes."""
    num_elements = case.offsets[-1] + case.placement("chunk_kv_indices").spare
    rows = _vector(inputs, "req_pool_indices")
    table = _table(inputs, "req_to_page")
    slots = oracle.create_chunked_cache_kv_indices_paged(
        num_elements,
        table.rows,
        rows,
        _vector(inputs, "chunk_starts"),
        _vector(inputs, "chunk_seq_lens"),
        _vector(inputs, "chunk_cum_seq_lens"),
        case.page_size,
        overflow_slot=dialect.overflow_slot,
        holes=dialect.holes,
    )
    writes: Writes
    if slots is None:
        writes = [None] * num_elements
    else:
        written = _fitting(case, "chunk_kv_indices", [*slots.values()])
        writes = dict(zip(slots, written))
    return Expected({"chunk_kv_indices": writes}, rows={"req_to_page": _in_pool(rows, table)})


def expect_chunking(case: ChunkingCase, inputs: Inputs, dialect: Dialect) -> Expected:
    """Return what `chunking` owes."""
    chunks = oracle.chunking(
        _vector(inputs, "prefix_lens"), case.num_chunks, case.batch_size, case.chunk_len
    )
    return Expected(returns=_chunk_values("chunks.", chunks, case.batch_size))


def expect_get_chunks(case: GetChunksCase, inputs: Inputs, dialect: Dialect) -> Expected:
    """Return what `get_chunks_paged` owes."""
    chunks, kv_indices_list, chunks_cpu = _get_chunks(case, "prefix_lens", inputs, dialect)
    return Expected(
        returns={
            **_chunk_values("chunks.", chunks, case.num_requests),
            **_slot_values(kv_indices_list),
            **_chunk_values("chunks_cpu.", chunks_cpu, case.num_requests, on_host=True),
        },
        rows=_prefix_rows(inputs),
    )


def expect_build_metadata(case: BuildMetadataCase, inputs: Inputs, dialect: Dialect) -> Expected:
    """Return what `build_chunked_prefill_metadata_arrays` owes."""
    chunks, kv_indices_list, chunks_cpu = _get_chunks(case, "extend_prefix_lens", inputs, dialect)
    values = _chunk_values("", chunks, case.num_requests)
    longest = [max(lens) for lens in chunks_cpu.len_in_chunk]
    return Expected(
        returns={
            "num_chunks": len(kv_indices_list),
            **_slot_values(kv_indices_list),
            "len_in_chunk": values["len_in_chunk"],
            "cum_seq_lens": values["cum_seq_lens"],
            **{f"max_len_per_chunk[{c}]": length for c, length in enumerate(longest)},
        },
        rows=_prefix_rows(inputs),
    )


def _get_chunks(
    case: PrefixCase, prefix_name: str, inputs: Inputs, dialect: Dialect
) -> tuple[Chunks, list[list[int | None]], Chunks]:
    return oracle.get_chunks_paged(
        _vector(inputs, prefix_name),
        case.prefix_lens,
        _table(inputs, "req_to_page").rows,
        _vector(inputs, "req_pool_indices"),
        case.page_size,
        case.chunk_capacity,
        overflow_slot=dialect.overflow_slot,
        holes=dialect.holes,
    )


def _prefix_rows(inputs: Inputs) -> dict[str, frozenset[int]]:
    rows = _vector(inputs, "req_pool_indices")
    return {"req_to_page": _in_pool(rows, _table(inputs, "req_to_page"))}


def _chunk_values(
    path: str, chunks: Chunks, batch_size: int, on_host: bool = False
) -> dict[str, TensorValue]:
    return {
        f"{path}{name}": TensorValue(
            (len(rows), batch_size + (name == "cum_seq_lens")),
            _in_range("int32", [value for row in rows for value in row]),
            on_host=on_host,
        )
        for name, rows in chunks._asdict().items()
    }


def _slot_values(kv_indices_list: Sequence[Sequence[int | None]]) -> dict[str, TensorValue]:
    return {
        f"kv_indices_list[{c}]": TensorValue((len(slots),), _in_range("int32", slots))
        for c, slots in enumerate(kv_indices_list)
    }


def _vector(inputs: Inputs, name: str) -> Sequence[int]:
    vector = inputs[name]
    assert not isinstance(vector, PageTable)
    return vector


def _table(inputs: Inputs, name: str) -> PageTable:
    table = inputs[name]
    assert isinstance(table, PageTable)
    return table


def _in_pool(rows: Iterable[int], table: PageTable) -> frozenset[int]:
    return frozenset(row for row in rows if 0 <= row < table.num_rows)


def _in_range(dtype: str, values: Sequence[int | None]) -> list[int | None]:
    """Return values with None for those that a dtype can't hold."""
    legal = DTYPE_RANGES[dtype]
    return [value if value is not None and value in legal else None for value in values]


def _fitting(
    case: Case, name: str, values: Sequence[int | None] | None, num_elements: int = 0
) -> list[int | None]:
    """Return values as an output can hold them; a whole answer that is open leaves all open."""
    if values is None:
        return [None] * num_elements
    return _in_range(case.placement(name).dtype, values)
