"""Trainings as `penstock top` shows them, gathered at one moment.

In:  recorded runs and their sockets; process trees.
Out: ``Training``: figures, loaders and workers, processes, what happened last.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import PenstockError
from penstock.meter import Gpu, Roots
from penstock.monitor.process_trees import TreeSample, WatchedTree
from penstock.monitor.runs.reader import Run, ask
from penstock.monitor.system_levels import gpu_levels, system_levels

_EVENTS_KEPT = 50
_ANSWERS_WITHIN_S = 0.5
_ASKED_AGAIN_S = 5.0
"""How long a training that does not answer is left alone: it must not hold up the screen every second."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training."""

    id: str
    """Of the run; "process N" where it is not recorded."""
    name: str
    """Any text: the run's name, or a command line."""
    is_recorded: bool
    state: str
    """running, finished, failed, killed, ended."""
    what: str | None
    """Of a failed one, the exception."""
    pid: int | None
    started_s: float
    heard_s: float
    """When the figures are from."""
    measure: str
    """How tree_bytes was taken."""
    figures: dict[str, float]
    loaders: list[dict[str, Any]] = field(default_factory=list)
    """Name, configuration and workers of each, live; without workers where nobody answers."""
    gpus: list[str] = field(default_factory=list)
    """Names, in the order of gpu.N."""
    processes: list[dict[str, Any]] = field(default_factory=list)
    """Of a training that is not recorded."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Journal and alerts, oldest first: t_s, who, kind, what."""
    alerts: list[str] = field(default_factory=list)
    """Those that stand, in words."""
    trouble: str | None = None
    """Why there are no live figures."""


class RecordedTraining:
    """A run, by its record and by what its process answers."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.id = run.id
        self._facts = run.facts
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS_KEPT)
        self._noted_s = self._alerted_s = 0.0
        self._standing: dict[tuple[str, Any], str] = {}
        self._asks_at_s = 0.0
        self._trouble: str | None = None

    def look(self, *, in_detail: bool) -> Training:
        """``in_detail`` asks the process; without it the record alone is read."""
        outcome, latest = self.run.outcome, self.run.latest
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
        return Training(
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
            alerts=list(self._standing.values()),
            trouble=self._trouble if outcome is None else None,
        )

    def turn(self, message: dict[str, Any]) -> dict[str, Any]:
        """Turn a valve; the answer of the training. Raises PenstockError."""
        return ask(self.run, {"do": "set", "who": "terminal", **message}, timeout_s=2.0)

    def close(self) -> None:
        self.run.close()

    # -- inside -----------------------------------------------------------------------------

    def _ask(self) -> dict[str, Any] | None:
        if time.monotonic() < self._asks_at_s:
            return None
        try:
            answer = ask(self.run, {"do": "state"}, timeout_s=_ANSWERS_WITHIN_S)
            live = answer.get("state")
            if not isinstance(live, dict) or not isinstance(live.get("loaders"), list):
                raise PenstockError(str(answer.get("why", "an answer without a state")))
        except PenstockError as problem:
            self._trouble = str(problem)
            self._asks_at_s = time.monotonic() + _ASKED_AGAIN_S
            return None
        self._trouble = None
        return live

    def _read_events(self) -> None:
        new: list[dict[str, Any]] = []
        for note in self.run.journal(since=self._noted_s):
            self._noted_s = max(self._noted_s, note.t_s)
            new.append({"t_s": note.t_s, "who": note.who, "kind": note.kind, "what": note.what})
        for alert in self.run.alerts(since=self._alerted_s):
            self._alerted_s = max(self._alerted_s, alert.t_s)
            new.append({"t_s": alert.t_s, "who": "alert", "kind": alert.state, "what": alert.what})
            key = (alert.rule, (alert.details or {}).get("threshold"))
            if alert.state == "raised":
                self._standing[key] = alert.what
            else:
                self._standing.pop(key, None)
        self._events.extend(sorted(new, key=lambda event: event["t_s"]))


class StrangeTraining:
    """A process and its descendants, from outside."""

    def __init__(self, tree: WatchedTree, roots: Roots) -> None:
        self.id = f"process {tree.pid}"
        self._tree = tree
        self._roots = roots
        self._last: TreeSample | None = None
        self._last_s = 0.0

    def look(self, gpus: tuple[Gpu, ...]) -> Training:
        now = self._tree.sample()
        if now is not None:
            self._last, self._last_s = now, time.time()
        seen = self._last
        if seen is None:
            raise PenstockError(f"{self.id} has ended")
        figures = dict(seen.figures)
        if now is not None:
            figures |= system_levels(self._roots) | gpu_levels(enumerate(gpus))
            pids = {each.pid for each in seen.processes}
            held = [count or 0 for gpu in gpus for pid, count in gpu.processes.items() if pid in pids]
            if held:
                figures["gpu_tree_bytes"] = float(sum(held))
        return Training(
            id=self.id,
            name=seen.command,
            is_recorded=False,
            state="ended" if now is None else "running",
            what=None,
            pid=seen.pid,
            started_s=seen.started_s,
            heard_s=self._last_s,
            measure=seen.measure,
            figures=figures,
            gpus=[gpu.name for gpu in gpus],
            processes=[
                {"pid": each.pid, "name": each.name, "doing": each.doing, "processors": each.processors,
                 "bytes": each.bytes}
                for each in seen.processes
            ],
        )  # fmt: skip

    def close(self) -> None: ...


def opened(path: Any) -> RecordedTraining | None:
    """A run that goes on; None: it is over, or no record."""
    with contextlib.suppress(PenstockError):
        run = Run(path)
        if run.outcome is None:
            return RecordedTraining(run)
        run.close()
    return None
