"""The target's req_to_page, held to the contract."""

import pytest


@pytest.mark.parametrize(
    "family",
    [
        "update_req_to_page",
        "update_block_table",
    ],
)
def test_conforms_to_the_contract(conforms, family):
    conforms(family)
