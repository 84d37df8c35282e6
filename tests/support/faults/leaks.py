"""What must not be left after a test: processes, descriptors, threads, mappings, names in /dev/shm.

In:  this process, before and after.
Out: the fixture ``no_leaks``; import it, and every test of the module is checked.
Runs in: test process.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock

from ..datasets.faulty import Noisy
from .processes import workers

_SETTLE_S = 3.0
"""The kernel and daemon threads may take a moment over what has been let go of."""


def everything() -> dict[str, Any]:
    # A finaliser that runs in one collection leaves its engine, a cycle itself, to the next.
    for _ in range(3):
        gc.collect()
    return {
        "workers": collections.Counter(workers()),
        "descriptors": collections.Counter(_descriptors()),
        "threads": collections.Counter(thread.name for thread in threading.enumerate()),
        "mappings": collections.Counter(memfd=Path("/proc/self/maps").read_text().count("memfd:penstock")),
        "shared names": collections.Counter(_shared_names()),
    }


def _added(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What there is more of. Less of something is an earlier test's business."""
    return {name: after[name] - before[name] for name in before if after[name] - before[name]}


def _descriptors() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            found.append(target if target.startswith("/memfd") else target.split(":")[0])
    return found


def _shared_names() -> list[str]:
    """What this process or its children would have made; others use /dev/shm at the same time."""
    mine = (f"torch_{os.getpid()}_", "penstock")
    return [entry.name for entry in Path("/dev/shm").iterdir() if entry.name.startswith(mine)]


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves anything behind."""
    # Whatever multiprocessing and torch open once for a start method, they have opened after this.
    method = getattr(request.node, "callspec", None) and request.node.callspec.params.get("method")
    list(penstock.DataLoader(Noisy(2), num_workers=1, multiprocessing_context=method or "fork"))
    before, failed = everything(), request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        # Its traceback keeps the loader; the next test must not meet these workers.
        for loader in [thing for thing in gc.get_objects() if isinstance(thing, penstock.DataLoader)]:
            loader.close()
        return
    deadline = time.monotonic() + _SETTLE_S
    while (left := _added(before, everything())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"left behind: {left}"
