"""One batch on its way from the sampler to the user, and the tasks into which it is cut.

In:  indices drawn from the sampler; outcomes of tasks.
Out: the batch's state, and the work that is not done yet.
Runs in: trainer, under the engine's lock.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from penstock.arena.arena import Lease
from penstock.arena.codec import decode_all
from penstock.arena.segment import Segment
from penstock.arena.template import Template
from penstock.workers.protocol import NO_SEGMENT, Need, Outcome, Part, Span


@dataclass(eq=False)
class SamplerFailure:
    """The exception that the sampler raised instead of giving a batch.

    Only the iterator holds it, because the traceback of the error refers to the iterator. An engine that held it would
    keep the iterator and its workers alive after the user has dropped the iterator.
    """

    error: BaseException


@dataclass(eq=False)
class Batch:
    """A batch that was drawn. It is open from the moment when memory is set aside for it until it is taken."""

    number: int
    indices: Any
    rows: int
    seed: int | None
    forecast_position: int = 0
    """The batch's position in the loader's forecast, for a cache."""
    worker_id: int | None = None
    """The worker to which the batch belongs; None if every worker may take part."""
    failure: weakref.ref[SamplerFailure] | None = None
    """The failure of the sampler, if it raised instead of giving this batch."""
    sampler_state: Any = None
    """The sampler's own state after the sampler gave this batch."""
    memo: Any = None
    """The worker's state after the worker made this batch; None unless batches belong to workers in turn."""

    todo: deque[range] = field(default_factory=deque)
    """Row ranges that are not assigned to a worker yet."""
    running: int = 0
    """The number of tasks that are assigned but not done."""
    alone: bool = True
    """Whether a single task has all rows of the batch."""
    pieces: dict[int, tuple[range, Outcome]] = field(default_factory=dict)
    """The rows and the outcome of each task, by the first row of the task."""
    result: Outcome | None = None
    error: tuple[int, Any] | None = None
    """The lowest row that failed, and its exception."""
    template: Template | None = None
    rows_segment: Segment | None = None
    old_layouts: dict[int, Template] = field(default_factory=dict)
    """The layout of rows that were written before samples of another layout came, by segment number."""
    extra: dict[int, Segment] = field(default_factory=dict)
    """The batch's other segments (texts, encoded parts, results), by number."""
    text_segment: Segment | None = None
    """The segment that was taken in advance for the batch's texts; each row has ``text_row_bytes`` of it."""
    text_row_bytes: int = 0
    promised_bytes: int = 0
    careful: bool = False
    """Whether a worker crashed while it fetched the batch; the batch's samples are then fetched one by one."""
    wants_collate: bool = False
    ready: bool = False
    leases: list[Lease] = field(default_factory=list)
    """The leases of the batch's segments while these are copied to a device."""
    evicted: bool = False
    """Whether a batch that is due sooner needs this batch's memory. This batch starts over when none of its tasks is
    running."""

    def open(self, promised_bytes: int) -> None:
        """Start the batch, or start it over, with no row done."""
        self.todo = deque([range(self.rows)])
        self.pieces.clear()
        self.old_layouts.clear()
        self.result = self.error = self.template = None
        self.wants_collate = self.ready = self.evicted = False
        self.alone = True
        self.promised_bytes = promised_bytes

    @property
    def held_bytes(self) -> int:
        rows = 0 if self.rows_segment is None else self.rows_segment.capacity_bytes
        return rows + sum(s.capacity_bytes for s in self.extra.values())

    @property
    def samples(self) -> int:
        """How many samples the batch was made of: fewer than its rows at the end of a stream."""
        if self.result is not None:
            return self.result.rows or self.rows
        return self.row_count() if self.pieces else self.rows

    @property
    def collate_bytes(self) -> int:
        """The private memory that collating the batch takes: tensors are read in place and copied once; pickles are
        also unpacked."""
        copies = 2 if any(o.pickled is None and o.offsets for _, o in self.pieces.values()) else 1
        return sum(copies * outcome.used_bytes + 2 * outcome.text_bytes for _, outcome in self.pieces.values())

    @property
    def owed_bytes(self) -> int:
        """The bytes that were promised when the batch was opened and are not taken yet."""
        return max(0, self.promised_bytes - self.held_bytes)

    @property
    def segments(self) -> list[Segment]:
        return [*([] if self.rows_segment is None else [self.rows_segment]), *self.extra.values()]

    def take_rows(self, count: int, stretch: int) -> range:
        """The next ``count`` rows to fetch, cut so that every task consists of whole stretches."""
        rows = self.todo.popleft()
        if count < len(rows):
            count = max(stretch, count // stretch * stretch)
        if count < len(rows):
            self.todo.appendleft(rows[count:])
            rows = rows[:count]
        if len(rows) < self.rows:
            self.alone = False
        return rows

    def indices_of(self, rows: range) -> Any:
        """The indices of some rows; for all rows, the sampler's own object."""
        return self.indices if len(rows) == self.rows else self.indices[rows.start : rows.stop]

    def text_room(self, rows: range) -> Span | None:
        """Where the texts of some rows are to be written."""
        if self.text_segment is None:
            return None
        row_bytes = self.text_row_bytes
        return Span(self.text_segment.number, rows.start * row_bytes, rows.stop * row_bytes)

    def note_error(self, row: int, error: Any) -> None:
        if self.error is None or row < self.error[0]:
            self.error = (row, error)

    def set_layout_aside(self) -> None:
        """Keep the rows written so far under the old layout, and continue without a layout."""
        assert self.template is not None
        # Rows of a layout that takes no bytes lie in no segment, even if the batch has a segment by now.
        self.old_layouts[NO_SEGMENT] = self.template
        if self.rows_segment is not None:
            self.extra[self.rows_segment.number] = self.rows_segment
            self.old_layouts[self.rows_segment.number] = self.template
        self.template = self.rows_segment = None

    def unused_row_segments(self) -> list[Segment]:
        """The row segments that hold no row."""
        used = {outcome.segment for _, outcome in self.pieces.values() if outcome.kind == "rows" and outcome.rows}
        used |= {outcome.rows_segment for _, outcome in self.pieces.values() if outcome.rows}
        candidates = [self.extra[n] for n in self.old_layouts if n in self.extra]
        candidates += [] if self.rows_segment is None else [self.rows_segment]
        return [segment for segment in candidates if segment.number not in used]

    def drop_row_segment(self, segment: Segment) -> Segment:
        """Take a row segment out of the batch. If a segment with an older layout is left, it becomes the batch's row
        segment."""
        if segment is self.rows_segment:
            self.rows_segment = None
            for number, template in self.old_layouts.items():
                if number in self.extra:
                    self.rows_segment, self.template = self.extra.pop(number), template
        else:
            del self.extra[segment.number]
        return segment

    def stop_passing(self) -> None:
        """Note that the copy to the device is done or has failed. From now on the user holds the segments that are
        still lent."""
        for lease in self.leases:
            lease.stop_passing()
        self.leases.clear()

    @property
    def has_work(self) -> bool:
        """Whether there is a task to assign."""
        return bool(self.todo) or self.wants_collate

    @property
    def at_rest(self) -> bool:
        return not self.todo and not self.running

    @property
    def is_rows(self) -> bool:
        """Whether every piece was written with the same template into one segment."""
        kinds = {(outcome.kind, outcome.segment) for _, outcome in self.pieces.values()}
        return len(kinds) == 1 and next(iter(kinds))[0] == "rows"

    def row_count(self) -> int:
        return sum(outcome.rows for _, outcome in self.pieces.values())

    def texts(self) -> list[list[Any]]:
        """Text columns joined over the pieces, in row order."""
        ordered = [self._texts_of(outcome) for _, (_, outcome) in sorted(self.pieces.items())]
        return ordered[0] if len(ordered) == 1 else [list(chain(*column)) for column in zip(*ordered, strict=True)]

    def _texts_of(self, outcome: Outcome) -> list[list[Any]]:
        span = outcome.text_span
        return outcome.texts if span is None else decode_all(self.extra[span.segment].array()[span.start : span.end])

    @property
    def text_bytes(self) -> int:
        return sum(outcome.text_bytes for _, outcome in self.pieces.values())

    def parts(self) -> tuple[Part, ...]:
        """Everything a collating worker needs to rebuild the samples."""
        return tuple(
            Part(
                segment=outcome.rows_segment,
                rows=rows[: outcome.rows],
                batch_rows=self.rows,
                template=self.old_layouts.get(outcome.rows_segment, self.template) if outcome.rows else None,
                texts=outcome.texts,
                text_span=outcome.text_span,
                pickled=outcome.pickled,
                offsets=outcome.offsets,
                extra_segment=outcome.segment if outcome.kind == "part" else NO_SEGMENT,
            )
            for _, (rows, outcome) in sorted(self.pieces.items())
        )


@dataclass(eq=False)
class Task:
    """The work that is assigned to one worker at a time."""

    number: int
    batch: Batch
    rows: range | None
    """The rows to fetch; None if the task is to collate the batch."""
    assigned_s: float
    """When the task was assigned, on the monotonic clock."""
    need: Need | None = None
    """The request for room for which the task's worker waits."""
    room: Segment | None = None
    """The segment for the objects that this task encodes, given to the task in advance."""
    private_bytes: int = 0
    """The private memory that the task's worker is expected to need for it, beyond one sample."""

    @property
    def indices(self) -> Any:
        """The sampler's indices of the task's rows."""
        return self.batch.indices if self.rows is None else self.batch.indices_of(self.rows)

    def describe(self, row: int) -> str:
        """The index at ``row``, or all of the task's indices if the row is unknown (negative)."""
        is_known = row >= 0 and isinstance(self.batch.indices, list)
        return f"index {self.batch.indices[row]}" if is_known else f"indices {self.indices}"
