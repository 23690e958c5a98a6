"""Where kernels run: compiled on a GPU, or through Triton's interpreter on the CPU.

The choice is made once per process, before a kernel is decorated, because that is when
`TRITON_INTERPRET` is read.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

from . import __version__

DEVICES = ("auto", "cpu", "cuda")

WORKERS_PER_GPU = 12


class DeviceError(ValueError):
    """A device that is not there."""


def count_gpus() -> int:
    """Return how many GPUs this process may use, without touching CUDA."""
    # Importing torch takes seconds; a machine without a driver is told without it.
    if not any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")):
        return 0
    import torch

    return torch.cuda.device_count()


def resolve_device(device: str) -> str:
    """Return "cpu" or "cuda" for what was asked for.

    Args:
        device: "auto" takes a GPU where there is one, unless TRITON_INTERPRET=1 asks for the
            interpreter.

    Raises:
        DeviceError: "cuda" where there is no GPU, or a word that is none of the three.
    """
    if device not in DEVICES:
        raise DeviceError(f"device {device!r}, but should be one of {', '.join(DEVICES)}")
    if device == "cpu" or (device == "auto" and os.environ.get("TRITON_INTERPRET") == "1"):
        return "cpu"
    if count_gpus():
        return "cuda"
    if device == "cuda":
        raise DeviceError("device 'cuda', but this process can use no GPU")
    return "cpu"


def prepare(device: str, gpu_slot: int | None = None) -> None:
    """Make this process run kernels on a device; call it before a kernel is imported.

    Args:
        device: "cpu" or "cuda".
        gpu_slot: Number of the worker; workers are spread over the GPUs that
            CUDA_VISIBLE_DEVICES allows. None leaves this process all of them, which is what a
            process needs that starts workers: they inherit its environment.
    """
    os.environ["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
    if device == "cuda" and gpu_slot is not None:
        visible = visible_gpus()
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[gpu_slot % len(visible)]


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(i) for i in range(count_gpus())]


def count_workers(device: str) -> int:
    """Return a sensible number of worker processes: cores, or a few for each GPU."""
    cores = len(os.sched_getaffinity(0))
    if device == "cuda":
        return max(1, min(cores, WORKERS_PER_GPU * len(visible_gpus())))
    return cores


def versions() -> dict[str, str]:
    """Return the versions of everything that an answer may depend on, importing none of it."""
    found = {"pagefault": __version__, "python": platform.python_version()}
    for package in ("torch", "triton", "hypothesis"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    if "rocm" in found["torch"]:
        found["torch"] += " (nobody has tried pagefault on ROCm)"
    return found


def device_name(device: str) -> str:
    """Return a name of the device for people."""
    if device == "cpu":
        return "cpu, through Triton's interpreter"
    import torch

    return f"cuda, {torch.cuda.get_device_name()}"


def is_device_lost(device: str) -> bool:
    """Return whether nothing can be launched in this process any more."""
    if device == "cpu":
        return False
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def driver_version() -> str:
    """Return the version of NVIDIA's driver, or "" where it does not say."""
    try:
        said = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", said)
    return found[0] if found else ""
