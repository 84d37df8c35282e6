"""The file format of a recorded run: its tables, how points are packed, how old points are thinned. Read this first.

In:  nothing.
Out: the schema; ``Point``, ``Note``, ``Alert``, ``RunOutcome``, ``TriedSettings``; ``pack``, ``unpack``; ``THINNING``.
Runs in: trainer (writes), command line (reads).

Each run has one SQLite file, ``<home>/runs/<id>.sqlite``, and a file ``<id>.alive``, which the writer keeps locked
while it is alive. Writers of different runs share nothing. No text of a user is part of a path: the run's name is a
fact.

    facts           description of the run, as JSON by name; see ``FACTS``
    figures         names of the figures in a point's body, by position
    points          figures over time: end of the span in milliseconds, span in seconds, body
    journal         what was changed and what happened: time, source, kind, sentence, details as JSON
    alerts          alerts raised and cleared: time, rule, state, sentence, details as JSON
    configurations  results of each configuration of each loader, for comparing
    totals          figures of the whole run so far, by name
    outcome         one row after the run has ended: finished, failed, killed

A point's body has one 8-byte float per figure in the order of ``figures``, NaN where the value is unknown. Figures may
be added during a run; bodies written earlier are shorter. The format is compact because a week of JSON takes 100 MB.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

FORMAT = 1
"""The version of the format, which increases when older readers would misread a file."""

SUFFIX, ALIVE_SUFFIX = ".sqlite", ".alive"

MOST_ENTRIES = 5000
"""The most entries of the journal, and the most alerts; the oldest are deleted first."""
LONGEST_TEXT = 2000
"""The most characters of an entry's sentence."""
LONGEST_NAME = 20_000
"""The most characters of a run's name: names of ten kilobytes are kept whole."""

FACTS = {
    "format": "format of this file",
    "id": "id of the run, and the name of its file",
    "name": "the user's name for the run; any text",
    "started_s": "start of the run, seconds since 1970",
    "pid": "process id of the training",
    "process_started_s": "start of the process with this id, because process ids are reused",
    "host": "host name",
    "boot_id": "the kernel's id of this boot; the host name on platforms without one",
    "user": "user id",
    "command": "command line as a list, secrets replaced",
    "folder": "working directory",
    "python": "versions of Python, torch, penstock",
    "machine": "the meter's Limits of this machine or container",
    "gpus": "names, ids and memory of the GPUs, in the order of gpu.N",
    "rank": "rank, local_rank, world_size under torchrun and similar launchers; else null",
    "loaders": "name, kind and arguments of each loader at the start, in the order of loader.N",
    "tree_measure": "how tree_bytes is measured: pss (each page divided by the number of processes that map it) or rss",
    "every": "steps between log lines",
    "warn_at": "share of the memory limit at which a warning is logged",
    "socket": "path of the control socket; null: it could not be created",
}
"""Name -> meaning. A reader must work if any of these facts is missing."""

SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE figures (place INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE points (t_ms INTEGER PRIMARY KEY, span_s REAL NOT NULL, body BLOB NOT NULL);
CREATE TABLE journal (
    number INTEGER PRIMARY KEY, t_s REAL NOT NULL, who TEXT NOT NULL, kind TEXT NOT NULL, what TEXT NOT NULL,
    details TEXT NOT NULL);
CREATE TABLE alerts (
    number INTEGER PRIMARY KEY, t_s REAL NOT NULL, rule TEXT NOT NULL, state TEXT NOT NULL, what TEXT NOT NULL,
    details TEXT NOT NULL);
CREATE TABLE configurations (
    key TEXT PRIMARY KEY, loader INTEGER NOT NULL, configuration TEXT NOT NULL, began_s REAL NOT NULL,
    ended_s REAL NOT NULL, active_s REAL NOT NULL, samples REAL NOT NULL, wait_s REAL NOT NULL,
    peak_bytes REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE totals (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE outcome (only INTEGER PRIMARY KEY CHECK (only = 1), state TEXT NOT NULL, t_s REAL NOT NULL, what TEXT);
"""

TOTALS = {
    "t_s": "time of the last write",
    "step": "training steps so far",
    "samples": "samples delivered so far, by all loaders",
    "active_s": "time during which a loader was being iterated",
    "wait_s": "part of active_s in which the training loop waited for data",
    "peak_tree_bytes": "peak memory of the process tree",
    "peak_used_bytes": "peak memory in use within the limit",
    "worker_restarts": "workers that crashed and were replaced",
}
"""Name -> meaning."""


class ThinningStep(NamedTuple):
    """Points older than ``after_s`` are merged into one point per ``step_s``."""

    after_s: float
    step_s: float


THINNING = (
    ThinningStep(600, 10),
    ThinningStep(3 * 3600, 60),
    ThinningStep(24 * 3600, 600),
    ThinningStep(30 * 24 * 3600, 3600),
)
"""One point per second for ten minutes, per 10 s for three hours, per minute for a day, per 10 minutes for a month,
then per hour: 8,000 points after a month, 9,000 more each year."""


class Point(NamedTuple):
    """The figures of one span of time."""

    t_s: float
    """End of the span, seconds since 1970."""
    span_s: float
    """The length of the span, in seconds."""
    figures: dict[str, float]
    """Values by the names in ``figures``; unknown values are absent."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """An entry of the journal."""

    t_s: float
    who: str
    """training (the user's own code), terminal, page, governor, alert, loader, monitor."""
    kind: str
    """moment, resize, memory, cache, restart, decision, action (of an alert), warning, start, end."""
    what: str
    """A sentence for people; may contain text of the user."""
    details: dict[str, Any] = field(default_factory=dict)
    number: int = 0
    """Increases by one with every entry of the run."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """An alert that was raised or cleared."""

    t_s: float
    rule: str
    """memory, tree, swap, stall, gpu-idle or restarts."""
    state: Literal["raised", "cleared"]
    what: str
    details: dict[str, Any] = field(default_factory=dict)
    """Value, threshold and actions."""
    number: int = 0


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended."""

    state: Literal["finished", "failed", "killed"]
    t_s: float
    """When the run ended; for a killed run, the time of its last write."""
    what: str | None = None
    """The exception of a failed run."""


@dataclass(frozen=True, kw_only=True)
class TriedSettings:
    """One configuration of one loader, with its results so far."""

    loader: int
    """Number of the loader."""
    configuration: dict[str, Any]
    """workers, depth, prefetch_factor, memory, batch_size, cache_bytes, as set by the user or a valve; None: unset."""
    began_s: float
    ended_s: float
    """The first and the last time at which the configuration was in force."""
    active_s: float
    """Time during which the loader was being iterated."""
    samples: float
    wait_s: float
    peak_bytes: float
    """Peak memory of the process tree during the active time."""

    @property
    def samples_per_s(self) -> float | None:
        return self.samples / self.active_s if self.active_s > 0 and self.samples else None

    @property
    def wait_fraction(self) -> float | None:
        return min(1.0, self.wait_s / self.active_s) if self.active_s > 0 else None


def pack(figures: Mapping[str, float], places: Mapping[str, int]) -> bytes:
    """The bytes of a point's figures; ``places`` gives the place of every figure by its name."""
    body = array("d", [math.nan]) * len(places)
    for name, value in figures.items():
        body[places[name]] = value
    return body.tobytes()


def unpack(body: bytes, names: Sequence[str]) -> dict[str, float]:
    """The figures of a body, without the figures that were added to the run later."""
    values = array("d")
    values.frombytes(body[: len(body) // 8 * 8])
    return {name: value for name, value in zip(names, values, strict=False) if value == value}
