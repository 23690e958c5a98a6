"""Property-based differential testing of the Triton kernels of paged KV caches.

Everything public is here. Names are imported when they are first used, so that the pytest plugin
costs nothing in a run that has no use for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .case import Case as Case
    from .case import CaseError as CaseError
    from .case import PageTable as PageTable
    from .case import Placement as Placement
    from .compilations import assert_no_new_variants as assert_no_new_variants
    from .conformance import NonConformance as NonConformance
    from .conformance import assert_conforms as assert_conforms
    from .family import Dialect as Dialect
    from .family import Domain as Domain
    from .family import Expected as Expected
    from .family import Family as Family
    from .family import Tensor as Tensor
    from .family import families as families
    from .family import family_named as family_named
    from .recording import record as record

__version__ = "0.1.0"

_HOMES = {
    "Case": "case",
    "CaseError": "case",
    "PageTable": "case",
    "Placement": "case",
    "assert_no_new_variants": "compilations",
    "NonConformance": "conformance",
    "assert_conforms": "conformance",
    "Dialect": "family",
    "Domain": "family",
    "Expected": "family",
    "Family": "family",
    "Tensor": "family",
    "families": "family",
    "family_named": "family",
    "record": "recording",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
