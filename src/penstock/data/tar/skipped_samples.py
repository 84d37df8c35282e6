"""Which samples were passed over, by all processes that read them.

In:  numbers of samples, marked by whoever found them bad.
Out: how many different ones there are.
Runs in: trainer and worker; forked and spawned workers mark the same file.
"""

from __future__ import annotations

import os
import sys
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

from penstock.data.shared.shared_bytes import nameless_file
from penstock.units import MIB


class SkippedSamples:
    """A byte for each sample in a nameless file, which takes room only where samples were marked.

    A byte and not a bit, or two processes that mark neighbours could undo each other's. Written and read by place and
    not mapped: looking at a page that has no mark would take room for it. Pickled into a worker that is being started
    it is the same file there; pickled anywhere else, a copy.
    """

    def __init__(self, fd: int | None = None) -> None:
        """Takes over ``fd``, where there are marks already."""
        self._fd = nameless_file() if fd is None else fd

    def mark(self, number: int) -> None:
        os.pwrite(self._fd, b"\1", number)

    def __len__(self) -> int:
        total = at = 0
        while piece := os.pread(self._fd, MIB, at):
            total += piece.count(1)
            at += len(piece)
        return total

    def __del__(self, close: Any = os.close) -> None:
        # At the interpreter's end, modules may be gone already.
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            close(fd)

    def __reduce__(self) -> Any:
        if get_spawning_popen() is None or sys.platform == "win32":
            return _copied, (os.pread(self._fd, os.fstat(self._fd).st_size, 0),)
        return _received, (reduction.DupFd(self._fd),)


def _received(sent: Any) -> SkippedSamples:
    return SkippedSamples(sent.detach())


def _copied(marks: bytes) -> SkippedSamples:
    made = SkippedSamples()
    os.pwrite(made._fd, marks, 0)
    return made
