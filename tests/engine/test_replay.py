"""Calls that are captured in a CUDA graph with some values and replayed with others."""

import os

import pytest
import torch

from pagefault.case import PageTable
from pagefault.checker import REPLAY_ONE_IN, Checker
from pagefault.family import Domain, Tensor, families, family_named
from pagefault.replay import other_values
from pagefault.strategies.out_cache_loc import OutCacheLocCase
from pagefault.stream import draw_cases
from pagefault.target import Target, load_target

CAPTURABLE = [name for name, family in families().items() if family.capturable]
HAS_CUDA = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
on_a_gpu = pytest.mark.skipif(not HAS_CUDA, reason="needs a GPU, with Triton compiling")

TWO_REQUESTS = OutCacheLocCase(
    req_pool_indices=(1, 2),
    input_lengths=(2, 3),
    cache_start=(3, 0),
    req_to_pages=PageTable(3, 2),
    page_size=4,
)


def test_these_functions_promise_to_be_capturable():
    assert CAPTURABLE == [
        "chunking",
        "create_chunked_cache_kv_indices_paged",
        "fused_decode_input_prep",
        "compute_out_cache_loc",
        "compute_out_cache_loc_uniform",
        "update_req_to_page",
    ]


@pytest.mark.parametrize("name", CAPTURABLE)
def test_other_values_have_the_same_shapes_and_are_others(name):
    family = family_named(name)
    cases = []
    domain = Domain(without=frozenset(["wide table"]))
    draw_cases(family.strategy(domain), 100, 1, cases.append)
    num_others = 0
    for case in cases:
        other = other_values(family, case)
        shapes = []
        for each in (case, other):
            tensors = [a for a in family.arguments(each) if isinstance(a, Tensor)]
            spares = [each.placement(t.name).spare if t.values is None else 0 for t in tensors]
            shapes.append([(t.shape[0] + s, *t.shape[1:]) for t, s in zip(tensors, spares)])
        assert shapes[0] == shapes[1]
        num_others += other != case
    assert num_others > len(cases) // 2


def test_other_values_are_those_of_a_padded_batch():
    other = other_values(family_named("compute_out_cache_loc"), TWO_REQUESTS)
    assert other.req_pool_indices == (2, 0)
    assert other.input_lengths == (3, 0)
    assert other.cache_start == (0, 0)
    assert other.req_to_pages.first == TWO_REQUESTS.req_to_pages.first + 1
    assert other.placement("out_cache_loc").spare == 2


def replayed(function, case=TWO_REQUESTS):
    """Return the verdict of the one check that replays."""
    checker = Checker(Target("planted", {"compute_out_cache_loc": function}), "cuda", "arena")
    family = family_named("compute_out_cache_loc")
    verdicts = [checker.check(family, case) for _ in range(REPLAY_ONE_IN)]
    assert all(verdict.passed for verdict in verdicts[:-1])
    return verdicts[-1]


@on_a_gpu
@pytest.mark.parametrize("name", CAPTURABLE)
def test_ours_answer_a_replay_with_what_their_tensors_hold_then(name):
    checker = Checker(load_target("ours"), "cuda", "arena")
    family = family_named(name)
    verdicts = []
    domain = Domain(without=frozenset(["wide table"]), page_sizes=(4,), dtype_choices=(0,))

    def use(case):
        verdicts.append(checker._check(checker._replays[0], family, case).text())

    draw_cases(family.strategy(domain), 60, 3, use)
    assert set(verdicts) == {f"{name}: passed"}
    assert len(verdicts) == 60


@on_a_gpu
def test_a_function_that_waits_for_the_device_can_not_be_captured():
    ours = load_target("ours").functions["compute_out_cache_loc"]

    def compute_out_cache_loc(out, rows, lengths, *others):
        assert lengths.sum().item() >= 0
        ours(out, rows, lengths, *others)

    verdict = replayed(compute_out_cache_loc)
    assert [finding.kind for finding in verdict.findings] == ["capture"]
    assert "can't be captured in a CUDA graph" in verdict.text()
    # The process goes on.
    assert replayed(ours).passed


@on_a_gpu
def test_an_answer_from_what_the_host_knew_at_capture_is_wrong_when_replayed():
    ours = load_target("ours").functions["compute_out_cache_loc"]
    known = {}

    def compute_out_cache_loc(out, rows, lengths, *others):
        if not torch.cuda.is_current_stream_capturing():
            known[lengths.data_ptr()] = lengths.clone()
        ours(out, rows, known[lengths.data_ptr()], *others)

    verdict = replayed(compute_out_cache_loc)
    assert not verdict.passed
    assert "out_cache_loc[" in verdict.text()


@on_a_gpu
def test_in_a_net_a_reserved_table_is_not_replayed():
    checker = Checker(load_target("ours"), "cuda", "net")
    family = family_named("compute_out_cache_loc")
    verdicts = []

    def use(case):
        if "wide table" in family.edges(case):
            verdicts.append(checker._check(checker._replays[0], family, case).text())
        return len(verdicts) == 2

    draw_cases(family.strategy(Domain(page_sizes=(4,), dtype_choices=(0,))), 6000, 3, use)
    assert verdicts == ["compute_out_cache_loc: passed"] * 2
