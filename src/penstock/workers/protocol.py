"""What trainer and workers say to each other. Read this first: it is the whole protocol.

In:  nothing.
Out: message types.
Runs in: both.

    trainer                                   worker
    -------                                   ------
                                        <--   Started           set up; an error in that comes with the first task
    Attach / Detach                     -->                     map or unmap a segment
    Learn                               -->                     what samples look like, until further notice
    Fetch                               -->                     get these samples
                                        <--   Need              (when the given room is too small or none was given)
    Room                                -->                     here it is; or drop the samples, somebody is due first
                                        <--   Done              rows written, object encoded, error, or exhausted
    Collate                             -->                     make one batch of samples that others fetched
                                        <--   Need / Done
    Restart                             -->                     next epoch of a persistent worker
    Stop                                -->                     leave

Every worker has a channel of its own and answers in order. Messages are named tuples rather than dataclasses
because they are pickled for every batch, and tuples cost a third.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.arena.template import Template

NO_SEGMENT = -1
DROP = -2
"""Instead of a segment: forget the samples, somebody is due first."""


class Resume(NamedTuple):
    """Where a worker's successor goes on, when batches belong to workers in turn."""

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
    """Unmap a segment; nobody will mention it again."""

    number: int


class Learn(NamedTuple):
    """What samples look like, for every ``Fetch`` from now on that goes by template."""

    template: Template


class Fetch(NamedTuple):
    """Get samples and put them where they belong."""

    task: int
    indices: Any
    """Sampler indices of these rows; a count for iterable datasets; one index without auto-collation."""
    first_row: int
    batch_rows: int
    """Length of the whole batch; this task covers it alone when it equals the number of its indices."""
    seed: int | None
    """The batch's own seed, from which rows and collation derive theirs; None leaves the generators alone."""
    forecast_position: int
    """Where in its loader's plan the batch is, for a cache; 0 if there is none."""
    segment: int
    """Where to write, or NO_SEGMENT: fetch first, then ask with ``Need``."""
    by_template: bool
    """Whether rows lie in ``segment`` by the template last learnt; otherwise it is room for encoded objects."""
    alone: bool
    """Whether this worker builds the whole batch, collation included."""
    careful: bool
    """Whether somebody died here before: one sample at a time, so that the board names the one."""


class Collate(NamedTuple):
    """Make one batch of parts that are lying in segments."""

    task: int
    parts: tuple[Part, ...]
    seed: int | None
    segment: int
    forecast_position: int


class Part(NamedTuple):
    """Samples of consecutive rows, as one worker left them."""

    segment: int
    rows: range
    """Rows of the batch that lie in ``segment`` by ``template``."""
    batch_rows: int
    template: Template | None
    texts: list[list[Any]]
    pickled: bytes | None
    """Samples after those rows, encoded; their buffers are in ``extra_segment``."""
    offsets: list[tuple[int, int]]
    extra_segment: int


class Room(NamedTuple):
    """Answer to ``Need``: a segment to write to (NO_SEGMENT if nothing needs writing), or DROP."""

    task: int
    segment: int
    template: Template | None


class Restart(NamedTuple):
    """Begin the next epoch: a fresh fetcher, the generators as they are."""

    shared_seed: int | None


class Stop(NamedTuple):
    """Leave now."""


class Started(NamedTuple):
    """The worker is ready for work."""

    private_bytes: int
    trace_fd: int
    """Where its stack is written when asked for (``trace``), in its own numbering; -1 if it cannot be."""


class Need(NamedTuple):
    """The worker holds samples and wants a segment for them."""

    task: int
    need_bytes: int
    template: Template | None
    """Set when rows are to be laid out by it; None when encoded objects are to be written."""
    private_bytes: int
    """As in ``Done``, with the samples that wait."""


class Done(NamedTuple):
    """A task came to rest."""

    task: int
    outcome: Outcome
    error: Any
    """ExceptionWrapper, or None."""
    fetch_s: float
    collate_s: float
    private_bytes: int
    """Private memory of the worker at its recent fullest, 0 if not measured since."""
    memo: Any
    """What a successor needs to go on from here, where order matters: see ``Resume``. None elsewhere."""


class Outcome(NamedTuple):
    """What a task left behind."""

    kind: str
    """rows: written by template; part: samples to collate; object: a batch, encoded; inline: a batch, in ``pickled``;
    exhausted, error, dropped, "cannot travel": nothing."""
    rows: int = 0
    """Rows written by the template."""
    texts: list[list[Any]] = []  # noqa: RUF012  (never mutated: messages are rebuilt by pickle on the other side)
    pickled: bytes | None = None
    offsets: list[tuple[int, int]] = []  # noqa: RUF012
    segment: int = NO_SEGMENT
    """Where encoded buffers lie; for rows, where those are."""
    rows_segment: int = NO_SEGMENT
    """Where rows lie, if any."""
    used_bytes: int = 0
