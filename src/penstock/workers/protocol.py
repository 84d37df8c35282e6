"""The messages between trainer and workers. Read this file first: it contains the whole protocol.

In:  nothing.
Out: message types.
Runs in: both.

    trainer                                   worker
    -------                                   ------
                                        <--   Started           set up; an error in set-up is sent with the first task
    Attach / Detach                     -->                     map or unmap a segment
    Learn                               -->                     the template of samples, until the next Learn
    Fetch                               -->                     get these samples
                                        <--   Need              (if the segment is too small or there is none)
    Room                                -->                     the segment, or the order to drop the samples (see DROP)
                                        <--   Notice            (at most once) a warning for the user
                                        <--   Done              rows written, object encoded, error, or exhausted
    Collate                             -->                     make one batch of samples that other workers fetched
                                        <--   Need / Done
    KeepMemory                          -->                     keep the memory of samples, or return it to the system
    Restart                             -->                     next epoch of a persistent worker
    Stop                                -->                     exit

Every worker has its own channel and answers in order. Messages are named tuples and not dataclasses, because messages
travel for every batch, and tuples take a third of the time of dataclasses; ``channel`` says in which form they travel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.arena.template import Template

NO_SEGMENT = -1
DROP = -2
"""Stands in place of a segment: the worker drops the samples, because another batch is due first."""


class Resume(NamedTuple):
    """The point from which a worker's replacement continues, if batches belong to workers in turn."""

    batches: int
    """The number of batches that the predecessor had finished in this epoch; an iterable dataset is read past them."""
    memo: Any
    """The state after the last of these batches: of the generators under seeding="worker", of the dataset if it has a
    state."""


class Attach(NamedTuple):
    """Map a segment. If segments have descriptors, the segment's descriptor travels with the message."""

    number: int
    capacity_bytes: int
    name: str | None


class Detach(NamedTuple):
    """Unmap a segment; no later message refers to this segment."""

    number: int


class Learn(NamedTuple):
    """The template to use for every later ``Fetch`` with ``by_template``."""

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
    """The sampler's indices of these rows; for iterable datasets a count; without auto-collation one index."""
    first_row: int
    batch_rows: int
    """The length of the whole batch. If it equals the number of indices, this task covers the whole batch."""
    seed: int | None
    """The batch's seed, from which the seeds of rows and of collation are derived; None if nothing is seeded."""
    forecast_position: int
    """The batch's position in its loader's forecast, for a cache; 0 without a forecast."""
    segment: int
    """The segment to write to. If it is NO_SEGMENT, the worker fetches first and then asks with ``Need``."""
    by_template: bool
    """Whether rows are written to ``segment`` by the latest template; otherwise ``segment`` is room for encoded
    objects."""
    alone: bool
    """Whether this worker builds the whole batch, collation included."""
    text_room: Span | None
    """Where to write the texts of these rows; None if the length is unknown or texts are short."""
    careful: bool
    """Whether a worker crashed at these rows before. If so, samples are fetched one at a time, so that the board names
    the sample."""


class Collate(NamedTuple):
    """Collate parts, which lie in segments, into one batch."""

    task: int
    parts: tuple[Part, ...]
    seed: int | None
    segment: int
    forecast_position: int


class Part(NamedTuple):
    """Samples of consecutive rows, fetched by one worker."""

    segment: int
    rows: range
    """Rows of the batch that lie in ``segment``, laid out by ``template``."""
    batch_rows: int
    template: Template | None
    texts: list[list[Any]]
    text_span: Span | None
    """Where the encoded texts lie, if they are not in ``texts``."""
    pickled: bytes | None
    """The encoded samples that follow ``rows``; their buffers are in ``extra_segment``."""
    offsets: list[tuple[int, int]]
    extra_segment: int


class Room(NamedTuple):
    """Answer to ``Need``: a segment to write to (NO_SEGMENT if nothing needs writing), or DROP."""

    task: int
    segment: int
    template: Template | None


class KeepMemory(NamedTuple):
    """Whether the budget has room for memory that the worker keeps from one sample for the next; at first it has
    no room. If it has no room, the worker returns the kept memory at once."""

    allowed: bool


class Restart(NamedTuple):
    """Begin the next epoch with a new fetcher, without seeding the generators again."""

    shared_seed: int | None


class Stop(NamedTuple):
    """Exit now."""


class Started(NamedTuple):
    """The worker is ready for work."""

    private_bytes: int
    trace_fd: int
    """The descriptor in the worker to which its stack is written on request (``stack_dump``); -1 if that is
    impossible."""


class Need(NamedTuple):
    """The worker holds samples and needs a segment for them."""

    task: int
    need_bytes: int
    template: Template | None
    """The template by which rows are laid out; None if encoded objects are to be written."""
    private_bytes: int
    """The private memory as in ``Done``, including the samples that the worker holds."""
    is_guess: bool = False
    """Whether this is only an estimate of the batch's need from its first sample; the answer then gives no segment."""


class Notice(NamedTuple):
    """A warning that the user gets once."""

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
    """The most private memory that the worker had since its last report; 0 if it was not measured since then."""
    memo: Any
    """The state that a replacement needs to continue from here (see ``Resume``); None unless batches belong to workers
    in turn."""
    sent_s: float = 0.0
    """When the message was sent, on the monotonic clock, which all processes of a machine share."""


class Outcome(NamedTuple):
    """The result of a task."""

    kind: str
    """The kind of result. "rows": rows written by the template; "part": samples to collate; "object": an encoded batch;
    "inline": a batch in ``pickled``; "exhausted", "error", "dropped", "cannot travel": nothing."""
    rows: int = 0
    """The number of rows written by the template; for a batch of an iterable dataset, the number of samples in it."""
    texts: list[list[Any]] = []  # noqa: RUF012  (never mutated: pickle rebuilds messages on the other side)
    pickled: bytes | None = None
    offsets: list[tuple[int, int]] = []  # noqa: RUF012
    segment: int = NO_SEGMENT
    """The segment that holds the encoded buffers, or the rows if the kind is "rows"."""
    rows_segment: int = NO_SEGMENT
    """The segment in which rows lie, if there are rows."""
    used_bytes: int = 0
    text_span: Span | None = None
    """Where the encoded texts of the rows lie; short texts are in ``texts``."""
    text_bytes: int = 0
    """The length of the texts of the rows, wherever the texts lie."""

    @property
    def segments(self) -> set[int]:
        """Every segment that the result refers to."""
        spans = () if self.text_span is None else (self.text_span.segment,)
        return {self.segment, self.rows_segment, *spans}
