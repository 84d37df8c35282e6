"""What the page is answered, as plain values read from the records.

In:  a home (``home.state_folder()``), which run, what was seen of it already.
Out: dictionaries; ``encoded`` makes JSON of them. ``RequestError`` where there is no answer, with an HTTP status.
Runs in: command line, in threads: everything here may wait for a file or a training.

A record is opened for each answer and closed again: the training makes one tidy file of it at its end, which it cannot
while somebody has it open.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import ConfigError, PenstockError
from penstock.monitor.runs.format import SUFFIX, Alert, Note, Point, TriedSettings
from penstock.monitor.runs.home import runs_folder
from penstock.monitor.runs.reader import Run, RunSummary, ask
from penstock.units import parse_size

POINTS, MOST_POINTS = 1500, 5000
"""Of one answer: unless told, and at most."""
_STATE_WITHIN_S = 1.0
_SET_WITHIN_S = 5.0
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NOT_SHOWN = ("format", "socket", "boot_id", "process_started_s")
_COUNTS = ("workers", "depth")
_T = TypeVar("_T", Note, Alert)


class RequestError(Exception):
    """A request that cannot be answered."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


@dataclass(frozen=True, kw_only=True)
class StreamPosition:
    """How far somebody has followed a run."""

    points_s: float | None = None
    """The time of the last point."""
    last_note: int | None = None
    last_alert: int | None = None
    """Numbers of the last entries. None: what comes first are those after ``points_s``."""


@dataclass(frozen=True, kw_only=True)
class RunUpdate:
    """What a run has to say to somebody who has seen some of it."""

    seen: StreamPosition
    """How far this goes."""
    journal: list[dict[str, Any]]
    alerts: list[dict[str, Any]]
    points: dict[str, Any] | None
    ended: dict[str, Any] | None
    """The summary, of a run that is over; then there will be no more."""


class Answers:
    """Reads the runs of one home. For any number of threads."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._over: dict[tuple[str, int, int], dict[str, Any]] = {}
        self._lock = threading.Lock()

    def runs(self) -> list[dict[str, Any]]:
        """All runs, newest first. Those that are over do not change: they are read once."""
        found: list[dict[str, Any]] = []
        over: dict[tuple[str, int, int], dict[str, Any]] = {}
        with self._lock:
            known = self._over
        for path in runs_folder(self.home).glob(f"*{SUFFIX}"):
            try:
                stat = path.stat()
                key = (path.name, stat.st_ino, stat.st_mtime_ns)
                summary = known.get(key)
                if summary is None:
                    with Run(path) as run:
                        summary = plain_summary(run.summary())
            except (OSError, PenstockError):
                continue  # removed meanwhile, or no record: the list is of those that can be read
            if summary["state"] != "running":
                over[key] = summary
            found.append(summary)
        with self._lock:
            self._over = over
        return sorted(found, key=lambda each: (each["started_s"], each["id"]), reverse=True)

    def run(self, run_id: str) -> dict[str, Any]:
        """Everything of one run but its points, and but what its process says."""
        with self._opened(run_id) as run:
            summary = plain_summary(run.summary())
            facts = {name: value for name, value in run.facts.items() if name not in _NOT_SHOWN}
            return {
                "summary": summary,
                "facts": facts,
                "journal": [asdict(note) for note in run.journal()],
                "alerts": [asdict(alert) for alert in run.alerts()],
                "tried": summary["tried"],
            }

    def find(self, run_id: str) -> None:
        """Raises RequestError where there is no such run."""
        self._opened(run_id).close()

    def points(self, run_id: str, since_s: float | None, most: int) -> dict[str, Any]:
        with self._opened(run_id) as run:
            return columns(run.points(since_s, most))

    def news(self, run_id: str, seen: StreamPosition) -> RunUpdate:
        """What has come since."""
        with self._opened(run_id) as run:
            # Before the rest: what a run wrote last is there once its outcome is.
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
        """What the process of a running one says. Raises PenstockError where it does not answer."""
        with self._opened(run_id) as run:
            answer = ask(run, {"do": "state"}, timeout_s=_STATE_WITHIN_S)
        state = answer.get("state")
        if not isinstance(state, dict) or not isinstance(state.get("loaders"), list):
            raise PenstockError(str(answer.get("why", "an answer without a state")))
        return state

    def turn(self, run_id: str, wanted: Any) -> dict[str, Any]:
        """Turn valves; what is in force now."""
        message = {"do": "set", "who": "page", **_checked(wanted)}
        with self._opened(run_id) as run:
            _refuse_if_over(run)
            try:
                answer = ask(run, message, timeout_s=_SET_WITHIN_S)
            except PenstockError as silent:
                _refuse_if_over(run)
                raise RequestError(503, str(silent)) from None
        if not answer.get("ok"):
            raise RequestError(409, str(answer.get("why", "refused without a reason")))
        return {"now": answer.get("now", {})}

    def _opened(self, run_id: str) -> Run:
        path = runs_folder(self.home) / f"{run_id}{SUFFIX}"
        # An id comes from a request: it must not lead anywhere else.
        if not _ID.fullmatch(run_id) or not path.is_file():
            raise RequestError(404, f"no run {run_id[:100]!r} is recorded in {self.home}; it may have been removed")
        try:
            return Run(path)
        except PenstockError as problem:
            if not path.is_file():
                raise RequestError(404, f"the record of {run_id} was removed") from None
            raise RequestError(503, str(problem)) from None


def columns(points: Sequence[Point]) -> dict[str, Any]:
    """Points as one list per figure; null where a figure was not known."""
    figures: dict[str, list[float | None]] = {}
    for place, point in enumerate(points):
        for name, value in point.figures.items():
            column = figures.get(name)
            if column is None:
                column = figures[name] = [None] * len(points)
            if math.isfinite(value):
                column[place] = value
    return {
        "t_s": [point.t_s for point in points],
        "span_s": [point.span_s for point in points],
        "figures": figures,
    }


def plain_summary(summary: RunSummary) -> dict[str, Any]:
    tried = [_plain_tried(each) for each in summary.tried]
    return {**asdict(replace(summary, tried=[])), "duration_s": summary.duration_s, "tried": tried}


def encoded(value: Any) -> bytes:
    """JSON on one line, that every browser reads: what is no number in JSON is null."""
    try:
        return json.dumps(value, allow_nan=False, default=str, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, default=str, separators=(",", ":")).encode()


def listed(home: Path, runs: bytes) -> bytes:
    """The list of runs, encoded already, with the time it is now: a page tells by it how long ago things were."""
    return encoded({"now_s": time.time(), "home": str(home)})[:-1] + b',"runs":' + runs + b"}"


def _plain_tried(tried: TriedSettings) -> dict[str, Any]:
    return {**asdict(tried), "samples_per_s": tried.samples_per_s, "wait_fraction": tried.wait_fraction}


def _new(entries: list[_T], seen_s: float | None, last: int | None) -> tuple[list[_T], int]:
    """Those to be told, and the number of the last there is."""
    newest = entries[-1].number if entries else last or 0
    # Later on the number tells what is new: an entry may be written later than the time it bears.
    return entries if last is not None else [each for each in entries if each.t_s > (seen_s or 0.0)], newest


def _refuse_if_over(run: Run) -> None:
    outcome = run.outcome
    if outcome is not None:
        raise RequestError(409, f"{run.id} is over ({outcome.state}): nothing is left to set")


def _checked(wanted: Any) -> dict[str, Any]:
    """The values of a request, each of its kind; whether they can be is for the training to say."""
    if not isinstance(wanted, dict):
        raise RequestError(400, 'send an object, such as {"loader": null, "workers": 8}')
    known = (*_COUNTS, "memory", "loader")
    for name in wanted:
        if name not in known:
            raise RequestError(400, f"{name[:60]!r} cannot be set; workers, depth and memory can, of a loader")
    for name in _COUNTS:
        value = wanted.get(name, 1)
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise RequestError(400, f"{name}={str(value)[:60]} is not a whole number from 0 up")
    if "memory" in wanted:
        try:
            if not isinstance(wanted["memory"], str):
                raise ConfigError(f'memory={str(wanted["memory"])[:60]} is no size; write it as text: "6GB"')
            parse_size(wanted["memory"])
        except ConfigError as wrong:
            raise RequestError(400, str(wrong)) from None
    loader = wanted.get("loader")
    if loader is not None and type(loader) not in (str, int):
        raise RequestError(400, "loader is the name or the number of one, or null for the only one")
    if not set(wanted) - {"loader"}:
        raise RequestError(400, "nothing to set: send workers, depth or memory")
    return wanted


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
