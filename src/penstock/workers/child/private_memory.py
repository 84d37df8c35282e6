"""The private memory of a worker, measured by the worker, at little cost.

In:  /proc/self of the worker.
Out: the most bytes that killing this worker would have freed at any time since the last report.
Runs in: worker.

Pages of the arena are not counted here: a segment that only this worker has touched so far would look private. An exact
walk over all mappings costs milliseconds, so it is rare; between walks the growth of anonymous memory is added. At the
start nothing of the arena is mapped, so the kernel's own sum, which is cheap, is exact.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from penstock.arena.segment_sizes import PAGE_BYTES

_FIRST_EXACT_S = 0.5
_EXACT_EVERY_S = 10.0
_CHEAP_EVERY_S = 0.02
_WALK_SHARE = 0.002
"""At most this share of a worker's time goes into exact walks, however much is mapped."""
_ARENA_MAPPING = "/memfd:penstock"


class PrivateMemory:
    """A worker's measure of itself. Without /proc the measure reads nothing and always returns 0."""

    def __init__(self, proc_self: Path = Path("/proc/self"), clock: Callable[[], float] = time.monotonic) -> None:
        self._smaps = proc_self / "smaps"
        self._rollup = proc_self / "smaps_rollup"
        self._statm_fd = -1
        with contextlib.suppress(OSError):
            # The files stay open, because opening takes longer than reading.
            self._statm_fd = os.open(proc_self / "statm", os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._statm_fd)
        self._clock = clock
        self._exact_bytes = 0
        self._anonymous_then = 0
        self._anonymous_most = 0
        """The most anonymous memory since the last walk."""
        self._next_exact_s = self._next_cheap_s = 0.0
        self._take(self._rollup)
        self._next_exact_s = clock() + _FIRST_EXACT_S

    def note_fullest(self, *, sure: bool = False) -> None:
        """Call this while a sample is held, because the worker then takes the most memory. Measures only now and then,
        or every time if ``sure``."""
        now = self._clock()
        if now < self._next_cheap_s and not sure:
            return
        self._next_cheap_s = now + _CHEAP_EVERY_S
        self._anonymous_most = max(self._anonymous_most, self.anonymous_bytes())

    def read_bytes(self) -> int:
        """The figure to report, after an exact walk if a walk is due."""
        most = self._anonymous_most
        if self._clock() >= self._next_exact_s:
            self.measure_exactly()
        # Memory that was held only for a moment is added to the memory that stays.
        return self._exact_bytes + max(0, max(most, self._anonymous_most) - self._anonymous_then)

    def measure_exactly(self) -> None:
        began = self._clock()
        self._take(self._smaps)
        cost_s = self._clock() - began
        self._next_exact_s = began + max(_EXACT_EVERY_S, cost_s / _WALK_SHARE)

    def _take(self, source: Path) -> None:
        self._anonymous_then, self._anonymous_most = self.anonymous_bytes(), 0
        self._exact_bytes = _private_dirty_bytes(source)

    def anonymous_bytes(self) -> int:
        """The memory of this process apart from mapped files; 0 without /proc."""
        try:
            fields = os.pread(self._statm_fd, 200, 0).split()
        except OSError:
            return 0
        return (int(fields[1]) - int(fields[2])) * PAGE_BYTES


def _private_dirty_bytes(smaps: Path) -> int:
    total_kib = 0
    in_arena = False
    try:
        with smaps.open("rb") as lines:
            for line in lines:
                if line.startswith(b"Private_Dirty:"):
                    if not in_arena:
                        total_kib += int(line.split()[1])
                elif b"-" in line[:20] and not line[:1].isupper():
                    in_arena = _ARENA_MAPPING.encode() in line
    except (OSError, ValueError):
        return 0
    return total_kib << 10
