"""What the tests of the engine share: a right implementation, and pagefault as a command."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pagefault.target import Target, load_target

PLAIN_TARGET = Path(__file__).with_name("plain_target.py")


def child_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without what a test run has put there."""
    ours = ("PYTEST_", "TRITON_INTERPRET", "HYPOTHESIS_", "PAGEFAULT_", "CI", "COV_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "NO_COLOR": "1", "COLUMNS": "200", **changes}


@pytest.fixture(scope="session")
def environment() -> Callable[..., dict[str, str]]:
    """`child_environment`, as a fixture because test modules can't import a conftest."""
    return child_environment


@pytest.fixture(scope="session")
def pagefault() -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs `python -m pagefault` with arguments in a folder."""

    def run(*arguments: object, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pagefault", *map(str, arguments)],
            cwd=cwd,
            env=child_environment(**changes),
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


PYTEST_OPTIONS = ("-p", "no:cacheprovider", "--pagefault-device=cpu")


@pytest.fixture
def run_pytest(folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs pytest in the test module's `folder`."""

    def run(*arguments: object, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", *PYTEST_OPTIONS, *map(str, arguments)],
            cwd=folder,
            env=child_environment(**changes),
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture(scope="session")
def plain_target() -> Path:
    """The path of a right target in plain torch."""
    return PLAIN_TARGET


@pytest.fixture(scope="session")
def plain() -> Target:
    """The same, loaded."""
    return load_target(str(PLAIN_TARGET))


PARAMETERS = "out_cache_loc, req_pool_indices, input_lengths, cache_start, req_to_pages, page_size"


@pytest.fixture(scope="session")
def write_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes a target whose one function is right, then spoilt by some code.

    The code is the body of a function with the parameters of `compute_out_cache_loc`, which runs
    when the right answer has been written; `extra` is what the file has besides.
    """

    def write(spoil: str, name: str = "wrong.py", extra: str = "") -> Path:
        path = tmp_path_factory.mktemp("target") / name
        path.write_text(
            "import ctypes, importlib.util, os, time\n\n"
            f"spec = importlib.util.spec_from_file_location('plain', {str(PLAIN_TARGET)!r})\n"
            "plain = importlib.util.module_from_spec(spec)\n"
            "spec.loader.exec_module(plain)\n"
            f"{extra}\n\n"
            f"def compute_out_cache_loc({PARAMETERS}):\n"
            f"    plain.compute_out_cache_loc({PARAMETERS})\n"
            + "".join(f"    {line}\n" for line in spoil.strip().splitlines())
        )
        return path

    return write
