"""The mutants of our own kernels: what is changed, and which launchers a change belongs to."""

import ast
from pathlib import Path

import pytest

from pagefault.mutation.checks import CHECKS, checks_of
from pagefault.mutation.mutants import modules_of, mutants_of, sizes_in
from pagefault.mutation.reviewed import read_reviewed
from pagefault.target import load_target
from pagefault.verdict import KINDS, Finding

REVIEWED = Path(__file__).parents[1] / "equivalent_mutants.toml"
PARSED_ONE_IN = 10


@pytest.fixture(scope="module")
def modules():
    return modules_of(load_target("ours"))


@pytest.fixture(scope="module")
def mutants(modules):
    target = load_target("ours")
    return mutants_of(modules, target, target.functions, read_reviewed(REVIEWED).left_out)


def test_every_kernel_has_mutants(modules, mutants):
    kernels = {
        name
        for module in modules.values()
        for name, node in module.functions.items()
        if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert kernels
    assert kernels <= {mutant.function for mutant in mutants}


def test_a_shared_function_belongs_to_every_launcher_that_reaches_it(mutants):
    families = {mutant.function: set(mutant.families) for mutant in mutants}
    assert families["store_page_ids"] == {"update_req_to_page", "update_block_table"}
    assert families["load_slots"] >= {
        "compute_out_cache_loc",
        "compute_out_cache_loc_uniform",
        "fused_decode_input_prep",
        "create_chunked_cache_kv_indices_paged",
        "get_chunks_paged",
    }
    assert families["compute_out_cache_loc_kernel"] == {"compute_out_cache_loc"}


def test_swaps_of_what_a_device_function_hands_on_are_made_in_the_kernel(mutants):
    swaps = {(m.function, m.before) for m in mutants if m.operator == "arguments swapped"}
    assert ("update_req_to_page_kernel", "batch_size, num_page_ids,") in swaps
    assert ("write_page_ids", "batch_size, num_page_ids,") not in swaps


def test_a_mutant_is_python_and_differs_in_its_own_lines_alone(modules, mutants):
    for mutant in mutants[::PARSED_ONE_IN]:
        source = modules[mutant.module].source
        edited = source.edited(mutant.edit)
        ast.parse(edited)
        old, new = source.text.splitlines(), edited.splitlines()
        assert len(old) == len(new)
        last = source.line_number(mutant.edit.end)
        different = {i for i, (a, b) in enumerate(zip(old, new), 1) if a != b}
        assert different
        assert different <= set(range(mutant.line, last + 1)), mutant.diff()


def test_the_sizes_of_a_target_are_the_numbers_in_its_source(modules):
    launches = {name: m for name, m in modules.items() if name.endswith("launches")}
    assert set(sizes_in(launches)) >= {8, 64, 256, 1024, 2048, 2**18}
    assert set(sizes_in(launches)) <= set(sizes_in(modules))
    assert max(sizes_in(modules)) < 2**31


def test_refusals_are_left_out(mutants):
    assert not [mutant for mutant in mutants if mutant.file == "checks.py"]
    assert not [mutant for mutant in mutants if "validate_" in mutant.before]


@pytest.mark.parametrize("kind", KINDS)
def test_every_finding_is_of_a_check(kind):
    headline = "x[0] = 1, but should still be 2"
    assert set(checks_of([Finding(kind, "x", headline)], False)) <= set(CHECKS)
    assert checks_of([Finding(kind, "x", headline)], False)


def test_a_write_that_both_checks_have_seen_counts_for_both():
    lines = ("write of x[0], which the contract does not name",)
    seen = Finding("outside", "x", "x[0] = 1, but should still be 2", lines)
    assert checks_of([seen], False) == ["memory", "footprints"]
    by_access = Finding("outside", "x", lines[0])
    assert checks_of([by_access], False) == ["footprints"]
    assert checks_of([seen], True) == ["garbage"]
