"""How ``memory=`` is divided between the workers and the arena.

In:  the budget, the workers' measured private memory, the expected size of samples and batches.
Out: the arena's limit; whether workers may keep the memory of samples.
Runs in: trainer, under the engine's lock.
"""

from __future__ import annotations

from penstock.loader.engine.batch import Batch
from penstock.loader.engine.engine_parts import EngineParts


class MemoryBudget:
    def __init__(self, memory_bytes: int, parts: EngineParts) -> None:
        self.memory_bytes = memory_bytes
        self._slots = 0
        self._may_keep = False
        self._arena, self._workers, self._shapes = parts.arena, parts.workers, parts.admission.shapes
        self._pace, self._order, self._rules = parts.pace, parts.order, parts.rules

    def set(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self._workers.has_changed = True

    def update(self) -> None:
        """Set the arena's limit again if the workers' private memory may have changed."""
        if self._workers.has_changed:
            self.limit_arena()

    def limit_arena(self) -> None:
        """Give the arena the part of the budget that the workers leave."""
        self._workers.has_changed = False
        taken_bytes = self._workers.expected_bytes(self.fetch_bytes())
        if taken_bytes is not None:
            taken_bytes += self._rules.own_bytes(self.memory_bytes)
        self._arena.set_limit(max(0, self.memory_bytes - (taken_bytes or 0)))
        self._may_keep = taken_bytes is not None and self._has_room_to_keep()
        self._workers.allow_keeping(self._may_keep)

    def set_slots(self, slots: int) -> None:
        """Set how many batches must fit: the batches ahead and the batches that the user holds."""
        if slots != self._slots:
            self._slots = slots
            self._workers.has_changed = True

    def _has_room_to_keep(self) -> bool:
        """Whether workers may keep the memory of samples. Kept memory at most doubles the memory that the workers take
        now, and no batch waits for it."""
        batch_bytes = self._shapes.expected_bytes(self._pace.batch_rows)
        if not batch_bytes or not self._slots:
            return False
        growth_bytes = 0 if self._may_keep else self._workers.samples_bytes
        return self._slots * batch_bytes + growth_bytes <= self._arena.limit_bytes

    def lets_build_whole(self) -> bool:
        """Whether there is memory for each worker to build whole batches."""
        expected = self._shapes.expected_bytes(self._pace.batch_rows)
        left_bytes = self.memory_bytes - self._workers.base_bytes - self._rules.own_bytes(self.memory_bytes)
        return self._rules.builds_whole(expected, workers=self._workers.count, memory_bytes=left_bytes)

    def fetch_bytes(self) -> int:
        """The bytes that a worker holds while it fetches its share of a batch."""
        rows = self._pace.batch_rows
        if self._pace.in_place:
            sample_bytes = self._shapes.sample_bytes
            chunk_bytes = min(self._order.chunk_bytes, sample_bytes * rows)
            return max(sample_bytes * max(1, min(self._pace.threads, rows)), chunk_bytes)
        if not self._pace.splits or not rows:
            return 0
        return (self._shapes.expected_bytes(rows) or 0) * self._pace.rows_per_task(rows, self._workers.count) // rows

    def task_bytes(self, batch: Batch) -> int:
        """The private memory of a worker that builds ``batch`` alone from samples that are not written in place: the
        samples and the result."""
        if self._pace.in_place or self._pace.splits:
            return 0
        return 2 * (self._shapes.expected_bytes(batch.rows) or 0)
