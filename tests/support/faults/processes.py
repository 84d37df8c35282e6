"""Workers as the operating system sees them: found, killed, stopped, continued.

In:  the test's own process.
Out: signals to its children.
Runs in: test process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

HANG_S = 120.0
"""A deadline that tells a hang from progress: longer than anything takes on a busy machine."""


def workers(parent: int | None = None) -> list[int]:
    """Living processes below this one (or ``parent``), but for those multiprocessing keeps for itself."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(parent).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                # A worker of a fork server has the server's own command line, and is a child of it.
                words = " ".join(process.cmdline())
                above = process.parent()
                parents = " ".join(above.cmdline()) if above else ""
                server = "forkserver" in words and "forkserver" not in parents
                if "resource_tracker" not in words and not server:
                    found.append(process.pid)
    return sorted(found)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A worker that gets no processor, as in a paused container or a debugger."""
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def until(true: Callable[[], bool], within_s: float = HANG_S) -> float:
    """Wait until something is so; gives how long it took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < within_s, f"not so after {within_s} s"
        time.sleep(0.002)
    return time.monotonic() - began


def marked(mark: str) -> list[int]:
    """All living processes that were started with ``mark`` in their environment, or below one that was."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found
