"""The writer of a run's record: one connection, one thread, one transaction per second.

In:  points, notes, alerts, outcomes.
Out: ``<home>/runs/<id>.sqlite``; see ``format``.
Runs in: trainer.

Every method may raise ``sqlite3.Error`` or ``OSError``; the recorder then stops and the training continues.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.environment import private_folder
from penstock.monitor.figures import merged
from penstock.monitor.runs.format import (
    ALIVE_SUFFIX,
    FORMAT,
    LONGEST_TEXT,
    MOST_ENTRIES,
    SCHEMA,
    SUFFIX,
    THINNING,
    Alert,
    Note,
    Point,
    RunOutcome,
    TriedSettings,
    pack,
    unpack,
)
from penstock.monitor.runs.home import runs_folder
from penstock.monitor.runs.liveness import WriterLock

_BUSY_S = 0.2
"""How long a commit waits for a reader, on file systems where readers and the writer exclude each other."""
_THIN_EVERY_S = 60.0
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"
"""Letters and digits that are not easily confused when typed."""
_NETWORKS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "9p", "fuse", "ceph", "afs", "glusterfs", "virtiofs")

# -- forks ----------------------------------------------------------------------------------
# SQLite has locks for the whole process. A worker that is forked while the monitor's thread holds such a lock would
# wait forever as soon as its dataset uses SQLite. Therefore a fork waits until SQLite is not in use.

_GATE = threading.RLock()
"""Held during every use of SQLite. The thread that holds the gate may itself fork: at that moment it is not inside
SQLite."""
_FORK_WAITS_S = 2.0
"""The longest time that a fork waits: a disk that does not answer must not block a training."""
_held = threading.local()


def _before_fork() -> None:
    _held.is_held = _GATE.acquire(timeout=_FORK_WAITS_S)


def _after_in_parent() -> None:
    if _held.is_held:
        _GATE.release()


def _after_in_child() -> None:
    _GATE._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


def shares_memory(folder: Path, *, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether processes can share memory through a file in a folder, as SQLite's write-ahead log needs it: False on
    network file systems, because machines do not see each other's memory."""
    try:
        device = os.stat(folder).st_dev  # noqa: PTH116 - only the number is needed
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return True
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) > 2 and fields[2] == number:
            return not after.startswith(_NETWORKS)
    return True


# -- the record -----------------------------------------------------------------------------


def new_id(started_s: float) -> str:
    """An id that sorts by time and is easy to type: ``261116-055412-k3f9``."""
    when = time.strftime("%y%m%d-%H%M%S", time.localtime(started_s))
    return f"{when}-{''.join(secrets.choice(_LETTERS) for _ in range(4))}"


class RunRecord:
    """The writer's side of one run. Only one thread may use it at a time."""

    def __init__(self, home: Path, facts: Mapping[str, Any], *, run_id: str | None = None) -> None:
        """Begins a run with ``facts`` as in ``format.FACTS``; the format and the id are added.

        Raises PenstockError if the folder cannot be made."""
        started_s = float(facts.get("started_s") or time.time())
        self.id = run_id or new_id(started_s)
        folder = private_folder(runs_folder(home))
        self.path = folder / f"{self.id}{SUFFIX}"
        self._pid = os.getpid()
        self._places: dict[str, int] = {}
        self._last_ms = 0
        self._thinned_to_ms = [0] * len(THINNING)
        self._thin_due_s = started_s + _THIN_EVERY_S
        self._alive_path = folder / f"{self.id}{ALIVE_SUFFIX}"
        # The lock is taken before the database exists, so that a reader that finds the database finds the lock held.
        self.lock = WriterLock(self._alive_path)
        self._db: sqlite3.Connection | None = None
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            with _GATE:
                self._db = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
                if shares_memory(folder):
                    self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=NORMAL")
                self._db.execute("PRAGMA journal_size_limit=4194304")
            with self._transaction() as db:
                for statement in SCHEMA.split(";"):
                    db.execute(statement)
                for name, value in {"format": FORMAT, "started_s": started_s, **facts, "id": self.id}.items():
                    self._set_fact(db, name, value)
                self._set_totals(db, {"t_s": started_s})
            self._identity = self.path.stat().st_ino
        except BaseException:
            self.abandon()
            for path in (self.path, self._alive_path):
                path.unlink(missing_ok=True)
            raise

    # -- writing ----------------------------------------------------------------------------

    def write(
        self,
        points: Sequence[Point] = (),
        *,
        notes: Sequence[Note] = (),
        alerts: Sequence[Alert] = (),
        totals: Mapping[str, float] | None = None,
        tried: Mapping[str, TriedSettings] | None = None,
    ) -> None:
        """Write everything in one transaction."""
        with self._transaction() as db:
            last_ms = self._last_ms
            for each in points:
                self._name_figures(db, each.figures)
                # Two points within a millisecond, as at the end of a run, get different times.
                last_ms = max(round(each.t_s * 1000), last_ms + 1)
                row = (last_ms, each.span_s, pack(each.figures, self._places))
                db.execute("INSERT INTO points VALUES (?, ?, ?)", row)
            for note in notes:
                row = (note.t_s, note.who, note.kind, _cut(note.what), _json(note.details))
                _append(db, "journal (t_s, who, kind, what, details)", row)
            for alert in alerts:
                row = (alert.t_s, alert.rule, alert.state, _cut(alert.what), _json(alert.details))
                _append(db, "alerts (t_s, rule, state, what, details)", row)
            if totals:
                self._set_totals(db, totals)
            for key, each in (tried or {}).items():
                row = (
                    key, each.loader, _json(each.configuration), each.began_s, each.ended_s, each.active_s,
                    each.samples, each.wait_s, each.peak_bytes,
                )  # fmt: skip
                db.execute("INSERT OR REPLACE INTO configurations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            if points and points[-1].t_s >= self._thin_due_s:
                self._thin(db, points[-1].t_s)
        self._last_ms = last_ms

    def set_fact(self, name: str, value: Any) -> None:
        with self._transaction() as db:
            self._set_fact(db, name, value)

    def finish(self, outcome: RunOutcome) -> None:
        """Record the outcome unless one is recorded already; close the file and release the lock."""
        try:
            row = (outcome.state, outcome.t_s, None if outcome.what is None else _cut(outcome.what))
            with self._transaction() as db:
                db.execute("INSERT OR IGNORE INTO outcome VALUES (1, ?, ?, ?)", row)
            # Without its write-ahead log the file can be copied and read on read-only media. This fails while other
            # processes read.
            with _GATE, contextlib.suppress(sqlite3.Error):
                db.execute("PRAGMA journal_mode=DELETE")
        except (sqlite3.Error, OSError):
            self.keep_outcome(outcome)
        finally:
            self.abandon()

    def keep_outcome(self, outcome: RunOutcome) -> None:
        """Write the outcome into the lock's file, for when the database cannot be written."""
        self.lock.keep_outcome(outcome)

    @property
    def is_gone(self) -> bool:
        """Whether the file was removed or replaced, so that writing is pointless."""
        try:
            return self.path.stat().st_ino != self._identity
        except OSError:
            return True

    def abandon(self) -> None:
        """Close without an outcome. In a forked child SQLite must not be touched, not even to close it."""
        db, self._db = self._db, None
        if os.getpid() != self._pid:
            if db is not None:
                # The connection is never freed: freeing it would close it and wait for a lock that no thread of this
                # child will release.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(db))
        elif db is not None:
            with _GATE, contextlib.suppress(sqlite3.Error):
                db.close()
        self.lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._db is not None:
            state = "finished" if error is None else "failed"
            self.finish(RunOutcome(state=state, t_s=time.time(), what=None if error is None else repr(error)))

    # -- inside -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        db = self._db
        if db is None:
            raise sqlite3.ProgrammingError("this run's record is closed")
        kept = dict(self._places), list(self._thinned_to_ms), self._thin_due_s
        with _GATE:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                self._places, self._thinned_to_ms, self._thin_due_s = kept
                # SQLite may have rolled the transaction back itself, as it does when the disk is full.
                with contextlib.suppress(sqlite3.Error):
                    if db.in_transaction:
                        db.execute("ROLLBACK")
                raise

    def _name_figures(self, db: sqlite3.Connection, figures: Mapping[str, float]) -> None:
        for name in figures:
            if name not in self._places:
                db.execute("INSERT INTO figures VALUES (?, ?)", (len(self._places), name))
                self._places[name] = len(self._places)

    @staticmethod
    def _set_fact(db: sqlite3.Connection, name: str, value: Any) -> None:
        db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, _json(value)))

    @staticmethod
    def _set_totals(db: sqlite3.Connection, totals: Mapping[str, float]) -> None:
        known = [(name, value) for name, value in totals.items() if not math.isnan(value)]
        db.executemany("INSERT OR REPLACE INTO totals VALUES (?, ?)", known)

    def _thin(self, db: sqlite3.Connection, now_s: float) -> None:
        """Merge old points. Each step continues after the points it has already merged."""
        self._thin_due_s = now_s + _THIN_EVERY_S
        names = list(self._places)
        for number, thinning in enumerate(THINNING):
            step_ms = round(thinning.step_s * 1000)
            upto_ms = round((now_s - thinning.after_s) * 1000) // step_ms * step_ms
            from_ms, self._thinned_to_ms[number] = self._thinned_to_ms[number], upto_ms
            if upto_ms <= from_ms:
                continue
            rows = db.execute(
                "SELECT t_ms, span_s, body FROM points WHERE t_ms > ? AND t_ms <= ? ORDER BY t_ms", (from_ms, upto_ms)
            )
            groups: dict[int, list[tuple[int, float, bytes]]] = {}
            for row in rows:
                groups.setdefault((row[0] - 1) // step_ms, []).append(row)
            for group in groups.values():
                if len(group) == 1:
                    continue
                figures = merged((span_s, unpack(body, names)) for _, span_s, body in group)
                first_ms, last_ms = group[0][0], group[-1][0]
                db.execute("DELETE FROM points WHERE t_ms BETWEEN ? AND ?", (first_ms, last_ms))
                span_s = sum(span_s for _, span_s, _ in group)
                db.execute("INSERT INTO points VALUES (?, ?, ?)", (last_ms, span_s, pack(figures, self._places)))


def _append(db: sqlite3.Connection, into: str, row: tuple[Any, ...]) -> None:
    table = into.partition(" ")[0]
    number = db.execute(f"INSERT INTO {into} VALUES (?, ?, ?, ?, ?)", row).lastrowid or 0
    db.execute(f"DELETE FROM {table} WHERE number <= ?", (number - MOST_ENTRIES,))


def _json(value: Any) -> str:
    # A value may be a tensor or a path: its text is enough. Text with lone surrogates could not be printed.
    return json.dumps(value, default=str, ensure_ascii=False).encode("utf-8", "replace").decode()


def _cut(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"
