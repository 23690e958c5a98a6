"""The target's chunked_prefill, held to the contract."""

import pytest


@pytest.mark.parametrize(
    "family",
    [
        "chunking",
        "create_chunked_cache_kv_indices_paged",
        "get_chunks_paged",
        "build_chunked_prefill_metadata_arrays",
    ],
)
def test_conforms_to_the_contract(conforms, family):
    conforms(family)
