"""Our kernels in the small launches that mutants are tried in: the contract is the same."""

import pytest

from pagefault.checker import Checker
from pagefault.conformance import session
from pagefault.kernels import launches
from pagefault.stream import draw_cases
from pagefault.target import TargetError, load_target


@pytest.mark.parametrize("name", sorted(load_target("ours").functions))
def test_a_small_launch_gives_the_same(name):
    target = load_target("ours")
    family = next(family for family in target.families() if family.name == name)
    checker = Checker(target, session.device)
    verdicts = []

    def use(case):
        with target.launched("small"):
            verdicts.append(checker.check(family, case).text())

    draw_cases(family.strategy(checker.domain(family)), 60, 1, use)
    assert set(verdicts) == {f"{name}: passed"}


def test_a_small_launch_has_little_of_everything_and_ends():
    before = launches.RAGGED_SHAPES
    with load_target("ours").launched("small"):
        assert {shape.max_tile_programs for shape in launches.RAGGED_SHAPES.values()} == {5}
        assert max(shape.tile_size for shape in launches.RAGGED_SHAPES.values()) == 32
        for shape in launches.RAGGED_SHAPES.values():
            assert not shape.has_one_window or shape.most_requests <= shape.window_size
    assert launches.RAGGED_SHAPES is before


def test_launches_that_are_no_dict_are_refused(tmp_path):
    path = tmp_path / "target.py"
    path.write_text("pagefault_target = {'launches': 3}\ndef chunking(a, b, c, d): ...\n")
    with pytest.raises(TargetError, match="launches is 3, but should be a dict"):
        load_target(str(path))
