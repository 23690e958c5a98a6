"""The adapters of other engines' kernels, and what is declared of them."""

import os
import sys
from pathlib import Path

import pytest

from pagefault.checker import Checker
from pagefault.conformance import check_family, session
from pagefault.family import families
from pagefault.garbage import EDGE
from pagefault.target import TargetError, load_target

TARGET = "tokenspeed"
FOLDER = Path(os.environ.get("PAGEFAULT_PEERS", ".peers")) / TARGET


@pytest.fixture(scope="module")
def peer():
    if not FOLDER.is_dir():
        pytest.skip(f"{FOLDER} is missing: run make peers")
    return load_target(TARGET)


def test_every_known_fault_still_fails(peer):
    """An entry of a fault that is gone has to go as well."""
    checker = Checker(peer, session.device)
    for fault in peer.known_faults:
        family = families()[fault.family]
        case = family.case_type.from_fields(fault.case)
        assert fault.applies(case), fault.signature
        verdict = checker.check(family, case)
        found = {f"{family.name}: {finding.kind}: {finding.role}" for finding in verdict.findings}
        assert fault.signature in found, f"{fault.signature}: {verdict.text()}"


def test_known_faults_and_edges_left_out_have_reasons(peer):
    assert all(fault.reason for fault in peer.known_faults)
    for function in peer.functions:
        assert all(peer.terms_of(function).without.values())


def test_edges_left_out_are_edges_of_their_family(peer):
    for function in peer.functions:
        unknown = set(peer.terms_of(function).without) - families()[function].all_edges - {EDGE}
        assert not unknown, function


@pytest.mark.parametrize("family", ["chunking", "get_chunks_paged", "compute_out_cache_loc"])
def test_conforms_but_for_what_is_declared(peer, family):
    check_family(peer, families()[family], num_cases=15, seed=1)


def test_files_that_are_missing_make_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGEFAULT_PEERS", str(tmp_path))
    monkeypatch.delitem(sys.modules, "pagefault.targets.tokenspeed", raising=False)
    with pytest.raises(TargetError, match="make peers") as caught:
        load_target(TARGET)
    assert "\n" not in str(caught.value)


TARGET_WITH_TERMS = """
from pagefault.kernels.out_cache_loc import compute_out_cache_loc as right

def compute_out_cache_loc(out_cache_loc, *arguments):
    right(out_cache_loc, *arguments)
    out_cache_loc[:1] += 1

pagefault_target = {
    "without": {"row 0": "for all"},
    "functions": {"compute_out_cache_loc": {"overflow_slot": -1, "without": {"hole": "for one"}}},
    "known_faults": [{
        "signature": "compute_out_cache_loc: value: out_cache_loc: token",
        "case": {"req_pool_indices": [0], "input_lengths": [1], "cache_start": [0],
                 "req_to_pages": [[3]], "page_size": 1},
        "reason": "the first slot is one too large",
        "applies": lambda case: case.page_size == 1,
    }],
}
"""


@pytest.fixture
def target_with_terms(tmp_path):
    path = tmp_path / "with_terms.py"
    path.write_text(TARGET_WITH_TERMS)
    return load_target(str(path))


def test_terms_of_a_function_add_to_those_of_the_target(target_with_terms):
    terms = target_with_terms.terms_of("compute_out_cache_loc")
    assert terms.dialect.overflow_slot == -1
    assert set(terms.without) == {"row 0", "hole"}
    assert target_with_terms.terms_of("chunking").dialect.overflow_slot == 0
    assert set(target_with_terms.terms_of("chunking").without) == {"row 0"}


def test_known_fault_hides_only_the_cases_that_it_applies_to(target_with_terms):
    family = families()["compute_out_cache_loc"]
    checker = Checker(target_with_terms, session.device)
    (fault,) = target_with_terms.known_faults
    known = family.case_type.from_fields(fault.case)
    other = known.replace(page_size=2)
    for case, passes, indices in ((known, True, (0,)), (other, False, ())):
        verdict = checker.check(family, case)
        assert not verdict.passed
        left, found = target_with_terms.without_known(family, case, verdict)
        assert (left.passed, found) == (passes, indices)


def test_case_with_an_edge_left_out_is_not_allowed(target_with_terms):
    family = families()["compute_out_cache_loc"]
    case = family.case_type.from_fields(target_with_terms.known_faults[0].case)
    assert not target_with_terms.allows(family, case)


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ('{"functions": {"no_such": {}}}', "no function 'no_such'"),
        ('{"functions": {"chunking": {"hole": 1}}}', "chunking has an unknown key 'hole'"),
        ('{"functions": {"chunking": {"holes": "eat"}}}', "holes: 'eat'"),
    ],
    ids=["function", "key", "value"],
)
def test_terms_that_are_not_understood_are_refused(tmp_path, declaration, message):
    path = tmp_path / "bad_terms.py"
    path.write_text(f"def chunking(a, b, c, d): ...\npagefault_target = {declaration}\n")
    with pytest.raises(TargetError, match=message):
        load_target(str(path))
