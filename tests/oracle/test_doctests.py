"""Every public function of the oracle has an example, and every example is right."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import pagefault.oracle

MODULES = [
    importlib.import_module(f"pagefault.oracle.{module.name}")
    for module in pkgutil.iter_modules(pagefault.oracle.__path__)
]
FUNCTIONS = [
    function
    for module in MODULES
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and not name.startswith("_")
]


def test_the_oracle_has_the_modules_that_the_kernels_have():
    names = {module.__name__.rpartition(".")[2] for module in MODULES}
    assert names >= {"req_to_page", "out_cache_loc", "decode_input_prep", "chunked_prefill"}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_the_examples_of_a_module_are_right(module):
    failed, attempted = doctest.testmod(module)
    assert attempted > 0
    assert failed == 0


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_public_function_has_an_example_that_calls_it(function):
    examples = doctest.DocTestFinder(recurse=False).find(function)
    sources = "".join(example.source for test in examples for example in test.examples)
    assert f"{function.__name__}(" in sources
