"""Cases as values and as JSON: what is read, what is written, what is refused in which words."""

import json

import pytest

from pagefault.case import SCHEMA, CaseError, PageTable, Placement
from pagefault.family import FamilyError, case_from_json, family_named
from pagefault.strategies.out_cache_loc import OutCacheLocCase

FAMILY = "compute_out_cache_loc"


def document(**changes):
    """Return a small case as a person would type it, with changes; None takes a field away."""
    fields = {
        "schema": SCHEMA,
        "family": FAMILY,
        "req_pool_indices": [1, 0],
        "input_lengths": [2, 1],
        "cache_start": [3, 0],
        "req_to_pages": [[5, 9], [7, 4]],
        "page_size": 4,
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not None}


def read(**changes):
    return case_from_json(json.dumps(document(**changes)))[1]


def test_what_a_person_types_becomes_a_case():
    case = read(layout={"out_cache_loc": {"dtype": "int64", "spare": 3}})
    assert case.req_pool_indices == (1, 0)
    assert [case.req_to_pages.rows[0], case.req_to_pages.rows[1]] == [[5, 9], [7, 4]]
    assert case.page_size == 4
    assert case.placement("out_cache_loc") == Placement("int64", spare=3)
    assert case.placement("req_pool_indices") == Placement("int64")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param({"req_to_pages": {"num_rows": 300, "max_pages": 70}}, id="table-by-rule"),
        pytest.param(
            {
                "req_to_pages": {
                    "num_rows": 300,
                    "max_pages": 70,
                    "edits": [[299, 69, -1], [0, 0, 0]],
                    "first": 2,
                    "step": 5,
                }
            },
            id="table-by-rule-with-edits",
        ),
        pytest.param({"req_to_pages": {"num_rows": 2, "max_pages": 0}}, id="no-columns"),
        pytest.param(
            {
                "layout": {
                    "req_to_pages": {"pitch": 2, "offset": 1},
                    "req_pool_indices": {"dtype": "int32"},
                }
            },
            id="layout",
        ),
        pytest.param(
            {"req_pool_indices": [], "input_lengths": [], "cache_start": []}, id="no-requests"
        ),
    ],
)
def test_a_case_survives_json(changes):
    case = read(**changes)
    again = case_from_json(case.to_json(FAMILY))[1]
    assert again == case
    assert hash(again) == hash(case)


def test_every_family_writes_cases_that_it_reads(every_family_case):
    family, case = every_family_case
    assert family.from_json(family.to_json(case)) == case


@pytest.fixture(params=["update_req_to_page", "update_block_table", "chunking", FAMILY])
def every_family_case(request):
    """A family and a case of it that a strategy drew."""
    from pagefault.family import Domain
    from pagefault.stream import draw_cases

    family = family_named(request.param)
    drawn = []
    draw_cases(family.strategy(Domain()), 5, 1, drawn.append)
    return family, drawn[-1]


def test_a_small_table_is_written_as_rows_and_a_large_one_as_its_rule():
    small = json.loads(read().to_json(FAMILY))
    assert small["req_to_pages"] == [[5, 9], [7, 4]]
    large = json.loads(read(req_to_pages={"num_rows": 40, "max_pages": 40}).to_json(FAMILY))
    assert large["req_to_pages"] == {"num_rows": 40, "max_pages": 40, "edits": []}


def test_the_written_text_has_a_schema_version_and_names_its_family():
    written = json.loads(read().to_json(FAMILY))
    assert written["schema"] == SCHEMA
    assert written["family"] == FAMILY
    assert "layout" not in written


def test_a_layout_that_says_what_production_does_is_no_layout():
    assert read(layout={"req_pool_indices": {"dtype": "int64"}}) == read()


def test_the_later_of_two_edits_of_a_cell_counts():
    table = PageTable(1, 2, ((0, 1, 8), (0, 1, 10)))
    assert list(table.rows[0]) == [3, 10]
    assert table == PageTable(1, 2)


REFUSED = [
    pytest.param({"cache_start": None}, "field 'cache_start' is missing", id="missing field"),
    pytest.param({"page_sise": 4}, "unknown field 'page_sise'", id="unknown field"),
    pytest.param({"page_size": True}, "page_size: True, but should be an integer", id="bool"),
    pytest.param({"page_size": 4.0}, "page_size: 4.0, but should be an integer", id="float"),
    pytest.param({"page_size": "4"}, "page_size: '4', but should be an integer", id="text"),
    pytest.param(
        {"input_lengths": [2, False]},
        "input_lengths[1]: False, but should be an integer",
        id="bool in a list",
    ),
    pytest.param(
        {"input_lengths": [2, [1]]},
        "input_lengths[1]: [1], but should be an integer",
        id="list in a list",
    ),
    pytest.param({"input_lengths": 2}, "input_lengths: 2, but should be a list", id="no list"),
    pytest.param(
        {"input_lengths": [2]},
        "one entry per request each, but there are {'req_pool_indices': 2, 'input_lengths': 1",
        id="lengths differ",
    ),
    pytest.param(
        {"cache_start": [3, 2**31]},
        f"cache_start: {2**31} does not fit int32",
        id="too large for its dtype",
    ),
    pytest.param(
        {"cache_start": [3, 2**63]},
        f"cache_start[1]: {2**63}, but should be in {-(2**63)} … {2**63 - 1}",
        id="too large for any dtype",
    ),
    pytest.param({"cache_start": [3, -1]}, "cache_start: -1", id="negative start"),
    pytest.param({"page_size": 0}, "page_size: 0, but should be at least 1", id="page size 0"),
    pytest.param(
        {"page_size": 2**31, "layout": {"out_cache_loc": {"dtype": "int64"}}},
        f"page_size: {2**31}, but should be below 2**31",
        id="page size past 32 bits",
    ),
    pytest.param(
        {"req_pool_indices": [1, 2]},
        "req_pool_indices: 1 … 2, but should be in 0 … 1",
        id="no such row",
    ),
    pytest.param(
        {"layout": {"out": {}}},
        "layout: unknown field 'out', but should be one of ['out_cache_loc'",
        id="unknown tensor in the layout",
    ),
    pytest.param(
        {"layout": {"out_cache_loc": {"stride": 1}}},
        "layout.out_cache_loc: unknown field 'stride', but should be one of ['dtype', 'offset'",
        id="unknown choice in the layout",
    ),
    pytest.param(
        {"layout": {"out_cache_loc": {"dtype": "int16"}}},
        "layout.out_cache_loc: dtype: 'int16', but should be one of ['int32', 'int64']",
        id="unknown dtype",
    ),
    pytest.param(
        {"layout": {"out_cache_loc": {"offset": -1}}},
        "layout.out_cache_loc: offset: -1, but should be in 0",
        id="negative offset",
    ),
    pytest.param({"layout": []}, "layout: [], but should be an object", id="layout is a list"),
    pytest.param(
        {"req_to_pages": [[1, 2], [3]]},
        "req_to_pages: rows of a table differ in length",
        id="ragged table",
    ),
    pytest.param(
        {"req_to_pages": [[1, 2], 3]},
        "req_to_pages[1]: 3, but should be a list",
        id="row is no list",
    ),
    pytest.param(
        {"req_to_pages": [[1, 2], [3, 4.5]]},
        "req_to_pages[1][1]: 4.5, but should be an integer",
        id="float in a table",
    ),
    pytest.param(
        {"req_to_pages": [[1, 2], [3, 2**31]]},
        f"req_to_pages: page id {2**31} of cell [1][1] does not fit int32",
        id="page id past 32 bits",
    ),
    pytest.param(
        {"req_to_pages": {"num_rows": 2}},
        "req_to_pages: field 'max_pages' is missing",
        id="table without a width",
    ),
    pytest.param(
        {"req_to_pages": {"num_rows": -1, "max_pages": 2}},
        "req_to_pages: num_rows: -1, but should be in 0",
        id="negative rows",
    ),
    pytest.param(
        {"req_to_pages": {"num_rows": 2, "max_pages": 2, "step": 0}},
        "req_to_pages: step: 0, but should be in 1",
        id="rule that repeats itself",
    ),
    pytest.param(
        {"req_to_pages": {"num_rows": 2, "max_pages": 2, "edits": [[0, 2, 9]]}},
        "req_to_pages: edit of cell [0][2], but the table is 2 x 2",
        id="edit outside the table",
    ),
    pytest.param(
        {"req_to_pages": {"num_rows": 2, "max_pages": 2, "edits": [[0, 1]]}},
        "req_to_pages.edits: each is [row, column, page id]",
        id="edit of two numbers",
    ),
    pytest.param(
        {"req_to_pages": {"num_rows": 2, "max_pages": 2, "edits": [7]}},
        "req_to_pages.edits[0]: 7, but should be a list",
        id="edit is no list",
    ),
    pytest.param({"schema": None}, "schema: None, but", id="no schema"),
    pytest.param({"schema": 2}, "schema: 2, but this version of pagefault reads 1", id="schema 2"),
    pytest.param({"schema": True}, "schema: True, but", id="schema is a bool"),
    pytest.param({"family": None}, "family: None, but should be the name", id="no family"),
    pytest.param({"family": 7}, "family: 7, but should be the name", id="family is a number"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_case_that_is_no_case_is_refused_with_place_and_expectation(changes, message):
    with pytest.raises(CaseError) as raised:
        read(**changes)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_is_refused_is_one_step_from_what_is_read():
    assert read() == OutCacheLocCase(
        (1, 0), (2, 1), (3, 0), PageTable.from_rows([[5, 9], [7, 4]]), 4
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "not JSON", id="empty"),
        pytest.param('{"schema": 1,', "not JSON", id="cut off"),
        pytest.param("[" * 100_000, "not JSON", id="nested too deep"),
        pytest.param("[1]", "a case is a JSON object", id="a list"),
    ],
)
def test_text_that_is_no_json_object_is_refused(text, message):
    with pytest.raises(CaseError, match=message):
        case_from_json(text)


def test_a_family_that_is_not_installed_is_named_with_those_that_are():
    with pytest.raises(FamilyError, match="no family 'paged_attention', but should be one of: "):
        read(family="paged_attention")


def test_a_family_does_not_read_the_case_of_another():
    words = "family: 'compute_out_cache_loc', but should be 'chunking'"
    with pytest.raises(CaseError, match=words):
        family_named("chunking").from_json(json.dumps(document()))


def test_the_same_checks_hold_for_a_case_made_in_python():
    table = PageTable(2, 2)
    with pytest.raises(CaseError, match="page_size: 0"):
        OutCacheLocCase((1,), (1,), (0,), table, 0)
    with pytest.raises(CaseError, match="layout: no tensor 'out'"):
        OutCacheLocCase((1,), (1,), (0,), table, 4, layout=(("out", Placement()),))
    with pytest.raises(CaseError, match="one entry per request"):
        OutCacheLocCase((1,), (1, 2), (0,), table, 4)


def test_every_cell_of_a_rule_says_which_cell_it_is():
    table = PageTable(3, 4, ((1, 2, -1),))
    for row in range(3):
        for column in range(4):
            if (row, column) != (1, 2):
                assert list(table.cells_holding(table.page_id(row, column))) == [(row, column)]
    assert list(table.cells_holding(-1)) == [(1, 2)]
    assert list(table.cells_holding(table.rule(1, 2))) == []
    assert table.largest_page_id == table.page_id(2, 3)


@pytest.mark.parametrize("table", ["req_to_pages", "req_to_page"])
def test_page_ids_of_no_table_are_int64(table):
    name = "compute_out_cache_loc" if table == "req_to_pages" else "update_req_to_page"
    plain = family_named(name).case_type.PLAIN
    rest = (
        {"input_lengths": [1], "cache_start": [0], "page_size": 1}
        if table == "req_to_pages"
        else {"begins": [0], "new_occupied_pages": [[8]]}
    )
    fields = {"req_pool_indices": [0], table: [[3]], "layout": {table: {"dtype": "int64"}}, **rest}
    assert plain[table].dtype == "int32"
    with pytest.raises(CaseError, match=f"layout.{table}: page ids are int32"):
        family_named(name).case_type.from_fields(fields)
