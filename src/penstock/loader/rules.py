"""The loader's rules: how work is cut, how far ahead it runs, how memory is reused.

In:  nothing.
Out: ``LoaderRules``: numbers and pure functions of them, the same for all loaders; ``Order``: what one loader's
     arguments decide.
Runs in: trainer. The planner's simulator gets ``LoaderRules`` passed in, so that both follow the same rules.

Only speed and memory depend on ``LoaderRules``. The content of a batch never does.
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
    """Short tasks are queued on a worker up to this much work, so that it never waits for the trainer."""
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
    """The most that is set aside for the engine's own objects in the trainer, counted against the budget."""
    reuse_up_to: float = REUSE_UP_TO
    """A free segment is reused if it is at most this many times as large as the need."""
    reuse_any_below_bytes: int = REUSE_ANY_BELOW_BYTES
    """A free segment up to this size is reused whatever the need."""
    recent_needs: int = RECENT_NEEDS
    """A free segment that is too large for each of this many latest needs is closed first."""
    idle_release_s: float = 10.0
    """A loader that delivers no batch for this long releases its memory."""
    epoch_end_release_s: float = 1.0
    """The same after the last batch of an epoch; long enough for the next epoch to begin."""

    def stretch_rows(self, batch_rows: int) -> int:
        """How many consecutive rows share one seed; a task always has whole stretches."""
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
            # Each worker takes part in the first batch as soon as it has started.
            return stretch
        if row_s * batch_rows < self.task_s:
            rows = batch_rows
        else:
            rows = min(batch_rows, stretch * math.ceil(self.task_s / (row_s * stretch)))
        if rows * workers > batch_rows * most_open:
            # Few batches fit the budget: these must have work for all workers.
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
        """How many batches the arena may hold at a time: those ahead and those the user holds."""
        return min(depth + user_holds, self.most_slots)

    def own_bytes(self, memory_bytes: int) -> int:
        """Bytes set aside for the engine's own objects, out of a budget of ``memory_bytes``."""
        return min(self.most_own_bytes, memory_bytes // 25)

    def capacity_bytes(self, need_bytes: int) -> int:
        """The size of the segment for a need."""
        return capacity_for(need_bytes)

    def may_reuse(self, free_bytes: int, need_bytes: int) -> bool:
        """Whether a free segment of ``free_bytes`` is used for a need of ``need_bytes``."""
        return need_bytes <= free_bytes <= max(self.reuse_up_to * need_bytes, self.reuse_any_below_bytes)


@dataclass(frozen=True, kw_only=True)
class Order:
    """How one loader assigns work; fixed for an epoch."""

    rows: bool
    """Rows are written in place, under torch's default collate."""
    splittable: bool
    """Several workers may fetch rows of one batch."""
    bound: bool
    """Batches belong to workers in turn, as in torch: iterable datasets and seeding="worker"."""
    keeps_generators: bool
    """Workers' generators continue from batch to batch and from epoch to epoch: seeding="worker"."""
    in_order: bool
    batch_rows: int
    """Nominal batch length, for estimates until batches are drawn; 1 where a custom batch sampler decides."""
