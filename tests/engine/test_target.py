"""Targets: how they are found, what of them is left out and why, and what can't be loaded."""

import os
import sys
import textwrap

import pytest

from pagefault.case import PageTable
from pagefault.checker import Checker
from pagefault.family import Dialect, Domain, families, family_named
from pagefault.strategies.out_cache_loc import OutCacheLocCase
from pagefault.stream import draw_cases
from pagefault.target import DESCRIPTIONS, REGISTRY, TargetError, load_target

OURS = {
    "update_req_to_page",
    "update_block_table",
    "compute_out_cache_loc",
    "compute_out_cache_loc_uniform",
    "fused_decode_input_prep",
    "chunking",
    "create_chunked_cache_kv_indices_paged",
    "get_chunks_paged",
    "build_chunked_prefill_metadata_arrays",
}
SIX = "out_cache_loc, req_pool_indices, input_lengths, cache_start, req_to_pages, page_size"


@pytest.fixture
def load(tmp_path):
    """A function that writes a file and loads it as a target."""

    def load_text(text):
        path = tmp_path / "some_target.py"
        path.write_text(textwrap.dedent(text))
        return load_target(str(path))

    return load_text


def refusal_of(load, text):
    with pytest.raises(TargetError) as raised:
        load(text)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_our_nine_functions_are_a_target_by_name():
    target = load_target("ours")
    assert set(target.functions) == OURS
    assert target.dialect == Dialect()
    assert not target.skipped


def test_every_name_of_the_registry_has_a_description():
    assert set(DESCRIPTIONS) == set(REGISTRY)


def test_a_module_is_a_target(plain_target, tmp_path, monkeypatch):
    (tmp_path / "engine_of_mine").mkdir()
    (tmp_path / "engine_of_mine" / "__init__.py").touch()
    (tmp_path / "engine_of_mine" / "kernels.py").write_text(plain_target.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    target = load_target("engine_of_mine.kernels")
    assert "compute_out_cache_loc" in target.functions


def test_what_a_file_lacks_is_skipped_with_the_reason(plain):
    assert set(plain.functions) == {
        "update_req_to_page",
        "update_block_table",
        "compute_out_cache_loc",
        "chunking",
    }
    assert set(plain.skipped) == set(families()) - set(plain.functions)
    assert set(plain.skipped.values()) == {"the target has no function of this name"}
    assert [family.name for family in plain.families()] == [
        name for name in families() if name in plain.functions
    ]


def test_a_file_finds_what_lies_beside_it(tmp_path, load):
    (tmp_path / "beside_the_target.py").write_text("ANSWER = 42\n")
    target = load(f"""
        from beside_the_target import ANSWER

        def compute_out_cache_loc({SIX}):
            return ANSWER
    """)
    assert target.functions["compute_out_cache_loc"](*range(6)) == 42


def test_a_file_without_any_of_the_functions_is_refused(load):
    message = refusal_of(load, "def something_else(): pass")
    assert "has none of the functions" in message
    assert "compute_out_cache_loc: the target has no function of this name" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("raise RuntimeError('two\\nlines')", "RuntimeError: two lines", id="raises"),
        pytest.param("raise SystemExit(3)", "SystemExit: 3", id="exits"),
        pytest.param("def compute_out_cache_loc(:", "SyntaxError: ", id="syntax"),
        pytest.param("import nothing_of_the_kind", "ModuleNotFoundError: No module", id="import"),
        pytest.param("assert False", "AssertionError", id="asserts"),
        pytest.param("\0", "can't be imported", id="null byte"),
    ],
)
def test_a_file_that_does_not_import_is_refused_in_one_line(load, text, words):
    message = refusal_of(load, text)
    assert "some_target.py" in message
    assert "can't be imported" in message
    assert words in message
    assert "pagefault_target_some_target" not in sys.modules


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("no/such/file.py", "target 'no/such/file.py': no such file", id="file"),
        pytest.param("no_such_module_here", "No module named 'no_such_module_here'", id="module"),
        pytest.param("some/folder", "a file's path ends in .py", id="folder"),
        pytest.param("", "target '' can't be imported", id="empty"),
    ],
)
def test_a_target_that_is_not_there_is_refused_in_one_line(name, words):
    with pytest.raises(TargetError) as raised:
        load_target(name)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        pytest.param(
            "def compute_out_cache_loc(a, b): pass",
            "can't be called with the contract's 6 arguments (out_cache_loc, ",
            id="too few parameters",
        ),
        pytest.param(
            "def compute_out_cache_loc(a, b, c, d, e, f, g): pass",
            "can't be called with the contract's 6 arguments",
            id="too many parameters",
        ),
        pytest.param(
            "def compute_out_cache_loc(a, b, c, d, e, *, page_size): pass",
            "can't be called with the contract's 6 arguments",
            id="keyword only",
        ),
        pytest.param("compute_out_cache_loc = 3", "is no function", id="no function"),
    ],
)
def test_a_function_that_can_not_be_called_as_the_contract_says_is_left_out(
    load, definition, reason
):
    target = load(f"""
        def compute_out_cache_loc_uniform({SIX}): pass

        {definition}
    """)
    assert set(target.functions) == {"compute_out_cache_loc_uniform"}
    assert reason in target.skipped["compute_out_cache_loc"]


@pytest.mark.parametrize("parameters", [f"{SIX}, stream=None", "*arguments", "a, b, c, d, e, f"])
def test_a_function_that_can_be_called_so_is_taken(load, parameters):
    target = load(f"def compute_out_cache_loc({parameters}): pass")
    assert set(target.functions) == {"compute_out_cache_loc"}


def test_a_kernel_in_the_place_of_its_launcher_is_left_out(load):
    target = load(f"""
        import triton

        @triton.jit
        def compute_out_cache_loc({SIX}):
            pass

        def compute_out_cache_loc_uniform({SIX}):
            pass
    """)
    reason = "compute_out_cache_loc is a Triton kernel, and a launcher is needed"
    assert target.skipped["compute_out_cache_loc"] == reason
    assert set(target.functions) == {"compute_out_cache_loc_uniform"}


def test_an_edit_of_the_same_size_in_the_same_second_is_seen(tmp_path):
    path = tmp_path / "kernels.py"
    answers = []
    for answer in (1, 2):
        path.write_text(f"def chunking(a, b, c, d): return {answer}")
        os.utime(path, (1_000_000_000, 1_000_000_000))
        answers.append(load_target(str(path)).functions["chunking"](0, 0, 0, 0))
    assert answers == [1, 2]


# Row 1 has page ids -1 and 5: a hole, a page, and what lies past them.
HOLE_PAGE_OVERFLOW = OutCacheLocCase(
    (1, 1, 1), (1, 1, 1), (1, 4, 8), PageTable.from_rows([[8, 9], [-1, 5]]), 4
)


@pytest.mark.parametrize(
    ("declaration", "slots"),
    [
        pytest.param("{}", [0, 20, 0], id="ours"),
        pytest.param("{'overflow_slot': -1}", [-1, 20, -1], id="padding slot"),
        pytest.param("{'holes': 'multiply'}", [-3, 20, 0], id="holes are multiplied"),
        pytest.param("{'overflow_slot': -1, 'holes': 'multiply'}", [-3, 20, -1], id="both"),
    ],
)
def test_the_oracle_speaks_the_dialect_that_a_target_declares(load, declaration, slots):
    family = family_named("compute_out_cache_loc")

    def verdict_on(answer):
        target = load(f"""
            import torch

            pagefault_target = {declaration}

            def compute_out_cache_loc({SIX}):
                out_cache_loc[:] = torch.tensor({answer})
        """)
        return Checker(target, "cpu").check(family, HOLE_PAGE_OVERFLOW)

    assert verdict_on(slots).passed
    for index in range(3):
        wrong = [slot + (i == index) for i, slot in enumerate(slots)]
        assert verdict_on(wrong).text().startswith(f"out_cache_loc[{index}] = {wrong[index]}")


def test_edges_that_a_target_can_not_do_are_not_drawn(load):
    target = load(f"""
        pagefault_target = {{"without": {{"hole": "this engine has no holes"}}}}

        def compute_out_cache_loc({SIX}): pass
    """)
    family = family_named("compute_out_cache_loc")

    def edges_drawn_from(domain):
        drawn = []
        draw_cases(family.strategy(domain), 200, 1, drawn.append)
        return set().union(*map(family.edges, drawn))

    assert target.without == {"hole": "this engine has no holes"}
    assert "hole" in edges_drawn_from(Domain())
    assert "hole" not in edges_drawn_from(target.domain)


def test_a_function_that_a_target_declares_as_skipped_is_left_out_with_its_reason(load):
    target = load(f"""
        pagefault_target = {{"skipped": {{"compute_out_cache_loc": "not released yet"}}}}

        def compute_out_cache_loc({SIX}): pass

        def compute_out_cache_loc_uniform({SIX}): pass
    """)
    assert target.skipped["compute_out_cache_loc"] == "not released yet"
    assert set(target.functions) == {"compute_out_cache_loc_uniform"}


@pytest.mark.parametrize(
    ("declaration", "words"),
    [
        pytest.param("{'overflow_slots': -1}", "unknown key 'overflow_slots'", id="unknown key"),
        pytest.param("{'overflow_slot': '-1'}", "overflow_slot: '-1', but should be", id="text"),
        pytest.param("{'overflow_slot': True}", "overflow_slot: True, but should be", id="bool"),
        pytest.param("{'holes': 'ignore'}", "holes: 'ignore', but should be one of", id="holes"),
        pytest.param("-1", "pagefault_target is -1, but should be a dict", id="no dict"),
        pytest.param(
            "{'skipped': ['chunking']}", "skipped is ['chunking'], but should", id="skipped"
        ),
        pytest.param("{'without': ['hole']}", "without is ['hole'], but should", id="without"),
        pytest.param("{'known_faults': [7]}", "pagefault_target: ", id="fault is a number"),
    ],
)
def test_a_declaration_that_is_not_understood_is_refused(load, declaration, words):
    message = refusal_of(
        load,
        f"""
        pagefault_target = {declaration}

        def compute_out_cache_loc({SIX}): pass
        """,
    )
    assert "some_target.py" in message
    assert words in message
