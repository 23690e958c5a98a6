"""The minimiser, on predicates that say exactly what the smallest case is."""

import time
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefault.case import Case, CaseError, PageTable, PerRequest, PerRequestLists, Placement
from pagefault.family import Expected, Family
from pagefault.minimal import Budget, minimise, size_of
from pagefault.verdict import Finding, Verdict


@dataclass(frozen=True)
class PlainCase(Case):
    """A field of every type that a case can have; `number` has to be even."""

    PLAIN: ClassVar = {"items": Placement(), "table": Placement("int64")}

    items: PerRequest
    lists: PerRequestLists
    number: int
    flat: tuple[int, ...]
    table: PageTable
    page_size: int

    def check(self) -> None:
        if self.number % 2 or self.page_size < 1:
            raise CaseError("number: odd, or page_size: below 1")


FAMILY = Family(
    name="plain",
    parameters=(),
    case_type=PlainCase,
    cases=lambda domain: st.nothing(),
    arguments=lambda case: [],
    expect=lambda case, dialect: Expected(),
    edges=lambda case: frozenset(),
    size=lambda case: sum(map(len, case.lists)),
)

LARGE = PlainCase(
    items=(40, 7, 300, -12, 65, 9, 3),
    lists=((5, 6), (), (70, 80, 90), (1,), (2, 3), (), (11,)),
    number=1000,
    flat=(9, 8, 700, 6, -5),
    table=PageTable(13, 11, ((2, 3, 4000), (12, 10, -9))),
    page_size=100,
    layout=(
        ("items", Placement("int64", offset=3, spare=300)),
        ("table", Placement("int32", offset=2, pitch=14)),
    ),
)
SMALLEST = PlainCase(
    items=(), lists=(), number=0, flat=(), table=PageTable(0, 0), page_size=1, layout=()
)


def verdict(kind="value", role="cell"):
    return Verdict("plain", (Finding(kind, role, role),))


PASSED = Verdict("plain")


def smallest_with(predicate, **budget):
    assert predicate(LARGE)
    return minimise(
        FAMILY,
        LARGE,
        verdict(),
        lambda case: verdict() if predicate(case) else PASSED,
        Budget(**budget),
    )


def edited(num_rows, max_pages, *edits):
    return PageTable(num_rows, max_pages, edits)


def placed(name, **changes):
    plain = {"dtype": PlainCase.PLAIN[name].dtype}
    return ((name, Placement(**{**plain, **changes})),)


@pytest.mark.parametrize(
    ("predicate", "changes"),
    [
        pytest.param(lambda c: True, {}, id="anything"),
        pytest.param(lambda c: c.number >= 38, {"number": 38}, id="a number"),
        pytest.param(lambda c: c.number > 0, {"number": 2}, id="the least legal number"),
        pytest.param(lambda c: c.page_size >= 37, {"page_size": 37}, id="the page size"),
        pytest.param(
            lambda c: c.num_requests >= 3, {"items": (0,) * 3, "lists": ((),) * 3}, id="requests"
        ),
        pytest.param(
            lambda c: max(c.items, default=0) >= 99,
            {"items": (99,), "lists": ((),)},
            id="one entry per request",
        ),
        pytest.param(
            lambda c: sum(map(len, c.lists)) >= 4,
            {"items": (0, 0), "lists": ((0,), (0, 0, 0))},
            id="entries of lists",
        ),
        pytest.param(
            lambda c: any(n >= 77 for page_ids in c.lists for n in page_ids),
            {"items": (0,), "lists": ((77,),)},
            id="an entry of a list",
        ),
        pytest.param(lambda c: len(c.flat) >= 2, {"flat": (0, 0)}, id="a tuple's length"),
        pytest.param(lambda c: max(c.flat, default=0) >= 55, {"flat": (55,)}, id="a tuple's entry"),
        pytest.param(lambda c: min(c.flat, default=0) <= -3, {"flat": (-3,)}, id="a negative"),
        pytest.param(lambda c: c.table.num_rows >= 6, {"table": edited(6, 0)}, id="rows"),
        pytest.param(lambda c: c.table.max_pages >= 7, {"table": edited(0, 7)}, id="columns"),
        pytest.param(
            lambda c: any(page_id >= 444 for _, _, page_id in c.table.edits),
            {"table": edited(3, 4, (2, 3, 444))},
            id="an edit",
        ),
        pytest.param(
            lambda c: c.placement("items").offset >= 2,
            {"layout": placed("items", offset=2)},
            id="an offset",
        ),
        pytest.param(
            lambda c: c.placement("items").spare >= 41,
            {"layout": placed("items", spare=41)},
            id="spare elements",
        ),
        pytest.param(
            lambda c: c.placement("table").pitch >= 5,
            {"layout": placed("table", pitch=5)},
            id="a pitch",
        ),
        pytest.param(
            lambda c: c.placement("table").dtype == "int32",
            {"layout": placed("table", dtype="int32")},
            id="a dtype",
        ),
        pytest.param(
            lambda c: c.number >= 38 and c.placement("items").offset and len(c.items) >= 2,
            {
                "number": 38,
                "items": (0, 0),
                "lists": ((), ()),
                "layout": placed("items", offset=1),
            },
            id="several fields",
        ),
    ],
)
def test_a_threshold_on_a_field_is_met_exactly(predicate, changes):
    minimal = smallest_with(predicate)
    if changes.get("lists") == ((0,), (0, 0, 0)):
        # How the entries are spread over the lists makes no difference, unless one holds all.
        assert minimal.case.num_requests == 1 or sum(map(len, minimal.case.lists)) == 4
    else:
        assert minimal.case == SMALLEST.replace(**changes)
    assert minimal.exhausted == ""


@settings(max_examples=25)
@given(
    st.integers(0, 500).map(lambda n: 2 * n),
    st.integers(1, 100),
    st.integers(0, 13),
    st.integers(0, 11),
    st.integers(0, 3),
    st.integers(0, 300),
)
def test_thresholds_on_all_fields_at_once_are_met_exactly(
    number, page_size, num_rows, max_pages, offset, spare
):
    minimal = smallest_with(
        lambda c: (
            c.number >= number
            and c.page_size >= page_size
            and c.table.num_rows >= num_rows
            and c.table.max_pages >= max_pages
            and c.placement("items").offset >= offset
            and c.placement("items").spare >= spare
        )
    )
    assert minimal.case == SMALLEST.replace(
        number=number,
        page_size=page_size,
        table=PageTable(num_rows, max_pages),
        layout=(("items", Placement("int32", offset=offset, spare=spare)),),
    )


def test_every_case_tried_is_smaller_than_the_best_so_far_and_no_case_is_tried_twice():
    best = size_of(FAMILY, LARGE)
    tried = set()

    def check(case):
        nonlocal best
        assert size_of(FAMILY, case) < best
        assert case not in tried
        tried.add(case)
        if case.number >= 38 and case.num_requests >= 2:
            best = size_of(FAMILY, case)
            return verdict()
        return PASSED

    minimal = minimise(FAMILY, LARGE, verdict(), check)
    assert len(tried) == minimal.num_checks
    assert best == size_of(FAMILY, minimal.case)


def test_another_finding_is_not_followed():
    def check(case):
        return verdict() if case.number >= 38 else verdict(role="another cell")

    minimal = minimise(FAMILY, LARGE, verdict(), check)
    assert minimal.case.number == 38
    assert minimal.verdict == verdict()


@pytest.mark.parametrize("other", [verdict(kind="stale"), verdict(role="another cell")])
def test_a_case_that_only_has_another_finding_stays_as_it_is(other):
    minimal = minimise(FAMILY, LARGE, verdict(), lambda case: other)
    assert (minimal.case, minimal.verdict) == (LARGE, verdict())
    assert minimal.exhausted == ""


def test_the_verdict_is_that_of_the_smallest_case():
    def check(case):
        return Verdict("plain", (Finding("value", "cell", f"{case.number}"),))

    minimal = minimise(FAMILY, LARGE, check(LARGE), check)
    assert minimal.verdict.text() == "0"


def test_cases_outside_the_domain_are_not_tried():
    seen = []
    smallest_with(lambda c: seen.append(c) or c.number >= 38)
    assert len(seen) > 10
    assert all(case.number % 2 == 0 and case.page_size >= 1 for case in seen)


def test_a_case_that_only_the_check_finds_outside_the_domain_is_passed_over():
    def check(case):
        if case.number < 38:
            raise CaseError("number: below 38")
        return verdict()

    minimal = minimise(FAMILY, LARGE, verdict(), check)
    assert minimal.case == SMALLEST.replace(number=38)


def test_a_smallest_case_is_reported_as_minimal():
    minimal = smallest_with(lambda c: True)
    assert str(minimal) == (
        f"minimal: no single step makes it smaller ({minimal.num_checks} cases tried)"
    )


def test_the_budget_of_cases_is_kept_and_named():
    tried = []
    minimal = smallest_with(lambda c: tried.append(c) or c.number >= 38, num_checks=5)
    assert minimal.num_checks == 5
    assert len(tried) == 6  # LARGE itself was looked at before.
    assert str(minimal) == "not known to be minimal: the budget of 5 cases ran out"
    assert size_of(FAMILY, minimal.case) < size_of(FAMILY, LARGE)


def test_the_budget_of_time_is_kept_and_named():
    def predicate(case):
        time.sleep(0.02)
        return case.number >= 38

    started = time.monotonic()
    minimal = smallest_with(predicate, seconds=0.1)
    assert time.monotonic() - started < 2
    assert str(minimal) == "not known to be minimal: the budget of 0.1 s ran out"
    assert size_of(FAMILY, minimal.case) < size_of(FAMILY, LARGE)


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        pytest.param(
            {"items": (9,), "lists": ((1, 2, 3),)},
            {"items": (0, 0), "lists": ((), ())},
            id="requests before tokens",
        ),
        pytest.param(
            {"items": (0,), "lists": ((),), "table": PageTable(9, 9)},
            {"items": (0,), "lists": ((1,),)},
            id="tokens before cells",
        ),
        pytest.param(
            {"table": PageTable(1, 1), "page_size": 9}, {"table": PageTable(2, 1)}, id="cells"
        ),
        pytest.param({"page_size": 2, "number": 90}, {"page_size": 3}, id="page size"),
        pytest.param(
            {"number": 90, "table": PageTable(2, 2)},
            {"table": PageTable(2, 2, ((0, 0, 1),))},
            id="edits before numbers",
        ),
        pytest.param(
            {"number": 2, "layout": placed("items", offset=3)}, {"number": 4}, id="numbers"
        ),
        pytest.param({"number": 2}, {"number": -2}, id="no sign"),
        pytest.param(
            {"layout": placed("items", dtype="int64")},
            {"layout": placed("items", offset=1)},
            id="a dtype before an offset",
        ),
        pytest.param(
            {"layout": placed("items", offset=1)},
            {"layout": placed("items", offset=2)},
            id="offsets",
        ),
    ],
)
def test_sizes_are_ordered_as_the_design_says(smaller, larger):
    assert size_of(FAMILY, SMALLEST.replace(**smaller)) < size_of(
        FAMILY, SMALLEST.replace(**larger)
    )
