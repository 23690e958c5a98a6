"""An engine: rows, pages, a prefix cache and steps, which call a target's functions in order.

The table is updated when a step is scheduled, on a stream of its own; the step itself runs later,
when the device comes to it. What an engine may get wrong in between are methods of their own, so
that a subclass can do as another engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .functions import Copies, Functions
from .model import Model

# Sizes of a batch for which steps are captured.
CAPTURED_SIZES = (2, 4)

# Tokens of a request in one decode step, the first included.
MOST_DRAFTS = 4

# How far a request may be past the context length before it is scheduled no more.
MOST_OVERRUN = 4


@dataclass(frozen=True)
class Shape:
    """The sizes of an engine.

    Attributes:
        page_size: Tokens per page.
        max_pages: Pages of a row of the page table.
        num_requests: Rows for requests.
        num_pages: Pages for them; the dummy page is not counted.
        most_under_way: Steps that may have been scheduled and not run.
        chunk_capacity: Tokens of a chunk of prefixes; more where there are more requests.
        pitch: Elements between the rows of the page table.
        update: What updates the page table, see `functions.UPDATES`.
    """

    page_size: int
    max_pages: int
    num_requests: int
    num_pages: int
    most_under_way: int = 0
    chunk_capacity: int = 64
    pitch: int = 0
    update: str = "update_block_table"

    @property
    def context_len(self) -> int:
        """Tokens that a row of the page table has slots for."""
        return self.page_size * self.max_pages

    def __str__(self) -> str:
        return (
            f"pages of {self.page_size}, {self.max_pages} to a row, {self.num_requests} rows, "
            f"{self.num_pages} pages, at most {self.most_under_way} steps under way, "
            f"table updated by {self.update}"
        )


class PagePool:
    """Pages, and how many requests and cached prefixes have each.

    Args:
        num_pages: How many there are; the dummy page, page 0, is none of them.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages, 0, -1))
        self._num_owners = [0] * (num_pages + 1)

    @property
    def num_free(self) -> int:
        """How many can be taken."""
        return len(self._free)

    def take(self) -> int:
        """Return a page that nobody has, the one that was given back last."""
        page_id = self._free.pop()
        self._num_owners[page_id] = 1
        return page_id

    def share(self, page_id: int) -> None:
        """Give a page one owner more."""
        self._num_owners[page_id] += 1

    def release(self, page_id: int) -> None:
        """Take an owner from a page, which is free with the last one."""
        self._num_owners[page_id] -= 1
        if not self._num_owners[page_id]:
            self._free.append(page_id)


@dataclass
class Request:
    """What the host knows of a request.

    Attributes:
        name: Its name.
        row: Its row of the page table.
        pages: Its pages, by page index.
        num_prompt: Tokens that have to be prefilled.
        num_scheduled: Tokens that have been scheduled; at most, while a step with drafts is under
            way.
        num_computed: Tokens whose KV the device is known to have.
        num_written: Columns of its row that hold its pages.
        num_under_way: Steps under way that it is in.
        is_exact: Whether `num_scheduled` is no upper bound.
        num_kept_at_end: How many pages are to stay in the cache when it ends; None before that.
    """

    name: str
    row: int
    pages: list[int]
    num_prompt: int
    num_scheduled: int
    num_computed: int
    num_written: int = 0
    num_under_way: int = 0
    is_exact: bool = True
    num_kept_at_end: int | None = None

    @property
    def num_left(self) -> int:
        """Tokens that are still to be prefilled."""
        return max(0, self.num_prompt - self.num_scheduled)


@dataclass
class Step:
    """What the device has been asked for.

    Attributes:
        requests: Those in it.
        run: Carries it out.
        copies: Those under way when it was scheduled.
    """

    requests: list[Request]
    run: Callable[[], None]
    copies: Copies = field(default_factory=Copies)


class Engine:
    """Keeps requests alive by the functions of a target.

    Args:
        shape: Its sizes.
        functions: What it calls.
        model: What it reports to.

    Attributes:
        requests: Those with a row, by name.
        cache: Pages of prefixes that are kept, by the name of whose they were.
        steps: Those under way, the next one first.
        req_to_page: The page table, on the device.
        lengths: Tokens of the request in each row, on the device.
    """

    pool_type: type[PagePool] = PagePool

    def __init__(self, shape: Shape, functions: Functions, model: Model) -> None:
        self.shape = shape
        self.functions = functions
        self.model = model
        self.requests: dict[str, Request] = {}
        self.cache: dict[str, list[int]] = {}
        self.steps: list[Step] = []
        self.pool = self.pool_type(shape.num_pages)
        self.free_rows = list(range(shape.num_requests, 0, -1))
        num_rows = shape.num_requests + 1
        row_stride = shape.max_pages + shape.pitch
        storage = functions.tensor([0] * (num_rows * row_stride))
        self.req_to_page = storage.as_strided((num_rows, shape.max_pages), (row_stride, 1))
        self.lengths = functions.tensor([0] * num_rows)
        # A captured step has the same tensors in every replay.
        self.captured_rows = functions.tensor([0] * CAPTURED_SIZES[-1], torch.int64)
        self.captured_slots = functions.tensor([0] * (CAPTURED_SIZES[-1] * MOST_DRAFTS))

    # What a scheduler decides

    def admit(self, name: str, num_prompt: int, source: str = "", num_shared: int = 0) -> None:
        """Give a request a row and, of a prefix that is in the cache already, the pages.

        Args:
            name: Its name.
            num_prompt: Tokens that it has.
            source: The request, resident or cached, whose first tokens are the same.
            num_shared: So many pages of those are wanted.
        """
        pages = self.cached_pages(source, min(num_shared, (num_prompt - 1) // self.shape.page_size))
        self.share(pages)
        num_cached = self.cached_len(source, pages)
        request = Request(name, self.take_row(), pages, num_prompt, num_cached, num_cached)
        self.requests[name] = request
        self.model.admit(name, request.row, num_prompt, source, num_cached)
        shared = f", {num_cached} of them cached for {source} in pages {pages}" if pages else ""
        self.model.note(f"admit {name} to row {request.row}: {num_prompt} tokens{shared}")
        self.model.counts["prefixes shared"] += bool(pages)

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Return whether a request has pages for its first tokens, after taking what it lacks."""
        num_pages = -(-num_tokens // self.shape.page_size) - len(request.pages)
        while self.cache and self.pool.num_free < num_pages:
            self.evict(next(iter(self.cache)))
        if self.pool.num_free < num_pages:
            return False
        taken = [self.pool.take() for _ in range(num_pages)]
        if taken:
            request.pages += taken
            self.model.note(f"give {request.name} pages {taken}")
        return True

    def evict(self, name: str) -> None:
        """Give up a prefix that is in the cache."""
        self.model.drop(name)
        self.model.note(f"evict the cached prefix of {name}: pages {self.cache[name]}")
        self.release_pages(self.cache.pop(name))

    def finish(self, request: Request, num_kept: int = 0) -> None:
        """End a request, of whose pages some stay in the cache."""
        request.num_kept_at_end = num_kept
        self.model.note(f"finish {request.name}")
        self.model.counts["finished with a step under way"] += request.num_under_way > 0
        if self.may_release(request):
            self.release(request, num_kept)

    def preempt(self, request: Request, num_kept: int = 0) -> None:
        """Take a request's row and pages, of which some stay in the cache, to resume it later."""
        while request.num_under_way:
            self.run_next()
        self.model.note(f"preempt {request.name}")
        self.release(request, num_kept)

    def release(self, request: Request, num_kept: int) -> None:
        """Take back what a request has, but for pages that stay in the cache."""
        page_size = self.shape.page_size
        num_kept = min(num_kept, request.num_computed // page_size, self.shape.max_pages)
        if num_kept:
            self.cache[request.name] = request.pages[:num_kept]
            self.share(request.pages[:num_kept])
            self.model.keep(request.name, num_kept * page_size)
        self.release_pages(request.pages)
        self.release_row(request.row)
        del self.requests[request.name]
        kept = f", {num_kept} of them kept in the cache" if num_kept else ""
        self.model.note(
            f"take row {request.row} and pages {request.pages} from {request.name}{kept}"
        )
        self.model.retire(request.name)

    # Steps

    def prefill(self, requests: Sequence[Request], most_tokens: int, way: str) -> bool:
        """Schedule the next tokens of prompts, and one token of each request that has none left.

        Args:
            requests: Those in the batch; left out is who gets no pages.
            most_tokens: Of a prompt.
            way: What finds the slots of the prefixes, see `functions.GATHERS`.

        Returns:
            Whether a request was left in the batch.
        """
        for request in requests:
            self.settle(request)
        batch, lens, starts = [], [], []
        for request in requests:
            length = min(most_tokens, request.num_left or 1)
            if self.reserve(request, request.num_scheduled + length):
                batch.append(request)
                lens.append(length)
                starts.append(request.num_scheduled)
                request.num_scheduled += length
        if not batch:
            return False
        rows = self.stage("rows", [request.row for request in batch])
        staged = self.stage("lens", lens), self.stage("starts", starts)
        what = [f"{r.name}[{s}:{s + n}]" for r, s, n in zip(batch, starts, lens)]
        self.schedule(
            batch, lambda: self.run_prefill(batch, rows, *staged, way), f"prefill {', '.join(what)}"
        )
        return True

    def decode(
        self,
        requests: Sequence[Request],
        num_tokens: int,
        num_accepted: Sequence[int],
        is_captured: bool,
        way: str,
    ) -> bool:
        """Schedule a decode step.

        Args:
            requests: Those in the batch; left out is who gets no pages.
            num_tokens: Tokens of each, all but the first of them drafts.
            num_accepted: So many of them turn out to be right.
            is_captured: Whether the batch is padded to a size that is captured.
            way: What computes the slots, see `functions.DECODES`.

        Returns:
            Whether a request was left in the batch.
        """
        kept = [i for i, r in enumerate(requests) if self.reserve_drafts(r, num_tokens)]
        batch = [requests[i] for i in kept]
        if not batch:
            return False
        accepted = [num_accepted[i] for i in kept]
        for request in batch:
            request.num_scheduled += num_tokens
            request.is_exact &= num_tokens == 1
        rows = self.stage("rows", [request.row for request in batch])
        size = next(n for n in CAPTURED_SIZES if n >= len(batch)) if is_captured else len(batch)
        names = [f"{r.name} (accepts {n})" for r, n in zip(batch, accepted)]
        self.schedule(
            batch,
            lambda: self.run_decode(batch, rows, size, num_tokens, accepted, way),
            f"decode {num_tokens} of {', '.join(names)}, batch of {size}",
        )
        return True

    def schedule(self, batch: list[Request], run: Callable[[], None], what: str) -> None:
        """Update the page table, and ask the device for a step.

        Args:
            batch: The requests in it; none where the step has no tokens.
            run: Carries it out.
            what: For the log.
        """
        step = Step(batch, run)
        self.model.counts["steps"] += 1
        self.model.counts["steps without tokens"] += not batch
        self.model.note(f"schedule: {what if batch else 'a step without tokens'}")
        with step.copies:
            self.update_table(batch)
        for request in batch:
            request.num_under_way += 1
        self.model.schedule([request.name for request in batch])
        self.steps.append(step)
        while len(self.steps) > self.shape.most_under_way:
            self.run_next()

    def run_next(self) -> None:
        """Let the device run the next step that is under way, if there is one."""
        if not self.steps:
            return
        step = self.steps.pop(0)
        step.copies.verify()
        if step.requests:
            self.model.note(f"run the step of {', '.join(r.name for r in step.requests)}")
            step.run()
        for request in step.requests:
            request.num_under_way -= 1
            request.is_exact |= not request.num_under_way
        self.model.ran([request.name for request in step.requests])
        for request in step.requests:
            is_here = self.requests.get(request.name) is request
            if is_here and request.num_kept_at_end is not None and self.may_release(request):
                self.release(request, request.num_kept_at_end)

    def run_prefill(
        self,
        batch: Sequence[Request],
        staged_rows: torch.Tensor,
        staged_lens: torch.Tensor,
        staged_starts: torch.Tensor,
        way: str,
    ) -> None:
        """Compute slots, write the KV there, and read that of the prefixes."""
        shape = self.shape
        rows = staged_rows.to(self.functions.device)
        lens = staged_lens.to(self.functions.device, torch.int32)
        starts = staged_starts.to(self.functions.device, torch.int32)
        lens_cpu, starts_cpu = lens.tolist(), starts.tolist()
        out = self.functions.tensor([-7] * sum(lens_cpu))
        self.functions.ragged_slots(out, rows, lens, starts, self.req_to_page, shape.page_size)
        slots = out.tolist()
        first = 0
        for request, length, start in zip(batch, lens_cpu, starts_cpu):
            self.model.write_prompt(request.name, start, slots[first : first + length])
            first += length
        prefix_lens = [min(start, shape.context_len) for start in starts_cpu]
        capacity = max(shape.chunk_capacity, len(batch))
        prefixes = self.functions.prefix_slots(
            way, rows.tolist(), prefix_lens, self.req_to_page, shape.page_size, capacity
        )
        for request, prefix in zip(batch, prefixes):
            self.model.read(request.name, prefix, way)
        self.lengths[rows] = self.lengths_after_prefill(rows, starts + lens)
        for request, start, length in zip(batch, starts_cpu, lens_cpu):
            request.num_computed = start + length

    def run_decode(
        self,
        batch: Sequence[Request],
        staged_rows: torch.Tensor,
        size: int,
        num_tokens: int,
        num_accepted: Sequence[int],
        way: str,
    ) -> None:
        """Compute slots, write the KV there, and read each request's own along its row."""
        rows = self.pad(staged_rows.to(self.functions.device), size)
        slots, starts = self.decode_slots(way, rows, len(batch), num_tokens)
        num_slots = len(batch) * num_tokens
        for idx, (request, accepted) in enumerate(zip(batch, num_accepted)):
            own = slots[idx * num_tokens : (idx + 1) * num_tokens]
            self.model.write_drafts(request.name, starts[idx], own, accepted)
        self.model.write_padding(slots[num_slots : size * num_tokens])
        table = self.req_to_page.tolist()
        for request, row, start in zip(batch, rows.tolist(), starts):
            self.model.read_row(request.name, table[row], start + num_tokens, "attention")
        counts = self.functions.tensor(num_accepted)
        real_rows = rows[: len(batch)]
        self.lengths[real_rows] += self.length_after_decode(counts, num_tokens)
        for request, accepted in zip(batch, num_accepted):
            self.model.accept(request.name, num_tokens, accepted)
            request.num_computed += accepted
            request.num_scheduled -= num_tokens - accepted

    # What an engine may get wrong

    def cached_pages(self, source: str, num_pages: int) -> list[int]:
        """Return as many pages of a prefix as may be shared: those that are full and computed."""
        if source in self.requests:
            request = self.requests[source]
            num_full = min(request.num_computed // self.shape.page_size, self.shape.max_pages)
            return request.pages[: min(num_pages, num_full)]
        return self.cache.get(source, [])[:num_pages]

    def cached_len(self, source: str, pages: Sequence[int]) -> int:
        """Return how many tokens of a request lie in pages that it shares."""
        return len(pages) * self.shape.page_size

    def share(self, pages: Sequence[int]) -> None:
        """Give pages one owner more."""
        for page_id in pages:
            self.pool.share(page_id)

    def take_row(self) -> int:
        """Return a row that no request has, the one that was given back last."""
        return self.free_rows.pop()

    def release_row(self, row: int) -> None:
        """Take a row back."""
        self.free_rows.append(row)

    def release_pages(self, pages: Sequence[int]) -> None:
        """Take an owner from each page."""
        for page_id in pages:
            self.pool.release(page_id)

    def may_release(self, request: Request) -> bool:
        """Return whether a request that ends can be parted from its row and pages."""
        return not request.num_under_way

    def settle(self, request: Request) -> None:
        """Wait until the host knows how many tokens a request has."""
        self.model.counts["prefills that had to wait"] += not request.is_exact
        while not request.is_exact:
            self.run_next()

    def reserve_drafts(self, request: Request, num_tokens: int) -> bool:
        """Return whether a request has pages for all tokens of a decode step."""
        return self.reserve(request, request.num_scheduled + num_tokens)

    def update_table(self, batch: Sequence[Request]) -> None:
        """Write the pages of all requests that are not in the page table yet."""
        requests = [r for r in self.requests.values() if r in batch or r.num_written < len(r.pages)]
        begins = [self.first_column(request) for request in requests]
        page_ids = [request.pages[begin:] for request, begin in zip(requests, begins)]
        self.write_columns(requests, begins, page_ids)

    def first_column(self, request: Request) -> int:
        """Return the column from which on a row does not hold the request's pages yet."""
        return request.num_written

    def write_columns(
        self,
        requests: Sequence[Request],
        begins: Sequence[int],
        page_ids: Sequence[Sequence[int]],
    ) -> None:
        """Write new pages into the page table."""
        for request, begin, ids in zip(requests, begins, page_ids):
            request.num_written = begin + len(ids)
            if ids:
                self.model.note(f"write pages {ids} to row {request.row} from column {begin} on")
        if requests:
            names, rows = [r.name for r in requests], [r.row for r in requests]
            self.functions.update(
                self.shape.update, self.req_to_page, names, rows, begins, page_ids
            )

    def stage(self, name: str, values: Sequence[int]) -> torch.Tensor:
        """Return numbers in memory of the host, from where the device copies them when it runs.

        Args:
            name: What they are.
            values: The numbers.
        """
        return torch.tensor(values, dtype=torch.int64)

    def pad(self, rows: torch.Tensor, size: int) -> torch.Tensor:
        """Return the rows of a batch in the tensor of a captured step, padded by row 0."""
        self.captured_rows[: rows.numel()] = rows
        self.captured_rows[rows.numel() : size] = 0
        return self.captured_rows[:size]

    def decode_slots(
        self, way: str, rows: torch.Tensor, batch_size: int, num_tokens: int
    ) -> tuple[list[int], list[int]]:
        """Return the slots of a padded batch, and the position of each request's first token."""
        out = self.captured_slots[: rows.numel() * num_tokens]
        starts = self.functions.decode_slots(
            way, out, rows, self.lengths, num_tokens, self.req_to_page, self.shape.page_size
        )
        return out.tolist(), starts

    def lengths_after_prefill(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return the lengths of requests whose new tokens end at some positions."""
        return ends

    def length_after_decode(self, num_accepted: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return by how much lengths grow in a decode step."""
        return num_accepted
