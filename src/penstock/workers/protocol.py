"""The messages between trainer and workers. Read this file first: it is the whole protocol.

In:  nothing.
Out: message types.
Runs in: both.

    trainer                                   worker
    -------                                   ------
                                        <--   Started           set up; an error in that is sent with the first task
    Attach / Detach                     -->                     map or unmap a segment
    Learn                               -->                     the template of samples, until the next Learn
    Fetch                               -->                     get these samples
                                        <--   Need              (if the segment is too small or there is none)
    Room                                -->                     the segment; or drop the samples (see DROP)
                                        <--   Notice            (at most once) a warning for the user
                                        <--   Done              rows written, object encoded, error, or exhausted
    Collate                             -->                     make one batch of samples that other workers fetched
                                        <--   Need / Done
    KeepMemory                          -->                     keep the memory of samples, or return it to the system
    Restart                             -->                     next epoch of a persistent worker
    Stop                                -->                     exit

Every worker has its own channel and answers in order. Messages are named tuples and not dataclasses, because they are
pickled for every batch and tuples take a third of the time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.arena.template import Template

NO_SEGMENT = -1
DROP = -2
"""Instead of a segment: drop the samples, because another batch is due first."""


class Resume(NamedTuple):
    """The point from which a worker's replacement continues, where batches belong to workers in turn."""

    batches: int
    """Batches its predecessor had finished in this epoch: an iterable dataset is read past them."""
    memo: Any
    """State after the last of them: the generators' under seeding="worker", the dataset's own where it keeps one."""


class Attach(NamedTuple):
    """Map a segment. Its descriptor travels with the message where segments have one."""

    number: int
    capacity_bytes: int
    name: str | None


class Detach(NamedTuple):
    """Unmap a segment; no later message refers to it."""

    number: int


class Learn(NamedTuple):
    """The template for every later ``Fetch`` with ``by_template``."""

    template: Template


class Span(NamedTuple):
    """Bytes of a segment."""

    segment: int
    start: int
    end: int


class Fetch(NamedTuple):
    """Fetch samples and write them to their place."""

    task: int
    indices: Any
    """Sampler indices of these rows; a count for iterable datasets; one index without auto-collation."""
    first_row: int
    batch_rows: int
    """Length of the whole batch. If it equals the number of indices, this task covers the whole batch."""
    seed: int | None
    """The batch's seed, from which the seeds of its rows and of collation are derived; None: do not seed."""
    forecast_position: int
    """The batch's position in its loader's forecast, for a cache; 0 without a forecast."""
    segment: int
    """Where to write, or NO_SEGMENT: fetch first, then ask with ``Need``."""
    by_template: bool
    """Whether rows are written to ``segment`` by the last template; otherwise ``segment`` is room for encoded
    objects."""
    alone: bool
    """Whether this worker builds the whole batch, collation included."""
    text_room: Span | None
    """Where to write the texts of these rows, if it is known how long texts are."""
    careful: bool
    """Whether a worker crashed at these rows before: fetch one sample at a time, so that the board names the sample."""


class Collate(NamedTuple):
    """Collate parts, which lie in segments, to one batch."""

    task: int
    parts: tuple[Part, ...]
    seed: int | None
    segment: int
    forecast_position: int


class Part(NamedTuple):
    """Samples of consecutive rows, fetched by one worker."""

    segment: int
    rows: range
    """Rows of the batch that lie in ``segment`` by ``template``."""
    batch_rows: int
    template: Template | None
    texts: list[list[Any]]
    text_span: Span | None
    """Where the texts lie, encoded, instead of in ``texts``."""
    pickled: bytes | None
    """Samples after those rows, encoded; their buffers are in ``extra_segment``."""
    offsets: list[tuple[int, int]]
    extra_segment: int


class Room(NamedTuple):
    """Answer to ``Need``: a segment to write to (NO_SEGMENT if nothing needs writing), or DROP."""

    task: int
    segment: int
    template: Template | None


class KeepMemory(NamedTuple):
    """Whether the budget has room for memory that the worker keeps from one sample for the next; at first it has not.

    If not, the worker returns what it keeps at once.
    """

    allowed: bool


class Restart(NamedTuple):
    """Begin the next epoch: with a new fetcher, and without seeding the generators again."""

    shared_seed: int | None


class Stop(NamedTuple):
    """Exit now."""


class Started(NamedTuple):
    """The worker is ready for work."""

    private_bytes: int
    trace_fd: int
    """The worker's descriptor that its stack is written to on request (``stack_dump``); -1 if that is impossible."""


class Need(NamedTuple):
    """The worker holds samples and needs a segment for them."""

    task: int
    need_bytes: int
    template: Template | None
    """The template to lay rows out by; None if encoded objects are to be written."""
    private_bytes: int
    """As in ``Done``, including the samples it holds."""
    is_guess: bool = False
    """Whether this is only what the batch will need judging by its first sample; the answer gives no segment."""


class Notice(NamedTuple):
    """Something the user should be told once."""

    text: str


class Done(NamedTuple):
    """A task has ended."""

    task: int
    outcome: Outcome
    error: Any
    """ExceptionWrapper, or None."""
    fetch_s: float
    collate_s: float
    private_bytes: int
    """The most private memory the worker had since its last report; 0 if it was not measured since."""
    memo: Any
    """What a replacement needs to continue from here, where order matters: see ``Resume``. Otherwise None."""
    sent_s: float = 0.0
    """When it was sent, on the monotonic clock, which all processes of a machine share."""


class Outcome(NamedTuple):
    """What a task left behind."""

    kind: str
    """rows: written by template; part: samples to collate; object: a batch, encoded; inline: a batch, in ``pickled``;
    exhausted, error, dropped, "cannot travel": nothing."""
    rows: int = 0
    """Rows written by the template; of a batch of an iterable dataset, the samples that it was made of."""
    texts: list[list[Any]] = []  # noqa: RUF012  (never mutated: messages are rebuilt by pickle on the other side)
    pickled: bytes | None = None
    offsets: list[tuple[int, int]] = []  # noqa: RUF012
    segment: int = NO_SEGMENT
    """The segment of encoded buffers; for rows, the segment of the rows."""
    rows_segment: int = NO_SEGMENT
    """Where rows lie, if any."""
    used_bytes: int = 0
    text_span: Span | None = None
    """Where the texts of the rows lie, encoded; short ones are in ``texts``."""
    text_bytes: int = 0
    """How long the texts of the rows are, wherever they are."""

    @property
    def segments(self) -> set[int]:
        """Every segment that it refers to."""
        spans = () if self.text_span is None else (self.text_span.segment,)
        return {self.segment, self.rows_segment, *spans}
