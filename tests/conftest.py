"""What all tests share: which of them run on one worker of xdist."""

import pytest

# Fixtures of a module that run a campaign: set up by each worker they would take most of the time.
RUN_CAMPAIGNS = frozenset(["compared", "soaked", "twice", "undisturbed", "out_of_overtime"])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that share such a fixture on one worker; `--dist=loadgroup` is in addopts."""
    for item in items:
        for name in RUN_CAMPAIGNS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(name))
