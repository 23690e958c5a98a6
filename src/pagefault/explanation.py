"""What the interpreter says of a case that a GPU has failed: the tensor, the index, the line."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .family import Family
from .side_case import AnyCase

SECONDS = 60.0


def through_interpreter(
    target: str, family: Family, case: AnyCase, seconds: float = SECONDS
) -> str:
    """Return lines for the report of a case, from a check of it in a process without a GPU.

    Args:
        target: As `load_target` takes it.
        family: The case's family.
        case: The case.
        seconds: How long to wait for the answer.
    """
    with tempfile.TemporaryDirectory(prefix="pagefault-") as folder:
        path = Path(folder) / "case.json"
        path.write_text(case.to_json(family.name))
        command = [sys.executable, "-m", "pagefault", "repro", str(path)]
        try:
            process = subprocess.run(
                [*command, "--target", target, "--device", "cpu"],
                capture_output=True,
                text=True,
                timeout=seconds,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )
        except subprocess.TimeoutExpired:
            return f"in the interpreter: no answer within {seconds:g} s"
    if process.returncode == 0:
        return "in the interpreter: this case passes; what is wrong shows on the GPU alone"
    if process.returncode != 1:
        reason = (process.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"in the interpreter: {reason}"
    lines = process.stdout.strip().splitlines()
    return "\n".join(["in the interpreter:", *(f"  {line}" for line in lines)])
