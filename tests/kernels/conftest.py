"""The device that the kernel tests run on."""

import os

import pytest
import torch


@pytest.fixture(scope="module")
def device() -> torch.device:
    """Return the GPU, or the CPU where there is none or Triton is interpreting."""
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
