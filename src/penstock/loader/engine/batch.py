"""One batch on its way from sampler to user, and the tasks it is cut into.

In:  indices drawn from the sampler; outcomes of tasks.
Out: the batch's state, and the work that is left.
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
    """What the sampler raised instead of giving a batch.

    Only the iterator holds it: the traceback of the error refers to the iterator, and an engine that held it would keep
    an iterator alive that the user has dropped, and its workers with it.
    """

    error: BaseException


@dataclass(eq=False)
class Batch:
    """A batch that was drawn. It is open from when memory is set aside for it until it is taken."""

    number: int
    indices: Any
    rows: int
    seed: int | None
    forecast_position: int = 0
    """Its position in the loader's forecast, for a cache."""
    worker_id: int | None = None
    """The worker it belongs to; None when every worker may take part."""
    failure: weakref.ref[SamplerFailure] | None = None
    """What the sampler raised instead of giving this batch."""
    sampler_state: Any = None
    """The sampler's own state after it gave this batch."""
    memo: Any = None
    """The worker's state after it made this batch, where batches belong to workers in turn."""

    todo: deque[range] = field(default_factory=deque)
    """Row ranges that are not assigned."""
    running: int = 0
    """Tasks that are assigned and not done."""
    alone: bool = True
    """Whether a single task has all its rows."""
    pieces: dict[int, tuple[range, Outcome]] = field(default_factory=dict)
    """First row -> the rows and the outcome of the task that fetched from there."""
    result: Outcome | None = None
    error: tuple[int, Any] | None = None
    """Lowest failing row and its exception."""
    template: Template | None = None
    rows_segment: Segment | None = None
    old_layouts: dict[int, Template] = field(default_factory=dict)
    """Segment number -> layout of rows that were written before samples of another layout came."""
    extra: dict[int, Segment] = field(default_factory=dict)
    """Its other segments, by number: texts, encoded parts and results."""
    text_segment: Segment | None = None
    """The one of these that was taken in advance for its texts; each row has ``text_row_bytes`` of it."""
    text_row_bytes: int = 0
    promised_bytes: int = 0
    careful: bool = False
    """Whether a worker crashed while fetching it: its samples are then fetched one by one."""
    wants_collate: bool = False
    ready: bool = False
    leases: list[Lease] = field(default_factory=list)
    """Leases of its segments while they are copied to a device."""
    evicted: bool = False
    """Whether a batch that is due sooner needs its memory: it starts over once its tasks have come to rest."""

    def open(self, promised_bytes: int) -> None:
        """Start, or start over, with nothing done."""
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
        """How many samples it was made of: at the end of a stream, fewer than its rows."""
        if self.result is not None:
            return self.result.rows or self.rows
        return self.row_count() if self.pieces else self.rows

    @property
    def collate_bytes(self) -> int:
        """Private memory for collating it: tensors are read in place and copied once, pickles are also unpacked."""
        copies = 2 if any(o.pickled is None and o.offsets for _, o in self.pieces.values()) else 1
        return sum(copies * outcome.used_bytes + 2 * outcome.text_bytes for _, outcome in self.pieces.values())

    @property
    def owed_bytes(self) -> int:
        """Bytes promised when it was opened and not taken yet."""
        return max(0, self.promised_bytes - self.held_bytes)

    @property
    def segments(self) -> list[Segment]:
        return [*([] if self.rows_segment is None else [self.rows_segment]), *self.extra.values()]

    def take_rows(self, count: int, stretch: int) -> range:
        """The next ``count`` rows to fetch, cut so that tasks stay whole stretches."""
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
        """The indices of some rows; the sampler's own object for all of them."""
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
        """Keep the rows written so far under the old layout, and start without one."""
        assert self.template is not None
        # Rows of a layout that takes no bytes lie in no segment, even if the batch has one by now.
        self.old_layouts[NO_SEGMENT] = self.template
        if self.rows_segment is not None:
            self.extra[self.rows_segment.number] = self.rows_segment
            self.old_layouts[self.rows_segment.number] = self.template
        self.template = self.rows_segment = None

    def unused_row_segments(self) -> list[Segment]:
        """Row segments without a single row."""
        used = {outcome.segment for _, outcome in self.pieces.values() if outcome.kind == "rows" and outcome.rows}
        used |= {outcome.rows_segment for _, outcome in self.pieces.values() if outcome.rows}
        candidates = [self.extra[n] for n in self.old_layouts if n in self.extra]
        candidates += [] if self.rows_segment is None else [self.rows_segment]
        return [segment for segment in candidates if segment.number not in used]

    def drop_row_segment(self, segment: Segment) -> Segment:
        """Take out a row segment; if one with an older layout is left, that becomes the batch's."""
        if segment is self.rows_segment:
            self.rows_segment = None
            for number, template in self.old_layouts.items():
                if number in self.extra:
                    self.rows_segment, self.template = self.extra.pop(number), template
        else:
            del self.extra[segment.number]
        return segment

    def stop_passing(self) -> None:
        """Its copy is on the device, or has failed: segments still lent are the user's from now on."""
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
    """Work assigned to one worker."""

    number: int
    batch: Batch
    rows: range | None
    """Rows to fetch; None to collate the batch."""
    assigned_s: float
    """When it was assigned, on the monotonic clock."""
    need: Need | None = None
    """The question that its worker waits to have answered."""
    room: Segment | None = None
    """A segment for what this task encodes, given to it in advance."""
    private_bytes: int = 0
    """Private memory its worker is expected to need for it, beyond one sample."""

    @property
    def indices(self) -> Any:
        """The sampler's indices of its rows."""
        return self.batch.indices if self.rows is None else self.batch.indices_of(self.rows)

    def describe(self, row: int) -> str:
        """The index at ``row``, or all of the task's indices if the row is unknown (negative)."""
        is_known = row >= 0 and isinstance(self.batch.indices, list)
        return f"index {self.batch.indices[row]}" if is_known else f"indices {self.indices}"
