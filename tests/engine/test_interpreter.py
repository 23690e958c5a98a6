"""What is kept of types changes nothing that the interpreter computes or refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

# Run in two processes: prints, for each way to combine two operands, the result or what is raised.
SCRIPT = """
import itertools, json, operator, os, sys

os.environ["TRITON_INTERPRET"] = "1"
import torch, triton, triton.language as tl
from triton.runtime import interpreter as triton_interpreter
from pagefault import interpreter

if sys.argv[1] == "tuned":
    interpreter.tune()
else:
    interpreter._let_integers_wrap(triton_interpreter)

OPERATORS = [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod,
    operator.truediv, operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift,
    operator.lt, operator.le, operator.eq, operator.ne, operator.ge, operator.gt]
NAMES = ["int1", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "float32", "float64"]
NUMBERS = [0, 1, -1, 3, 127, 128, -129, 255, 256, 2**31 - 1, 2**31, -2**31 - 1, 2**32,
    2**63 - 1, 2**63, True, 2.5]
found = []


def said(name, work):
    try:
        result = work()
    except Exception as error:
        found.append([name, type(error).__name__, str(error)])
        return
    for tensor in result if isinstance(result, tuple) else (result,):
        data = tensor.handle.data
        shape = [int(size) for size in tensor.shape]
        found.append([name, str(tensor.type), str(tensor.dtype), shape, int(tensor.numel),
            str(tensor.handle.dtype), str(data.dtype), list(data.shape), data.tolist()])


def pair(a, b, name):
    for apply in OPERATORS:
        said(f"{name} {apply.__name__}", lambda: apply(a, b))


@triton.jit
def kernel(numbers_ptr, out_ptr):
    one = tl.load(numbers_ptr + 3)
    row = tl.load(numbers_ptr + tl.arange(0, 4))
    column, pair_of_rows = row[:, None], tl.join(row, row)
    same = {}
    for kind in NAMES:
        type_ = getattr(tl, kind)
        same[kind] = {"one": one.to(type_), "row": row.to(type_), "column": column.to(type_)}
    for kind, other in itertools.product(NAMES, NAMES):
        for x, y in (("one", "one"), ("one", "row"), ("row", "one"), ("row", "row"),
                     ("row", "column"), ("column", "one")):
            pair(same[kind][x], same[other][y], f"{kind} {x} {other} {y}")
        for x in ("one", "row", "column"):
            said(f"{kind} {x} to {other}", lambda: same[kind][x].to(getattr(tl, other)))
        said(f"where {kind} {other}",
             lambda: tl.where(row > 1, same[kind]["row"], same[other]["one"]))
        said(f"minimum {kind} {other}", lambda: tl.minimum(same[kind]["one"], same[other]["row"]))
    for kind, number in itertools.product(NAMES, NUMBERS):
        for x in ("one", "row", "column"):
            pair(same[kind][x], number, f"{kind} {x} {number!r}")
            pair(number, same[kind][x], f"{number!r} {kind} {x}")
    # Wherever the tensors lie.
    numbers_ptr.handle.data = torch.tensor([2**40], dtype=torch.uint64).numpy()
    out_ptr.handle.data = torch.tensor([2**41], dtype=torch.uint64).numpy()
    pointers = numbers_ptr + tl.arange(0, 4)
    for other in (1, one, row, row.to(tl.int64), row.to(tl.uint32), row.to(tl.float32), pointers,
                  out_ptr, pair_of_rows):
        for pointer in (numbers_ptr, pointers):
            pair(pointer, other, f"pointer {pointer.type} {other}")
            pair(other, pointer, f"{other} pointer {pointer.type}")
    said("sums", lambda: tl.sum(pair_of_rows, axis=0))
    said("scan", lambda: tl.cumsum(row, 0))
    said("halves", lambda: tl.split(pair_of_rows))
    said("full", lambda: tl.full((4, 2), 7, tl.int16))
    said("scalar", lambda: tl.full((), 7, tl.int64))
    said("zeros", lambda: tl.zeros([8], tl.uint8))
    said("not a power of two", lambda: tl.zeros([6], tl.uint8))
    said("no number", lambda: tl.zeros(["6"], tl.uint8))
    said("no dimension", lambda: tl.core.block_type(tl.int32, []))
    said("histogram", lambda: tl.histogram(row, 8, mask=row > 1))


kernel.fn.__globals__.update(globals())
kernel[(1,)](torch.arange(1, 9, dtype=torch.int32), torch.zeros(8, dtype=torch.int64))
print(json.dumps(found))
"""


def _said(script: Path, how: str) -> list[list[object]]:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(script), how]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    said: list[list[object]] = json.loads(result.stdout)
    return said


def test_types_that_are_kept_change_nothing(tmp_path: Path) -> None:
    """Every operator gives the same value and type, or raises the same, with and without."""
    script = tmp_path / "operators.py"  # Triton reads a kernel's source from its file.
    script.write_text(SCRIPT)
    plain, tuned = _said(script, "plain"), _said(script, "tuned")
    assert len(plain) > 20_000
    assert tuned == plain
