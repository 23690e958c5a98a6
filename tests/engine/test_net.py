"""Addresses that all lead to one page: far accesses neither kill the process nor go unnoticed."""

import os

import pytest
import torch

from pagefault.case import PageTable
from pagefault.checker import Checker
from pagefault.family import families, family_named
from pagefault.memory import NetMemory
from pagefault.strategies.out_cache_loc import OutCacheLocCase
from pagefault.stream import draw_cases
from pagefault.target import Target, load_target

HAS_CUDA = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
pytestmark = pytest.mark.skipif(not HAS_CUDA, reason="needs a GPU, with Triton compiling")

CASE = OutCacheLocCase(
    req_pool_indices=(1,),
    input_lengths=(3,),
    cache_start=(0,),
    req_to_pages=PageTable(2, 2),
    page_size=4,
)


def verdict_of(after_ours):
    """Return the verdict on ours with something after it, in a net."""
    ours = load_target("ours").functions["compute_out_cache_loc"]

    def compute_out_cache_loc(*arguments):
        ours(*arguments)
        after_ours(*arguments)

    checker = Checker(
        Target("planted", {"compute_out_cache_loc": compute_out_cache_loc}), "cuda", "net"
    )
    assert isinstance(checker._memories[0], NetMemory)
    return checker.check(family_named("compute_out_cache_loc"), CASE), checker


def element_far_from(tensor, distance):
    """Return the element so far from a tensor's first one, in a net."""
    from pagefault.mapping import nets_of_process

    for net in nets_of_process():
        start = (tensor.data_ptr() - net.everything.data_ptr()) // 4
        if 0 <= start < len(net.everything):
            return net.everything[start + distance]
    raise AssertionError("not in a net")


@pytest.mark.parametrize("distance", [-(2**31), -(2**32), 2**31, 2**32, 2**24])
def test_a_far_write_is_found_and_the_next_case_is_not_blamed(distance):
    verdict, checker = verdict_of(lambda out, *others: element_far_from(out, distance).fill_(77))
    assert [(f.kind, f.role) for f in verdict.findings] == [("outside", "far away")]
    assert "77 was written to one of 1 cells far away" in verdict.text()
    checker.target.functions["compute_out_cache_loc"] = load_target("ours").functions[
        "compute_out_cache_loc"
    ]
    assert checker.check(family_named("compute_out_cache_loc"), CASE).passed


@pytest.mark.parametrize("distance", [-(2**31), 2**31])
def test_a_far_read_gives_each_replica_another_value(distance):
    verdict, _ = verdict_of(lambda out, *others: out[:1].copy_(element_far_from(out, distance) + 1))
    assert [f.kind for f in verdict.findings] == ["stale"]


def test_nothing_planted_is_nothing_found():
    verdict, _ = verdict_of(lambda *arguments: None)
    assert verdict.passed


@pytest.mark.parametrize("name", list(families()))
def test_ours_pass_in_a_net(name):
    checker = Checker(load_target("ours"), "cuda", "net")
    family = family_named(name)
    verdicts = []
    draw_cases(
        family.strategy(checker.domain(family)),
        60,
        1,
        lambda case: verdicts.append(checker.check(family, case).text()),
    )
    assert set(verdicts) == {f"{name}: passed"}
