"""Shared memory as one worker sees it: which segments the worker has mapped, and what lies in these segments.

In:  segments that this worker maps and unmaps for the trainer.
Out: arrays and row writers over these segments; pages are mapped before they are touched.
Runs in: worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.arena.codec import decode, decode_all
from penstock.arena.layout import BatchLayout, RowWriter, layout_of
from penstock.arena.segment import Segment, attach_segment
from penstock.workers.board import BOARD_SEGMENT, BoardPlace
from penstock.workers.protocol import NO_SEGMENT, Attach, Part, Span

_NO_BYTES = np.empty(0, np.uint8)


class Views:
    def __init__(self, worker_id: int, segments: dict[int, Segment] | None) -> None:
        """``segments`` is the trainer's own table of segments if this worker is a thread."""
        self._worker_id = worker_id
        self._segments: dict[int, Segment] = {} if segments is None else segments
        self._writers: dict[int, tuple[BatchLayout, RowWriter]] = {}
        self._mapped: dict[int, set[tuple[int, int]]] = {}
        """For each segment, the ranges of bytes whose pages are mapped in this process."""
        self.place: BoardPlace | None = None
        """Where this worker writes its current task and row; the trainer reads them after a crash."""

    def attach(self, message: Attach, fd: int | None) -> None:
        segment = attach_segment(message.number, message.capacity_bytes, fd=fd, name=message.name)
        self._segments[message.number] = segment
        if message.number == BOARD_SEGMENT:
            self.place = BoardPlace(segment, self._worker_id)

    def detach(self, number: int) -> None:
        self._writers.pop(number, None)
        self._mapped.pop(number, None)
        if (segment := self._segments.pop(number, None)) is not None:
            segment.close()

    def move(self, number: int, keep: Sequence[tuple[int, int]]) -> None:
        """Map a segment elsewhere, and leave private copies of the parts to ``keep`` at its old address."""
        self._writers.pop(number, None)
        self._mapped.pop(number, None)
        self._segments[number].move(keep)

    def capacity_bytes(self, number: int) -> int:
        return 0 if number == NO_SEGMENT else self._segments[number].capacity_bytes

    def array(self, number: int) -> np.ndarray:
        return _NO_BYTES if number == NO_SEGMENT else self._segments[number].array()

    def writer(self, number: int, layout: BatchLayout, rows: range) -> RowWriter:
        """The row writer for a segment, reused while segment and layout stay the same. Maps the pages of ``rows``."""
        # A new segment has no pages yet; every worker creates the pages of its own rows.
        for start, end in layout.spans(rows):
            self._map(number, start, end)
        known = self._writers.get(number)
        if known is None or known[0] is not layout:
            known = self._writers[number] = (layout, RowWriter(layout, self.array(number)))
        return known[1]

    def all_of(self, number: int) -> np.ndarray:
        """All bytes of a segment, after their pages were mapped."""
        self._map(number, 0, self.capacity_bytes(number))
        return self.array(number)

    def bytes_of(self, span: Span) -> np.ndarray:
        """The bytes of a span, after their pages were mapped."""
        self._map(span.segment, span.start, span.end)
        return self.array(span.segment)[span.start : span.end]

    def _map(self, number: int, start: int, end: int) -> None:
        """Map pages in one call, before they are touched one by one."""
        mapped = self._mapped.setdefault(number, set())
        if number != NO_SEGMENT and (start, end) not in mapped:
            mapped.add((start, end))
            self._segments[number].populate(start, end)

    def samples_of(self, part: Part) -> list[Any]:
        """The samples that one task left for the worker that collates the batch; these samples may be views of shared
        rows."""
        samples: list[Any] = []
        if part.rows:
            assert part.template is not None
            layout = layout_of(part.template, part.batch_rows)
            for start, end in layout.spans(part.rows):
                self._map(part.segment, start, end)
            columns = layout.columns(self.array(part.segment))
            texts = part.texts if part.text_span is None else decode_all(self.bytes_of(part.text_span))
            samples = [layout.sample(columns, texts, row, row - part.rows.start) for row in part.rows]
        if part.pickled is not None or part.offsets:
            samples += decode(part.pickled, part.offsets, self.all_of(part.extra_segment))
        return samples
