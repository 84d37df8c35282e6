"""One worker as the dispatcher sees it: what it has in hand, what it knows.

In:  tasks and segments for the worker.
Out: messages on its line.
Runs in: trainer, under the engine's lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.arena.segment import Segment
from penstock.arena.template import Template
from penstock.loader.engine.batch import Batch
from penstock.workers.protocol import DROP, Learn, Need, Resume, Room
from penstock.workers.worker import Worker

_FROM_THE_START = Resume(0, None)


@dataclass(eq=False)
class Task:
    """Work handed to one worker."""

    number: int
    batch: Batch
    rows: range | None
    """Rows to fetch; None to collate the batch."""
    handed_s: float
    """When it was handed out, on the monotonic clock."""
    need: Need | None = None
    """What its worker waits for an answer to."""
    room: Segment | None = None
    """Segment for what this task encodes, its own until used."""
    private_bytes: int = 0
    """What its worker will take for itself meanwhile, beyond one sample, as far as can be told beforehand."""

    @property
    def indices(self) -> Any:
        """What the sampler asked for in these rows."""
        return self.batch.indices if self.rows is None else self.batch.indices_of(self.rows)


@dataclass(eq=False)
class Seat:
    """One worker's place. When the worker dies, another takes a new seat."""

    handle: Worker
    tasks: dict[int, Task] = field(default_factory=dict)
    exhausted: bool = False
    """Whether its copy of an iterable dataset has nothing more to give this epoch."""
    resume: Resume = _FROM_THE_START
    """Where a successor would go on, when batches belong to workers in turn."""
    leaving: bool = False
    """Whether it gets no further work and goes once it has none."""
    has_unsent: bool = False
    """Whether its socket is full and being watched for room."""
    base_bytes: int = 0
    """Its worker's private memory before any work."""
    rows_done: int = 0
    """Samples its worker has fetched."""
    ending: str = ""
    """How its worker died, in words; empty while it lives."""

    def will_take(self, fetch_bytes: int) -> int:
        """Private memory to count on: as much as it was measured to take, or what its tasks are going to take."""
        ahead = max((task.private_bytes for task in self.tasks.values()), default=0)
        return max(self.handle.private_bytes, self.base_bytes + max(fetch_bytes, ahead))

    def show(self, segment: Segment) -> None:
        """Make sure the worker has the segment mapped."""
        if not self.handle.has_attached(segment.number):
            self.handle.attach(segment)

    def teach(self, template: Template) -> None:
        """Make sure the worker goes by this template."""
        if self.handle.template is not template:
            self.handle.template = template
            self.handle.post(Learn(template))

    def drop(self, task: Task) -> None:
        """Tell the worker, who is waiting for room, to forget the samples it holds."""
        task.need = None
        self.handle.post(Room(task.number, DROP, None))
