"""Estimates of one engine: how long fetching a row takes, which layout batches have, and how many bytes they take.

In:  times of finished tasks; finished batches.
Out: rows per task, tasks per worker, batches ahead; the expected layout and size of the next batch.
Runs in: trainer, under the engine's lock.

Only speed and memory depend on these numbers. The content of a batch never does.
"""

from __future__ import annotations

import sys
from collections import deque
from statistics import median

from penstock.arena.layout import layout_of
from penstock.arena.segment_sizes import capacity_for
from penstock.arena.template import Template
from penstock.loader.rules import LoaderRules

_WEIGHT = 0.2
"""Weight of the latest task in the average time per row."""
_ABSENCE_WEIGHT, _ABSENCE_KEPT = 0.5, 0.98
"""The weight of an absence of the trainer that is longer than the estimate and made the loop wait; after any other
absence, the share of the estimate that is kept."""
_RECENT_TASKS, _LEAST_TASKS, _FIRST_TAKE = 16, 4, 2.0
"""Workers repeat work if the time per row of three in four first tasks is more than the third number times the median
of later tasks. A first task is a worker's first task of a batch. The latest tasks count (first number), if there are
enough tasks of each kind (second number)."""
_RECENT_BATCHES = 8
"""How many of the latest batches decide how many rows the next batch is expected to have."""
_SHORT_TEXT_BYTES = 16 << 10
"""Texts of a batch up to this length travel in messages."""
_TEXT_FRAME_BYTES = 64
"""The bytes that a row takes in an encoded task in addition to its text."""
_AGREE_AFTER_CHANGE = 3
"""After samples have changed shape, this many batches in a row must agree before rows are laid out in advance again."""


class Pace:
    """How long a row takes and how many rows a batch has, and what follows from both by the rules."""

    def __init__(
        self, rules: LoaderRules, *, splits: bool, in_place: bool = True, batch_rows: int = 1, threads: int = 1
    ) -> None:
        """``batch_rows``: the length of batches as far as it is known before the first batch is drawn. ``threads``: how
        many rows of a task a worker fetches at a time."""
        self._rules = rules
        self._drawn_rows: deque[int] = deque(maxlen=_RECENT_BATCHES)
        self.batch_rows = batch_rows
        """The mean length of the latest batches drawn."""
        self.threads = threads
        self.may_split = splits
        """Whether rows of one batch may come from several workers."""
        self.in_place = in_place
        """Whether samples are written into the rows of their batch, without being encoded and collated."""
        self.builds_whole = True
        """Whether memory allows each worker to build whole batches."""
        self.gains_together = False
        """Whether workers that share a batch repeat work, because the dataset reads in chunks and keeps the latest
        chunk."""
        self.keeps_together = False
        """Whether each batch goes to one worker so that no work is repeated; this needs enough memory."""
        self._first_s: deque[float] = deque(maxlen=_RECENT_TASKS)
        self._later_s: deque[float] = deque(maxlen=_RECENT_TASKS)
        """Seconds per row of the latest tasks. ``_first_s``: tasks that were a worker's first of a batch; ``_later_s``:
        others."""
        self.row_s: float | None = None
        """The seconds that one worker takes per row; None until a task is done."""
        self.absence_s = 0.0
        """How late the trainer answers workers, as far as the training loop has to wait because of that."""
        self._latest_s = 0.0
        """The longest delay of an answer since the loop last asked for a batch."""
        self.most_open = sys.maxsize
        """How many batches memory allows to be filled at a time."""

    @property
    def splits(self) -> bool:
        """Whether rows of one batch come from several workers if rows take long enough."""
        return self.may_split and (self.in_place or not self.builds_whole)

    def note_drawn(self, rows: int) -> None:
        """Note that a batch of ``rows`` rows was drawn. With a custom batch sampler, the length of batches is known
        only from draws."""
        self._drawn_rows.append(rows)
        self.batch_rows = max(1, round(sum(self._drawn_rows) / len(self._drawn_rows)))

    def note(self, rows: int, spent_s: float) -> None:
        if rows <= 0:
            return
        row_s = spent_s / rows
        self.row_s = row_s if self.row_s is None else self.row_s + _WEIGHT * (row_s - self.row_s)

    def note_part(self, rows: int, spent_s: float, *, is_first: bool) -> None:
        """Note that a worker fetched some rows of a batch. ``is_first``: the worker had fetched no rows of this batch
        before."""
        (self._first_s if is_first else self._later_s).append(spent_s / max(1, rows))
        if min(len(self._first_s), len(self._later_s)) >= _LEAST_TASKS and not self._rules.split_always:
            self.gains_together = sorted(self._first_s)[len(self._first_s) // 4] > _FIRST_TAKE * median(self._later_s)

    def rows_per_task(self, batch_rows: int, workers: int) -> int:
        """How many rows one task has; all rows of the batch if it is not split."""
        if not self.splits or self.keeps_together:
            return batch_rows
        return self._rules.rows_per_task(
            self.row_s, batch_rows, workers=workers, most_open=self.most_open, threads=self.threads
        )

    def note_answer(self, late_s: float) -> None:
        """Note that a report of a worker was read ``late_s`` after it was sent."""
        self._latest_s = max(self._latest_s, late_s)

    def note_asked(self, *, waits: bool) -> None:
        """Note that the training loop asked for a batch. ``waits``: whether the loop has to wait for it."""
        if waits and self._latest_s > self.absence_s:
            self.absence_s += _ABSENCE_WEIGHT * (self._latest_s - self.absence_s)
        else:
            self.absence_s *= _ABSENCE_KEPT
        self._latest_s = 0.0

    def tasks_queued(self, rows: int, *, in_order: bool) -> int:
        """How many tasks of ``rows`` rows a worker may have at a time."""
        return self._rules.tasks_queued(self.row_s, rows, in_order=in_order, absence_s=self.absence_s)

    def depth(self, batch_rows: int, workers: int, *, in_order: bool, cheap: int = 0) -> int:
        """The least number of batches ahead that keeps all workers busy; never below 2. ``cheap``: how many batches
        ahead are cheap."""
        rows = self.rows_per_task(batch_rows, workers)
        return self._rules.depth(
            self.row_s, batch_rows, workers, rows=rows, in_order=in_order, absence_s=self.absence_s, cheap=cheap
        )


class Shapes:
    """The layout and the size of batches, learnt from earlier batches."""

    def __init__(self, rules: LoaderRules) -> None:
        self.template: Template | None = None
        """The layout that every sample is expected to have; None while it is unknown or changes."""
        self._sizes: deque[int] = deque(maxlen=rules.recent_batches)
        self._text_sizes: deque[int] = deque([0], maxlen=rules.recent_batches)
        self._sample_sizes: deque[int] = deque([0], maxlen=rules.recent_batches)
        self._guess: int | None = None
        self._last: Template | None = None
        self._agreeing = 0
        self._has_changed = False

    def note_match(self, template: Template, rows: int) -> None:
        """Note that a batch was laid out by ``template``, and every sample fitted."""
        self.note_size(layout_of(template, rows).total_bytes)
        self._agreeing = self._agreeing + 1 if template == self._last else 1
        self._last = template
        if self.template is None and self._agreeing >= (_AGREE_AFTER_CHANGE if self._has_changed else 1):
            self.template = template

    def note_mismatch(self) -> None:
        """Note that a batch had to go through torch's collate function."""
        self._has_changed = True
        self.template = None
        self._agreeing = 0

    def note_size(self, batch_bytes: int) -> None:
        self._sizes.append(batch_bytes)

    def note_guess(self, batch_bytes: int) -> None:
        """Note the size of a batch as estimated from its first sample. The estimate is used until the size of a batch
        is known."""
        self._guess = batch_bytes

    def note_texts(self, text_bytes: int, rows: int) -> None:
        """Note that the texts of a batch of ``rows`` samples took ``text_bytes``."""
        is_short = text_bytes <= _SHORT_TEXT_BYTES
        self._text_sizes.append(0 if is_short else -(-text_bytes // max(1, rows)))

    @property
    def text_row_bytes(self) -> int:
        """The room for the texts of one row: somewhat more than recent texts took; 0 if texts are short."""
        largest = max(self._text_sizes)
        return largest + largest // 16 + _TEXT_FRAME_BYTES if largest else 0

    def note_sample(self, sample_bytes: int) -> None:
        self._sample_sizes.append(sample_bytes)

    @property
    def sample_bytes(self) -> int:
        """The bytes that a worker holds while it makes one sample: the largest recent sample, plus a quarter if sizes
        vary."""
        largest = max(self._sample_sizes)
        return largest if self.template is not None else largest * 5 // 4

    def expected_bytes(self, rows: int) -> int | None:
        """The size of the next batch if it has ``rows`` samples; None while no size is known."""
        text_bytes = self.text_row_bytes * rows
        if self.template is None:
            return max(self._sizes) + text_bytes if self._sizes else self._guess
        row_bytes = layout_of(self.template, rows).total_bytes
        # Rows and texts lie in two segments, and the size of each segment is rounded up.
        return capacity_for(row_bytes) + capacity_for(text_bytes) if text_bytes else row_bytes
