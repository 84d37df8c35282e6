"""penstock.Monitor: logs and records a training, and makes it reachable while it runs.

In:  the loaders of a training, one ``step()`` per training step.
Out: log lines, warnings, a recorded run, a control socket.
Runs in: trainer.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import selectors
import socket
import sqlite3
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.environment import state_folder
from penstock.errors import ConfigError, PenstockError
from penstock.monitor.alerts.alarm import Alarm
from penstock.monitor.alerts.rules import AlertRule
from penstock.monitor.control.server import Control, answerer
from penstock.monitor.gauges import Gauges, GaugeSample, figures_between
from penstock.monitor.log_line import log_line, say
from penstock.monitor.recorder import PointObserver, Recorder, Sink, WallClock
from penstock.monitor.runs.facts import run_facts, run_name
from penstock.monitor.runs.format import RunOutcome
from penstock.monitor.runs.home import socket_path
from penstock.monitor.runs.writer import RunRecord
from penstock.monitor.watched_loader import WatchedLoader

EVERY_S = 1.0
_MOST_DUTY = 0.05
"""Share of one processor that ticks may take; ticks that take longer, as in a large process tree, are therefore less
frequent."""
_END_WITHIN_S = 5.0
_NEVER = sys.maxsize


class Ticker:
    """The monitor's thread: it ticks every second and serves the control socket in between."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._selector = getattr(selectors, "PollSelector", selectors.SelectSelector)()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._control: Control | None = None
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="penstock-monitor", daemon=True)
        self.cpu_s = self._cost_s = 0.0
        """Processor time of all ticks, and of the last tick."""

    def listen(self, path: Path, answer: Callable[[Any], dict[str, Any]]) -> None:
        """Answer messages that come through a socket at ``path``. Raises OSError."""
        self._control = Control(path, self._selector, answer)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def end(self, within_s: float) -> bool:
        """Stop; False if the thread does not end in time."""
        self._is_ending = True
        with contextlib.suppress(OSError):
            self._wake_write.send(b"\0")
        if self._thread.ident is not None and not self.is_this_thread:
            self._thread.join(within_s)
            if self._thread.is_alive():
                return False
        self._close()
        return True

    def forget(self) -> None:
        """In a forked child, which has no such thread: close the child's copies of its sockets."""
        self._is_ending = True
        self._wake_read.close()
        self._wake_write.close()
        if self._control is not None:
            self._control.forget()

    # -- inside -----------------------------------------------------------------------------

    def _close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _run(self) -> None:
        due_s = time.monotonic() + EVERY_S
        ticks = True
        while not self._is_ending:
            for key, events in self._selector.select(max(0.0, due_s - time.monotonic())):
                if key.data is not None:
                    key.data(events)
            now_s = time.monotonic()
            if self._is_ending or now_s < due_s:
                continue
            if self._control is not None:
                self._control.close_silent()
            if ticks:
                ticks = self._tick()
            cpu_s = self._cost_s
            # Ticks come at regular times as long as they are cheap; a missed tick is not repeated.
            due_s = max(due_s + EVERY_S, now_s + cpu_s / _MOST_DUTY, now_s + EVERY_S / 2)

    def _tick(self) -> bool:
        began_s = time.thread_time()
        try:
            self._recorder.tick()
        except Exception as problem:
            # A failing monitor must not end the training.
            say(logging.WARNING, f"penstock: the monitor has failed, training goes on without it: {problem!r}")
            return False
        finally:
            self._cost_s = time.thread_time() - began_s
            self.cpu_s += self._cost_s
        return True


class Monitor:
    """Watches the memory, the speed and the waiting of a training once a second, from a thread of its own.

    Args:
        loader: a loader, or several (``[train_loader, eval_loader]``), or None to watch the process alone. A loader can
            also be torch's own DataLoader, which has fewer figures.
        every: training steps between log lines; None for none.
        warn_at: share of the machine's or container's memory in use at which a warning with advice is logged, once each
            time memory rises above it; None for no warnings.
        run: the name of this run; the script's name if left out.
        sinks: objects with ``write(step, figures)`` and ``close()``, called once a second from the monitor's thread:
            for TensorBoard, Weights & Biases and similar tools. Names and units are in ``penstock.monitor.figures``.
        alerts: ``penstock.monitor.AlertRule``s: thresholds on memory, swap, waiting, idle GPUs and crashed
            workers, each with its actions: log, run a command, call a webhook, or lower depth and workers.

    Call ``step()`` once per training step. The run is recorded below ``~/.local/state/penstock`` (or below
    ``PENSTOCK_HOME``) and listed by ``penstock runs``; ``penstock set`` reaches it while it runs. Used as a context
    manager, the monitor records an exception as the run's outcome; otherwise the run ends with the program.
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
            raise ConfigError(f"every={every!r} is not a whole number of at least 1; None logs no steps")
        if warn_at is not None and not 0 < warn_at <= 1:
            raise ConfigError(f"warn_at={warn_at!r} is not a share of memory, above 0 and at most 1; None never warns")
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
        """The id of this run for ``penstock set`` and ``penstock runs``; None if the run cannot be recorded."""
        self._recorder.tick()
        self._say_line("Start", self._line, None)
        _MONITORS.add(self)
        atexit.register(self._end_with_program)
        self._ticker.start()

    def step(self) -> None:
        """Call this after every training step."""
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

    def watch_with(self, observer: PointObserver) -> None:
        """Pass every point to ``observer``, which may act; see ``penstock.monitor.recorder.PointObserver``."""
        self._recorder.watch_with(observer)

    def close(self) -> None:
        """End the run. May be called twice."""
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
        facts = run_facts(name, self._began_s)
        facts |= {
            "loaders": [each.facts for each in self._recorder.loaders],
            "gpus": gauges.gpus,
            "tree_measure": gauges.tree_measure,
            "every": self._every,
            "warn_at": warn_at,
            "socket": None,
        }
        where = ""
        try:
            home = state_folder()
            where = f" ({home})"
            record = RunRecord(home, facts)
        except (OSError, sqlite3.Error, PenstockError) as problem:
            say(
                logging.WARNING,
                f"penstock: this run is not recorded, training goes on: {problem}{where}; set PENSTOCK_HOME to a "
                "folder that you can write to",
            )
            return None
        self._recorder.run_id = record.id
        path = self._listen(home, record.id)
        try:
            record.set_fact("socket", None if path is None else str(path))
        except (OSError, sqlite3.Error) as problem:
            # The disk became full after the record was begun. The recorder stops with a warning if the disk stays full.
            self._recorder.note("monitor", "start", f"no other terminal can reach this run: {problem}")
        return record

    def _listen(self, home: Path, run_id: str) -> Path | None:
        about = {"id": run_id, "name": self._name, "pid": self._pid, "started_s": self._began_s}
        try:
            path = socket_path(home, run_id)
            self._ticker.listen(path, answerer(self._recorder, about))
        except (OSError, AttributeError, PenstockError) as problem:
            # This platform or file system has no such sockets; everything else works.
            self._recorder.note("monitor", "start", f"no control socket: {problem}")
            return None
        return path

    def _log_step(self) -> None:
        every = self._every or _NEVER
        self._next_line += every
        if self._is_over:
            self._next_line = _NEVER
            return
        sample = self._recorder.read(in_haste=True)
        self._say_line(f"Step {sample.step}", sample, self._line)
        self._line = sample

    def _say_line(self, label: str, sample: GaugeSample, since: GaugeSample | None) -> None:
        say(logging.INFO, log_line(label, figures_between(since, sample)))

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
        """In a forked child: the run belongs to the parent. The child writes nothing and keeps no socket open."""
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
