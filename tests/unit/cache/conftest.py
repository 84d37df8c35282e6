"""A folder of its own for every test's caches, and a region of shared memory for those that ask for one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cache.policy.policies import LRU
from penstock.cache.store.memory import Memory

MIB = 1 << 20


@pytest.fixture(autouse=True)
def own_folder(runtime_folder: None) -> None:
    pass


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Memory]:
    fd = os.open(tmp_path / "locks", os.O_RDWR | os.O_CREAT, 0o600)
    made = Memory.create(fd, limit_bytes=4 * MIB, virtual_bytes=64 * MIB, policy=LRU)
    yield made
    made.close()
