"""The board: it shows each worker's current task and row, and can be read even after the worker crashed.

In:  the current task and row of a worker.
Out: the same task and row, for the trainer.
Runs in: worker (writes its own place), trainer (reads).

A killed worker cannot report anything, so the board is shared memory: one page, with two numbers per worker.
"""

from __future__ import annotations

import numpy as np

from penstock.arena.segment import Segment, create_segment
from penstock.arena.segment_sizes import PAGE_BYTES

BOARD_SEGMENT = -3
"""The segment number of the board; the arena counts from 0."""
_NOTHING = -1
_PLACES = PAGE_BYTES // 16


class BoardPlace:
    """The place of one worker on the board; the worker writes to it."""

    def __init__(self, segment: Segment, worker_id: int) -> None:
        cells = segment.array().view(np.int64)
        start = 2 * (worker_id % _PLACES)
        self._cells = cells[start : start + 2].data  # a memoryview stores a number three times as fast as an array

    def begin(self, task: int) -> None:
        self._cells[1] = _NOTHING
        self._cells[0] = task

    def at_row(self, row: int) -> None:
        self._cells[1] = row

    def end(self) -> None:
        self._cells[0] = self._cells[1] = _NOTHING


class Board:
    """All places on the board; the trainer reads them."""

    def __init__(self) -> None:
        self.segment = create_segment(BOARD_SEGMENT, PAGE_BYTES)
        self._cells = self.segment.array().view(np.int64)
        self._cells[:] = _NOTHING

    def in_hand(self, worker_id: int) -> tuple[int, int]:
        """The number of the worker's current or last task, and its row (the first of a few small rows); negative if
        there is none."""
        start = 2 * (worker_id % _PLACES)
        return int(self._cells[start]), int(self._cells[start + 1])

    def clear(self, worker_id: int) -> None:
        start = 2 * (worker_id % _PLACES)
        self._cells[start : start + 2] = _NOTHING

    def close(self) -> None:
        del self._cells
        self.segment.unlink()
        self.segment.close()
