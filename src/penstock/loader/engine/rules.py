"""The loader's own rules, in one value: how work is cut, how far ahead it runs, how memory is reused.

In:  nothing.
Out: ``LoaderRules``: numbers, and pure functions of them.
Runs in: trainer. The planner's simulator gets the same value passed in, so that both follow the same rules.

Only speed and memory depend on these rules. The content of a batch never does.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from penstock.arena.segment_sizes import RECENT_NEEDS, REUSE_ANY_BELOW_BYTES, REUSE_UP_TO, capacity_for
from penstock.workers.stretches import stretch_rows


@dataclass(frozen=True, kw_only=True)
class LoaderRules:
    """The rules that hold where the user has set nothing. Tests change single numbers to force every path."""

    # -- cutting work -------------------------------------------------------------------

    task_s: float = 0.005
    """A batch that takes less than this is fetched by one worker; longer ones are cut into tasks of about this
    length."""
    queue_s: float = 0.006
    """Short tasks are queued on their worker up to this much work ahead, so that it never waits for the trainer."""
    patient_s: float = 0.020
    """Tasks of at least this length are never queued behind another task: a slow sample would delay them."""
    most_queued: int = 24
    """The most tasks a worker has at a time."""
    split_always: bool = False
    """Whether every batch is cut into single stretches, however short it is."""

    # -- memory -------------------------------------------------------------------------

    auto_memory_share: float = 0.5
    """Share of the available memory that memory="auto" takes."""
    most_slots: int = 256
    """The most batches in the arena at a time: being filled, ready or lent."""
    recent_batches: int = 8
    """A batch of unknown size gets as much room as the largest of this many earlier batches."""
    most_own_bytes: int = 4 << 20
    """The most that is set aside for the pipeline's own objects in the trainer, counted against the budget."""
    reuse_up_to: float = REUSE_UP_TO
    """A free segment is reused if it is at most this many times as large as the need."""
    reuse_any_below_bytes: int = REUSE_ANY_BELOW_BYTES
    """A free segment up to this size is reused whatever the need."""
    recent_needs: int = RECENT_NEEDS
    """A free segment too large for each of this many latest needs is the first to be closed."""
    idle_release_s: float = 10.0
    """A loader that delivers no batch for this long releases its memory."""
    epoch_end_release_s: float = 1.0
    """The same after the last batch of an epoch: long enough to begin the next epoch."""

    def stretch_rows(self, batch_rows: int) -> int:
        """How many consecutive rows share one seed: a task is always whole stretches."""
        return stretch_rows(batch_rows)

    def rows_per_task(
        self, row_s: float | None, batch_rows: int, *, workers: int = 1, most_open: int = sys.maxsize
    ) -> int:
        """How many rows of a splittable batch one task has.

        ``row_s``: seconds a worker takes per row, None while no task is done. ``most_open``: batches that memory allows
        to be filled at a time.
        """
        stretch = stretch_rows(batch_rows)
        if self.split_always or row_s is None:
            # The first batch is fetched by workers as they come up, one by one.
            return stretch
        if row_s * batch_rows < self.task_s:
            rows = batch_rows
        else:
            rows = min(batch_rows, stretch * math.ceil(self.task_s / (row_s * stretch)))
        if rows * workers > batch_rows * most_open:
            # Few batches fit the budget: all workers must find work in those.
            rows = max(stretch, batch_rows * most_open // workers // stretch * stretch)
        return rows

    def tasks_queued(self, row_s: float | None, rows: int, *, in_order: bool = True) -> int:
        """How many tasks of ``rows`` rows a worker may have at a time."""
        if row_s is None or not in_order:
            return 1
        task_s = row_s * rows
        if task_s >= self.patient_s:
            return 1
        return min(self.most_queued, max(2, 1 + math.ceil(self.queue_s / max(task_s, 1e-6))))

    def depth(self, row_s: float | None, batch_rows: int, workers: int, *, rows: int, in_order: bool = True) -> int:
        """The least number of batches ahead that keeps all workers busy with tasks of ``rows`` rows, at least 2."""
        tasks_per_batch = max(1, math.ceil(batch_rows / max(1, rows)))
        tasks = workers * self.tasks_queued(row_s, rows, in_order=in_order)
        return max(2, math.ceil(tasks / tasks_per_batch) + 1)

    def slots(self, depth: int, *, user_holds: int = 1) -> int:
        """How many batches the arena may hold at a time: those ahead, and those the user holds."""
        return min(depth + user_holds, self.most_slots)

    def own_bytes(self, memory_bytes: int) -> int:
        """What is set aside for the pipeline's own objects, out of a budget of ``memory_bytes``."""
        return min(self.most_own_bytes, memory_bytes // 25)

    def capacity_bytes(self, need_bytes: int) -> int:
        """How large the segment for a need is."""
        return capacity_for(need_bytes)

    def may_reuse(self, free_bytes: int, need_bytes: int) -> bool:
        """Whether a free segment of ``free_bytes`` is used for a need of ``need_bytes``."""
        return need_bytes <= free_bytes <= max(self.reuse_up_to * need_bytes, self.reuse_any_below_bytes)
