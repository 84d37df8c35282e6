"""Runs of tests are recorded in a folder of their own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short, because sockets live in it."""
    folder = Path(tempfile.mkdtemp(prefix="ps-"))
    monkeypatch.setenv("PENSTOCK_HOME", str(folder))
    yield folder
    shutil.rmtree(folder)
