"""Which calls a mutant is tried on, and in which order."""

from types import SimpleNamespace

from pagefault.family import family_named
from pagefault.garbage import Garbage
from pagefault.mutation.cases import Cost, Deck, Item, deal
from pagefault.strategies.out_cache_loc import OutCacheLocCase

PART, OTHER_PART = ("kernels", 10), ("kernels", 20)


def call(*edges, accesses=1, reached=(PART,), fault="", sizes=(), times=1):
    """Return a call that has some edges and sizes, and what it takes on the original."""
    item = SimpleNamespace(edges=frozenset(edges), sizes=frozenset(sizes), launch="")
    return item, Cost(accesses, 0.01, fault, dict.fromkeys(reached, times))


def dealt(calls, num=100, part=PART, more=()):
    decks = {"f": Deck(*zip(*calls)), "g": Deck(*zip(*more)) if more else Deck((), ())}
    return [item for item, _ in deal(decks, ("f", "g"), part, num)]


def test_calls_that_do_not_reach_the_change_are_passed_over():
    calls = [call("a", reached=[OTHER_PART]), call("b"), call("c", fault="x is wrong")]
    assert dealt(calls) == [calls[1][0]]
    assert dealt(calls, part=None) == [calls[0][0], calls[1][0]]
    assert dealt(calls, part=("kernels", 30)) == []


def test_what_has_most_new_features_for_its_cost_comes_first():
    calls = [call("a"), call("a", "b", accesses=1000), call("a", "c", "d"), call("a")]
    assert dealt(calls)[:2] == [calls[2][0], calls[1][0]]


def test_a_rare_feature_is_not_cut_off():
    calls = [*[call("a", accesses=k) for k in range(50)], call("rare", accesses=10_000)]
    assert calls[-1][0] in dealt(calls, num=5)
    assert len(dealt(calls, num=5)) == 5


def test_sizes_and_often_reached_parts_are_features():
    calls = [call() for _ in range(9)]
    calls += [call(sizes=["9 bits of requests"]), call(times=9)]
    assert {id(item) for item, _ in calls[9:]} <= set(map(id, dealt(calls, num=5)))


def test_sizes_are_those_of_the_batch_and_of_its_largest_entries():
    case = OutCacheLocCase.from_fields(
        {
            "req_pool_indices": [0, 0, 0],
            "input_lengths": [0, 300, 1],
            "cache_start": [0, 2**20, 0],
            "req_to_pages": [[3, 4, 5]],
            "page_size": 1,
        }
    )
    sizes = {"2 bits of requests", "0 bits of req_pool_indices", "9 bits of input_lengths"}
    assert Item(family_named("compute_out_cache_loc"), case).sizes == sizes


def test_calls_of_all_functions_take_turns():
    calls, more = [call("a") for _ in range(30)], [call("a") for _ in range(30)]
    found = set(map(id, dealt(calls, num=20, more=more)))
    assert abs(sum(id(item) in found for item, _ in calls) - 10) <= 2


def test_garbage_counts_by_tensor_and_kind():
    case = OutCacheLocCase.from_fields(
        {
            "req_pool_indices": [0],
            "input_lengths": [1],
            "cache_start": [0],
            "req_to_pages": [[3, 4, 5]],
            "page_size": 1,
        }
    )
    spoilt = (
        ("cache_start", 0, -1),
        ("req_pool_indices", 0, 3),
        ("input_lengths", 0, -6),
        ("req_to_pages", 0, -7),
        ("req_to_pages", 1, 2),
    )
    edges = Item(family_named("compute_out_cache_loc"), Garbage(case, spoilt)).edges
    assert {
        "cache_start -1",
        "req_pool_indices as req_to_pages has in dimension 1",
        "input_lengths just negative",
        "req_to_pages far negative",
        "req_to_pages another",
    } <= edges
