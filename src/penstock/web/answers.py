"""What the server answers, as plain values read from the records.

In:  a home (``environment.state_folder()``), a run's id, how much of the run the client has.
Out: dictionaries; ``encoded`` turns them into JSON. ``RequestError`` with an HTTP status where there is no answer.
Runs in: command line, in threads: every function here may wait for a file or a training.

Each answer opens a record and closes it again: at its end the training turns the record into one file, which is not
possible while another process has it open.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import ConfigError, PenstockError
from penstock.monitor.runs.format import SUFFIX, Alert, Note, Point
from penstock.monitor.runs.home import runs_folder
from penstock.monitor.runs.reader import Run, RunSummary, ask, record_files
from penstock.units import parse_size

POINTS, MOST_POINTS = 1500, 5000
"""Number of points in one answer: the default and the maximum."""
_STATE_WITHIN_S = 1.0
_SET_WITHIN_S = 5.0
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NOT_SHOWN = ("format", "socket", "boot_id", "process_started_s")
_COUNTS = ("workers", "depth")
_Entry = TypeVar("_Entry", Note, Alert)


class RequestError(Exception):
    """A request that cannot be answered."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


@dataclass(frozen=True, kw_only=True)
class StreamPosition:
    """How much of a run a client has."""

    points_s: float | None = None
    """The time of the last point."""
    last_note: int | None = None
    last_alert: int | None = None
    """Numbers of the last entries. None: the first entries to send are those after ``points_s``."""


@dataclass(frozen=True, kw_only=True)
class RunUpdate:
    """The part of a run that the client does not have yet."""

    seen: StreamPosition
    """The client's position once it has this update."""
    journal: list[dict[str, Any]]
    alerts: list[dict[str, Any]]
    points: dict[str, Any] | None
    ended: dict[str, Any] | None
    """The summary of a run that has ended; no more updates follow."""


class Answers:
    """Reads the runs of one home. Several threads may use it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._ended: dict[tuple[str, int, int], dict[str, Any]] = {}
        """Summaries of ended runs, by file, inode and time of change."""
        self.unreadable = 0
        """Files of the last list that are not intact records."""

    def runs(self) -> list[dict[str, Any]]:
        """All runs, newest first. Ended runs do not change: each is read once."""
        found: list[dict[str, Any]] = []
        ended: dict[tuple[str, int, int], dict[str, Any]] = {}
        unreadable = 0
        for path in record_files(self.home):
            try:
                stat = path.stat()
                key = (path.name, stat.st_ino, stat.st_mtime_ns)
                summary = self._ended.get(key)
                if summary is None:
                    with Run(path) as run:
                        summary = plain_summary(run.summary())
            except (OSError, PenstockError):
                unreadable += path.exists()  # otherwise the file was removed in the meantime
                continue
            if summary["state"] != "running":
                ended[key] = summary
            found.append(summary)
        self._ended, self.unreadable = ended, unreadable
        return sorted(found, key=lambda each: (each["started_s"], each["id"]), reverse=True)

    def run(self, run_id: str) -> dict[str, Any]:
        """Everything about one run except its points and the live state of its process."""
        with self._opened(run_id) as run:
            summary = plain_summary(run.summary())
            return {
                "summary": summary,
                "facts": {name: value for name, value in run.facts.items() if name not in _NOT_SHOWN},
                "journal": [asdict(note) for note in run.journal()],
                "alerts": [asdict(alert) for alert in run.alerts()],
                "tried": summary["tried"],
            }

    def find(self, run_id: str) -> None:
        """Raises RequestError if there is no such run."""
        self._opened(run_id).close()

    def points(self, run_id: str, since_s: float | None, most: int) -> dict[str, Any]:
        with self._opened(run_id) as run:
            return columns(run.points(since_s, most))

    def news(self, run_id: str, seen: StreamPosition) -> RunUpdate:
        """The part of a run that is newer than ``seen``."""
        with self._opened(run_id) as run:
            # The outcome is read first: if there is an outcome, everything else has been written.
            ended = plain_summary(run.summary()) if run.outcome is not None else None
            notes, last_note = _new(run.journal(after=seen.last_note or 0), seen.points_s, seen.last_note)
            alerts, last_alert = _new(run.alerts(after=seen.last_alert or 0), seen.points_s, seen.last_alert)
            points = run.points(seen.points_s, POINTS)
        points_s = points[-1].t_s if points else seen.points_s
        return RunUpdate(
            seen=StreamPosition(points_s=points_s, last_note=last_note, last_alert=last_alert),
            journal=[asdict(note) for note in notes],
            alerts=[asdict(alert) for alert in alerts],
            points=columns(points) if points else None,
            ended=ended,
        )

    def state(self, run_id: str) -> dict[str, Any]:
        """The live state of a running run, from its process. Raises PenstockError if the process does not answer."""
        with self._opened(run_id) as run:
            answer = ask(run, {"do": "state"}, timeout_s=_STATE_WITHIN_S)
        state = answer.get("state")
        if not isinstance(state, dict) or not isinstance(state.get("loaders"), list):
            raise PenstockError(str(answer.get("why", "the answer has no state")))
        return state

    def turn(self, run_id: str, wanted: Any) -> dict[str, Any]:
        """Turn valves; returns the values now in force."""
        message = {"do": "set", "who": "page", **_checked(wanted)}
        with self._opened(run_id) as run:
            _refuse_if_ended(run)
            try:
                answer = ask(run, message, timeout_s=_SET_WITHIN_S)
            except PenstockError as silent:
                _refuse_if_ended(run)
                raise RequestError(503, str(silent)) from None
        if not answer.get("ok"):
            raise RequestError(409, str(answer.get("why", "the training refused without a reason")))
        return {"now": answer.get("now", {})}

    def _opened(self, run_id: str) -> Run:
        path = runs_folder(self.home) / f"{run_id}{SUFFIX}"
        try:
            # The id comes from a request, and the path must not leave the folder of the runs.
            is_there = bool(_ID.fullmatch(run_id)) and path.is_file()
        except OSError as refused:
            raise RequestError(503, f"{path.parent} cannot be read: {refused.strerror}") from None
        if not is_there:
            raise RequestError(404, f"no run {run_id[:100]!r} is recorded in {self.home}; it may have been removed")
        try:
            return Run(path)
        except PenstockError as problem:
            if not path.is_file():
                raise RequestError(404, f"the record of {run_id} was removed") from None
            raise RequestError(503, str(problem)) from None


def columns(points: Sequence[Point]) -> dict[str, Any]:
    """Points as one list per figure; null where a value is unknown."""
    names = dict.fromkeys(name for point in points for name in point.figures)
    return {
        "t_s": [point.t_s for point in points],
        "span_s": [point.span_s for point in points],
        "figures": {name: [_known(point.figures.get(name)) for point in points] for name in names},
    }


def plain_summary(summary: RunSummary) -> dict[str, Any]:
    tried = [
        {**asdict(each), "samples_per_s": each.samples_per_s, "wait_fraction": each.wait_fraction}
        for each in summary.tried
    ]
    return {**asdict(summary), "duration_s": summary.duration_s, "tried": tried}


def encoded(value: Any) -> bytes:
    """JSON on one line that every browser can read: NaN and infinity become null."""
    try:
        return json.dumps(value, allow_nan=False, default=str, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, default=str, separators=(",", ":")).encode()


def listed(home: Path, runs: bytes, unreadable: int) -> bytes:
    """The encoded list of runs with the server's time, from which the page computes how long ago something was."""
    return encoded({"now_s": time.time(), "home": str(home), "unreadable": unreadable})[:-1] + b',"runs":' + runs + b"}"


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return _known(value)
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _new(entries: list[_Entry], seen_s: float | None, last: int | None) -> tuple[list[_Entry], int]:
    """The entries to send, and the number of the newest."""
    newest = entries[-1].number if entries else last or 0
    # Once a number is known, the numbers decide which entries are new: an entry may be written later than its time.
    return entries if last is not None else [each for each in entries if each.t_s > (seen_s or 0.0)], newest


def _refuse_if_ended(run: Run) -> None:
    outcome = run.outcome
    if outcome is not None:
        raise RequestError(409, f"{run.id} is over ({outcome.state}): nothing is left to set")


def _checked(wanted: Any) -> dict[str, Any]:
    """The values of a request, each of the right type; the training decides whether they are possible."""
    if not isinstance(wanted, dict):
        raise RequestError(400, 'send an object, such as {"loader": null, "workers": 8}')
    for name, value in wanted.items():
        if name in _COUNTS:
            if type(value) is not int or not 0 <= value < 1 << 31:
                raise RequestError(400, f"{name}={str(value)[:60]} is not a whole number of at least 0")
        elif name == "memory":
            try:
                if not isinstance(value, str):
                    raise ConfigError(f'memory={str(value)[:60]} is not a size; write it as text: "6GB"')
                parse_size(value)
            except ConfigError as wrong:
                raise RequestError(400, str(wrong)) from None
        elif name == "loader":
            if value is not None and type(value) not in (str, int):
                raise RequestError(400, "loader is the name or the number of a loader, or null for the only loader")
        else:
            raise RequestError(400, f"{name[:60]!r} cannot be set; only workers, depth and memory of a loader can")
    if not set(wanted) - {"loader"}:
        raise RequestError(400, "there is nothing to set; send workers, depth or memory")
    return wanted
