"""Page-locked slots: locked once, unlocked before they are unmapped.

In:  segments of the arena.
Out: whether a segment is page-locked, so that the device can read it at full speed.
Runs in: trainer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from penstock.arena.segment import Segment
from penstock.device import cuda


class PageLocks:
    """The page-locked segments of one arena. After one refusal nothing is tried again."""

    def __init__(
        self,
        lock: Callable[[int, int], str | None] = cuda.page_lock,
        unlock: Callable[[int], None] = cuda.page_unlock,
    ) -> None:
        """``lock`` page-locks an address range and says what is wrong if it cannot; ``unlock`` undoes it."""
        self._lock = lock
        self._unlock = unlock
        self._locked: dict[int, int] = {}
        """Number -> address of the segments that are locked."""
        self.refused = False
        self.locked_bytes = 0

    def lock(self, segment: Segment) -> bool:
        """Page-lock a segment if it is not; False if that cannot be."""
        if segment.number in self._locked:
            return True
        if self.refused or segment.address is None:
            return False
        problem = self._lock(segment.address, segment.capacity_bytes)
        if problem is not None:
            self.refused = True
            warnings.warn(
                f"batches cannot be page-locked where they are ({problem}), so each is copied into pinned memory as "
                "torch does, which is slower; raise the limit on locked memory (ulimit -l unlimited, in docker "
                "--ulimit memlock=-1), or lower memory=",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        self._locked[segment.number] = segment.address
        self.locked_bytes += segment.capacity_bytes
        return True

    def unlock(self, segment: Segment) -> None:
        """Before a segment is unmapped."""
        address = self._locked.pop(segment.number, None)
        if address is not None:
            self._unlock(address)
            self.locked_bytes -= segment.capacity_bytes
