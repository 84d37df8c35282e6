"""Keys have the same digest in every process, and different keys different ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cache.keys import digest
from penstock.errors import CacheError

KEYS: list[Any] = [
    "", "a", "ab", b"a", b"", 0, 1, -1, 10**30, 0.5, None, (), ("a",), ("a", "b"), ("ab",), ("a", ("b",)),
    (("a", "b"),), ("", "ab"), (1, 2), (12,), ("1", 2), "\ud800", (None,), (b"a", "a"),
]  # fmt: skip


def test_different_keys_have_different_digests() -> None:
    assert len({digest(key) for key in KEYS}) == len(KEYS)


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (1, 1.0), (1, np.int64(1)), ((1, "a"), (np.int32(1), "a")), ("a", Path("a"))]
)
def test_equal_keys_have_one_digest(one: Any, other: Any) -> None:
    assert digest(one) == digest(other)


def test_digests_are_the_same_in_another_process() -> None:
    code = "from penstock.cache.keys import digest; print(digest(('frame', 12, 'left')).hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == digest(("frame", 12, "left")).hex()


@pytest.mark.parametrize("key", [object(), [1], {"a": 1}, {1}, lambda: 1])
def test_keys_that_differ_between_processes_are_refused(key: Any) -> None:
    with pytest.raises(CacheError, match="cannot be a cache key"):
        digest(key)
