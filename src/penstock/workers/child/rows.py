"""Writes the rows of one task into a segment. In: samples, in row order.
Out: rows written by the batch's template; the samples that do not fit the template.
Runs in: worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from penstock.arena.codec import encode
from penstock.arena.layout import BatchLayout, RowWriter, layout_of
from penstock.arena.template import Template, learn
from penstock.workers.child.loans import Loans
from penstock.workers.protocol import Fetch, Outcome, Room, Span

_SHORT_TEXT_BYTES, _INLINE_TEXT_BYTES = 4 << 10, 16 << 10
"""Texts of a task travel in its message up to the first length, and up to the second length if no room was reserved for
them in advance: a segment would cost more time."""


class RowKeeper(Protocol):
    """The attributes and methods of the worker that ``Rows`` uses."""

    template: Template | None
    """The template that was learnt last."""
    chunk_bytes: int
    """The bytes of samples that are written to their rows in one call."""
    loans: Loans
    """The parts of the current sample's row that are lent to the dataset."""

    def array(self, number: int) -> np.ndarray: ...
    def writer(self, number: int, layout: BatchLayout, rows: range) -> RowWriter: ...
    def ask_for_rows(self, task: int, template: Template, batch_rows: int) -> Room: ...
    def bytes_of(self, span: Span) -> np.ndarray: ...
    def ask_for_texts(self, task: int, need_bytes: int) -> int: ...
    def note_fullest(self, held_bytes: int = 0) -> None: ...


class Rows:
    """The rows of one task, and their way into a segment."""

    def __init__(self, worker: RowKeeper, task: Fetch) -> None:
        self._worker = worker
        self._task = task
        self._layout: BatchLayout | None = None
        self.group_rows = 1
        """How many samples to write at once; 1 until the size of samples is known."""
        self._pending: list[Sequence[Any]] = []
        self._has_misfits = False
        self._relearnt = False
        """Whether samples of this batch differed from the template, so that a new template was learnt."""
        self.segment = task.segment
        self.texts: list[list[Any]] = []
        self.written = 0
        if task.by_template:
            assert worker.template is not None
            self._open(worker.template)

    @property
    def used_bytes(self) -> int:
        return 0 if self._layout is None else self._layout.total_bytes

    def lend_next(self) -> None:
        """Lend the row of the next sample to the code that makes it, if samples are written one by one. After a crash
        nothing is lent, because lent memory that the dataset misuses may have caused the crash."""
        if self._layout is not None and self.group_rows == 1 and not self._has_misfits and not self._task.careful:
            self._worker.loans.open(self.segment, self._layout, self._task.first_row + self.written)

    def add(self, samples: list[Any]) -> list[Any]:
        """Take samples for the next rows; they are written once they are numerous or large enough for one call.

        Returns the first sample that does not fit the batch's layout, and all samples after it. No sample may be added
        after them.
        """
        misfits = self._add(samples)
        self._has_misfits = bool(misfits)
        return misfits

    def _add(self, samples: list[Any]) -> list[Any]:
        if not samples or (self._layout is None and not self._learn(samples[0])):
            return samples
        assert self._layout is not None
        match = self._layout.match
        for position, sample in enumerate(samples):
            values = match(sample)
            if self.group_rows == 1:
                self._worker.loans.close(values)
            if values is None:
                if not self.written and not self._pending and not self._relearnt:
                    self._relearnt = True
                    return self._add(samples) if self._learn(sample) else samples
                return self.flush() + samples[position:]
            self._pending.append(values)
            if len(self._pending) >= self.group_rows and (misfits := self.flush()):
                return misfits + samples[position + 1 :]
        return []

    def flush(self) -> list[Any]:
        """Write the pending samples. If a tensor turns out not to be plain bytes, the samples are returned instead."""
        pending, self._pending = self._pending, []
        if not pending:
            return []
        self._worker.note_fullest()
        try:
            with self._worker.loans.lock:
                self._writer().write(self._task.first_row + self.written, pending, self.texts)
        except (TypeError, RuntimeError):
            assert self._layout is not None
            return [self._layout.rebuild(values) for values in pending]
        self.written += len(pending)
        return []

    def as_samples(self) -> list[Any]:
        """The samples written so far, read back from their rows."""
        if self._layout is None:
            return []
        columns = self._layout.columns(self._worker.array(self.segment))
        first = self._task.first_row
        return [self._layout.sample(columns, self.texts, first + i, i) for i in range(self.written)]

    def outcome(self) -> Outcome:
        """The result to report when all rows are written. Texts are written last, unless they are short."""
        done = Outcome("rows", self.written, self.texts, segment=self.segment, rows_segment=self.segment,
                       used_bytes=self.used_bytes)  # fmt: skip
        text_bytes = sum(sum(map(len, column)) for column in self.texts)
        if text_bytes > _SHORT_TEXT_BYTES:
            encoded = encode(self.texts, small_bytes=0)
            room = self._task.text_room
            if room is None or room.end - room.start < encoded.total_bytes:
                if text_bytes <= _INLINE_TEXT_BYTES:
                    return done._replace(text_bytes=text_bytes)
                number = self._worker.ask_for_texts(self._task.task, encoded.total_bytes)
                room = Span(number, 0, encoded.total_bytes)
            encoded.write(self._worker.bytes_of(room))
            span = room._replace(end=room.start + encoded.total_bytes)
            return done._replace(texts=[], text_span=span, text_bytes=encoded.total_bytes)
        return done._replace(text_bytes=text_bytes) if text_bytes else done

    def _learn(self, sample: Any) -> bool:
        template = learn(sample)
        if template is None:
            return False
        room = self._worker.ask_for_rows(self._task.task, template, self._task.batch_rows)
        assert room.template is not None
        self.segment = room.segment
        self._open(room.template)
        return True

    def _writer(self) -> RowWriter:
        """The writer of the task's rows, with their pages mapped. Asked for each time: a segment may move."""
        assert self._layout is not None
        first = self._task.first_row
        count = self._task.batch_rows if self._task.alone else len(self._task.indices)
        return self._worker.writer(self.segment, self._layout, range(first, first + count))

    def _open(self, template: Template) -> None:
        self._layout = layout_of(template, self._task.batch_rows)
        self._writer()
        self.group_rows = max(1, self._worker.chunk_bytes // max(1, template.row_bytes))
        self.texts = [[] for leaf in template.leaves if leaf.kind == "text"]
