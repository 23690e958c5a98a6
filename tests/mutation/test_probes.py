"""Probes: which part of a module a call reaches, and which part a change is in."""

import pytest

from pagefault.mutation import probes
from pagefault.mutation.operators import Source
from pagefault.mutation.probes import Probes, take_reached

TEXT = '''
def f(a):
    """Say something."""
    if a > 2:
        return early(a)
    b = 0
    while a:
        a -= 1
        if a == 5:
            never(a)
    return b


def early(a): return a


def never(a):
    if a:
        pass
'''
SOURCE = Source(TEXT)
PROBES = Probes("planted", SOURCE)


def part_at(text):
    return PROBES.part_of(TEXT.index(text))


@pytest.fixture
def f():
    """The function, with its probes."""
    probes.install()
    take_reached()
    scope = {}
    exec(PROBES.probed(), scope)
    return scope["f"]


def test_a_call_reaches_what_it_runs_and_nothing_else(f):
    f(3)
    assert take_reached() == {part_at("return early"): 1, part_at("return a"): 1}
    f(2)
    assert take_reached() == {part_at("b = 0"): 1, part_at("a -= 1"): 2, part_at("return b"): 1}
    assert take_reached() == {}


def test_a_header_belongs_to_the_statements_in_front_of_it():
    assert part_at("while a") == part_at("b = 0") != part_at("a -= 1")
    assert part_at("if a == 5") == part_at("a -= 1") != part_at("never(a)\n")


def test_where_no_probe_stands_any_call_may_reach_a_change():
    assert part_at("if a > 2") is None
    assert part_at("if a:") is None


def test_probed_lines_keep_their_numbers():
    lines = PROBES.probed().splitlines()
    assert len(lines) == len(TEXT.splitlines())
    for line, probed in zip(TEXT.splitlines(), lines):
        assert probed == line or probes.PROBE in probed
