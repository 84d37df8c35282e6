"""Page-locked segments: each segment is locked once, and unlocked before it is unmapped.

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
    """The page-locked segments of one arena. After the first refusal no further segment is locked."""

    def __init__(
        self,
        lock: Callable[[int, int], str | None] = cuda.page_lock,
        unlock: Callable[[int], None] = cuda.page_unlock,
    ) -> None:
        """``lock`` page-locks an address range and returns an error message if that fails; ``unlock`` unlocks the
        range."""
        self._lock = lock
        self._unlock = unlock
        self._locked: dict[int, int] = {}
        """The address of each locked segment, by the segment's number."""
        self.warn: Callable[[str], None] = _warn
        self.refused = False
        self.locked_bytes = 0

    def lock(self, segment: Segment) -> bool:
        """Page-lock a segment unless it is locked already; False if locking fails."""
        if segment.number in self._locked:
            return True
        if self.refused or segment.address is None:
            return False
        problem = self._lock(segment.address, segment.capacity_bytes)
        if problem is not None:
            self.refused = True
            self.warn(
                f"Shared batches cannot be page-locked ({problem}), so each batch is copied into pinned memory, as "
                "in torch. This is slower. Raise the limit on locked memory (ulimit -l unlimited; in Docker --ulimit "
                "memlock=-1), or lower memory=."
            )
            return False
        self._locked[segment.number] = segment.address
        self.locked_bytes += segment.capacity_bytes
        return True

    def unlock(self, segment: Segment) -> None:
        """Unlock a segment; call this before the segment is unmapped."""
        address = self._locked.pop(segment.number, None)
        if address is not None:
            self._unlock(address)
            self.locked_bytes -= segment.capacity_bytes


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)
