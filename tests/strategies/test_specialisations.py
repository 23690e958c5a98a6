"""Whatever Triton tells apart, some case has: a kernel with all specialisations on runs them all.

`probe_kernel` is launched with every tensor of a call, and with every size that a launcher could
hand to a kernel; only its launches are noted.
"""

from functools import partial

import pytest
import torch
import triton

from pagefault.calls import Calls
from pagefault.conformance import session
from pagefault.family import Domain, HostTensor, families, family_named
from pagefault.specialisations import install
from pagefault.stream import draw_cases
from pagefault.target import Target

NUM_CASES = 1000

# No function takes more tensors on the device.
MOST_TENSORS = 6
# Requests, a table's row stride, rows and columns, and plain numbers.
MOST_NUMBERS = 6


@triton.jit
def probe_kernel(t0, t1, t2, t3, t4, t5, n0, n1, n2, n3, n4, n5):
    pass


def probe(*values, is_on_host):
    tensors = [
        value
        for value, on_host in zip(values, is_on_host, strict=True)
        if isinstance(value, torch.Tensor) and not on_host
    ]
    numbers = [len(tensors[0])] if tensors else []
    for table in (tensor for tensor in tensors if tensor.dim() == 2):
        numbers += [table.stride(0), *table.shape]
    numbers += [value for value in values if isinstance(value, int)]
    probe_kernel[(1,)](
        *tensors,
        *[None] * (MOST_TENSORS - len(tensors)),
        *numbers,
        *[0] * (MOST_NUMBERS - len(numbers)),
    )


def launches_of(name):
    """Return the variants of the probe over cases of a family."""
    family = family_named(name)
    sweep_cases = []
    draw_cases(
        family.strategy(Domain(without=frozenset(["wide table"]))), NUM_CASES, 1, sweep_cases.append
    )
    is_on_host = [isinstance(argument, HostTensor) for argument in family.arguments(sweep_cases[0])]
    calls = Calls(Target("probe", {name: partial(probe, is_on_host=is_on_host)}), session.device)
    with install().sweeping() as sweep:
        for case in sweep_cases:
            calls.call(name, case)
    (variants,) = sweep.variants.values()
    return variants


@pytest.mark.parametrize("name", sorted(families()))
def test_every_specialisation_is_reached(name):
    variants = launches_of(name)
    # What a function has not got is always None or 0.
    treatments = variants.values()
    missing = {
        parameter: absent
        for parameter, absent in variants.unseen().items()
        if len(treatments[parameter]) > 1 or parameter.startswith("t")
    }
    assert missing == {}
    num_pairings, num_possible = variants.dtype_pairings()
    assert num_pairings == num_possible
