"""The loader's rules: how work is cut, how far ahead the loader runs, how memory is reused.

In:  nothing.
Out: ``LoaderRules``: numbers, the same for all loaders, and pure functions of these numbers; ``Order``: the settings
     that follow from one loader's arguments.
Runs in: trainer. The planner's simulator gets ``LoaderRules`` passed in, so that the loader and the simulator follow
         the same rules.

Only speed and memory depend on ``LoaderRules``. The content of a batch never does.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from penstock.arena.segment_sizes import RECENT_NEEDS, capacity_for, is_too_large, may_reuse
from penstock.workers.stretches import stretch_rows


@dataclass(frozen=True, kw_only=True)
class LoaderRules:
    """The rules that apply to everything that the user has not set. Tests change single numbers to force every path."""

    # -- cutting work -------------------------------------------------------------------

    task_s: float = 0.005
    """A batch that takes less time than this is fetched by one worker; a longer batch is cut into tasks of about this
    length."""
    queue_s: float = 0.006
    """Short tasks are queued on a worker up to this much work, so that the worker never waits for the trainer."""
    patient_s: float = 0.020
    """Tasks of at least this length are never queued behind another task, because a slow sample would delay them."""
    most_queued: int = 24
    """The most tasks that a worker has at a time."""
    absent_from: float = 0.125
    """A trainer counts as absent if it answers later than this share of a task's time while its loop has to wait.
    Workers then have work queued for the whole absence, however long their tasks are."""
    split_always: bool = False
    """Whether every batch is cut into single stretches, however short it is."""
    whole_share: float = 0.25
    """A share of the part of the budget that the workers leave at their start. If whole batches fit into this share,
    each worker builds whole batches when samples are not written in place. Workers that share such a batch must encode
    its samples, and a custom collate function would get copies of the samples."""

    # -- running ahead ------------------------------------------------------------------

    ahead_share: float = 0.125
    """The share of the batches' memory up to which the depth may grow if the loop loses time."""
    cheap_share: float = 1 / 64
    """The share of the batches' memory that batches ahead may take before it is known whether more batches ahead
    help."""
    ahead_per_worker: int = 2
    """The number of batches ahead per worker if one worker builds each batch, as in torch; also the most batches ahead
    per worker if a batch has bytes that are not counted."""
    bound_per_worker: int = 4
    """The most batches ahead per worker if batches belong to workers in turn. If one worker is always slow, the others
    would only get further ahead of it."""
    remembered: float = 0.9
    """The share of the batches that idle workers could have made which still counts one batch later."""
    tolerated: float = 0.03
    """The share of the time that the loop may wait while workers are idle before the depth grows."""
    new_page_s: float = 4e-9
    """The cost in seconds of each byte of one more batch ahead: several times the time to make the byte's share of a
    page. The depth grows by one batch whenever the loop has lost the cost of a batch."""
    new_batch_s: float = 0.001
    """The cost of one more batch ahead in addition to its bytes, so that a short delay does not fill the arena with
    tiny batches."""
    least_price: float = 0.25
    """The least cost of one more batch ahead, in times that workers together take for a batch."""
    shrink_after: int = 64
    """The depth shrinks after at least this many batches if fewer batches ahead would have sufficed."""

    # -- memory -------------------------------------------------------------------------

    auto_memory_share: float = 0.5
    """The share of the available memory that memory="auto" takes."""
    most_slots: int = 256
    """The most batches in the arena at a time, counting batches that are being filled, ready or lent."""
    recent_batches: int = 8
    """A batch of unknown size gets as much room as the largest of this many earlier batches."""
    most_own_bytes: int = 4 << 20
    """The most bytes that are set aside for the engine's own objects in the trainer; they count against the budget."""
    recent_needs: int = RECENT_NEEDS
    """A free segment that is too large for each of this many latest needs is closed first."""
    idle_release_s: float = 10.0
    """A loader that delivers no batch for this long closes its free segments. It keeps ready batches for the user's
    return after the step or the validation, unless the machine has less memory left than the arena uses."""
    epoch_end_release_s: float = 1.0
    """This many seconds after the last batch of an epoch everything is released. The next epoch usually begins
    sooner."""

    def stretch_rows(self, batch_rows: int) -> int:
        """How many consecutive rows share one seed; a task always has whole stretches."""
        return stretch_rows(batch_rows)

    def rows_per_task(
        self,
        row_s: float | None,
        batch_rows: int,
        *,
        workers: int = 1,
        most_open: int = sys.maxsize,
        threads: int = 1,
    ) -> int:
        """How many rows of a splittable batch one task has.

        ``row_s``: seconds that a worker takes per row, None while no task is done. ``most_open``: how many batches
        memory allows to be filled at a time. ``threads``: how many rows of a task a worker fetches at a time.
        """
        stretch = stretch_rows(batch_rows)
        if self.split_always or row_s is None:
            # Each worker takes part in the first batch as soon as it has started.
            return stretch
        if row_s * batch_rows < self.task_s:
            rows = batch_rows
        else:
            least_rows = max(threads, math.ceil(self.task_s / row_s))
            rows = min(batch_rows, stretch * math.ceil(least_rows / stretch))
        if rows * workers > batch_rows * most_open:
            # Only a few batches fit the budget, so these must have work for all workers.
            rows = max(stretch, batch_rows * most_open // workers // stretch * stretch)
        return rows

    def builds_whole(self, batch_bytes: int | None, *, workers: int, memory_bytes: int) -> bool:
        """Whether each worker alone builds batches of ``batch_bytes`` (None if unknown), if samples are not written in
        place. Each worker then holds the samples and the result. ``memory_bytes``: the part of the budget that the
        workers leave at their start."""
        if self.split_always:
            return False
        return batch_bytes is None or 2 * batch_bytes * workers <= self.whole_share * memory_bytes

    def tasks_queued(self, row_s: float | None, rows: int, *, in_order: bool = True, absence_s: float = 0.0) -> int:
        """How many tasks of ``rows`` rows a worker may have at a time; ``absence_s``: how long the trainer takes to
        answer."""
        if row_s is None:
            return 1
        task_s = max(row_s * rows, 1e-6)
        queued = 1
        if in_order and task_s < self.patient_s:
            queued = max(2, 1 + math.ceil(self.queue_s / task_s))
        if absence_s >= self.absent_from * task_s:
            queued = max(queued, 1 + math.ceil(absence_s / task_s))
        return min(self.most_queued, queued)

    def depth(
        self,
        row_s: float | None,
        batch_rows: int,
        workers: int,
        *,
        rows: int,
        in_order: bool = True,
        absence_s: float = 0.0,
        cheap: int = 0,
    ) -> int:
        """The least number of batches ahead that keeps all workers busy with tasks of ``rows`` rows; never below 2.

        ``cheap``: how many batches ahead are cheap. Up to this number, workers that build whole batches get a next
        batch, and enough work for the trainer's absence.
        """
        tasks_per_batch = max(1, math.ceil(batch_rows / max(1, rows)))

        def keeps_busy(tasks: int) -> int:
            return max(2, math.ceil(workers * tasks / tasks_per_batch) + 1)

        least = keeps_busy(self.tasks_queued(row_s, rows, in_order=in_order))
        wanted = keeps_busy(self.tasks_queued(row_s, rows, in_order=in_order, absence_s=absence_s))
        if row_s and absence_s >= self.absent_from * row_s * rows:
            # Tasks that workers finish while the trainer is absent keep their place in the queue until the trainer is
            # back.
            wanted += math.ceil(absence_s * workers / (row_s * max(1, batch_rows)))
        if rows >= batch_rows:
            wanted = max(wanted, self.ahead_per_worker * workers)
        return max(least, min(wanted, cheap))

    def most_ahead(self, batch_bytes: int, limit_bytes: int, workers: int, *, per_worker: int = 0) -> int:
        """How many batches ahead are worth their memory, if each takes ``batch_bytes`` and all may take
        ``limit_bytes``.

        ``per_worker``: the most batches for each worker, if more would not help or a batch has bytes that are not
        counted; 0 for any number.
        """
        return self._within(int(self.ahead_share * limit_bytes), batch_bytes, per_worker * workers)

    def cheap_ahead(self, batch_bytes: int, limit_bytes: int, workers: int, *, per_worker: int = 0) -> int:
        """How many batches are so cheap that they may be ahead before it is known whether more batches ahead help."""
        return self._within(int(self.cheap_share * limit_bytes), batch_bytes, per_worker * workers)

    def _within(self, share_bytes: int, batch_bytes: int, most: int) -> int:
        count = min(self.most_slots, share_bytes // max(1, batch_bytes))
        return min(count, most) if most else count

    def ahead_price(self, batch_bytes: int, batch_s: float) -> float:
        """How much time, counted in batches, the loop must lose before one more batch of ``batch_bytes`` is ahead.
        ``batch_s``: the time that workers together take for a batch."""
        return max(self.least_price, (self.new_batch_s + self.new_page_s * batch_bytes) / max(batch_s, 1e-6))

    def slots(self, depth: int, *, user_holds: int = 1) -> int:
        """How many batches the arena may hold at a time: the batches ahead and the batches that the user holds."""
        return min(depth + user_holds, self.most_slots)

    def own_bytes(self, memory_bytes: int) -> int:
        """The bytes set aside for the engine's own objects, out of a budget of ``memory_bytes``."""
        return min(self.most_own_bytes, memory_bytes // 25)

    def capacity_bytes(self, need_bytes: int) -> int:
        """The size of the segment for a need."""
        return capacity_for(need_bytes)

    def may_reuse(self, free_bytes: int, need_bytes: int) -> bool:
        """Whether a free segment of ``free_bytes`` is used for a need of ``need_bytes``."""
        return may_reuse(free_bytes, need_bytes)

    def is_too_large(self, free_bytes: int, need_bytes: int) -> bool:
        """Whether a free segment of ``free_bytes`` would waste memory on a need of ``need_bytes``."""
        return is_too_large(free_bytes, need_bytes)


def depth_ceiling(workers: int, prefetch_factor: int | None) -> int | None:
    """The most batches ahead: as torch promises, at most ``prefetch_factor`` batches per worker."""
    return None if prefetch_factor is None else max(1, workers * prefetch_factor)


@dataclass(frozen=True, kw_only=True)
class Order:
    """How one loader assigns work; this is fixed for an epoch."""

    rows: bool
    """Whether rows are written in place, as torch's default collate allows."""
    splittable: bool
    """Whether several workers may fetch rows of one batch."""
    bound: bool
    """Whether batches belong to workers in turn, as in torch: for iterable datasets and seeding="worker"."""
    keeps_generators: bool
    """Whether workers' generators continue from batch to batch and from epoch to epoch: for seeding="worker"."""
    in_order: bool
    batch_rows: int
    """The nominal length of batches, for estimates until batches are drawn; 1 if a custom batch sampler decides."""
    threads: int = 1
    """How many rows of a task a worker fetches at a time."""
    chunk_bytes: int = 0
    """The most bytes of samples that a worker holds before it writes them."""
