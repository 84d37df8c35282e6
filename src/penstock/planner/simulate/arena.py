"""The loader's arena in thought: segments that are used again.

In:  needs of batches and of samples that lie apart.
Out: segments, by their size; pages as they come and go.
Runs in: anywhere; pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

REUSE_UP_TO = 2.0
"""The arena's own: how many times what is needed a segment may have to be used again."""
RECENT_NEEDS = 64
"""The arena's own, too: by how many needs it tells which free segments are of use."""


class Segment:
    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        self.used_bytes = 0
        self.touched_bytes = 0
        """Pages it has: as much as was ever used of it."""
        self.new_bytes = 0
        """Of them, those that had to be made for its present use."""


class Arena:
    """Segments are used again for what fits well, and of those that lie free no more are kept than were ever in use.

    ``add`` is told of pages that come and go.
    """

    def __init__(self, add: Callable[[int], None]) -> None:
        self._add = add
        self._free: list[Segment] = []
        self._needs: deque[int] = deque(maxlen=RECENT_NEEDS)
        self._in_use_bytes = self._most_in_use_bytes = 0

    def take(self, used_bytes: int, *, room_bytes: int = 0) -> Segment:
        """A segment with room for ``room_bytes``, of which so many are used."""
        room_bytes = max(room_bytes, used_bytes)
        self._needs.append(room_bytes)
        fitting = [each for each in self._free if room_bytes <= each.room_bytes <= REUSE_UP_TO * room_bytes]
        segment = min(fitting, key=lambda each: each.room_bytes, default=None)
        if segment is None:
            segment = Segment(room_bytes)
        else:
            self._free.remove(segment)
        self._in_use_bytes += segment.room_bytes
        self._most_in_use_bytes = max(self._most_in_use_bytes, self._in_use_bytes)
        self._close_beyond()
        segment.used_bytes = used_bytes
        segment.new_bytes = max(0, used_bytes - segment.touched_bytes)
        if segment.new_bytes:
            self._add(segment.new_bytes)
            segment.touched_bytes = used_bytes
        return segment

    def give_back(self, segments: list[Segment]) -> None:
        self._in_use_bytes -= sum(each.room_bytes for each in segments)
        self._free += segments
        self._close_beyond()

    def _close_beyond(self) -> None:
        while sum(each.room_bytes for each in self._free) > self._most_in_use_bytes - self._in_use_bytes:
            largest = max(self._free, key=lambda each: each.room_bytes)
            is_too_large = largest.room_bytes > REUSE_UP_TO * max(self._needs)
            goes = largest if is_too_large else min(self._free, key=lambda each: each.room_bytes)
            self._free.remove(goes)
            self._add(-goes.touched_bytes)
