"""What the contract tests share: the loaders under test, and torch's own beside them.

Runs in: test processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch_oracle import TORCH

HERE = Path(__file__).parent

MakeLoader = Callable[..., Any]


def penstock_loader(*args: Any, **kwargs: Any) -> Any:
    import penstock

    return penstock.DataLoader(*args, **kwargs)


MAKERS: dict[str, MakeLoader] = {
    "torch": TORCH,
    "batch": functools.partial(penstock_loader, seeding="batch"),
    "worker": functools.partial(penstock_loader, seeding="worker"),
}


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
