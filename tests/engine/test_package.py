"""What is built and installed: the wheel's content, and pagefault in somebody else's repository."""

import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build", reason="the package `build` is not installed")

ROOT = Path(__file__).resolve().parents[2]
NEEDED = (
    "__init__.py",
    "cli.py",
    "plugin.py",
    "py.typed",
    "templates/report.html.j2",
    "templates/report.md.j2",
    "templates/report.css",
    "families/out_cache_loc.py",
    "kernels/out_cache_loc.py",
    "kernels/req_to_page.py",
    "oracle/out_cache_loc.py",
    "oracle/slots.py",
    "strategies/out_cache_loc.py",
    "strategies/edges.py",
    "targets/",
)
SOURCES = (
    *("src", "kernels", "oracle", "strategies"),
    *("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"),
)

KERNEL = """
import torch
import triton
import triton.language as tl
from pagefault import assert_conforms


@triton.jit
def uniform_kernel(out, rows, starts, table, row_stride, max_pages, length, page_size: tl.constexpr,
                   bound: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request).to(tl.int64)
    start = tl.load(starts + request).to(tl.int64)
    for k in range(length):
        position = start + k
        column = position // page_size
        page_id = tl.load(table + row * row_stride + column, mask=column < max_pages, other=-1)
        slot = page_id.to(tl.int64) * page_size + position % page_size
        slot = tl.where(page_id < bound, 0, slot)
        tl.store(out + request * length + k, slot.to(out.dtype.element_ty))


def launch(out, rows, length, starts, table, page_size, bound):
    if len(rows):
        uniform_kernel[(len(rows),)](
            out, rows, starts, table, table.stride(0), table.shape[1], length, page_size, bound
        )


def right(*arguments):
    launch(*arguments, bound=0)


def wrong(*arguments):
    launch(*arguments, bound=1)


def test_right():
    assert_conforms(right, family="compute_out_cache_loc_uniform", num_cases=20, seed=1)


def test_wrong():
    assert_conforms(wrong, family="compute_out_cache_loc_uniform", num_cases=200, seed=1)
"""


def run(*command, **options):
    process = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=300, **options
    )
    return process


def build(source, out, *arguments):
    process = run(
        *(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *arguments, source)
    )
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the source tree, links and all: builds leave things behind."""
    copy = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def built(source, tmp_path_factory):
    """The wheel from the tree, the sdist, and the wheel from the sdist."""
    out = tmp_path_factory.mktemp("built")
    build(source, out / "tree", "--wheel")
    build(source, out / "sdist")
    (from_tree,) = (out / "tree").glob("*.whl")
    (from_sdist,) = (out / "sdist").glob("*.whl")
    (sdist,) = (out / "sdist").glob("*.tar.gz")
    return from_tree, sdist, from_sdist


def names_in(wheel):
    return set(zipfile.ZipFile(wheel).namelist())


def top_level_of(names):
    return sorted({re.sub(r"-[^/]*\.dist-info", "-*.dist-info", n).split("/")[0] for n in names})


def test_the_wheel_installs_the_package_and_nothing_else_at_top_level(built):
    assert top_level_of(names_in(built[0])) == ["pagefault", "pagefault-*.dist-info"]


def test_a_second_top_level_package_would_be_seen(built):
    names = names_in(built[0]) | {"kernels/out_cache_loc.py"}
    assert top_level_of(names) == ["kernels", "pagefault", "pagefault-*.dist-info"]


@pytest.mark.parametrize("needed", NEEDED)
def test_the_wheel_has_what_the_package_needs(built, needed):
    for wheel in (built[0], built[2]):
        assert any(name.startswith(f"pagefault/{needed}") for name in names_in(wheel))


def test_the_wheel_has_every_module_of_the_tree(built):
    package = ROOT / "src" / "pagefault"
    modules = {
        f"pagefault/{folder.name}/{path.name}" if folder != package else f"pagefault/{path.name}"
        for folder in (package, *(path for path in package.iterdir() if path.is_dir()))
        for path in folder.glob("*.py")
    }
    assert len(modules) > 30
    assert modules - names_in(built[0]) == set()


def test_the_wheel_from_the_sdist_is_the_wheel_from_the_tree(built):
    from_tree, _, from_sdist = built
    assert names_in(from_sdist) == names_in(from_tree)


def test_the_sdist_has_the_root_folders(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"kernels/out_cache_loc.py", "oracle/slots.py", "strategies/edges.py"} <= names
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


def test_the_metadata_says_what_is_needed_and_what_is_brought(built):
    with zipfile.ZipFile(built[0]) as wheel:
        (metadata,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        (entry_points,) = (n for n in wheel.namelist() if n.endswith("/entry_points.txt"))
        said = wheel.read(metadata).decode()
        brought = wheel.read(entry_points).decode()
    assert "Requires-Dist: torch>=2.11\n" in said
    assert "Requires-Dist: triton>=3.6\n" in said
    assert "Requires-Python: >=3.11\n" in said
    assert "License-Expression: MIT\n" in said
    assert "[console_scripts]\npagefault = pagefault.cli:main\n" in brought
    assert "[pytest11]\npagefault = pagefault.plugin\n" in brought


@pytest.fixture(scope="module")
def elsewhere(built, tmp_path_factory):
    """The interpreter of a fresh environment that has the wheel, and this one's other packages.

    A path in a `.pth` file makes this environment's packages importable, without its own `.pth`
    files: so the checkout that is installed here is not seen there.
    """
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    process = run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-deps", "--no-index", built[0]),
    )
    assert process.returncode == 0, process.stderr
    (site_packages,) = folder.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    assert ours
    (site_packages / "torch_is_large.pth").write_text("\n".join(ours) + "\n")
    return python


def test_in_another_repository_a_test_of_one_line_holds_a_kernel_to_a_contract(
    elsewhere, environment, tmp_path
):
    (tmp_path / "test_mine.py").write_text(
        KERNEL
        + "\n\ndef test_where():\n"
        + "    import pagefault\n"
        + f"    assert pagefault.__file__.startswith({str(elsewhere.parents[1])!r})\n"
    )
    process = run(
        *(elsewhere, "-m", "pytest", "--device=cpu", "-p", "no:cacheprovider"),
        cwd=tmp_path,
        env=environment(),
    )
    assert "1 failed, 2 passed" in process.stdout, process.stdout + process.stderr
    assert "pagefault: device cpu (interpreter), pagefault " in process.stdout
    # A page id of 0 is multiplied like any other; this kernel diverts it.
    assert re.search(
        r"NonConformance: out_cache_loc\[0\] = 0, but should be [1-9]\n", process.stdout
    )
    assert "page id 0" in process.stdout
    assert "guards intact; inputs intact" in process.stdout
    (case,) = (tmp_path / ".pagefault" / "cases").iterdir()
    assert case.name in process.stdout


def test_the_command_is_installed_as_well(elsewhere, environment, tmp_path):
    process = run(elsewhere.with_name("pagefault"), "--version", cwd=tmp_path, env=environment())
    assert process.returncode == 0, process.stderr
    assert re.fullmatch(r"pagefault \d+\.\d+\.\d+\n", process.stdout)
