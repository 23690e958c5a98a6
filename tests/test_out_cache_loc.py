"""The target's out_cache_loc, held to the contract."""

import pytest


@pytest.mark.parametrize(
    "family",
    [
        "compute_out_cache_loc",
        "compute_out_cache_loc_uniform",
    ],
)
def test_conforms_to_the_contract(conforms, family):
    conforms(family)
