"""Simulates the loader's arena and the reuse of its segments.

In:  the bytes that batches need, and the bytes that separately stored samples need.
Out: segments with their sizes, and calls that report new and released pages.
Runs in: anywhere; pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from penstock.planner.simulate.rules import Rules


class SimulatedSegment:
    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        self.used_bytes = 0
        self.touched_bytes = 0
        """The bytes of the segment's pages: the most bytes of the segment that were ever used."""
        self.new_bytes = 0
        """The bytes of pages that the current use of the segment has to create."""


class SimulatedArena:
    """Reuses free segments if the rules allow it. All free segments together never take more memory than the segments
    that were in use."""

    def __init__(self, rules: Rules, add: Callable[[int], None]) -> None:
        """``add`` is called with the bytes of new pages, and with a negative number for released pages."""
        self._rules, self._add = rules, add
        self._free: list[SimulatedSegment] = []
        self._needs: deque[int] = deque(maxlen=rules.recent_needs)
        self._in_use_bytes = self._most_in_use_bytes = 0

    def take(self, used_bytes: int, *, room_bytes: int = 0) -> SimulatedSegment:
        """Take a segment with room for ``room_bytes``, of which ``used_bytes`` are used."""
        need_bytes = max(room_bytes, used_bytes)
        self._needs.append(need_bytes)
        fitting = [each for each in self._free if self._rules.may_reuse(each.room_bytes, need_bytes)]
        segment = min(fitting, key=lambda each: each.room_bytes, default=None)
        if segment is None:
            segment = SimulatedSegment(self._rules.capacity_bytes(need_bytes))
        else:
            self._free.remove(segment)
        self._in_use_bytes += segment.room_bytes
        self._most_in_use_bytes = max(self._most_in_use_bytes, self._in_use_bytes)
        self._close_surplus()
        segment.used_bytes = used_bytes
        segment.new_bytes = max(0, used_bytes - segment.touched_bytes)
        if segment.new_bytes:
            self._add(segment.new_bytes)
            segment.touched_bytes = used_bytes
        return segment

    def release(self, segments: list[SimulatedSegment]) -> None:
        self._in_use_bytes -= sum(each.room_bytes for each in segments)
        self._free += segments
        self._close_surplus()

    def _close_surplus(self) -> None:
        while sum(each.room_bytes for each in self._free) > self._most_in_use_bytes - self._in_use_bytes:
            largest = max(self._free, key=lambda each: each.room_bytes)
            is_too_large = self._rules.is_too_large(largest.room_bytes, max(self._needs))
            closed = largest if is_too_large else min(self._free, key=lambda each: each.room_bytes)
            self._free.remove(closed)
            self._add(-closed.touched_bytes)
