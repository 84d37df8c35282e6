"""How long fetching takes here, and what follows: how finely to cut batches and how far to run ahead.

In:  times of finished tasks.
Out: rows per task, tasks queued per worker, batches ahead.
Runs in: trainer, under the dispatcher's lock.

Only speed depends on these numbers. What is in a batch never does.
"""

from __future__ import annotations

import math
import sys

from penstock.loader.engine.tuning import Tuning
from penstock.workers.rng import stretch_rows

_WEIGHT = 0.2
_MOST_QUEUED = 24


class Pace:
    """Running estimates of one pipeline."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self.row_s: float | None = None
        """Seconds one worker takes per row, None before the first task is done."""
        self.most_open = sys.maxsize
        """Batches that memory allows to be filled at a time."""

    def note(self, rows: int, spent_s: float) -> None:
        if rows <= 0:
            return
        row_s = spent_s / rows
        self.row_s = row_s if self.row_s is None else self.row_s + _WEIGHT * (row_s - self.row_s)

    def rows_per_task(self, batch_rows: int, workers: int) -> int:
        """How many rows of a splittable batch one task should have."""
        stretch = stretch_rows(batch_rows)
        if self._tuning.split_always or self.row_s is None:
            # The first batch is fetched by workers as they come up, one by one.
            return stretch
        if self.row_s * batch_rows < self._tuning.task_s:
            rows = batch_rows
        else:
            rows = min(batch_rows, stretch * math.ceil(self._tuning.task_s / (self.row_s * stretch)))
        if rows * workers > batch_rows * self.most_open:
            # Few batches fit the budget: all workers must find work in those.
            rows = max(stretch, batch_rows * self.most_open // workers // stretch * stretch)
        return rows

    def tasks_queued(self, rows: int, *, in_order: bool) -> int:
        """How many tasks of ``rows`` rows a worker may have in hand."""
        if self.row_s is None or not in_order:
            return 1
        task_s = self.row_s * rows
        if task_s >= self._tuning.patient_s:
            return 1
        return min(_MOST_QUEUED, max(2, 1 + math.ceil(self._tuning.queue_s / max(task_s, 1e-6))))

    def depth(self, batch_rows: int, workers: int, *, splittable: bool, in_order: bool) -> int:
        """The least number of batches ahead that keeps all workers busy, at least 2."""
        rows = self.rows_per_task(batch_rows, workers) if splittable else batch_rows
        tasks_per_batch = max(1, math.ceil(batch_rows / max(1, rows)))
        in_hand = workers * self.tasks_queued(rows, in_order=in_order)
        return max(2, math.ceil(in_hand / tasks_per_batch) + 1)
