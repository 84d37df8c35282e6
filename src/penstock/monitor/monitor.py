"""penstock.Monitor: a training that is logged, recorded, and can be reached while it runs.

In:  the loaders of a training, one ``step()`` per training step.
Out: log lines, warnings, a recorded run, a control socket.
Runs in: trainer.
"""

from __future__ import annotations

import atexit
import logging
import os
import sqlite3
import sys
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.environment import state_folder
from penstock.errors import ConfigError, PenstockError
from penstock.monitor.alerts.alarm import Alarm
from penstock.monitor.alerts.rules import AlertRule
from penstock.monitor.control.server import answerer
from penstock.monitor.gauges import Gauges, GaugeSample, figures_between
from penstock.monitor.log_line import log_line, say
from penstock.monitor.recorder import Recorder, Sink, WallClock, Watcher
from penstock.monitor.runs.facts import run_facts, run_name
from penstock.monitor.runs.format import RunOutcome
from penstock.monitor.runs.home import socket_path
from penstock.monitor.runs.writer import RunRecord
from penstock.monitor.ticker import Ticker
from penstock.monitor.watched_loader import WatchedLoader

_END_WITHIN_S = 5.0
_NEVER = sys.maxsize


class Monitor:
    """Watches a training: memory, speed, waiting, once a second, from a thread of its own.

    Args:
        loader: a loader, or several (``[train_loader, eval_loader]``), or None to watch the process alone. Also torch's
            own DataLoader, with fewer figures.
        every: training steps between log lines; None for none.
        warn_at: share of the machine's or container's memory in use at which a warning with advice is logged, once each
            time that is passed; None for never.
        run: what to call this run; the script's name if left out.
        sinks: objects with ``write(step, figures)`` and ``close()``, called once a second from the monitor's thread:
            for TensorBoard, Weights & Biases and their like. Names and units of figures: ``penstock.monitor.figures``.
        alerts: ``penstock.monitor.AlertRule``s: thresholds on memory, swap, waiting, idle GPUs and dead workers,
            and what to do at each: log, run a command, call a webhook, or lower depth and workers.

    Call ``step()`` once per training step. The run is recorded below ``~/.local/state/penstock`` (``PENSTOCK_HOME``
    overrides) and seen by ``penstock runs``; ``penstock set`` reaches it while it runs. As a context manager, an
    exception becomes the run's outcome; without, the run is over when the program is.
    """

    def __init__(
        self,
        loader: Any = None,
        every: int | None = 100,
        warn_at: float | None = 0.9,
        run: str | None = None,
        *,
        sinks: Iterable[Sink] = (),
        alerts: Iterable[AlertRule] = (),
    ) -> None:
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ConfigError(f"every={every!r} is not a number of steps of at least 1; None logs no steps")
        if warn_at is not None and not 0 < warn_at <= 1:
            raise ConfigError(f"warn_at={warn_at!r} is no share of memory, 0 to 1; None never warns")
        alarm = Alarm(alerts)
        self._pid = os.getpid()
        self._is_closed = False
        self._every = every
        self._next_line = _NEVER if every is None else every
        given = _listed(loader)
        loaders = [WatchedLoader(each, number, is_only=len(given) == 1) for number, each in enumerate(given)]
        clock = WallClock()
        gauges = Gauges(loaders, clock=clock.monotonic)
        self._recorder = Recorder(loaders, gauges, clock=clock, warn_at=warn_at, sinks=tuple(sinks))
        self._recorder.watch_with(alarm)
        self._ticker = Ticker(self._recorder)
        self._name = run_name(run)
        self._began_s = clock()
        self._line: GaugeSample = self._recorder.read()
        self._recorder.record = self._begin_record(run, warn_at, gauges)
        self.run_id = self._recorder.run_id
        """What ``penstock set`` and ``penstock runs`` call this run; None where it cannot be recorded."""
        self._recorder.tick()
        self._say_line("Start", self._line, None)
        _MONITORS.add(self)
        atexit.register(self._end_with_program)
        self._ticker.start()

    def step(self) -> None:
        """One training step is done."""
        recorder = self._recorder
        recorder.step += 1
        if recorder.step >= self._next_line:
            self._log_step()

    def log(self, moment: str) -> None:
        """Log a line now, and mark the moment in the record: ``monitor.log("After dataset creation")``."""
        if self._is_over:
            return
        self._recorder.note("training", "moment", str(moment))
        self._say_line(str(moment), self._recorder.read(), self._line)

    def watch_with(self, watcher: Watcher) -> None:
        """Have ``watcher`` look at every point, and act; see ``penstock.monitor.recorder.Watcher``."""
        self._recorder.watch_with(watcher)

    def close(self) -> None:
        """The run is over. May be called twice."""
        self._close("finished", None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(*_ending_of(error))

    # -- inside -----------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._is_closed or os.getpid() != self._pid

    def _begin_record(self, name: str | None, warn_at: float | None, gauges: Gauges) -> RunRecord | None:
        home = state_folder()
        facts = run_facts(name, self._began_s)
        facts |= {
            "loaders": [each.facts for each in self._recorder.loaders],
            "gpus": gauges.gpus,
            "tree_measure": gauges.tree_measure,
            "every": self._every,
            "warn_at": warn_at,
            "socket": None,
        }
        try:
            record = RunRecord(home, facts)
        except (OSError, sqlite3.Error) as problem:
            say(
                logging.WARNING,
                f"penstock: this run is not recorded, training goes on: {problem} ({home}); set PENSTOCK_HOME to a "
                "folder of yours",
            )
            return None
        self._recorder.run_id = record.id
        path = self._listen(home, record.id)
        record.set_fact("socket", None if path is None else str(path))
        return record

    def _listen(self, home: Path, run_id: str) -> Path | None:
        about = {"id": run_id, "name": self._name, "pid": self._pid, "started_s": self._began_s}
        try:
            path = socket_path(home, run_id)
            self._ticker.listen(path, answerer(self._recorder, lambda: about))
        except (OSError, AttributeError, PenstockError) as problem:
            # No such sockets on this platform or file system: everything else works.
            self._recorder.note("monitor", "start", f"no control socket: {problem}")
            return None
        return path

    def _log_step(self) -> None:
        every = self._every or _NEVER
        self._next_line += every
        if self._is_over:
            self._next_line = _NEVER
            return
        reading = self._recorder.read(in_haste=True)
        self._say_line(f"Step {reading.step}", reading, self._line)
        self._line = reading

    def _say_line(self, label: str, reading: GaugeSample, since: GaugeSample | None) -> None:
        figures = figures_between(since, reading)
        say(logging.INFO, log_line(label, figures))

    def _close(self, state: Any, what: str | None) -> None:
        if self._is_over:
            return
        self._is_closed = True
        atexit.unregister(self._end_with_program)
        _MONITORS.discard(self)
        outcome = RunOutcome(state=state, t_s=self._recorder.now_s(), what=what)
        if self._ticker.end(_END_WITHIN_S):
            self._recorder.close(outcome)
        else:
            self._recorder.keep_outcome(outcome)

    def _end_with_program(self) -> None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        self._close(*_ending_of(error))

    def _forget(self) -> None:
        """In a forked child: it is the parent's run. Nothing is written, no line is held open."""
        self._is_closed = True
        self._next_line = _NEVER
        self._ticker.forget()
        self._recorder.abandon()


_MONITORS: weakref.WeakSet[Monitor] = weakref.WeakSet()


def _forget_all() -> None:
    for monitor in list(_MONITORS):
        monitor._forget()
    _MONITORS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _listed(loader: Any) -> Sequence[Any]:
    if loader is None:
        return ()
    return tuple(loader) if isinstance(loader, (list, tuple)) else (loader,)


def _ending_of(error: BaseException | None) -> tuple[str, str | None]:
    if error is None or isinstance(error, GeneratorExit):
        return "finished", None
    if isinstance(error, SystemExit):
        return ("finished", None) if error.code in (None, 0) else ("failed", f"exit status {error.code}")
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return "failed", text[:2000]
