"""Any bytes are safe: what a function owes whatever its device tensors hold.

`faulty_any_bytes/` has functions that are right for every legal case, and not safe outside.
"""

import dataclasses
import json
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from pagefault.checker import Checker
from pagefault.conformance import NonConformance, session
from pagefault.family import Domain, families, family_named
from pagefault.garbage import (
    EDGE,
    Garbage,
    check_any_bytes,
    check_garbage,
)
from pagefault.side_case import any_case_from_json
from pagefault.strategies.any_bytes import garbage_of
from pagefault.stream import draw_cases
from pagefault.target import load_target

FAULTY = Path(__file__).parent / "faulty_any_bytes"

# By file: the function, and the kind and role of what has to be found.
PLANTED = {
    "lengths_unclamped": ("compute_out_cache_loc", "address", "write of out_cache_loc"),
    "length_walked_to_its_end": ("compute_out_cache_loc", "hang", "deadline"),
    "negative_length_refused": ("compute_out_cache_loc", "raised", "ValueError"),
    "pool_index_unchecked": ("compute_out_cache_loc_uniform", "address", "read of req_to_pages"),
    "first_page_truncated": (
        *("compute_out_cache_loc_uniform", "address", "read of req_to_pages"),
    ),
    "position_truncated": ("compute_out_cache_loc_uniform", "value", "out_cache_loc: cell"),
    "start_looked_up_unchecked": (
        *("fused_decode_input_prep", "address", "read of valid_cache_lengths"),
    ),
    "negative_column_written": ("update_req_to_page", "outside", "req_to_page"),
    "negative_row_unchecked": ("update_req_to_page", "address", "write of req_to_page"),
    "ids_not_consumed": ("update_req_to_page", "value", "req_to_page: cell"),
    "holes_kept": ("update_block_table", "value", "req_to_page: cell"),
    "negative_prefix_kept": ("chunking", "value", "chunks.ends: cell"),
    "offsets_unchecked": (
        *("create_chunked_cache_kv_indices_paged", "address", "write of chunk_kv_indices"),
    ),
    "sized_by_the_device": ("get_chunks_paged", "returned", "kv_indices_list"),
    "lengths_past_the_output": (
        *("build_chunked_prefill_metadata_arrays", "address", "write of kv_indices_ptr"),
    ),
}

MOST_CASES = 800
# The faulty kernels have a program for each request, which takes the interpreter a millisecond.
QUICK = Domain(without=frozenset(["more than 64 requests", "wide table"]))
# Far more than any call takes, and little enough to wait for.
HANG_SECONDS = 2.0


@pytest.fixture(autouse=True)
def _without_validation(monkeypatch):
    """Validation refuses garbage, as it should; this is about what happens without."""
    monkeypatch.delenv("PAGEFAULT_VALIDATE", raising=False)


@pytest.mark.parametrize("family", sorted(families()))
def test_any_bytes_are_safe(pagefault_target, pagefault_shard, family):
    if family not in pagefault_target.functions:
        pytest.skip(pagefault_target.skipped[family])
    without = pagefault_target.terms_of(family).without
    if EDGE in without:
        pytest.skip(without[EDGE])
    check_any_bytes(
        pagefault_target,
        family_named(family),
        num_cases=max(1, settings().max_examples // 3),
        shard=pagefault_shard,
    )


class _Found(BaseException):
    """Ends a stream of cases."""


@pytest.fixture
def interpreter():
    """Where no fault takes the process along, and a walk without an end can be stopped."""
    if session.device != "cpu":
        pytest.skip("planted faults are looked for in Triton's interpreter")


@cache
def faulty_target(fault):
    return load_target(str(FAULTY / f"{fault}.py"))


def found_in(fault):
    """Return the signatures of what is found, until the planted fault is."""
    function, *wanted = PLANTED[fault]
    family = family_named(function)
    checker = Checker(faulty_target(fault), "cpu")
    found = []

    def use(garbage):
        if wanted not in found:
            verdict = check_garbage(checker, family, garbage, HANG_SECONDS)
            found.extend([finding.kind, finding.role] for finding in verdict.findings)
        if wanted in found:
            raise _Found

    with suppress(_Found):
        draw_cases(garbage_of(family, QUICK), MOST_CASES, 1, use)
    return found


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("fault", sorted(PLANTED))
def test_a_planted_fault_is_found(fault):
    assert list(PLANTED[fault][1:]) in found_in(fault)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("fault", sorted(PLANTED))
def test_a_planted_fault_does_not_show_in_legal_cases(fault):
    family = family_named(PLANTED[fault][0])
    checker = Checker(faulty_target(fault), "cpu")
    verdicts = []
    draw_cases(
        family.strategy(QUICK), 10, 1, lambda case: verdicts.append(checker.check(family, case))
    )
    assert len(verdicts) == 10
    assert [verdict.text() for verdict in verdicts if not verdict.passed] == []


def test_every_file_is_a_planted_fault():
    assert {path.stem for path in FAULTY.glob("*.py")} == set(PLANTED)
    assert {function for function, *_ in PLANTED.values()} == set(families())


@pytest.mark.usefixtures("interpreter")
def test_a_failure_says_which_element_was_spoilt_and_can_be_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr("pagefault.conformance.session.out", tmp_path)
    target = faulty_target("pool_index_unchecked")
    family = family_named("compute_out_cache_loc_uniform")
    with pytest.raises(NonConformance) as failure:
        check_any_bytes(target, family, num_cases=MOST_CASES, seed=1, device="cpu")
    read, garbage = any_case_from_json(failure.value.path.read_text())
    assert read is family
    ((name, idx, value),) = garbage.spoilt
    assert name == "req_pool_indices"
    assert f"any bytes are safe: req_pool_indices[{idx}] = {value}" in str(failure.value)
    assert garbage.case.num_requests == 1
    verdict = check_garbage(Checker(target, "cpu"), family, garbage)
    assert (verdict.signature.kind, verdict.signature.role) == ("address", "read of req_to_pages")
    assert check_garbage(Checker(load_target("ours"), "cpu"), family, garbage).passed


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("target", "function"),
    [
        ("ours", "update_req_to_page"),
        ("ours", "compute_out_cache_loc"),
        ("ours", "get_chunks_paged"),
        ("negative_row_unchecked", "update_req_to_page"),
        ("lengths_unclamped", "compute_out_cache_loc"),
        ("sized_by_the_device", "get_chunks_paged"),
    ],
)
def test_a_family_that_says_nothing_of_garbage_is_held_to_its_tensors(target, function):
    family = dataclasses.replace(family_named(function), expect_any_bytes=None)
    is_ours = target == "ours"
    checker = Checker(load_target(target) if is_ours else faulty_target(target), "cpu")
    verdicts = []

    def use(garbage):
        verdicts.append(check_garbage(checker, family, garbage))
        if not verdicts[-1].passed:
            raise _Found

    with suppress(_Found):
        draw_cases(garbage_of(family, QUICK), 15 if is_ours else MOST_CASES, 1, use)
    if is_ours:
        assert [verdict.text() for verdict in verdicts if not verdict.passed] == []
    else:
        kinds = {"address", "outside", "returned"}
        assert {finding.kind for finding in verdicts[-1].findings} & kinds


# Pages before position 0, counted in tokens, are more than 32 bits hold.
BEFORE_HUGE_PAGES = Path(__file__).parent / "garbage" / "before_huge_pages.json"


@pytest.mark.parametrize(
    "function",
    ["compute_out_cache_loc_uniform", "compute_out_cache_loc", "fused_decode_input_prep"],
)
def test_ours_cut_no_distance_of_pages_off(function):
    document = json.loads(BEFORE_HUGE_PAGES.read_text())
    start = document.pop("cache_start")
    document["family"] = function
    if function == "fused_decode_input_prep":
        document["valid_cache_lengths"] = start * 2
        document["spoilt"] = [["valid_cache_lengths", 1, -(2**31)]]
    else:
        document["cache_start"] = start
    if function == "compute_out_cache_loc":
        document["input_lengths"] = [document.pop("uniform_input_length")]
    family, garbage = any_case_from_json(json.dumps(document))
    checker = Checker(load_target("ours"), session.device)
    assert check_garbage(checker, family, garbage, thoroughly=True).text().endswith(": passed")


def test_garbage_is_what_the_call_gets_and_nothing_else_changes():
    family = family_named("compute_out_cache_loc")
    fields = {
        "req_pool_indices": [0, 1],
        "input_lengths": [1, 2],
        "cache_start": [0, 0],
        "req_to_pages": [[3, 5], [7, 9]],
        "page_size": 4,
    }
    case = family.case_type.from_fields(fields)
    spoilt = (("req_pool_indices", 1, -1), ("req_to_pages", 3, -5), ("cache_start", 7, 1))
    inputs = Garbage(case, spoilt).inputs(family)
    assert list(inputs["req_pool_indices"]) == [0, -1]
    assert [list(row) for row in inputs["req_to_pages"].rows] == [[3, 5], [7, -5]]
    assert list(inputs["cache_start"]) == [0, 0]
