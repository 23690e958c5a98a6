"""Numbers at the edges, and how to draw many small choices cheaply.

Hypothesis charges for each value it draws and prefers small integers among large ones, so a case
is made from one drawn string of bytes, and each choice takes a byte or two of it. Every menu
starts with its plainest entry: bytes that shrink to 0 make the plain case.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from hypothesis import strategies as st

T = TypeVar("T")

NUM_BYTES = 56

INT32_MAX = 2**31 - 1

# Kernels handle this many tokens or pages at a time, ours and other people's; a large one takes
# its share of a run's time and comes seldom.
TILE_SIZES = (
    *(16, 32, 64, 128, 128, 256, 256, 512, 1024, 32, 64, 128, 128, 256, 256, 2048) * 2,
    *(16, 32, 64, 128, 128, 256, 256, 512, 1024, 32, 64, 128, 128, 256, 256, 4096),
)

AROUND = (0, -1, 1)

MANY = -1
NUM_REQUESTS = (
    *(1,) * 6,
    *(2,) * 8,
    *(3,) * 8,
    *(4,) * 6,
    *(5,) * 3,
    *(6, 7, 8, 8, 9, 0, 0, 16, 17, 33, MANY),
    *(65, 129),
)
# A kernel that looks at a whole batch does so for one more than a power of two, or it does not;
# one that looks at what lies before a group of requests does so for a group more.
MANY_REQUESTS = (*(257, 300) * 8, *(513,) * 4, *(1025,) * 4, 2049, 4097)
PAGE_SIZES = (1, 2, 4, 4, 16, 16, 64, 64, 3, 5, 7, 8, 12, 32, 48, 100, 128, 256, 1000)
HUGE_PAGE_SIZES = (2**16, 2**20, 2**30, INT32_MAX)
MAX_PAGES = (
    *(1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 8, 9, 16, 17, 31, 32, 33, 64, 65, 0, 128, 129, 257, 1025) * 2,
    *(2049, 4097),
)

# So large a batch or table takes its share of the run's time, and no more.
MAX_TOKENS = 800
MAX_CELLS = 13_000


class Choices:
    """Drawn bytes that small choices are taken off of.

    Args:
        drawn: The bytes; where they have run out, the first of each menu is chosen.
    """

    def __init__(self, drawn: bytes) -> None:
        self._bytes = iter(drawn)

    def below(self, bound: int) -> int:
        """Return a number in 0 … bound - 1, evenly where bound is far below 2**8 or 2**16."""
        number = next(self._bytes, 0)
        if bound > 32:
            number = number << 8 | next(self._bytes, 0)
        return number % bound

    def pick(self, menu: Sequence[T]) -> T:
        """Return one entry of a menu."""
        return menu[self.below(len(menu))]

    def one_in(self, number: int) -> bool:
        """Return True once in so many."""
        return self.below(number) == number - 1


_samplers: WeakKeyDictionary[st.SearchStrategy[Any], Callable[[Random], Any]] = WeakKeyDictionary()


def made_from_choices(make: Callable[[Choices], T]) -> st.SearchStrategy[T]:
    """Strategy of what a function makes of drawn choices."""

    def make_from_bytes(drawn: bytes) -> T:
        return make(Choices(drawn))

    strategy = st.binary(min_size=NUM_BYTES, max_size=NUM_BYTES).map(make_from_bytes)
    _samplers[strategy] = lambda random: make_from_bytes(random.randbytes(NUM_BYTES))
    return strategy


def only_where(
    strategy: st.SearchStrategy[T], accepts: Callable[[T], bool]
) -> st.SearchStrategy[T]:
    """Strategy of the cases of a strategy that a function accepts."""
    filtered = strategy.filter(accepts)
    sample = sampler_of(strategy)
    if sample is not None:
        some_sample = sample

        def sample_accepted(random: Random) -> T | None:
            case = some_sample(random)
            return case if case is not None and accepts(case) else None

        _samplers[filtered] = sample_accepted
    return filtered


def sampler_of(strategy: st.SearchStrategy[T]) -> Callable[[Random], T | None] | None:
    """Return a function that draws one case from a source of random numbers, or None for neither.

    Where nothing is to be shrunk, this takes half the time that Hypothesis takes, and each choice
    is even. None for a strategy that is not made from choices; the function returns None for a
    case that is not accepted.
    """
    return _samplers.get(strategy)


# A kernel may treat a batch of more in another way; such a batch comes seldom.
SMALL_BATCH = 64
# Batches near a size of the target's come as often as they are cheap.
LARGE_BATCH, LARGEST_BATCH = 2**11, 2**13


def near_sizes(sizes: Sequence[int]) -> list[int]:
    """Return a menu of small multiples of sizes, the large ones once and the others twice."""
    multiples = sorted({k * size for size in sizes for k in (1, 2, 4) if size > 1})
    return [n for n in multiples if n <= LARGEST_BATCH for _ in range(2 if n <= LARGE_BATCH else 1)]


def tile_sizes(sizes: Sequence[int]) -> Sequence[int]:
    """Return a menu of how many elements a kernel may handle at a time, given a target's sizes."""
    return near_sizes(sizes) or TILE_SIZES


def num_requests(choices: Choices, sizes: Sequence[int] = ()) -> int:
    """Return the size of a batch, now and then one near some sizes."""
    menu = near_sizes(sizes)
    if menu and choices.one_in(4):
        return choices.pick(menu) + choices.pick((1, 0, -1, 9, 70))
    number = choices.pick(NUM_REQUESTS)
    return choices.pick(MANY_REQUESTS) if number == MANY else number


# A batch of more has, now and then, nothing for most of its requests.
FEW_REQUESTS = 8


def only_some(choices: Choices, wanted: Sequence[int]) -> list[int]:
    """Return lengths of which, now and then, most are 0 or 1.

    All are 0 but the last, or every tenth from there; or all are 1 but the longest, which is
    anywhere: a prefill among decodes.
    """
    num_requests = len(wanted)
    if num_requests <= FEW_REQUESTS or not choices.one_in(4):
        return list(wanted)
    step = choices.pick((10, num_requests, 0, 0))
    if not step:
        longest_at = choices.below(num_requests)
        return [max(wanted) if i == longest_at else 1 for i in range(num_requests)]
    return [length if (num_requests - 1 - i) % step == 0 else 0 for i, length in enumerate(wanted)]


def within_budget(choices: Choices, wanted: Sequence[int], budget: int) -> list[int]:
    """Return lengths of which some are cut, so that they add up to little more than a budget.

    One long request may be longer if the others are not. Where there are many, those for which
    nothing is left have one each: a fault may be in the last. Now and then those in front are the
    ones that are cut: a fault may be in a long one behind many.
    """
    num_requests = len(wanted)
    first = 0
    if num_requests > FEW_REQUESTS and choices.one_in(2):
        first = num_requests - 1 - choices.below(choices.pick((9, num_requests)))
    left = max(budget, max(wanted, default=0) + num_requests)
    kept = [0] * num_requests
    for num_after in range(num_requests - 1, -1, -1):
        i = (first - num_after - 1) % num_requests
        kept[i] = min(wanted[i], max(1, left - num_after))
        left -= kept[i]
    return kept


def page_size(choices: Choices, page_sizes: Sequence[int] | None, huge: bool = True) -> int:
    """Return a page size of a menu, of ours, or now and then any.

    Args:
        choices: Where choices come from.
        page_sizes: The only ones allowed, or None.
        huge: Whether sizes are of use that make the slots of a small table pass 2**31 - 1.
    """
    if page_sizes is not None:
        return choices.pick(page_sizes)
    kind = choices.below(16)
    if kind == 15 and huge:
        return choices.pick(HUGE_PAGE_SIZES)
    if kind == 14:
        return 1 + choices.below(300)
    return choices.pick(PAGE_SIZES)
