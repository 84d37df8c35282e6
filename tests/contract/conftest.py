"""Fixtures of the contract tests.

Runs in: test processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.loaders import MAKERS, MakeLoader

HERE = Path(__file__).parent


@pytest.fixture(params=["batch", "worker"])
def penstock_maker(request: pytest.FixtureRequest) -> MakeLoader:
    """penstock's loader, with each seeding: for tests that compare with torch themselves."""
    return MAKERS[request.param]


@pytest.fixture(params=list(MAKERS))
def any_maker(request: pytest.FixtureRequest) -> MakeLoader:
    """torch's loader too: what such a test expects is then seen to be true of torch."""
    return MAKERS[request.param]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    quiet = pytest.mark.filterwarnings("ignore:This DataLoader will create")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(quiet)
