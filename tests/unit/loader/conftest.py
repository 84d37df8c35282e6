"""Every test has a folder for its caches."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_folder(runtime_folder: None) -> None:
    pass
