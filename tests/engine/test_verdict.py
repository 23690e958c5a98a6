"""What a report says: found, expected, where; where a wrong slot came from; then the counts."""

import pytest

from pagefault.case import PageTable, Placement
from pagefault.checker import Checker
from pagefault.family import family_named
from pagefault.strategies.out_cache_loc import OutCacheLocCase
from pagefault.target import Target
from pagefault.verdict import KINDS, Finding, Signature, Verdict, sorted_findings

PAGE_SIZE = 16
# Request 1 has 4 tokens from position 16 on, which are page index 1 of row 3: page id 4.
CASE = OutCacheLocCase(
    req_pool_indices=(1, 3, 2),
    input_lengths=(3, 4, 2),
    cache_start=(0, 16, 30),
    req_to_pages=PageTable.from_rows([[40, 41], [20, 21], [30, 31], [3, 4]]),
    page_size=PAGE_SIZE,
)
RIGHT = [320, 321, 322, 64, 65, 66, 67, 510, 511]


@pytest.fixture
def verdict_on(plain):
    """A function that returns the verdict on a right function whose output is then changed."""

    def check(changes, case=CASE):
        def compute_out_cache_loc(out_cache_loc, *others):
            plain.functions["compute_out_cache_loc"](out_cache_loc, *others)
            for index, value in changes.items():
                out_cache_loc[index] = value

        target = Target("planted", {"compute_out_cache_loc": compute_out_cache_loc})
        return Checker(target, "cpu").check(family_named("compute_out_cache_loc"), case)

    return check


def test_the_case_of_these_tests_has_the_answers_worked_out_by_hand(verdict_on):
    assert verdict_on(dict(enumerate(RIGHT))).text() == "compute_out_cache_loc: passed"


def test_a_report_says_found_expected_where_then_the_counts(verdict_on):
    lines = verdict_on({5: 50, 6: 51, 7: 1}).text().splitlines()
    assert lines[:3] == [
        "out_cache_loc[5] = 50, but should be 66",
        "  request 1 (pool row 3), token 2 of 4: position 18 = page index 1, offset 2, page id 4",
        "  50 is page id 3 at offset 2: req_to_pages[3][0], one column to the left",
    ]
    counts = "; ".join(line.strip() for line in lines[3:])
    assert "3 of 9 elements of out_cache_loc differ" in counts
    assert "guards intact; inputs intact" in counts


@pytest.mark.parametrize(
    ("index", "found", "origin"),
    [
        pytest.param(
            1, 21 * 16 + 1, "req_to_pages[1][1], one column to the right", id="right"
        ),
        pytest.param(
            7, 30 * 16 + 14, "req_to_pages[2][0], one column to the left", id="left"
        ),
        pytest.param(
            0, 40 * 16, "req_to_pages[0][0], row 0, not row 1", id="another row"
        ),
        pytest.param(
            5, 4 * 16 + 3, "67 is page id 4 at offset 3: req_to_pages[3][1], the right page",
            id="another offset",
        ),
        pytest.param(3, -7, "-7 is what lay there, or beside a tensor", id="poison"),
    ],
)  # fmt: skip
def test_a_wrong_slot_is_traced_to_the_cell_it_came_from(verdict_on, index, found, origin):
    assert origin in verdict_on({index: found}).text()


def test_a_slot_from_two_columns_away_says_how_many(verdict_on):
    case = CASE.replace(
        req_to_pages=PageTable.from_rows([[40, 41, 42], [20, 21, 22], [30, 31, 32], [3, 4, 5]])
    )
    assert "2 columns to the right" in verdict_on({0: 22 * 16}, case).text()


@pytest.mark.parametrize("bits", [32, -32], ids=["wrapped down", "wrapped up"])
def test_a_slot_that_wrapped_in_32_bits_is_named_with_what_it_was(verdict_on, bits):
    page_id, page_size = 2**27 + 5, 16
    slot = page_id * page_size
    case = OutCacheLocCase(
        (0,),
        (1,),
        (0,),
        PageTable.from_rows([[page_id]]),
        page_size,
        layout=(("out_cache_loc", Placement("int64")),),
    )
    found = slot - 2**32 if bits > 0 else slot + 2**32
    text = verdict_on({0: found}, case).text()
    assert f"out_cache_loc[0] = {found}, but should be {slot}" in text
    assert f"{found} is {slot} in 32 bits" in text


def test_a_slot_that_came_from_nowhere_is_given_no_origin(verdict_on):
    text = verdict_on({5: 99_999}).text()
    assert "99999 is" not in text
    assert "out_cache_loc[5] = 99999, but should be 66" in text


def test_an_overflow_token_is_called_one(verdict_on):
    case = CASE.replace(cache_start=(0, 30, 30))
    verdict = verdict_on({5: 64}, case)
    assert verdict.signature == Signature(
        "compute_out_cache_loc", "value", "out_cache_loc: overflow token"
    )
    assert "token 2 of 4: position 32 = past the row, which ends at 32" in verdict.text()


def test_each_kind_of_wrong_cell_is_reported_once(verdict_on):
    case = CASE.replace(cache_start=(0, 30, 30))
    verdict = verdict_on({0: 1, 1: 2, 5: 64, 6: 65}, case)
    assert [finding.headline for finding in verdict.findings] == [
        "out_cache_loc[0] = 1, but should be 320",
        "out_cache_loc[5] = 64, but should be 0",
    ]
    assert "4 of 9 elements of out_cache_loc differ" in verdict.text()


def test_a_stray_write_does_not_claim_that_guards_are_intact(plain):
    def compute_out_cache_loc(out_cache_loc, *others):
        plain.functions["compute_out_cache_loc"](out_cache_loc, *others)
        out_cache_loc.as_strided((1,), (1,), out_cache_loc.storage_offset() + 9).fill_(5)

    target = Target("planted", {"compute_out_cache_loc": compute_out_cache_loc})
    verdict = Checker(target, "cpu").check(family_named("compute_out_cache_loc"), CASE)
    assert verdict.text().splitlines() == [
        "out_cache_loc: element 0 past its end = 5, but should still be -7",
        "  1 cell in or beside out_cache_loc changed",
    ]


def test_findings_are_sorted_by_how_telling_they_are_then_as_they_came():
    findings = [Finding(kind, role, "") for kind in reversed(KINDS) for role in ("b", "a")]
    in_order = [(finding.kind, finding.role) for finding in sorted_findings(findings)]
    assert in_order == [(kind, role) for kind in KINDS for role in ("b", "a")]


def test_only_a_device_error_ends_the_process():
    for kind in KINDS:
        verdict = Verdict("chunking", (Finding(kind, "role", "headline"),))
        assert verdict.fatal == (kind == "device error")
        assert not verdict.passed
