"""Recorded runs, for every command and page that shows them. Reading never blocks the run that is being written.

In:  a home (``home.state_folder()``), which run.
Out: ``RunSummary`` for lists; ``Run`` with facts, points, journal, alerts, outcome; ``ask`` for a running one.
Runs in: command line, web page; any number at once.

    for each in list_runs(home): print(each.id, each.name, each.state)
    with open_run(home, "last") as run:
        run.facts["loaders"], run.outcome
        points = run.points(most=500)                 # oldest first
        later = run.points(since=points[-1].t_s)      # points that came later
        run.journal(since=points[-1].t_s)
        run.alerts(after=12)                          # alerts with a higher number
        ask(run, {"do": "state"})                     # live, from the process itself

Errors are ``PenstockError``: no such run, a file that is not a record, a run that does not answer. A file that another
program wrote or that is damaged gives one ``DataError``, whatever is wrong inside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote

from penstock.errors import DataError, PenstockError
from penstock.monitor.control.client import ask, own_socket
from penstock.monitor.figures import merged
from penstock.monitor.runs.format import (
    ALIVE_SUFFIX,
    FORMAT,
    SUFFIX,
    Alert,
    Note,
    Point,
    RunOutcome,
    TriedSettings,
    unpack,
)
from penstock.monitor.runs.home import runs_folder
from penstock.monitor.runs.liveness import is_alive, last_outcome

__all__ = ["RecordedRuns", "Run", "RunSummary", "ask", "delete_run", "list_runs", "open_run", "record_files"]

_BUSY_S = 0.5
State = Literal["running", "finished", "failed", "killed"]
_FACT_TYPES: dict[str, type | tuple[type, ...]] = {
    "name": str, "started_s": (int, float), "pid": int, "process_started_s": (int, float), "host": str, "boot_id": str,
    "command": list, "folder": str, "python": dict, "machine": dict, "gpus": list, "rank": dict, "loaders": list,
    "tree_measure": str, "socket": str,
}  # fmt: skip
"""Types that readers rely on. Any fact may be null or absent."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One line of a list of runs. None: unknown."""

    id: str
    name: str
    """Any text; it must never be interpreted as markup."""
    state: State
    what: str | None
    """The exception of a failed run."""
    started_s: float
    ended_s: float | None
    """The end of the run; None while it is running."""
    heard_s: float
    """Time of the run's last write."""
    pid: int | None
    host: str
    rank: dict[str, int] | None
    step: int
    samples: int
    samples_per_s: float | None
    """The rate while a loader was being iterated."""
    wait_fraction: float | None
    """Share of the active time in which the training loop waited for data."""
    peak_bytes: int | None
    """Peak memory of the process tree."""
    limit_bytes: int | None
    """The memory limit of the machine or container."""
    worker_restarts: int
    loaders: list[dict[str, Any]] = field(default_factory=list)
    """Name and arguments of each loader at the start."""
    tried: list[TriedSettings] = field(default_factory=list)
    """Each configuration with its results."""

    @property
    def duration_s(self) -> float:
        return max(0.0, (self.heard_s if self.ended_s is None else self.ended_s) - self.started_s)


class Run:
    """One recorded run, running or ended. Several threads may use it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name.removesuffix(SUFFIX)
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._db = _open(path)
        try:
            _ = self.facts  # raises if the file is not a record
        except PenstockError:
            self.close()
            raise

    @property
    def facts(self) -> dict[str, Any]:
        """Description of the run; see ``format.FACTS``."""
        with _intact(self.path):
            found = {name: _json(value) for name, value in self._rows("SELECT name, value FROM facts")}
            if found.get("format") != FORMAT:
                raise DataError(
                    f"{self.path} has record format {found.get('format')}, this penstock reads format {FORMAT}; "
                    "read it with the version that wrote it, or remove it"
                )
            for name, kind in _FACT_TYPES.items():
                if not isinstance(found.get(name), (kind, type(None))):
                    raise TypeError(f"the fact {name} is {str(found[name])[:60]!r}")
            for name in ("loaders", "gpus"):
                if not all(isinstance(each, dict) for each in found.get(name) or ()):
                    raise TypeError(f"the fact {name} is not a list of objects")
        return found

    @property
    def totals(self) -> dict[str, float]:
        """Figures of the whole run so far; see ``format.TOTALS``."""
        with _intact(self.path):
            return {name: float(value) for name, value in self._rows("SELECT name, value FROM totals")}

    @property
    def outcome(self) -> RunOutcome | None:
        """How the run ended; None while it runs. A run whose process is gone without an outcome was killed; the first
        reader that notices this records the outcome."""
        heard_s = self.totals.get("t_s", 0.0)
        found = self._written_outcome()
        if found is not None:
            return found
        if is_alive(self._alive_path, self.facts, heard_s):
            return None
        # The run may have ended normally between the two queries.
        found = self._written_outcome()
        if found is None:
            found = last_outcome(self._alive_path) or RunOutcome(state="killed", t_s=heard_s)
            self._settle(found)
        return found

    @property
    def state(self) -> State:
        outcome = self.outcome
        return "running" if outcome is None else outcome.state

    def points(self, since: float | None = None, most: int = 2000) -> list[Point]:
        """Figures over time after ``since`` (seconds since 1970), oldest first. More than ``most`` points are merged
        with their neighbours, as thinning does."""
        since_ms = max(0, round((since or 0.0) * 1000))
        points = self._points("WHERE t_ms > ? ORDER BY t_ms", (since_ms,))
        return points if len(points) <= most else _fewer(points, max(1, most))

    @property
    def latest(self) -> Point | None:
        """The last point written."""
        found = self._points("ORDER BY t_ms DESC LIMIT 1")
        return found[0] if found else None

    def journal(self, since: float | None = None, after: int = 0) -> list[Note]:
        """Entries of the journal, oldest first, later than ``since`` and with a number above ``after``. An entry may be
        written later than its time, but never with a lower number."""
        with _intact(self.path):
            return [
                Note(number=number, t_s=t_s, who=who, kind=kind, what=what, details=_json(details))
                for number, t_s, who, kind, what, details in self._entries("journal", "who, kind", since, after)
            ]

    def alerts(self, since: float | None = None, after: int = 0) -> list[Alert]:
        """Alerts raised and cleared, oldest first, later than ``since`` and with a number above ``after``."""
        with _intact(self.path):
            return [
                Alert(number=number, t_s=t_s, rule=rule, state=state, what=what, details=_json(details))
                for number, t_s, rule, state, what, details in self._entries("alerts", "rule, state", since, after)
            ]

    @property
    def tried(self) -> list[TriedSettings]:
        """Each configuration of each loader with its results, in the order of their first use."""
        names = ("loader", "configuration", "began_s", "ended_s", "active_s", "samples", "wait_s", "peak_bytes")
        with _intact(self.path):
            rows = self._rows(f"SELECT {', '.join(names)} FROM configurations ORDER BY began_s")
            found = [dict(zip(names, row, strict=True)) for row in rows]
            return [TriedSettings(**{**each, "configuration": _json(each["configuration"])}) for each in found]

    def summary(self) -> RunSummary:
        with _intact(self.path):
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
                limit_bytes=(facts.get("machine") or {}).get("memory_limit_bytes"),
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
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def _entries(self, table: str, columns: str, since: float | None, after: int) -> list[Any]:
        query = f"SELECT number, t_s, {columns}, what, details FROM {table}"
        return self._rows(f"{query} WHERE number > ? AND t_s > ? ORDER BY number", (after, since or 0.0))

    def _points(self, which: str, values: Sequence[Any] = ()) -> list[Point]:
        with _intact(self.path):
            rows = self._rows(f"SELECT t_ms, span_s, body FROM points {which}", values)
            if len(self._names) < max((len(body) // 8 for _, _, body in rows), default=0):
                self._names = [name for (name,) in self._rows("SELECT name FROM figures ORDER BY place")]
            return [Point(t_ms / 1000, span_s, unpack(body, self._names)) for t_ms, span_s, body in rows]

    def _written_outcome(self) -> RunOutcome | None:
        with _intact(self.path):
            rows = self._rows("SELECT state, t_s, what FROM outcome")
            return RunOutcome(state=rows[0][0], t_s=float(rows[0][1]), what=rows[0][2]) if rows else None

    def _settle(self, outcome: RunOutcome) -> None:
        """Record the outcome of a run whose process is gone. If that fails, the next reader tries again."""
        # If the schema is damaged, even the text of SQLite's error may not be UTF-8.
        with contextlib.suppress(sqlite3.Error, UnicodeDecodeError):
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


class RecordedRuns(list[RunSummary]):
    """Summaries, newest first; ``unreadable`` has the files that are not intact records."""

    def __init__(self, found: Iterable[RunSummary], unreadable: Sequence[Path]) -> None:
        super().__init__(sorted(found, key=lambda each: (each.started_s, each.id), reverse=True))
        self.unreadable = tuple(unreadable)


def list_runs(home: Path) -> RecordedRuns:
    """All runs recorded in ``home``. Raises PenstockError if the folder cannot be read."""
    found, unreadable = [], []
    for path in record_files(home):
        try:
            with Run(path) as run:
                found.append(run.summary())
        except PenstockError:
            if path.exists():  # otherwise the file was removed in the meantime
                unreadable.append(path)
    return RecordedRuns(found, unreadable)


def open_run(home: Path, which: str) -> Run:
    """A run by its id, the beginning of its id, its name (the newest of that name), or "last"."""
    files = record_files(home)
    ids = [path.name.removesuffix(SUFFIX) for path in files]
    if which == "last":
        if not files:
            raise PenstockError(f"no run is recorded in {home}; penstock.Monitor(loader) in a training records a run")
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
        raise PenstockError(f"the ids of {len(begun)} runs begin with {_short(which)}: {some}; type more of the id")
    raise PenstockError(
        f"no run in {home} has the name {_short(which)} or an id that begins with it; penstock runs lists all of them"
    )


def delete_run(run: Run) -> None:
    """Remove an ended run. Raises PenstockError if it cannot be removed."""
    if run.outcome is None:
        raise PenstockError(f"{run.id} is running (process {run.facts.get('pid')}); stop it first")
    run.close()
    parts = (run.path.with_name(run.path.name + end) for end in ("", "-wal", "-shm", "-journal"))
    for path in (*parts, run.path.with_name(run.id + ALIVE_SUFFIX)):
        try:
            path.unlink(missing_ok=True)
        except OSError as refused:
            raise PenstockError(f"{path} cannot be removed: {refused.strerror}") from None


def record_files(home: Path) -> list[Path]:
    """The files of all runs, oldest first. Raises PenstockError if the folder cannot be read."""
    folder = runs_folder(home)
    try:
        # glob would pass over a folder that cannot be read.
        names = [entry.name for entry in os.scandir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as refused:
        raise PenstockError(
            f"{folder} cannot be read: {refused.strerror}; set PENSTOCK_HOME to a folder that you can read"
        ) from None
    # Ids begin with the time, so the order of names is the order of time.
    return [folder / name for name in sorted(names) if name.endswith(SUFFIX)]


def _newest(files: list[Path]) -> Path:
    """The file of the run that began last. The ids of runs that began in the same second have no order."""

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
    with _intact(path):
        db = _connect(f"{where}?mode=ro")
        try:
            db.execute("SELECT 1 FROM facts").fetchone()
        except UnicodeDecodeError:
            db.close()
            raise
        except sqlite3.Error as problem:
            db.close()
            if "open" not in str(problem) and "readonly" not in str(problem):
                raise
            # A file with a write-ahead log in a folder that cannot be written to is read as it is.
            db = _connect(f"{where}?mode=ro&immutable=1")
            try:
                db.execute("SELECT 1 FROM facts").fetchone()
            except (sqlite3.Error, UnicodeDecodeError):
                db.close()
                raise
        return db


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)


@contextlib.contextmanager
def _intact(path: Path) -> Iterator[None]:
    """Turns everything that a damaged or foreign file causes into one error."""
    try:
        yield
    except PenstockError:
        raise
    except UnicodeDecodeError:
        # SQLite's own message quotes the damaged bytes.
        raise DataError(f"{path} cannot be read as the record of a run: it is damaged") from None
    except (sqlite3.Error, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as why:
        raise DataError(f"{path} cannot be read as the record of a run: {why}") from None


def _json(text: str) -> Any:
    """A value of the record; NaN and Infinity, which no other program reads, become None."""
    return json.loads(text, parse_constant=lambda _: None)


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


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
