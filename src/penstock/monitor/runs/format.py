"""The file a run is recorded in: its tables, how points are packed, how old ones thin out. Read this first.

In:  nothing.
Out: the schema; ``Point``, ``Note``, ``Alert``, ``RunOutcome``; ``pack`` and ``unpack``; ``THINNING``.
Runs in: trainer (writes), command line (reads).

One SQLite file per run, ``<home>/runs/<id>.sqlite``, and beside it ``<id>.alive``, which the writer holds locked while
it lives. Writers of different runs never meet. Nothing a user wrote is part of a path: the run's name is a fact.

    facts           what a run is, as JSON by name; see ``FACTS``
    figures         names of the figures in a point's body, by place
    points          figures over time: when (milliseconds, end of the time it stands for), seconds it stands for, body
    journal         what was done to the run and what happened to it: when, who, kind, in words, details as JSON
    alerts          alerts raised and cleared: when, which rule, state, in words, details as JSON
    configurations  what each configuration tried of each loader has achieved, for comparing
    totals          figures over the whole run so far, by name
    outcome         one row once the run has ended: finished, failed, killed

A point's body is one 8-byte float per figure in the order of ``figures``, NaN for what was not known; figures may be
added while a run goes on, and bodies written before that are shorter. Compact, because a week of JSON is 100 MB.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

FORMAT = 1
"""Goes up when older readers would misread a file."""

SUFFIX, ALIVE_SUFFIX = ".sqlite", ".alive"

MOST_ENTRIES = 5000
"""Of the journal, and of the alerts: the oldest go first."""
LONGEST_TEXT = 2000
"""Characters of an entry's words."""
LONGEST_NAME = 20_000
"""Characters of a run's name: ten kilobytes are kept as they are."""

FACTS = {
    "format": "of this file",
    "id": "of the run; its file's name",
    "name": "what the user calls it; any text",
    "started_s": "when it began, seconds since 1970",
    "pid": "process id of the training",
    "process_started_s": "when that process began: ids are used again",
    "host": "host name",
    "boot_id": "the kernel's own id of this boot; the host name where there is none",
    "user": "number of the user",
    "command": "command line, as a list, with what looks like a secret taken out",
    "folder": "working directory",
    "python": "versions of Python, torch, penstock",
    "machine": "what this machine allows: the meter's Limits",
    "gpus": "names, ids and memory of the GPUs, in the order of gpu.N",
    "rank": "rank, local_rank, world_size, under torchrun and its like; else null",
    "loaders": "one per loader, in the order of loader.N: name, what it is, its arguments at the start",
    "tree_measure": "how tree_bytes is taken: pss (each page divided by those who map it) or rss",
    "every": "steps between log lines",
    "warn_at": "share of the memory limit the warning comes at",
    "socket": "path of the control socket; null: none could be made",
}
"""Name -> what it says. A reader must do without any of them."""

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
    "t_s": "when anything was last written",
    "step": "training steps so far",
    "samples": "samples handed out so far, by all loaders",
    "active_s": "time in which a loader was being read",
    "wait_s": "of that, time the training loop waited for data",
    "peak_tree_bytes": "most memory of the process tree",
    "peak_used_bytes": "most memory in use of the limit",
    "worker_restarts": "workers that died and were started again",
}
"""Name -> what it says."""


class ThinningStep(NamedTuple):
    """Points older than ``after_s`` are made one for each ``step_s``."""

    after_s: float
    step_s: float


THINNING = (
    ThinningStep(600, 10),
    ThinningStep(3 * 3600, 60),
    ThinningStep(24 * 3600, 600),
    ThinningStep(30 * 24 * 3600, 3600),
)
"""Every second for ten minutes, every 10 s for three hours, every minute for a day, every 10 minutes for a month, and
then every hour: 8,000 points in a month, 9,000 more in each year."""


class Point(NamedTuple):
    """The figures of one stretch of time."""

    t_s: float
    """When it ends, seconds since 1970."""
    span_s: float
    """How long it is."""
    figures: dict[str, float]
    """By name; see ``figures``. What was not known is not there."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """An entry of the journal."""

    t_s: float
    who: str
    """training (the user's own code), terminal, page, governor, alert, loader, monitor."""
    kind: str
    """moment, resize, memory, cache, restart, decision, action (of an alert), warning, start, end."""
    what: str
    """In words, for people; may hold text of the user's."""
    details: dict[str, Any] = field(default_factory=dict)
    number: int = 0
    """Goes up by one with every entry of the run."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """An alert that was raised or cleared."""

    t_s: float
    rule: str
    """Which threshold: memory, swap, stall, gpu-idle, restarts, ..."""
    state: Literal["raised", "cleared"]
    what: str
    details: dict[str, Any] = field(default_factory=dict)
    """Value, threshold, action taken and what came of it."""
    number: int = 0


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended."""

    state: Literal["finished", "failed", "killed"]
    t_s: float
    """When; of a killed one, when it was last heard of."""
    what: str | None = None
    """Of a failed one, the exception."""


@dataclass(frozen=True, kw_only=True)
class TriedSettings:
    """What one configuration of one loader has achieved so far in a run."""

    loader: int
    """Which of the run's loaders."""
    configuration: dict[str, Any]
    """workers, depth, prefetch_factor, memory, batch_size, cache_bytes: what the user or a valve set; None: unset."""
    began_s: float
    ended_s: float
    """When it was first and last in force."""
    active_s: float
    """Time in which the loader was being read."""
    samples: float
    wait_s: float
    peak_bytes: float
    """Most memory of the process tree meanwhile."""

    @property
    def samples_per_s(self) -> float | None:
        return self.samples / self.active_s if self.active_s > 0 and self.samples else None

    @property
    def wait_fraction(self) -> float | None:
        return min(1.0, self.wait_s / self.active_s) if self.active_s > 0 else None


def pack(figures: Mapping[str, float], places: Mapping[str, int]) -> bytes:
    """A point's body; every name has a place."""
    body = array("d", [math.nan]) * len(places)
    for name, value in figures.items():
        body[places[name]] = value
    return body.tobytes()


def unpack(body: bytes, names: Sequence[str]) -> dict[str, float]:
    """The figures of a body; those added after it are not in it."""
    values = array("d")
    values.frombytes(body[: len(body) // 8 * 8])
    return {name: value for name, value in zip(names, values, strict=False) if value == value}
