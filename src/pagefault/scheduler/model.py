"""What lies in which slot, in plain Python: a step writes it, and a later one must find it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..oracle.slots import slot_of_position

# What users care about; each finding names the one that does not hold.
OWN_SLOT = "no two live tokens lie in one slot"
SAME_SLOT = "a token's slot never changes while it lives"
OWN_TOKENS = "a request reads its own tokens"
NOT_FINISHED = "nothing of a finished request is reachable"
IN_ORDER = "a request's next token follows its last"
NOT_DUMMY = "a token within the context length lies in a page of its request"
HARMLESS = "padding and tokens past the context length harm nobody"
COPY = "nothing overwrites a buffer whose copy is under way"
RETURNS = "a call that is legal returns"

INVARIANTS = (
    *(OWN_SLOT, SAME_SLOT, OWN_TOKENS, NOT_FINISHED, IN_ORDER, NOT_DUMMY, HARMLESS, COPY),
    RETURNS,
)


# Who looks a token up, beside the functions.
TABLE = "the page table"


class Broken(AssertionError):
    """An invariant that does not hold.

    Attributes:
        invariant: One of `INVARIANTS`.
        detail: Whose token, which slot, which row.
    """

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}; but {detail}")
        self.invariant = invariant
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.invariant, self.detail)


@dataclass(frozen=True, eq=False)
class Token:
    """One token's KV. What is computed a second time is another token."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass
class Life:
    """A request in the request pool, or with a step under way.

    Attributes:
        row: Row of the page table.
        tokens: Those that are known, by position.
        num_computed: So many of them have their KV.
        num_under_way: Steps that have been scheduled with it and not run.
        is_resident: Whether the engine still has it.
        is_mapped: Whether a step with it has been scheduled, so that its row has its pages.
    """

    row: int
    tokens: list[Token]
    num_computed: int
    num_under_way: int = 0
    is_resident: bool = True
    is_mapped: bool = False


@dataclass
class Model:
    """The KV memory, and whose tokens are alive in it.

    Attributes:
        page_size: Tokens per page.
        max_pages: Width of the page table.
        dummies: Slots outside the dummy page that belong to nobody.
        lives: The requests that are alive, by name.
        cached: Tokens of prefixes that the engine keeps, by the name of whose they were.
        log: What has happened, one line each.
        counts: How often each kind of thing has happened.
    """

    page_size: int
    max_pages: int
    dummies: frozenset[int] = frozenset()
    lives: dict[str, Life] = field(default_factory=dict)
    cached: dict[str, list[Token]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    _held: dict[int, Token] = field(default_factory=dict)
    _slots: dict[Token, int] = field(default_factory=dict)
    _pages_used: set[int] = field(default_factory=set)
    _rows_used: set[int] = field(default_factory=set)

    @property
    def context_len(self) -> int:
        """Tokens that a row of the page table has slots for."""
        return self.max_pages * self.page_size

    # What the engine reports

    def note(self, line: str) -> None:
        """Add a line to the log."""
        self.log.append(line)

    def admit(self, name: str, row: int, num_tokens: int, source: str, num_cached: int) -> None:
        """Take a request in.

        Args:
            name: The request's.
            row: Its row of the page table.
            num_tokens: How many tokens it has.
            source: Of which request's tokens the first are the same.
            num_cached: So many of those need not be computed again.
        """
        known = self.lives[source].tokens if source in self.lives else self.cached.get(source, [])
        tokens = known[:num_cached]
        tokens += [self._token(name, position) for position in range(len(tokens), num_tokens)]
        self.lives[name] = Life(row, tokens, num_cached)
        self.counts["rows reused"] += row in self._rows_used
        self._rows_used.add(row)

    def schedule(self, names: Sequence[str]) -> None:
        """Take note of a step that will run."""
        for name in names:
            self.lives[name].num_under_way += 1
            self.lives[name].is_mapped = True

    def ran(self, names: Sequence[str]) -> None:
        """Take note of a step that has run."""
        for name in names:
            self.lives[name].num_under_way -= 1
            self._bury(name)

    def retire(self, name: str) -> None:
        """Take note that the engine has given up a request's row and pages."""
        life = self.lives[name]
        life.is_resident = False
        self._bury(name)

    def keep(self, name: str, num_tokens: int) -> None:
        """Take note that the first tokens of a request stay in the cache."""
        self.cached[name] = self.lives[name].tokens[:num_tokens]

    def drop(self, name: str) -> None:
        """Take note that a prefix is no longer in the cache."""
        del self.cached[name]

    # What a step does

    def write_prompt(self, name: str, start: int, slots: Sequence[int]) -> None:
        """Write the KV of tokens that are known, or of one more.

        Args:
            name: The request's.
            start: Position of the first one, as the functions were told.
            slots: Where the functions say that they lie.
        """
        life = self._at(name, start)
        end = start + len(slots)
        life.tokens += [self._token(name, at) for at in range(len(life.tokens), end)]
        self._write(name, life, start, life.tokens[start:end], slots)
        life.num_computed = end

    def write_drafts(self, name: str, start: int, slots: Sequence[int], num_accepted: int) -> None:
        """Write the KV of a decode step, whose last tokens may be rejected.

        Args:
            name: The request's.
            start: Position of the first one, as the functions found it.
            slots: Where the functions say that they lie.
            num_accepted: So many are accepted once the step has run, see `accept`.
        """
        life = self._at(name, start)
        tokens = [
            self._token(name, start + k, "" if k < num_accepted else "rejected draft ")
            for k in range(len(slots))
        ]
        life.tokens = life.tokens[:start] + tokens
        self._write(name, life, start, tokens, slots)

    def accept(self, name: str, num_drafts: int, num_accepted: int) -> None:
        """Take back the tokens of a decode step that are rejected."""
        life = self.lives[name]
        num_rejected = num_drafts - num_accepted
        life.tokens = life.tokens[: len(life.tokens) - num_rejected]
        life.num_computed = len(life.tokens)
        self.counts["drafts rejected"] += num_rejected

    def write_padding(self, slots: Sequence[int]) -> None:
        """Write what a captured step writes for the entries that pad its batch."""
        self.counts["entries of padding"] += len(slots)
        for idx, slot in enumerate(slots):
            self._put(Token(f"padding entry {idx}"), slot, HARMLESS)

    def read(self, name: str, slots: Sequence[int], how: str) -> None:
        """Look for the first tokens of a request in the slots where they are said to lie.

        Args:
            name: The request's.
            slots: By position.
            how: What says so.
        """
        life = self.lives[name]
        self.counts[f"tokens read by {how}"] += len(slots)
        for position, slot in enumerate(slots):
            token = life.tokens[position]
            found = self._held.get(slot)
            if found is not token or self._slots[token] != slot:
                self._refuse_read(name, life, position, slot, how)

    def check_rows(self, rows: Sequence[Sequence[int]]) -> None:
        """Look up every live token in the page table as it is now."""
        for name, life in self.lives.items():
            if life.is_mapped:
                self.read_row(name, rows[life.row], life.num_computed, TABLE)

    def read_row(self, name: str, row: Sequence[int], num_tokens: int, how: str) -> None:
        """Look for the first tokens of a request in the slots of a row of the page table."""
        num_tokens = min(num_tokens, self.context_len)
        slots = [slot_of_position(at, row, self.page_size) for at in range(num_tokens)]
        self.read(name, slots, how)

    # How it is told

    def _at(self, name: str, start: int) -> Life:
        life = self.lives[name]
        if start != life.num_computed:
            raise Broken(
                IN_ORDER,
                f"{name} (row {life.row}) has {life.num_computed} tokens, and a step puts its "
                f"next one at position {start}",
            )
        return life

    def _write(
        self, name: str, life: Life, start: int, tokens: Sequence[Token], slots: Sequence[int]
    ) -> None:
        self.counts["tokens written"] += len(tokens)
        for position, token, slot in zip(range(start, start + len(tokens)), tokens, slots):
            if position >= self.context_len:
                self.counts["tokens past the context length"] += 1
                where = f" (row {life.row}), past the context length of {self.context_len},"
                self._put(token, slot, HARMLESS, where)
            elif self._is_dummy(slot):
                raise Broken(
                    NOT_DUMMY,
                    f"{token} (row {life.row}) is written to slot {slot}, {self._place(slot)}",
                )
            else:
                self._put(token, slot, OWN_SLOT, f" (row {life.row})")
                self._slots[token] = slot

    def _put(self, token: Token, slot: int, invariant: str, where: str = "") -> None:
        if self._is_dummy(slot):
            return
        there = self._held.get(slot)
        owner = self._owner_of(there) if there is not None else ""
        if owner:
            raise Broken(
                invariant,
                f"{token}{where} is written to slot {slot}, {self._place(slot)}, where {there} "
                f"lies, which {owner} needs",
            )
        page_id = slot // self.page_size
        self.counts["slots reused"] += there is not None
        self._pages_used.add(page_id)
        self._held[slot] = token

    def _owner_of(self, token: Token) -> str:
        """Return who needs a token, or "" if it is dead."""
        for who, tokens in self._living():
            if any(other is token for other in tokens):
                return who
        return ""

    def _living(self) -> Iterator[tuple[str, Sequence[Token]]]:
        for name, life in self.lives.items():
            yield f"{name} (row {life.row})", life.tokens
        for name, tokens in self.cached.items():
            yield f"the cached prefix of {name}", tokens

    def _refuse_read(self, name: str, life: Life, position: int, slot: int, how: str) -> None:
        token = life.tokens[position]
        found = self._held.get(slot)
        what = f"where {found} lies" if found is not None else "where nothing lies"
        if self._is_dummy(slot):
            what = "which is nobody's"
        should = self._slots.get(token)
        home = f"it lies in slot {should}" if should is not None else "it was never computed"
        is_dead = found is not None and not self._owner_of(found)
        invariant = SAME_SLOT if should is not None and how == TABLE else OWN_TOKENS
        if is_dead and not str(found).endswith(f" of {name}"):
            invariant = NOT_FINISHED
        waiting = "; a step of it is under way" if life.num_under_way else ""
        shared = "" if str(token).endswith(f" of {name}") else f", token {position} of {name}"
        raise Broken(
            invariant,
            f"{token}{shared} (row {life.row}) is looked for by {how} in "
            f"slot {slot}, {self._place(slot)}, {what}; {home}{waiting}",
        )

    def _is_dummy(self, slot: int) -> bool:
        return 0 <= slot < self.page_size or slot in self.dummies

    def _place(self, slot: int) -> str:
        if slot in self.dummies and not 0 <= slot < self.page_size:
            return "the overflow slot"
        page_id, offset = divmod(slot, self.page_size)
        return f"page {page_id}" + ("" if page_id else " (the dummy)") + f" at offset {offset}"

    def _bury(self, name: str) -> None:
        life = self.lives[name]
        if not life.is_resident and not life.num_under_way:
            del self.lives[name]

    @staticmethod
    def _token(name: str, position: int, prefix: str = "") -> Token:
        return Token(f"{prefix}token {position} of {name}")
