"""A Hypothesis state machine that plays the users and the scheduler of an engine."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from ..device import is_device_lost
from ..target import Target
from .engine import MOST_DRAFTS, MOST_OVERRUN, Engine, Request, Shape
from .functions import DECODES, GATHERS, UPDATES, Functions
from .model import RETURNS, Broken, Model
from .shorten import End

T = TypeVar("T")

PAGE_SIZES = (1, 2, 3, 4, 8)
CAPACITIES = (64, 5, 16)

# Bits that choose among the requests of an engine, and numbers that are cut to size.
_SOME = st.integers(1, 15)
_MOST = st.sampled_from((15, 14, 13, 11, 7))
_ONE = st.integers(0, 7)


class DeviceLost(BaseException):
    """Ends a run that can launch nothing any more.

    Not an Exception: Hypothesis would go on, and take every later call for a failure too.

    Attributes:
        end: What is to be reported.
    """

    def __init__(self, end: End) -> None:
        super().__init__(str(end.broken))
        self.end = end


def _recorded(method: Callable[..., None]) -> Callable[..., None]:
    """Return a rule that remembers what was drawn for it."""

    @functools.wraps(method)
    def recorded(self: Machine, **arguments: Any) -> None:
        self._program.append((method.__name__, dict(arguments)))
        method(self, **arguments)

    return recorded


class Machine(RuleBasedStateMachine):
    """The life of an engine; the classes made by `machine_for` have a target and a device.

    Attributes:
        target: The functions under test.
        device: "cpu" or "cuda".
        engine_type: The engine.
        totals: How often what has happened, over all lives.
        last_end: How the last life ended in which an invariant was broken.
        model: What must be true of the engine.
    """

    target: Target
    device: str
    engine_type: type[Engine]
    totals: Counter[str]
    last_end: End | None = None
    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(1, 0)
        self._waiting: dict[str, int] = {}
        self._num_named = 0
        self._program: list[tuple[str, dict[str, int]]] = []

    @initialize(
        page_size=st.sampled_from(PAGE_SIZES),
        max_pages=st.sampled_from((1, 2, 3, 4, 6, 8)),
        num_requests=st.sampled_from((1, 2, 3, 4)),
        num_pages=st.sampled_from((2, 6, 10, 16, 24, 32)),
        most_under_way=st.sampled_from((0, 1, 2, 2)),
        options=st.sampled_from(range(12)),
    )
    @_recorded
    def start(
        self,
        page_size: int,
        max_pages: int,
        num_requests: int,
        num_pages: int,
        most_under_way: int,
        options: int,
    ) -> None:
        """Start an engine."""
        page_size, max_pages = max(1, page_size), max(1, max_pages)
        num_requests, num_pages = max(1, num_requests), max(1, num_pages)
        log: list[str] = []
        functions = Functions(self.target, self.device, log)
        updates = functions.ways(UPDATES)
        shape = Shape(
            page_size,
            max_pages,
            num_requests,
            num_pages,
            most_under_way,
            chunk_capacity=CAPACITIES[options % 3],
            pitch=3 if options % 4 >= 2 else 0,
            update=updates[options % len(updates)],
        )
        self.model = Model(page_size, max_pages, functions.dummies, log=log)
        self.model.note(f"start: {shape}")
        self.engine = self.engine_type(shape, functions, self.model)
        self._decodes, self._gathers = functions.ways(DECODES), functions.ways(GATHERS)

    # Rules

    @rule(num_tokens=st.integers(1, 16), source=_ONE, num_shared=st.integers(0, 4))
    @_recorded
    def admit(self, num_tokens: int, source: int, num_shared: int) -> None:
        """A user's request comes in, perhaps with a prefix that has been seen before."""
        if self.engine.free_rows:
            self._admit(num_tokens, source, num_shared)
        else:
            self._go_on(source)

    @rule(which=_ONE)
    @_recorded
    def resume(self, which: int) -> None:
        """A preempted request gets a row again, and what is left of its prefix."""
        if not self._waiting or not self.engine.free_rows:
            self._go_on(which)
            return
        name = _pick(list(self._waiting), which)
        num_tokens = self._waiting.pop(name)
        pages = self.engine.cache.get(name, [])
        self.model.counts["resumed"] += 1
        self.model.counts["resumed with a prefix"] += bool(pages)
        self.engine.admit(name, num_tokens, name if pages else "", len(pages))
        if name in self.engine.cache:
            self.engine.evict(name)

    @rule(which=_SOME, most_tokens=st.integers(1, 16), way=_ONE)
    @_recorded
    def prefill(self, which: int, most_tokens: int, way: int) -> None:
        """A step of a chunk of each of some prompts, and of requests that decode along."""
        can_go_on = [r for r in self._resident() if r.num_left or r in self._decoding()]
        batch = _some(can_go_on, which)
        if batch:
            self._prefill(batch, max(1, most_tokens), way)
        else:
            self._go_on(way)

    @rule(which=_MOST, is_captured=st.booleans(), way=_ONE)
    @_recorded
    def decode(self, which: int, is_captured: bool, way: int) -> None:
        """A step of one token for requests that have been prefilled."""
        self._decode(_some(self._decoding(), which), 1, 0, is_captured, way)

    @rule(
        which=_SOME,
        num_tokens=st.integers(2, MOST_DRAFTS),
        rejected=st.sampled_from((0, 1, 2, 3)),
        is_captured=st.booleans(),
        way=_ONE,
    )
    @_recorded
    def decode_drafts(
        self, which: int, num_tokens: int, rejected: int, is_captured: bool, way: int
    ) -> None:
        """A step of some requests, with drafts, of which some are rejected."""
        num_tokens = max(1, num_tokens)
        self._decode(_some(self._decoding(), which), num_tokens, rejected, is_captured, way)

    @rule(which=_ONE, num_pages=st.integers(0, 2))
    @_recorded
    def look_ahead(self, which: int, num_pages: int) -> None:
        """A step in which no request has tokens, and one gets pages that it will need."""
        if not self._resident():
            self._go_on(which)
            return
        request = _pick(self._resident(), which)
        num_pages = min(len(request.pages) + num_pages, self.engine.shape.max_pages)
        self.engine.reserve(request, num_pages * self.engine.shape.page_size)
        self.engine.schedule([], lambda: None, "")

    @rule(way=_ONE)
    @_recorded
    def run(self, way: int) -> None:
        """The device runs the next step."""
        if self.engine.steps:
            self.engine.run_next()
        else:
            self._go_on(way)

    @rule(which=_ONE, num_kept=st.integers(0, 4), is_done=st.booleans())
    @_recorded
    def leave(self, which: int, num_kept: int, is_done: bool) -> None:
        """A request is done, or has to wait; some of its pages stay in the cache."""
        requests = [request for request in self._resident() if request.num_computed]
        if not requests:
            self._go_on(which)
            return
        if is_done:
            self._finish(_pick(requests, which), num_kept)
        else:
            self._preempt(_pick(requests, which), num_kept)

    @invariant()
    def tokens_are_where_they_were(self) -> None:
        """The page table leads every live token to its slot."""
        if hasattr(self, "engine"):
            self.model.counts["steps of the state machine"] += 1
            self.model.check_rows(self.engine.req_to_page.tolist())

    def teardown(self) -> None:
        """Add up what has happened; this runs while an exception is on its way."""
        self.totals.update(self.model.counts)
        error = sys.exc_info()[1]
        if isinstance(error, Broken):
            end = End(tuple(self._program), error, tuple(self.model.log))
            type(self).last_end = end
            if error.invariant == RETURNS and is_device_lost(self.device):
                raise DeviceLost(end) from error

    # What there is to do

    def _resident(self) -> list[Request]:
        return [r for r in self.engine.requests.values() if r.num_kept_at_end is None]

    def _prefilling(self) -> list[Request]:
        return [request for request in self._resident() if request.num_left]

    def _decoding(self) -> list[Request]:
        """Return the requests that have been prefilled and are not far past the context length."""
        most_tokens = self.engine.shape.context_len + MOST_OVERRUN
        return [r for r in self._resident() if not r.num_left and r.num_scheduled < most_tokens]

    def _admit(self, num_tokens: int, source: int, num_shared: int) -> None:
        known = [*self.engine.requests, *self.engine.cache]
        name = _pick(known, source) if known and num_shared else ""
        longest = self.engine.shape.context_len + MOST_OVERRUN
        num_tokens = max(1, num_tokens) + (num_shared * self.engine.shape.page_size if name else 0)
        self.engine.admit(self._name(), min(num_tokens, longest), name, num_shared)

    def _prefill(self, batch: Sequence[Request], most_tokens: int, way: int) -> None:
        if not self.engine.prefill(batch, most_tokens, _pick(self._gathers, way)):
            self._make_room(way)

    def _decode(
        self,
        batch: Sequence[Request],
        num_tokens: int,
        rejected: int,
        is_captured: bool,
        way: int,
    ) -> None:
        """Schedule a decode step; `rejected` is how many drafts of the first request are."""
        num_accepted = [num_tokens - (rejected + idx) % num_tokens for idx in range(len(batch))]
        if batch:
            way_name = _pick(self._decodes, way)
            if not self.engine.decode(batch, num_tokens, num_accepted, is_captured, way_name):
                self._make_room(way)
        else:
            self._go_on(way)

    def _go_on(self, number: int) -> None:
        """Do something useful where what was drawn can't be done."""
        if self._prefilling():
            self._prefill(self._prefilling(), self.engine.shape.context_len, number)
        elif self.engine.free_rows:
            self._admit(1 + 2 * number, number, number % 3)
        elif self._decoding():
            self._decode(self._decoding(), 1, 0, number % 2 == 1, number)
        elif self.engine.steps:
            self.engine.run_next()
        else:
            self._finish(_pick(self._resident(), number), number % 3)

    def _make_room(self, number: int) -> None:
        """Do what engines do when nobody in a batch gets pages: preempt who came last."""
        *others, last = self._resident()
        if others:
            self._preempt(last, number % 3)
        else:
            self._finish(last, number % 3)

    def _finish(self, request: Request, num_kept: int) -> None:
        self.model.counts["finished"] += 1
        self.engine.finish(request, num_kept)

    def _preempt(self, request: Request, num_kept: int) -> None:
        self.model.counts["preempted"] += 1
        self.engine.preempt(request, num_kept)
        self._waiting[request.name] = max(request.num_computed, request.num_prompt)

    def _name(self) -> str:
        """Return A, B, ... Z, A1, B1, ..."""
        number, letter = divmod(self._num_named, 26)
        self._num_named += 1
        return chr(ord("A") + letter) + (str(number) if number else "")


def _some(requests: Sequence[Request], which: int) -> list[Request]:
    return [request for bit, request in enumerate(requests) if which >> bit & 1] or [*requests[:1]]


def _pick(items: Sequence[T], which: int) -> T:
    return items[which % len(items)]


def machine_for(target: Target, device: str, engine_type: type[Engine]) -> type[Machine]:
    """Return a state machine class of a target."""
    attributes = {
        "target": target,
        "device": device,
        "engine_type": engine_type,
        "totals": Counter(),
    }
    return type("Machine", (Machine,), attributes)
