"""Trainings as `penstock top` shows them: recorded runs that are running, one run, a process, or all processes that
match a pattern.

In:  the choice on the command line; recorded runs and their sockets; process trees.
Out: ``TrainingSnapshot``s: figures, loaders and workers, processes, the latest events.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from penstock.cli.watch.subjects import add_matching, tree_of
from penstock.errors import PenstockError
from penstock.formatting import one_line
from penstock.meter import Gpu, Roots, gpu_status
from penstock.monitor.process_trees import TreeSample, WatchedTree
from penstock.monitor.runs.format import SUFFIX
from penstock.monitor.runs.reader import Run, ask, open_run, record_files
from penstock.monitor.system_levels import gpu_levels, system_levels

_EVENTS_KEPT = 50
_ANSWERS_WITHIN_S = 0.5
_ASKED_AGAIN_S = 5.0
"""Time before the next request to a training that did not answer: such a training must not delay every frame."""
_CPU_OVER_S = 0.3


@dataclass(frozen=True, kw_only=True)
class TrainingSnapshot:
    """One training at one moment."""

    id: str
    """The id of the run; "process N" for a training without a record."""
    name: str
    """Any text: the run's name, or a command line."""
    is_recorded: bool
    state: str
    """running, finished, failed, killed, ended."""
    what: str | None
    """The exception, if the training failed."""
    pid: int | None
    started_s: float
    heard_s: float
    """Time of the figures."""
    measure: str
    """How tree_bytes was measured."""
    figures: dict[str, float]
    loaders: list[dict[str, Any]] = field(default_factory=list)
    """Name, configuration and workers of each loader, live; without workers if the training does not answer."""
    gpus: list[str] = field(default_factory=list)
    """Names of the GPUs, in the order of gpu.N."""
    processes: list[dict[str, Any]] = field(default_factory=list)
    """The processes of a training without a record; empty for a recorded run."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Journal and alerts, oldest first: t_s, who, kind, what."""
    alerts: list[str] = field(default_factory=list)
    """Alerts that are raised, in words."""
    problem: str | None = None
    """Why there are no live figures."""


class RecordedTraining:
    """A run: its record and the answers of its process."""

    def __init__(self, run: Run) -> None:
        self.id = run.id
        self._run, self._facts = run, run.facts
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS_KEPT)
        self._noted_s = self._alerted_s = 0.0
        self._raised: dict[tuple[str, Any], str] = {}
        self._asks_at_s = 0.0
        self._problem: str | None = None

    def snapshot(self, *, in_detail: bool) -> TrainingSnapshot:
        """``in_detail`` asks the process; otherwise only the record is read."""
        outcome, latest = self._run.outcome, self._run.latest
        facts = self._facts
        figures, heard_s = ({}, 0.0) if latest is None else (latest.figures, latest.t_s)
        loaders = [
            {"number": number, "name": each.get("name"), "kind": each.get("kind"), "configuration": {}, "workers": None}
            for number, each in enumerate(facts.get("loaders") or [])
        ]
        live = self._ask() if in_detail and outcome is None else None
        if live is not None:
            figures, heard_s, loaders = live.get("figures", figures), live.get("t_s") or heard_s, live["loaders"]
            figures = {**figures, "step": float(live.get("step", figures.get("step", 0.0)))}
        if in_detail:
            self._read_events()
        return TrainingSnapshot(
            id=self.id,
            name=str(facts.get("name", "")),
            is_recorded=True,
            state="running" if outcome is None else outcome.state,
            what=None if outcome is None else outcome.what,
            pid=facts.get("pid"),
            started_s=float(facts.get("started_s") or 0.0),
            heard_s=heard_s,
            measure=str(facts.get("tree_measure") or ""),
            figures=figures,
            loaders=loaders,
            gpus=[str(each.get("name", "")) for each in facts.get("gpus") or []],
            events=list(self._events),
            alerts=list(self._raised.values()),
            problem=self._problem if outcome is None else None,
        )

    def set_valve(self, message: dict[str, Any]) -> dict[str, Any]:
        """The training's answer. Raises PenstockError."""
        return ask(self._run, {"do": "set", "who": "terminal", **message}, timeout_s=2.0)

    def close(self) -> None:
        self._run.close()

    def _ask(self) -> dict[str, Any] | None:
        if time.monotonic() < self._asks_at_s:
            return None
        try:
            answer = ask(self._run, {"do": "state"}, timeout_s=_ANSWERS_WITHIN_S)
            live = answer.get("state")
            if not isinstance(live, dict) or not isinstance(live.get("loaders"), list):
                raise PenstockError(str(answer.get("why", "the answer has no state")))
        except PenstockError as problem:
            self._problem = str(problem)
            self._asks_at_s = time.monotonic() + _ASKED_AGAIN_S
            return None
        self._problem = None
        return live

    def _read_events(self) -> None:
        new: list[dict[str, Any]] = []
        for note in self._run.journal(since=self._noted_s):
            self._noted_s = max(self._noted_s, note.t_s)
            new.append({"t_s": note.t_s, "who": note.who, "kind": note.kind, "what": note.what})
        for alert in self._run.alerts(since=self._alerted_s):
            self._alerted_s = max(self._alerted_s, alert.t_s)
            new.append({"t_s": alert.t_s, "who": "alert", "kind": alert.state, "what": alert.what})
            key = (alert.rule, (alert.details or {}).get("threshold"))
            if alert.state == "raised":
                self._raised[key] = alert.what
            else:
                self._raised.pop(key, None)
        self._events.extend(sorted(new, key=lambda event: event["t_s"]))


class UnrecordedTraining:
    """A process and its descendants, seen from outside."""

    def __init__(self, tree: WatchedTree, roots: Roots) -> None:
        self.id = f"process {tree.pid}"
        self._tree = tree
        self._roots = roots
        self._last: TreeSample | None = None
        self._last_s = 0.0

    def snapshot(self, gpus: tuple[Gpu, ...]) -> TrainingSnapshot:
        now = self._tree.sample()
        if now is not None:
            self._last, self._last_s = now, time.time()
        latest = self._last
        if latest is None:
            raise PenstockError(f"{self.id} has ended")
        figures = dict(latest.figures)
        if now is not None:
            figures |= system_levels(self._roots) | gpu_levels(enumerate(gpus))
            pids = {each.pid for each in latest.processes}
            held = [count or 0 for gpu in gpus for pid, count in gpu.processes.items() if pid in pids]
            if held:
                figures["gpu_tree_bytes"] = float(sum(held))
        return TrainingSnapshot(
            id=self.id,
            name=latest.command,
            is_recorded=False,
            state="ended" if now is None else "running",
            what=None,
            pid=latest.pid,
            started_s=latest.started_s,
            heard_s=self._last_s,
            measure=latest.measure,
            figures=figures,
            gpus=[gpu.name for gpu in gpus],
            processes=[
                {"pid": each.pid, "name": each.name, "doing": each.doing, "processors": each.processors,
                 "bytes": each.bytes}
                for each in latest.processes
            ],
        )  # fmt: skip


# -- which trainings --------------------------------------------------------------------------------------------------


class TrainingSource(Protocol):
    """Trainings that are sampled for every frame."""

    nothing: str
    """The text for the page if there is no training."""

    def snapshots(self, chosen: str | None) -> list[TrainingSnapshot]:
        """All trainings. Only the training with the id ``chosen`` is in detail; if ``chosen`` is None, every training
        is."""
        ...

    def recorded(self, training_id: str) -> RecordedTraining | None:
        """The training, if it has valves."""
        ...

    def close(self) -> None: ...


class RunningRuns:
    """All running runs, newest first; or one run in any state."""

    def __init__(self, home: Path, which: str | None) -> None:
        self.nothing = (
            "no training with a monitor is running; penstock.Monitor(loader) in a training shows it here, and --pid N "
            "or --match REGEX shows any other training"
        )
        self._home = home
        self._only = None if which is None else RecordedTraining(open_run(home, which))
        self._running: dict[str, RecordedTraining] = {}
        self._ended: set[str] = set()
        """Records that need not be opened again."""

    def snapshots(self, chosen: str | None) -> list[TrainingSnapshot]:
        if self._only is not None:
            return [self._only.snapshot(in_detail=True)]
        self._find()
        shown = []
        for each in sorted(self._running.values(), key=lambda each: each.id, reverse=True):
            try:
                found = each.snapshot(in_detail=chosen in (None, each.id))
            except PenstockError:  # the record was removed
                self._forget(each.id)
                continue
            if found.state != "running":
                self._forget(each.id)
            shown.append(found)
        return shown

    def recorded(self, training_id: str) -> RecordedTraining | None:
        return self._only or self._running.get(training_id)

    def close(self) -> None:
        for each in (*self._running.values(), *([self._only] if self._only else [])):
            each.close()

    def _find(self) -> None:
        for path in record_files(self._home):
            run_id = path.name.removesuffix(SUFFIX)
            if run_id in self._running or run_id in self._ended:
                continue
            self._ended.add(run_id)
            with contextlib.suppress(PenstockError), contextlib.ExitStack() as unused:  # not a record
                run = unused.enter_context(Run(path))
                if run.outcome is None:
                    self._running[run_id] = RecordedTraining(run)
                    self._ended.remove(run_id)
                    unused.pop_all()

    def _forget(self, run_id: str) -> None:
        self._ended.add(run_id)
        self._running.pop(run_id).close()


class ProcessTrainings:
    """A process by its id, or all processes that match a pattern; ended processes stay on the page."""

    def __init__(self, pid: int | None, pattern: re.Pattern[str] | None, roots: Roots) -> None:
        self.nothing = "" if pattern is None else f"no process matches {one_line(pattern.pattern)!r}"
        self._pattern = pattern
        self._roots = roots
        self._has_nvml = gpu_status(roots=roots).gpu_library == "nvml"
        self._trees = {} if pid is None else {pid: tree_of(pid)}
        self._trainings: dict[int, UnrecordedTraining] = {}

    def snapshots(self, chosen: str | None) -> list[TrainingSnapshot]:
        add_matching(self._trees, self._pattern)
        for pid, tree in self._trees.items():
            self._trainings.setdefault(pid, UnrecordedTraining(tree, self._roots))
        found = self._snapshots()
        if chosen is None and found:
            # The use of processors is a difference of two samples.
            time.sleep(_CPU_OVER_S)
            found = self._snapshots()
        return found

    def recorded(self, training_id: str) -> None:
        return None

    def close(self) -> None: ...

    def _snapshots(self) -> list[TrainingSnapshot]:
        gpus = gpu_status(roots=self._roots).gpus if self._has_nvml else ()
        found = []
        for pid, each in list(self._trainings.items()):
            try:
                found.append(each.snapshot(gpus))
            except PenstockError:  # ended before its first sample
                del self._trainings[pid], self._trees[pid]
        return found
