"""What `pagefault.record` costs an engine: calls of a launcher, alone and with a recorder around.

    python benchmarks/bench_record.py [--device cuda] [--calls N]

Calls take turns in the same run, and ratios are of medians: machines are shared and noisy. On a CPU
the launcher runs through Triton's interpreter, which takes it milliseconds; a ratio that says
something of an engine is one of a GPU.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import pagefault
from pagefault.device import device_name, prepare, resolve_device, versions

NUM_REQUESTS = 64
MAX_PAGES = 512
PAGE_SIZE = 64
# So seldom that no call of a run is one.
NEVER = 1_000_000_000

Launcher = Callable[..., Any]


def main(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    calls: Annotated[int, typer.Option(min=1, help="Calls of each way.")] = 200,
) -> None:
    """Print the time of a decode step's call, in each way and as a ratio."""
    resolved = resolve_device(device)
    prepare(resolved)
    from pagefault.kernels.out_cache_loc import compute_out_cache_loc as launcher

    console = Console()
    console.print(" · ".join(f"{name} {version}" for name, version in versions().items()))
    console.print(f"{device_name(resolved)}; {NUM_REQUESTS} requests, {MAX_PAGES} pages a row")
    with tempfile.TemporaryDirectory(prefix="pagefault-") as folder:
        out = Path(folder)
        more = {"max_cases": 10**9, "max_bytes": 1 << 40}
        ways: dict[str, Launcher] = {
            "the launcher alone": launcher,
            "not recorded (one_in)": pagefault.record(launcher, out=out / "1", one_in=NEVER),
            "recorded": pagefault.record(launcher, out=out / "2", **more),
            "held against the oracle": pagefault.record(
                launcher, out=out / "3", only_failing=True, **more
            ),
        }
        times = _times(ways, resolved, calls)
    alone = times["the launcher alone"]
    table = Table("a call", box=None, pad_edge=False)
    table.add_column("µs", justify="right")
    table.add_column("times the launcher alone", justify="right")
    for name, seconds in times.items():
        table.add_row(name, f"{1e6 * seconds:.1f}", f"{seconds / alone:.2f}")
    console.print(table)


def _times(ways: dict[str, Launcher], device: str, calls: int) -> dict[str, float]:
    """Return the median time of a call of each launcher, until the device is done."""
    on_device: dict[str, Any] = {"dtype": torch.int32, "device": device}
    num_rows = NUM_REQUESTS + 1
    table = torch.arange(1, num_rows * MAX_PAGES + 1, **on_device).view(num_rows, MAX_PAGES)
    rows = torch.arange(1, num_rows, device=device)
    lengths = torch.ones(NUM_REQUESTS, **on_device)
    starts = torch.arange(NUM_REQUESTS, **on_device) * 100
    out = torch.zeros(NUM_REQUESTS, **on_device)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for call in range(-3, calls):
        starts += 1  # No two calls are one case.
        for name, function in ways.items():
            started = time.perf_counter()
            function(out, rows, lengths, starts, table, PAGE_SIZE)
            if device == "cuda":
                torch.cuda.synchronize()
            if call >= 0:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(of_way) for name, of_way in seconds.items()}


if __name__ == "__main__":
    typer.run(main)
