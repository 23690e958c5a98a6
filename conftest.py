"""Profiles of this repository, and a word about checkouts that lost their links."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

for folder in ("kernels", "oracle", "strategies"):
    link = Path(__file__).parent / "src" / "pagefault" / folder
    if not link.is_dir():
        raise pytest.UsageError(
            f"{link} should be a link to the folder {folder}; this checkout made it a text file "
            "(on Windows: git config core.symlinks true, then check out again)"
        )

_slow = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": False}
settings.register_profile("dev", max_examples=60, **_slow)
settings.register_profile("ci", max_examples=60, derandomize=True, database=None, **_slow)
settings.register_profile("nightly", max_examples=5000, **_slow)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
