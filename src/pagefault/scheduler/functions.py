"""A target's functions on the tensors of an engine; plain Python for those that it lacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..conformance import session
from ..family import Dialect
from ..oracle import out_cache_loc as oracle
from ..target import Target
from .model import COPY, RETURNS, Broken

# The functions that can do each job; the first one in a row is the one that an engine prefers.
UPDATES = ("update_block_table", "update_req_to_page")
DECODES = ("fused_decode_input_prep", "compute_out_cache_loc_uniform", "compute_out_cache_loc")
GATHERS = (
    "build_chunked_prefill_metadata_arrays",
    "get_chunks_paged",
    "create_chunked_cache_kv_indices_paged",
)

PLAIN = "plain Python"


class Copies(TorchFunctionMode):
    """Takes note of copies that nothing waits for, to look at their sources once more later.

    The memory of a source is held until then, as torch's allocator of pinned memory holds it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sources: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        source = _source_of(func, args, kwargs or {})
        if source is not None and source.device.type == "cpu":
            self._sources.append((source, source.clone()))
        return result

    def verify(self) -> None:
        """Look at the sources again, now that the device has come to the copies.

        Raises:
            Broken: One of them holds something else.
        """
        for source, copied in self._sources:
            changed = (source != copied).flatten().nonzero().flatten().tolist()
            if changed:
                idx = changed[0]
                raise Broken(
                    COPY,
                    f"element {idx} of a buffer of {source.numel()} held "
                    f"{copied.flatten()[idx].item()} when its copy was asked for, and holds "
                    f"{source.flatten()[idx].item()} before the device has come to it",
                )
        self._sources.clear()


def _source_of(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Return what a call copies without waiting, or None."""
    name = getattr(func, "__name__", "")
    if name not in ("to", "copy_", "cuda"):
        return None
    if not kwargs.get("non_blocking", any(value is True for value in args[1:])):
        return None
    source = kwargs.get("src", args[1] if len(args) > 1 else None) if name == "copy_" else args[0]
    return source if isinstance(source, torch.Tensor) else None


class Functions:
    """Calls the functions of a target, or the oracle where it lacks one.

    Args:
        target: The functions under test.
        device: "cpu" or "cuda".
        log: What has happened, for whoever has to say what ended the process.
    """

    def __init__(self, target: Target, device: str, log: list[str]) -> None:
        self.device = device
        self._target = target
        self._log = log

    @property
    def dummies(self) -> frozenset[int]:
        """Slots that overflow and holes go to."""
        names = [*self._target.functions, ""]
        return frozenset(self._target.terms_of(name).dialect.overflow_slot for name in names)

    def ways(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return which of some functions there are, or that there is only plain Python."""
        return tuple(name for name in names if name in self._target.functions) or (PLAIN,)

    def tensor(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Return numbers on the device."""
        return torch.tensor(values, dtype=dtype).to(self.device)

    def update(
        self,
        way: str,
        req_to_page: torch.Tensor,
        names: Sequence[str],
        rows: Sequence[int],
        begins: Sequence[int],
        page_ids: Sequence[Sequence[int]],
    ) -> None:
        """Write new pages into the page table.

        Args:
            way: One of `UPDATES`, or plain Python.
            req_to_page: [num_rows, max_pages], written.
            names: Of the requests.
            rows: Row of each.
            begins: Column of the first new page of each.
            page_ids: The new pages of each.
        """
        counts = [len(ids) for ids in page_ids]
        if way == "update_block_table":
            step = SimpleNamespace(
                request_ids=list(names),
                request_pool_indices=list(rows),
                sizes=counts,
                begins=list(begins),
                new_occupied_pages=[list(ids) for ids in page_ids],
            )
            self._call(way, step, self.device, req_to_page)
        elif way == "update_req_to_page":
            flat = [page_id for ids in page_ids for page_id in ids]
            self._call(
                way,
                req_to_page,
                self.tensor(rows, torch.int64),
                *map(self.tensor, (flat, counts, begins)),
            )
        else:
            max_pages = req_to_page.shape[1]
            for row, begin, ids in zip(rows, begins, page_ids):
                kept = list(ids)[: max(0, max_pages - begin)]
                req_to_page[row, begin : begin + len(kept)] = self.tensor(kept)

    def ragged_slots(
        self,
        out_cache_loc: torch.Tensor,
        rows: torch.Tensor,
        lens: torch.Tensor,
        starts: torch.Tensor,
        req_to_page: torch.Tensor,
        page_size: int,
    ) -> None:
        """Write the slots of the new tokens of requests of different lengths."""
        name = "compute_out_cache_loc"
        if name in self._target.functions:
            self._call(name, out_cache_loc, rows, lens, starts, req_to_page, page_size)
            return
        args = rows.tolist(), lens.tolist(), starts.tolist(), req_to_page.tolist()
        slots = oracle.compute_out_cache_loc(*args, page_size, **self._dialect)
        out_cache_loc[: len(slots)] = self.tensor(slots)

    def decode_slots(
        self,
        way: str,
        out_cache_loc: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        num_tokens: int,
        req_to_page: torch.Tensor,
        page_size: int,
    ) -> list[int]:
        """Write the slots of a decode step, and return the position of each request's first token.

        Args:
            way: One of `DECODES`, or plain Python.
            out_cache_loc: [>= batch_size * num_tokens], written.
            rows: [batch_size], row of each request.
            lengths: [num_rows], tokens of the request in each row.
            num_tokens: New tokens of each request.
            req_to_page: [num_rows, max_pages].
            page_size: Tokens per page.
        """
        batch_size = rows.numel()
        if way == "fused_decode_input_prep":
            positions = torch.full_like(out_cache_loc, -7)
            seq_lens = torch.full((batch_size,), -7, dtype=torch.int32, device=rows.device)
            args = (out_cache_loc, positions, seq_lens, rows, lengths, num_tokens)
            self._call(way, *args, req_to_page, page_size)
            starts = [int(seq_len) - num_tokens for seq_len in seq_lens.tolist()]
            _check_positions(positions.tolist(), starts, num_tokens)
            return starts
        starts_of_batch = lengths[rows]
        starts = [int(start) for start in starts_of_batch.tolist()]
        if way == "compute_out_cache_loc_uniform":
            self._call(
                way, out_cache_loc, rows, num_tokens, starts_of_batch, req_to_page, page_size
            )
        else:
            lens = torch.full_like(starts_of_batch, num_tokens)
            self.ragged_slots(out_cache_loc, rows, lens, starts_of_batch, req_to_page, page_size)
        return starts

    def prefix_slots(
        self,
        way: str,
        rows: Sequence[int],
        prefix_lens: Sequence[int],
        req_to_page: torch.Tensor,
        page_size: int,
        chunk_capacity: int,
    ) -> list[list[int]]:
        """Return the slots of each request's prefix, put together from chunks.

        Args:
            way: One of `GATHERS`, or plain Python.
            rows: Row of each request.
            prefix_lens: Tokens of each prefix; inside the table.
            req_to_page: [num_rows, max_pages].
            page_size: Tokens per page.
            chunk_capacity: Tokens of a chunk, over all requests; no less than there are requests.
        """
        if way == PLAIN or not any(prefix_lens):
            starts = [0] * len(rows)
            table = req_to_page.tolist()
            slots = oracle.compute_out_cache_loc(
                rows, prefix_lens, starts, table, page_size, **self._dialect
            )
            return _cut([(slots, prefix_lens)], len(rows))
        row_indices, lens = self.tensor(rows, torch.int64), self.tensor(prefix_lens)
        lens_cpu = torch.tensor(prefix_lens, dtype=torch.int32)
        if way == "create_chunked_cache_kv_indices_paged":
            return self._chunk_by_chunk(row_indices, lens, req_to_page, page_size, chunk_capacity)
        args = lens, lens_cpu, req_to_page, row_indices, page_size, chunk_capacity
        result = self._call(way, *args)
        if way == "get_chunks_paged":
            kv_indices, len_in_chunk = result[1], result[0].len_in_chunk
        else:
            kv_indices, len_in_chunk = result[1], result[2]
        chunks = zip([slots.tolist() for slots in kv_indices], len_in_chunk.tolist())
        return _cut(chunks, len(rows))

    def _chunk_by_chunk(
        self,
        rows: torch.Tensor,
        prefix_lens: torch.Tensor,
        req_to_page: torch.Tensor,
        page_size: int,
        chunk_capacity: int,
    ) -> list[list[int]]:
        batch_size = rows.numel()
        chunk_len = chunk_capacity // batch_size
        num_chunks = -(-int(prefix_lens.max()) // chunk_len)
        bounds = [(i * chunk_len, (i + 1) * chunk_len) for i in range(num_chunks)]
        pieces = []
        for begin, end in bounds:
            lens = prefix_lens.clamp(max=end) - begin
            lens = lens.clamp(min=0)
            sums = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
            out = self.tensor([-7] * int(sums[-1]))
            starts = torch.full_like(lens, begin)
            self._call(
                "create_chunked_cache_kv_indices_paged",
                *(req_to_page, rows, starts, lens, sums, out, page_size),
            )
            pieces.append((out.tolist(), lens.tolist()))
        return _cut(pieces, batch_size)

    @property
    def _dialect(self) -> dict[str, Any]:
        dialect: Dialect = self._target.dialect
        return {"overflow_slot": dialect.overflow_slot, "holes": dialect.holes}

    def _call(self, name: str, *args: Any) -> Any:
        journal = session.journal
        if journal is not None:
            journal.note(name, tuple(self._log))
        try:
            with _without_warnings():
                return self._target.functions[name](*args)
        except Broken:
            raise
        except Exception as error:
            raise Broken(RETURNS, f"{name} raised {type(error).__name__}: {error}") from error
        finally:
            if journal is not None:
                journal.clear()


def _check_positions(positions: Sequence[int], starts: Sequence[int], num_tokens: int) -> None:
    should = [start + k for start in starts for k in range(num_tokens)]
    found = list(positions[: len(should)])
    if found != should:
        raise Broken(
            RETURNS, f"positions of a decode step are {found}, but its lengths say {should}"
        )


def _cut(chunks: Iterable[tuple[Sequence[int], Sequence[int]]], batch_size: int) -> list[list[int]]:
    """Return the slots of each request from those of chunks, which lie one request after another.

    Args:
        chunks: Slots of each chunk, and how many are each request's.
        batch_size: Requests.
    """
    pieces: list[list[int]] = [[] for _ in range(batch_size)]
    for slots, lens in chunks:
        first = 0
        for piece, length in zip(pieces, lens):
            piece += slots[first : first + length]
            first += length
    return pieces


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep the log silent: a clamp is warned of in every one of many calls."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
