"""The target's decode_input_prep, held to the contract."""

import pytest


@pytest.mark.parametrize(
    "family",
    [
        "fused_decode_input_prep",
    ],
)
def test_conforms_to_the_contract(conforms, family):
    conforms(family)
