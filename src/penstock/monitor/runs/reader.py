"""Recorded runs, for everyone who shows them. Never in the way of the one who writes.

In:  a home (``home.state_folder()``), which run.
Out: ``RunSummary`` for lists; ``Run`` with facts, points, journal, alerts, outcome; ``ask`` for a running one.
Runs in: command line, web page; any number at once.

    for each in list_runs(home): print(each.id, each.name, each.state)
    with open_run(home, "last") as run:
        run.facts["loaders"], run.outcome
        points = run.points(most=500)                 # oldest first
        later = run.points(since=points[-1].t_s)      # what has come since
        run.journal(since=points[-1].t_s)
        run.alerts(after=12)                          # those with a higher number
        ask(run, {"do": "state"})                     # live, from the process itself

Errors are ``PenstockError``: no such run, a file that is no record, a run that does not answer. What a record holds
comes out of here in the right types, or not at all: see ``record_values``.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote

from penstock.errors import DataError, PenstockError
from penstock.monitor.control.client import ask, own_socket
from penstock.monitor.figures import merged
from penstock.monitor.runs import values as record_values
from penstock.monitor.runs.format import ALIVE_SUFFIX, FORMAT, SUFFIX, Alert, Note, Point, RunOutcome, TriedSettings
from penstock.monitor.runs.home import runs_folder
from penstock.monitor.runs.liveness import is_alive, last_word

__all__ = ["Run", "RunSummary", "ask", "delete_run", "list_runs", "open_run"]

_BUSY_S = 0.5
State = Literal["running", "finished", "failed", "killed"]
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One line of a list of runs. None: not known."""

    id: str
    name: str
    """Any text of the user's: to be shown as text."""
    state: State
    what: str | None
    """Of a failed run, the exception."""
    started_s: float
    ended_s: float | None
    """None: it runs."""
    heard_s: float
    """When it last wrote anything."""
    pid: int | None
    host: str
    rank: dict[str, int] | None
    step: int
    samples: int
    samples_per_s: float | None
    """While a loader was being read."""
    wait_fraction: float | None
    """Of that time, the share the training loop waited for data."""
    peak_bytes: int | None
    """Most memory of the process tree."""
    limit_bytes: int | None
    """What memory there is for it."""
    worker_restarts: int
    loaders: list[dict[str, Any]] = field(default_factory=list)
    """Name and arguments of each at the start."""
    tried: list[TriedSettings] = field(default_factory=list)
    """What each configuration has achieved."""

    @property
    def duration_s(self) -> float:
        return max(0.0, (self.heard_s if self.ended_s is None else self.ended_s) - self.started_s)


class Run:
    """One recorded run, running or over. May be used from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name.removesuffix(SUFFIX)
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._db = _open(path)
        try:
            _ = self.facts  # is it one that can be read?
        except PenstockError:
            self.close()
            raise

    @property
    def facts(self) -> dict[str, Any]:
        """What the run is; see ``record_format.FACTS``."""
        found = record_values.facts(self._rows("SELECT name, value FROM facts"))
        if found.get("format") != FORMAT:
            raise DataError(
                f"{self.path} is no record of a run that this penstock reads (format {found.get('format')}, not "
                f"{FORMAT}); read it with the version that wrote it, or remove it"
            )
        return found

    @property
    def totals(self) -> dict[str, float]:
        """Figures over the whole run so far; see ``record_format.TOTALS``."""
        return record_values.totals(self._rows("SELECT name, value FROM totals"))

    @property
    def outcome(self) -> RunOutcome | None:
        """How it ended; None while it runs. A run whose process is gone without a word was killed, and that is
        written down by whoever finds it first."""
        heard_s = self.totals.get("t_s", 0.0)
        found = self._written_outcome(heard_s)
        if found is not None:
            return found
        if is_alive(self._alive_path, self.facts, heard_s):
            return None
        # It may have ended in an orderly way between the two looks.
        found = self._written_outcome(heard_s)
        if found is None:
            word = last_word(self._alive_path) or {}
            found = record_values.outcome(word.get("state"), word.get("t_s"), word.get("what"), heard_s=heard_s)
            self._settle(found)
        return found

    @property
    def state(self) -> State:
        outcome = self.outcome
        return "running" if outcome is None else outcome.state

    def points(self, since: float | None = None, most: int = 2000) -> list[Point]:
        """Figures over time, oldest first: those after ``since`` (seconds since 1970), made at most ``most`` by
        merging neighbours as thinning does."""
        since_ms = max(0, round((since or 0.0) * 1000))
        points = self._points(
            self._rows("SELECT t_ms, span_s, body FROM points WHERE t_ms > ? ORDER BY t_ms", (since_ms,))
        )
        return points if len(points) <= most else _fewer(points, max(1, most))

    @property
    def latest(self) -> Point | None:
        """The last point written."""
        found = self._points(self._rows("SELECT t_ms, span_s, body FROM points ORDER BY t_ms DESC LIMIT 1"))
        return found[0] if found else None

    def journal(self, since: float | None = None, after: int = 0) -> list[Note]:
        """What was done and what happened, oldest first, after ``since`` and with a number above ``after``: an entry
        may be written later than the time it bears, but never with a lower number."""
        columns = "number, t_s, who, kind, what, details"
        return _sound(record_values.note, self._entries(f"SELECT {columns} FROM journal", since, after))

    def alerts(self, since: float | None = None, after: int = 0) -> list[Alert]:
        """Alerts raised and cleared, oldest first, after ``since`` and with a number above ``after``."""
        columns = "number, t_s, rule, state, what, details"
        return _sound(record_values.alert, self._entries(f"SELECT {columns} FROM alerts", since, after))

    @property
    def tried(self) -> list[TriedSettings]:
        """What each configuration of each loader has achieved, in the order they were first tried."""
        columns = "loader, configuration, began_s, ended_s, active_s, samples, wait_s, peak_bytes"
        return _sound(record_values.tried, self._rows(f"SELECT {columns} FROM configurations ORDER BY began_s"))

    def summary(self) -> RunSummary:
        facts, totals, outcome = self.facts, self.totals, self.outcome
        active_s, samples = totals.get("active_s", 0.0), totals.get("samples", 0.0)
        started_s = facts.get("started_s") or 0.0
        return RunSummary(
            id=self.id,
            name=facts.get("name") or "",
            state="running" if outcome is None else outcome.state,
            what=None if outcome is None else outcome.what,
            started_s=started_s,
            ended_s=None if outcome is None else outcome.t_s,
            heard_s=totals.get("t_s", started_s),
            pid=facts.get("pid"),
            host=facts.get("host") or "",
            rank=facts.get("rank"),
            step=int(totals.get("step", 0)),
            samples=int(samples),
            samples_per_s=samples / active_s if active_s > 0 and samples else None,
            wait_fraction=min(1.0, totals.get("wait_s", 0.0) / active_s) if active_s > 0 else None,
            peak_bytes=int(totals["peak_tree_bytes"]) if "peak_tree_bytes" in totals else None,
            limit_bytes=record_values.count((facts.get("machine") or {}).get("memory_limit_bytes")),
            worker_restarts=int(totals.get("worker_restarts", 0)),
            loaders=facts.get("loaders") or [],
            tried=self.tried,
        )

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------

    @property
    def _alive_path(self) -> Path:
        return self.path.with_name(self.id + ALIVE_SUFFIX)

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            with self._lock:
                return self._db.execute(query, values).fetchall()
        except sqlite3.Error as problem:
            raise _unreadable(self.path, problem) from None

    def _entries(self, query: str, since: float | None, after: int) -> list[Any]:
        return self._rows(f"{query} WHERE number > ? AND t_s > ? ORDER BY number", (after, since or 0.0))

    def _points(self, rows: list[Any]) -> list[Point]:
        count = max((record_values.body_length(row) for row in rows), default=0)
        if len(self._names) < count:
            found = self._rows("SELECT place, name FROM figures ORDER BY place")
            self._names = [record_values.text(name) or f"figure {place}" for place, name in found]
        names = self._names
        return _sound(lambda row: record_values.point(row, names), rows)

    def _written_outcome(self, heard_s: float) -> RunOutcome | None:
        rows = self._rows("SELECT state, t_s, what FROM outcome")
        return record_values.outcome(*rows[0], heard_s=heard_s) if rows else None

    def _settle(self, outcome: RunOutcome) -> None:
        """Write down how a run ended whose process cannot; what cannot be written is found again next time."""
        with contextlib.suppress(sqlite3.Error):
            db = sqlite3.connect(f"file:{quote(str(self.path))}?mode=rw", uri=True, timeout=_BUSY_S)
            try:
                row = (outcome.state, outcome.t_s, outcome.what)
                db.execute("INSERT OR IGNORE INTO outcome VALUES (1, ?, ?, ?)", row)
                db.commit()
            finally:
                db.close()
        left = own_socket(self)
        if left is not None:
            with contextlib.suppress(OSError):
                left.unlink()


def list_runs(home: Path) -> list[RunSummary]:
    """All runs recorded in ``home``, newest first. Files that cannot be read are passed over."""
    found = []
    for path in _files(home):
        with contextlib.suppress(PenstockError), Run(path) as run:
            found.append(run.summary())
    return sorted(found, key=lambda each: (each.started_s, each.id), reverse=True)


def open_run(home: Path, which: str) -> Run:
    """A run by its id, the beginning of one, its name, or "last". Of several with that name, the newest."""
    files = _files(home)
    ids = [path.name.removesuffix(SUFFIX) for path in files]
    if which == "last":
        if not files:
            raise PenstockError(f"no run is recorded in {home}")
        return Run(_newest(files))
    if which in ids:
        return Run(files[ids.index(which)])
    begun = [path for path, run_id in zip(files, ids, strict=True) if which and run_id.startswith(which)]
    if len(begun) == 1:
        return Run(begun[0])
    named = [path for path in files if _name_of(path) == which]
    if named:
        return Run(_newest(named))
    if begun:
        some = ", ".join(path.name.removesuffix(SUFFIX) for path in begun[:5])
        raise PenstockError(f"{_short(which)} begins {len(begun)} runs: {some}; type more of it")
    raise PenstockError(f"no run in {home} is called {_short(which)}, nor begins so; penstock runs lists them")


def delete_run(run: Run) -> None:
    """Remove a run that is over."""
    if run.outcome is None:
        raise PenstockError(f"{run.id} is running (process {run.facts.get('pid')}); end it first")
    run.close()
    for path in (run.path, *(run.path.with_name(run.path.name + end) for end in ("-wal", "-shm", "-journal"))):
        path.unlink(missing_ok=True)
    run.path.with_name(run.id + ALIVE_SUFFIX).unlink(missing_ok=True)


def _files(home: Path) -> list[Path]:
    # Names are times and sort by them.
    return sorted(runs_folder(home).glob(f"*{SUFFIX}"))


def _newest(files: list[Path]) -> Path:
    """By when they began: two runs of one second have ids in no order."""

    def began(path: Path) -> float:
        with contextlib.suppress(PenstockError), Run(path) as run:
            return run.facts.get("started_s") or 0.0
        return 0.0

    last_second = files[-1].name[:13]
    return max((path for path in files if path.name[:13] >= last_second), key=began)


def _name_of(path: Path) -> str | None:
    with contextlib.suppress(PenstockError), Run(path) as run:
        return run.facts.get("name")
    return None


def _open(path: Path) -> sqlite3.Connection:
    where = f"file:{quote(str(path))}"
    try:
        db = _connect(f"{where}?mode=ro")
        try:
            db.execute("SELECT 1 FROM facts").fetchone()
        except sqlite3.OperationalError as problem:
            db.close()
            if "open" not in str(problem) and "readonly" not in str(problem):
                raise
            # In a folder that cannot be written to, a file with a write-ahead log is read as it stands.
            db = _connect(f"{where}?mode=ro&immutable=1")
            db.execute("SELECT 1 FROM facts").fetchone()
        return db
    except sqlite3.Error as problem:
        raise _unreadable(path, problem) from None


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)


def _unreadable(path: Path, problem: sqlite3.Error) -> DataError:
    return DataError(f"{path} cannot be read as the record of a run: {problem}")


def _fewer(points: list[Point], most: int) -> list[Point]:
    first_s, last_s = points[0].t_s, points[-1].t_s
    width_s = (last_s - first_s) / most or 1.0
    groups: dict[int, list[Point]] = {}
    for point in points:
        groups.setdefault(min(most - 1, int((point.t_s - first_s) / width_s)), []).append(point)
    return [
        group[0]
        if len(group) == 1
        else Point(
            group[-1].t_s,
            sum(each.span_s for each in group),
            merged((each.span_s, each.figures) for each in group),
        )
        for group in groups.values()
    ]


def _sound(read: Callable[[Any], _T | None], rows: Iterable[Any]) -> list[_T]:
    """The rows that can be read."""
    return [found for row in rows if (found := read(row)) is not None]


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
