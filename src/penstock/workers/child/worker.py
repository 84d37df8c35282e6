"""A worker's main loop: it receives a task, fetches samples, writes them to their place and reports.

In:  messages from the trainer (``protocol``), the user's dataset and functions (``Setup``).
Out: rows in shared segments and ``Done`` messages.
Runs in: worker (a process, or a thread of the trainer).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch._utils import ExceptionWrapper

from penstock.arena.codec import Encoded, encode
from penstock.arena.layout import BatchLayout, RowWriter, layout_of
from penstock.arena.segment import Segment
from penstock.arena.segment_sizes import round_up
from penstock.arena.template import Template, learn
from penstock.workers import forecast_position
from penstock.workers.child.indexed_samples import IndexedSamples
from penstock.workers.child.kept_memory import KeptMemory
from penstock.workers.child.loans import Loans
from penstock.workers.child.mailbox import Dropped, Mailbox, StopReceived, WorkerEnd
from penstock.workers.child.private_memory import PrivateMemory
from penstock.workers.child.rows import Rows
from penstock.workers.child.views import Views
from penstock.workers.protocol import (
    NO_SEGMENT,
    Collate,
    Done,
    Fetch,
    KeepMemory,
    Learn,
    Need,
    Outcome,
    Restart,
    Resume,
    Room,
    Span,
    Started,
)
from penstock.workers.rng import get_generators, seed_collate, set_generators
from penstock.workers.setup import Setup, keeps_state, reseed_pipes

INLINE_BYTES = 16 << 10
"""Results up to this size travel inside their message."""
_STEP_BYTES = 256 << 10
_MOST_HELD_BYTES = 16 << 20
_LARGE_BYTES = 1 << 20
"""A worker measures its memory while it holds a result of this size."""


class WorkerLoop:
    """Does the tasks from one channel until the trainer asks it to stop."""

    def __init__(
        self,
        channel: WorkerEnd,
        setup: Setup,
        *,
        worker_id: int,
        where: str,
        segments: dict[int, Segment] | None = None,
        measure: PrivateMemory | None,
        kept: KeptMemory | None,
        trace_fd: int,
    ) -> None:
        """``where`` names this worker in errors; ``segments`` is the trainer's own table of segments if this worker is
        a thread."""
        self._setup = setup
        self._where = where
        self._trace_fd = trace_fd
        self._views = Views(worker_id, segments)
        self._mailbox = Mailbox(channel, self._views, where=where)
        self._measure = measure
        self._kept = kept
        self.loans = Loans(self._views)
        self._samples_done = 0
        self.template: Template | None = None
        self.chunk_bytes = setup.chunk_bytes
        self._iterator: Iterator[Any] | None = None
        self._read_rows = 0
        """The number of samples of an iterable dataset in the latest batch."""
        self._has_ended = False
        """Whether the iterator has raised StopIteration; a further next() might begin it again."""
        self._knows_size = setup.is_iterable
        """Whether the trainer has learnt the size of a batch; always true for streams, whose batches may have fewer
        rows than stated."""
        self._init_error: ExceptionWrapper | None = None
        self._collate_s = 0.0
        self._room = NO_SEGMENT
        """The segment of the current task, for encoded objects."""
        self._keeps_state = keeps_state(setup.dataset)
        self._indexed = IndexedSamples(setup, self._views, self._mailbox.send)

    def run(self, init: Callable[[], None], resume: Resume | None) -> None:
        """Set up with the user's ``init``, then work until asked to stop. Raises ChannelClosed if the trainer has
        ended."""
        with contextlib.suppress(StopReceived):
            self._serve(init, resume)

    def _serve(self, init: Callable[[], None], resume: Resume | None) -> None:
        try:
            init()
            self._begin_epoch(resume)
        except Exception:
            self._init_error = ExceptionWrapper(where=self._where)
        self._mailbox.send(Started(self._private_bytes(), self._trace_fd))
        while True:
            message = self._mailbox.next()
            if isinstance(message, Fetch):
                self._work(message, self._fetch)
            elif isinstance(message, Collate):
                self._work(message, self._collate)
            elif isinstance(message, Learn):
                self.template = message.template
            elif isinstance(message, KeepMemory):
                if self._kept is not None:
                    self._kept.allow(message.allowed)
            elif isinstance(message, Restart):
                self._restart(message)

    def _work(self, task: Any, job: Callable[[Any], Outcome]) -> None:
        began = time.perf_counter()
        place = self._views.place
        if place is not None:
            place.begin(task.task)
        self._collate_s = 0.0
        self._room = NO_SEGMENT if isinstance(task, Fetch) and task.by_template else task.segment
        samples_done = self._samples_done
        error: ExceptionWrapper | None = None
        if self._init_error is not None:
            outcome, error, self._init_error = Outcome("error"), self._init_error, None
        else:
            try:
                forecast_position.begin(task.forecast_position)
                outcome = job(task)
                if outcome.kind in ("object", "inline"):
                    outcome = outcome._replace(rows=self._read_rows)
            except Dropped:
                outcome = Outcome("dropped")
            except _Exhausted:
                outcome = Outcome("exhausted")
            except Exception:
                outcome, error = Outcome("error"), ExceptionWrapper(where=self._where)
            # After Ctrl-C or a Stop this is skipped: a sample may wait for hours.
            self._indexed.rest()
        # After the report, the segment belongs to the user or to another worker.
        self.loans.settle()
        spent_s = time.perf_counter() - began
        if place is not None:
            place.end()
        if self._samples_done == samples_done:
            self._sample_done()
        self._mailbox.say(
            Done(
                task=task.task,
                outcome=outcome,
                error=error,
                fetch_s=spent_s - self._collate_s,
                collate_s=self._collate_s,
                private_bytes=self._private_bytes(),
                memo=self._memo(),
                sent_s=time.monotonic(),
            )
        )

    def _private_bytes(self) -> int:
        # The figure is reported in coarse steps, because the trainer divides the memory anew after every change of it.
        return 0 if self._measure is None else round_up(self._measure.read_bytes(), _STEP_BYTES)

    # -- epochs -----------------------------------------------------------------------

    def _begin_epoch(self, resume: Resume | None = None) -> None:
        setup = self._setup
        if not setup.is_iterable:
            if resume is not None and resume.memo is not None:
                set_generators(resume.memo)
            return
        if resume is not None and resume.memo is not None:
            setup.dataset.load_state_dict(resume.memo)
        self._iterator, self._has_ended = iter(setup.dataset), False
        if resume is not None and resume.memo is None:
            self._read_past(resume.batches)

    def _read_past(self, batches: int) -> None:
        """Read and drop the samples that the predecessor had delivered."""
        for _ in range(batches):
            # A batch that raised an exception was delivered as this exception.
            with contextlib.suppress(Exception):
                # Samples are read one by one; otherwise a whole batch of samples would be held at a time.
                for _ in range(self._setup.batch_rows):
                    self._read(1)

    def _read(self, count: int) -> list[Any]:
        """The next ``count`` samples of the iterable dataset, or the remaining samples if there are fewer."""
        assert self._iterator is not None
        samples = [] if self._has_ended else list(itertools.islice(self._iterator, count))
        self._has_ended |= len(samples) < count
        return samples

    def _memo(self) -> Any:
        """The state that a successor needs to continue from here."""
        if self._setup.is_iterable:
            return self._stream_state()
        return get_generators() if self._setup.keeps_generators else None

    def _stream_state(self) -> Any:
        """The dataset's own state, if it keeps a state. After the first failure the dataset is not asked again: a
        successor reads past the delivered samples instead."""
        if not self._keeps_state:
            return None
        try:
            return self._setup.dataset.state_dict()
        except Exception:
            self._keeps_state = False
            return None

    def _restart(self, message: Restart) -> None:
        try:
            if message.shared_seed is not None:
                reseed_pipes(self._setup.dataset, message.shared_seed)
            self._begin_epoch()
        except Exception:
            self._init_error = ExceptionWrapper(where=self._where)

    # -- fetching ---------------------------------------------------------------------

    def _fetch(self, task: Fetch) -> Outcome:
        setup = self._setup
        if not setup.auto_collation:
            return self._finish(task, self._one_sample(task))
        if task.batch_rows == 0:
            return self._finish(task, [])
        if not setup.is_iterable and setup.fetches_whole_lists:
            self._indexed.at_row(0)
            self._indexed.seed(task, 0)
            found = setup.dataset.__getitems__(task.indices)
            if not setup.writes_rows or type(found) is not list or len(found) != task.batch_rows:
                return self._finish(task, found)
            return self._fetch_rows(task, found)
        if setup.writes_rows:
            return self._fetch_rows(task, None)
        # Samples are passed without a variable: a worker that waits for a segment must not hold samples that it has
        # encoded.
        return (
            self._finish(task, self._samples(task)) if task.alone else self._leave_part(task, None, self._samples(task))
        )

    def _samples(self, task: Fetch) -> list[Any]:
        self._knows_size |= task.segment != NO_SEGMENT or not task.alone
        samples: list[Any] = []
        for group in self._groups(task, None):
            samples += group
            if not self._knows_size:
                self._guess_by(group[0], task)
        if self._setup.is_iterable:
            self._check_not_exhausted(task, len(samples))
        return samples

    def _guess_by(self, sample: Any, task: Fetch) -> None:
        """Report the expected size of the batch, judged by one of its samples, so that the trainer can open more
        batches."""
        self._knows_size = True
        try:
            sample_bytes = encode(sample).total_bytes
        except Exception:
            return
        self.note_fullest()
        need_bytes = sample_bytes * task.batch_rows
        self._mailbox.ask(Need(task.task, need_bytes, None, self._private_bytes(), is_guess=True))

    def _fetch_rows(self, task: Fetch, found: list[Any] | None) -> Outcome:
        """Write samples into their rows as they come; samples that do not match the template are left to torch's
        collate."""
        ahead: list[list[Any]] = [[]]
        if self._setup.is_iterable and not task.by_template:
            ahead = [self._read_ahead(task)]
            if self._has_ended:
                self._check_not_exhausted(task, len(ahead[0]))
                return self._finish(task, ahead.pop())
        rows = Rows(self, task)
        strays: list[Any] = []
        for group in self._groups(task, rows, ahead) if found is None else [found]:
            strays += group if strays else rows.add(group)
            # Otherwise these samples stay in memory while the next samples are fetched.
            del group
            if found is None:
                self._sample_done()
        if not strays:
            strays = rows.flush()
        if self._setup.is_iterable:
            self._check_not_exhausted(task, rows.written + len(strays))
        if not strays:
            return rows.outcome()
        if task.alone:
            return self._finish(task, rows.as_samples() + strays)
        return self._leave_part(task, rows, strays)

    def _read_ahead(self, task: Fetch) -> list[Any]:
        """Read the first samples of a batch of an iterable dataset before room is requested. The room is for a whole
        batch, which may be many times larger than the dataset."""
        samples = self._read(1)
        template = learn(samples[0]) if samples else None
        whole_bytes = 0 if template is None else layout_of(template, task.batch_rows).total_bytes
        hold_bytes = min(_MOST_HELD_BYTES, self._setup.hold_bytes)
        if whole_bytes > hold_bytes:
            most = hold_bytes * task.batch_rows // whole_bytes
            while len(samples) < most and not self._has_ended:
                samples += self._read(1)
        return samples

    def _groups(self, task: Fetch, rows: Rows | None, ahead: list[list[Any]] | None = None) -> Iterator[list[Any]]:
        """Samples of the task in row order, a few small samples or one large sample at a time; each stretch of rows has
        its own seed. ``ahead``: a list that holds the samples of an iterable dataset that were read already; they are
        taken out of it."""
        lend_next = _lend_nothing if rows is None else rows.lend_next
        if self._setup.is_iterable:
            left = task.batch_rows
            if ahead and ahead[0]:
                left -= len(ahead[0])
                yield ahead.pop()
            while left and not self._has_ended:
                lend_next()
                group = [self._read(min(left, rows.group_rows if rows else left))]
                left -= len(group[0])
                yield group.pop()  # no reference may be left here when the samples have been written
            return
        yield from self._indexed.groups(task, self._most_at_once(task, rows), lend_next)

    def _most_at_once(self, task: Fetch, rows: Rows | None) -> Callable[[], int]:
        """A function that returns how many samples may be held at a time."""
        if task.careful:
            return lambda: 1
        if rows is not None:
            return lambda: rows.group_rows
        return lambda: len(task.indices) if self._knows_size else 1

    def _one_sample(self, task: Fetch) -> Any:
        if self._setup.is_iterable:
            found = self._read(1)
            self._read_rows = len(found)
            if not found:
                raise _Exhausted
            return found[0]
        self._indexed.at_row(0)
        self._indexed.seed(task, 0)
        return self._setup.dataset[task.indices]

    def _check_not_exhausted(self, task: Fetch, got: int) -> None:
        self._read_rows = got
        if got == 0 or (got < task.batch_rows and self._setup.drop_last):
            raise _Exhausted

    # -- results ----------------------------------------------------------------------

    def _finish(self, task: Fetch | Collate, samples: Any) -> Outcome:
        """Collate, and write the result to a segment or into the message."""
        began = time.perf_counter()
        if task.seed is not None and self._setup.auto_collation:
            seed_collate(task.seed)
        result = self._setup.collate_fn(samples)
        self._collate_s = time.perf_counter() - began
        encoded = encode(result)
        self.note_fullest(encoded.total_bytes)
        del samples
        if encoded.total_bytes <= INLINE_BYTES and encoded.pickled is not None:
            return Outcome("inline", pickled=encoded.as_bytes())
        del result
        segment = self._write(task, encoded)
        return Outcome("object", pickled=encoded.pickled, offsets=encoded.offsets, segment=segment,
                       used_bytes=encoded.total_bytes)  # fmt: skip

    def _leave_part(self, task: Fetch, rows: Rows | None, samples: list[Any]) -> Outcome:
        """Write samples, after rows already written, for the worker that collates the batch."""
        try:
            encoded = encode(samples, exactly=True)
        except Exception:
            return Outcome("cannot travel")
        self.note_fullest(encoded.total_bytes)
        del samples
        segment = self._write(task, encoded) if encoded.total_bytes else NO_SEGMENT
        part = Outcome("part", 0, [], encoded.pickled, encoded.offsets, segment, NO_SEGMENT, encoded.total_bytes)
        if rows is None or not rows.written:
            return part
        return part._replace(rows=rows.written, texts=rows.texts, rows_segment=rows.segment)

    def _write(self, task: Fetch | Collate, encoded: Encoded) -> int:
        """Copy encoded buffers into the task's segment, or into a segment requested now."""
        if self._views.capacity_bytes(self._room) < encoded.total_bytes:
            self._ask(task.task, encoded.total_bytes, None)
        encoded.write(self._views.all_of(self._room))
        return self._room

    def _collate(self, task: Collate) -> Outcome:
        # Parts may be views of shared rows. The result of collation is encoded again, so no view leaves the worker.
        return self._finish(task, [sample for part in task.parts for sample in self._views.samples_of(part)])

    # -- what rows need (``RowKeeper``) -------------------------------------------------

    def array(self, number: int) -> np.ndarray:
        return self._views.array(number)

    def writer(self, number: int, layout: BatchLayout, rows: range) -> RowWriter:
        return self._views.writer(number, layout, rows)

    def bytes_of(self, span: Span) -> np.ndarray:
        return self._views.bytes_of(span)

    def ask_for_rows(self, task: int, template: Template, batch_rows: int) -> Room:
        return self._ask(task, layout_of(template, batch_rows).total_bytes, template)

    def ask_for_texts(self, task: int, need_bytes: int) -> int:
        return self._ask(task, need_bytes, None).segment

    def _ask(self, task: int, need_bytes: int, template: Template | None) -> Room:
        self.note_fullest()
        room = self._mailbox.ask(Need(task, need_bytes, template, self._private_bytes()))
        # The trainer took back the room that the task had before.
        self._room = NO_SEGMENT if template is not None else room.segment
        return room

    def _sample_done(self) -> None:
        """Note that some or all samples of a task were written and dropped: their memory is free."""
        self._samples_done += 1
        self.loans.settle()
        if self._kept is not None:
            self._kept.sample_done()

    def note_fullest(self, held_bytes: int = 0) -> None:
        """Note that this worker holds the most memory now; at least ``held_bytes`` of it are known."""
        if self._measure is not None:
            self._measure.note_fullest(sure=held_bytes >= _LARGE_BYTES)


def _lend_nothing() -> None: ...


class _Exhausted(Exception):
    """The iterable dataset has no more samples for this worker."""
