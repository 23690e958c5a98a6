"""What the interpreter runs and the compiler refuses is found without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagefault.kernels.launches import RAGGED_SHAPES

SCRIPT = Path(__file__).with_name("compile_for_gpu.py")


def compiled(script, *kernels, **changes):
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, script, *kernels],
        env={**kept, **changes},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_every_kernel_compiles_in_every_shape_of_a_ragged_launch(tmp_path):
    process = compiled(SCRIPT, TRITON_CACHE_DIR=str(tmp_path))
    assert process.returncode == 0, process.stderr[-3000:]
    num_by_request = sum(shape.is_by_request for shape in RAGGED_SHAPES.values())
    assert process.stdout.count("bytes") == 5 * len(RAGGED_SHAPES) - 2 * num_by_request


def test_one_kernel_compiles_in_every_shape_of_a_ragged_launch(tmp_path):
    process = compiled(SCRIPT, "compute_out_cache_loc_kernel", TRITON_CACHE_DIR=str(tmp_path))
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout.count("bytes") == len(RAGGED_SHAPES)


def test_what_changes_its_type_in_a_loop_does_not(tmp_path):
    """The interpreter lets a name be a tensor of another shape in each turn of a loop."""
    script = tmp_path / "compile.py"
    kernel = (
        "@triton.jit\n"
        "def kernel(out_ptr, number):\n"
        "    x = tl.zeros([32], tl.int32)\n"
        "    while number > 0:\n"
        "        x = tl.zeros([64], tl.int32)\n"
        "        number -= 1\n"
        "    tl.store(out_ptr, tl.sum(x))\n"
    )
    script.write_text(
        "import triton\nimport triton.language as tl\n"
        "from triton.backends.compiler import GPUTarget\n"
        f"from triton.compiler import ASTSource\n\n\n{kernel}\n\n"
        "source = ASTSource(kernel, {'out_ptr': '*i32', 'number': 'i32'})\n"
        "triton.compile(source, target=GPUTarget('cuda', 90, 32))\n"
    )
    process = compiled(script, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert process.returncode != 0
    assert "x has initial type" in process.stderr
