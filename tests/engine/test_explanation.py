"""What the interpreter says of a case that a GPU has failed."""

from pathlib import Path

import pytest

from pagefault.explanation import through_interpreter
from pagefault.family import family_named

FAULTY = Path(__file__).parents[1] / "faulty" / "compute_out_cache_loc"
FIELDS = {
    "req_pool_indices": [0],
    "input_lengths": [1],
    "cache_start": [0],
    "req_to_pages": {"num_rows": 1, "max_pages": 0, "edits": []},
    "page_size": 1,
}


@pytest.fixture
def family():
    return family_named("compute_out_cache_loc")


@pytest.fixture
def case(family):
    return family.case_type.from_fields(FIELDS)


def test_the_tensor_the_index_and_the_line_are_named(family, case):
    text = through_interpreter(str(FAULTY / "overflow_clamped.py"), family, case)
    lines = text.splitlines()
    assert lines[0] == "in the interpreter:"
    assert "out_cache_loc[0]" in text or "req_to_pages[" in text


def test_a_case_that_passes_shows_on_the_gpu_alone(family, case):
    text = through_interpreter(str(FAULTY / "correct.py"), family, case)
    assert text == "in the interpreter: this case passes; what is wrong shows on the GPU alone"


def test_what_can_not_be_answered_is_said(family, case, tmp_path):
    missing = str(tmp_path / "missing.py")
    assert "missing.py" in through_interpreter(missing, family, case)
    text = through_interpreter(str(FAULTY / "correct.py"), family, case, seconds=0.01)
    assert text == "in the interpreter: no answer within 0.01 s"
