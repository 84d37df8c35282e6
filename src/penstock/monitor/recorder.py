"""The recorder of a run: reads its gauges, writes the record, warns, passes points on. It has no thread of its own.

In:  ``tick`` once a second; notes and alerts from anywhere.
Out: the record, warnings; points for sinks and observers.
Runs in: trainer: ``tick`` in the monitor's thread, the rest in any thread.

A full disk, a folder that was removed or a database that stays locked stops the recording with one warning;
everything else continues.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from penstock.advice.memory_warning import CALM_BELOW, AdvisedLoader, memory_full, warning_text
from penstock.monitor.gauges import Gauges, GaugeSample, figures_between
from penstock.monitor.log_line import say
from penstock.monitor.runs.format import Alert, Note, Point, RunOutcome, TriedSettings
from penstock.monitor.runs.writer import RunRecord
from penstock.monitor.watched_loader import WatchedLoader

_PATIENCE_POINTS = 60
"""The most points that are kept while the database is locked; with more points, recording stops."""
_CHECK_FILE_EVERY = 10
_WRITE_TOTALS_EVERY = 5
_JUMP_S = 5.0
_MOST_TRIED = 200
"""The most configurations whose results are kept apart; a governor may try many configurations."""


class Sink(Protocol):
    """Gets figures once a second, from the monitor's thread, for TensorBoard, Weights & Biases or anything else.

    A sink that raises is dropped with one warning.
    """

    def write(self, step: int, figures: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class PointObserver(Protocol):
    """Gets every point, in the monitor's thread, and may act on it.

    ``recorder.loaders`` have valves; ``recorder.note`` and ``recorder.alert`` write to the record. It must return
    within milliseconds; longer work needs a thread of its own.
    """

    def observe(self, point: Point, recorder: Recorder) -> None: ...
    def close(self) -> None: ...


class WallClock:
    """Seconds since 1970 that never go back, so that points stay in order: the system clock may be set back."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall, self.monotonic = wall, monotonic
        self._ahead_s = wall() - monotonic()

    def __call__(self) -> float:
        now_s, wall_s = self.monotonic() + self._ahead_s, self._wall()
        if wall_s > now_s + _JUMP_S:
            # The machine was suspended, or its clock was corrected.
            self._ahead_s += wall_s - now_s
            return wall_s
        return now_s


class Achievements:
    """The results of a run: in total, and with each configuration that was tried."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self.tried: dict[str, TriedSettings] = {}
        self.changed: set[str] = set()
        """Keys of ``tried`` that are not written yet."""
        self._active_s = self._wait_s = 0.0

    def add(
        self, before: GaugeSample | None, now: GaugeSample, configurations: Sequence[Mapping[str, Any]], t_s: float
    ) -> None:
        tree_bytes, used_bytes = now.levels.get("tree_bytes", 0.0), now.levels.get("used_bytes", 0.0)
        totals = self.totals
        totals["t_s"], totals["step"] = t_s, float(now.step)
        totals["samples"] = float(sum(each.samples or 0 for each in now.loaders))
        totals["peak_tree_bytes"] = max(totals.get("peak_tree_bytes", 0.0), tree_bytes)
        totals["peak_used_bytes"] = max(totals.get("peak_used_bytes", 0.0), used_bytes)
        totals["worker_restarts"] = now.levels.get("worker_restarts", 0.0)
        if before is None or now.t_s <= before.t_s:
            return
        span_s = now.t_s - before.t_s
        more = [
            float(max(0, (loader.samples or 0) - (then.samples or 0)))
            for then, loader in zip(before.loaders, now.loaders, strict=True)
        ]
        is_active = False
        for number, loader in enumerate(now.loaders):
            # A loop that was left early never ends its iteration; samples of another loader show that it was left.
            if not (more[number] or (loader.is_iterating and not any(more))):
                continue
            is_active = True
            wait_s = max(0.0, (loader.wait_s or 0.0) - (before.loaders[number].wait_s or 0.0))
            self._wait_s += wait_s
            self._add_tried(number, configurations[number], t_s, span_s, more[number], wait_s, tree_bytes)
        self._active_s += span_s if is_active else 0.0
        totals["active_s"], totals["wait_s"] = self._active_s, self._wait_s

    def _add_tried(
        self, number: int, configuration: Mapping[str, Any], t_s: float, span_s: float, samples: float, wait_s: float,
        tree_bytes: float,
    ) -> None:  # fmt: skip
        key = f"{number}:{json.dumps(configuration, sort_keys=True, default=str)}"
        found = self.tried.get(key)
        if found is None:
            if len(self.tried) >= _MOST_TRIED:
                return
            found = TriedSettings(
                loader=number, configuration=dict(configuration), began_s=t_s - span_s, ended_s=t_s, active_s=0.0,
                samples=0.0, wait_s=0.0, peak_bytes=0.0,
            )  # fmt: skip
        self.tried[key] = replace(
            found,
            ended_s=t_s,
            active_s=found.active_s + span_s,
            samples=found.samples + samples,
            wait_s=found.wait_s + wait_s,
            peak_bytes=max(found.peak_bytes, tree_bytes),
        )
        self.changed.add(key)


class Recorder:
    def __init__(
        self,
        loaders: Sequence[WatchedLoader],
        gauges: Gauges,
        *,
        clock: WallClock,
        warn_at: float | None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.loaders = loaders
        self.step = 0
        """Number of training steps so far; the training thread writes this number."""
        self.record: RunRecord | None = None
        self.point: Point | None = None
        """The latest point."""
        self.run_id: str | None = None
        self._gauges = gauges
        self._clock = clock
        self._warn_at = warn_at
        self._sinks = list(sinks)
        self._observers: list[PointObserver] = []
        self._gauges_lock = threading.Lock()
        self._sample: GaugeSample | None = None
        self._lock = threading.Lock()
        """Guards what other threads leave for the next tick."""
        self._notes: deque[Note] = deque(maxlen=_PATIENCE_POINTS * 10)
        self._alerts: deque[Alert] = deque(maxlen=_PATIENCE_POINTS * 10)
        self._points: list[Point] = []
        self._achieved = Achievements()
        for each in loaders:
            each.read()  # so that its present settings do not count as a change
        self._configurations = [each.configuration for each in loaders]
        self._stopped: RunRecord | None = None
        """The record, once it cannot be written any further."""
        self._ticks = 0
        self._is_warned = self._is_ticking = False

    # -- for any thread ---------------------------------------------------------------------

    def now_s(self) -> float:
        """The run's time; see ``WallClock``."""
        return self._clock()

    def note(self, who: str, kind: str, what: str, **details: Any) -> None:
        """An entry of the journal, written with the next point."""
        with self._lock:
            self._notes.append(Note(t_s=self._clock(), who=who, kind=kind, what=what, details=details))

    def alert(self, alert: Alert) -> None:
        """An alert for the record, written with the next point."""
        with self._lock:
            self._alerts.append(alert)

    def watch_with(self, observer: PointObserver) -> None:
        """Pass every point to ``observer`` from now on."""
        self._observers = [*self._observers, observer]

    def read(self, *, in_haste: bool = False) -> GaugeSample:
        """The gauges now, for the training thread. With ``in_haste`` they are a moment old if the monitor's thread is
        reading them."""
        if self._gauges_lock.acquire(blocking=not in_haste or self._sample is None):
            try:
                return self._gauges.read(self.step, in_haste=in_haste)
            finally:
                self._gauges_lock.release()
        assert self._sample is not None
        return self._sample._replace(step=self.step)

    def turn(self, loader: WatchedLoader, wanted: dict[str, Any], *, who: str) -> dict[str, Any]:
        """Turn valves and note the source of the change. Called in the monitor's thread."""
        if not self._is_ticking:
            # Results until now count for the old configuration.
            self.tick()
        now = loader.turn(wanted)
        self._note_changes(who)
        return now

    # -- once a second ----------------------------------------------------------------------

    def tick(self) -> Point:
        """Read the gauges, warn, pass the point on and write it. Called in the monitor's thread, or while that thread
        is not running."""
        self._is_ticking = True
        try:
            return self._tick()
        finally:
            self._is_ticking = False

    def _tick(self) -> Point:
        with self._gauges_lock:
            sample = self._gauges.read(self.step)
        before, self._sample = self._sample, sample
        span_s = 0.0 if before is None else max(0.0, sample.t_s - before.t_s)
        point = self.point = Point(self._clock(), span_s, figures_between(before, sample))
        self._achieved.add(before, sample, self._configurations, point.t_s)
        self._note_changes("training")
        self._note_endings(sample)
        self.warn_if_full(point.figures)
        self._pass_on(point)
        self._write(point)
        return point

    def warn_if_full(self, figures: dict[str, float]) -> None:
        """Warn once each time memory rises above ``warn_at``, and not again while it stays above."""
        if self._warn_at is None or not figures.get("limit_bytes"):
            return
        share = figures["used_bytes"] / figures["limit_bytes"]
        if share < self._warn_at - CALM_BELOW:
            self._is_warned = False
        elif share >= self._warn_at and not self._is_warned:
            self._is_warned = True
            loaders = [
                AdvisedLoader(
                    name=each.name, is_only=len(self.loaders) == 1, configuration=each.configuration, keys=each.keys
                )
                for each in self.loaders
            ]
            warning = warning_text(memory_full(figures, loaders, warn_at=self._warn_at, run_id=self.run_id))
            say(logging.WARNING, warning)
            self.note("monitor", "warning", warning, share=share)

    def close(self, outcome: RunOutcome) -> None:
        """Write the last point and the outcome; close sinks and observers."""
        with contextlib.suppress(Exception):
            # The outcome must be written even if something fails here.
            self._ticks = 0
            self.tick()
        for listener in (*self._sinks, *self._observers):
            self._try(listener.close, f"{type(listener).__name__}.close()")
        record, self.record, self._stopped = self.record or self._stopped, None, None
        if record is not None:
            record.finish(outcome)

    def abandon(self) -> None:
        """In a forked child: the run belongs to the parent."""
        record, self.record, self._stopped = self.record or self._stopped, None, None
        if record is not None:
            record.abandon()

    def keep_outcome(self, outcome: RunOutcome) -> None:
        """Keep the outcome in the lock's file, if the thread that writes the record does not end."""
        record = self.record or self._stopped
        if record is not None:
            record.keep_outcome(outcome)

    # -- inside -----------------------------------------------------------------------------

    def _note_changes(self, who: str) -> None:
        for number, loader in enumerate(self.loaders):
            now = loader.configuration
            before = self._configurations[number]
            changed = {key: (before.get(key), now[key]) for key in now if now[key] != before.get(key)}
            if not now or not changed:
                continue
            self._configurations[number] = now
            words = ", ".join(f"{key} {_shown(was)} -> {_shown(new)}" for key, (was, new) in changed.items())
            kind = "memory" if set(changed) == {"memory"} else "cache" if set(changed) == {"cache_bytes"} else "resize"
            self.note(who, kind, f"{loader.name}: {words}", loader=loader.name, number=number, now=now)

    def _note_endings(self, sample: GaugeSample) -> None:
        for loader, seen in zip(self.loaders, sample.loaders, strict=True):
            for ending in loader.new_endings(int(seen.figures.get("worker_restarts", 0))):
                what = f"{loader.name}: {ending}; it was replaced"
                self.note("loader", "restart", what, loader=loader.name)

    def _pass_on(self, point: Point) -> None:
        for sink in list(self._sinks):
            if not self._try(lambda sink=sink: sink.write(self.step, dict(point.figures)), type(sink).__name__):
                self._sinks.remove(sink)
        for observer in self._observers:
            if not self._try(lambda observer=observer: observer.observe(point, self), type(observer).__name__):
                self._observers = [each for each in self._observers if each is not observer]

    @staticmethod
    def _try(call: Callable[[], None], name: str) -> bool:
        try:
            call()
        except Exception as problem:
            say(logging.WARNING, f"penstock: {name} failed and is not called again: {problem!r}")
            return False
        return True

    def _write(self, point: Point) -> None:
        if self.record is None:
            with self._lock:
                self._notes.clear()
                self._alerts.clear()
            return
        self._points.append(_finite(point))
        with self._lock:
            notes, alerts = list(self._notes), list(self._alerts)
        is_due = self._ticks % _WRITE_TOTALS_EVERY == 0
        changed = set(self._achieved.changed) if is_due else set()
        try:
            if self._ticks % _CHECK_FILE_EVERY == 0 and self.record.is_gone:
                raise FileNotFoundError(f"{self.record.path} is gone")
            self._ticks += 1
            self.record.write(
                self._points,
                notes=notes,
                alerts=alerts,
                totals=self._achieved.totals,
                tried={key: self._achieved.tried[key] for key in changed},
            )
        except (sqlite3.Error, OSError) as problem:
            is_locked = "locked" in str(problem) or "busy" in str(problem)
            if not is_locked or len(self._points) > _PATIENCE_POINTS:
                self._stop_recording(problem)
            return
        self._points.clear()
        self._achieved.changed -= changed
        with self._lock:
            for written, kept in ((notes, self._notes), (alerts, self._alerts)):
                for _ in range(min(len(written), len(kept))):
                    kept.popleft()

    def _stop_recording(self, problem: Exception) -> None:
        record, self.record = self.record, None
        assert record is not None
        self._points.clear()
        self._stopped = record
        say(
            logging.WARNING,
            f"penstock: recording of this run has stopped, training goes on: {problem} ({Path(record.path)}); free "
            "space there or set PENSTOCK_HOME before the next run",
        )


def _finite(point: Point) -> Point:
    """In a record NaN means that a value is unknown."""
    figures = {name: value for name, value in point.figures.items() if math.isfinite(value)}
    return point._replace(figures=figures)


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)
