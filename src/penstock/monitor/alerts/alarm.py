"""The alarm of a run: it checks every point, raises alerts, performs their actions and records them.

In:  rules; points, from the monitor's thread.
Out: alerts in the run's record, log lines, commands, webhooks, valves turned down.
Runs in: trainer.

Nothing here waits, and no failure here reaches the training.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.monitor.alerts.actions import ActionRunner
from penstock.monitor.alerts.rules import (
    AlertRule,
    AlertState,
    Command,
    GiveBack,
    Log,
    Transition,
    WatchedValue,
    Webhook,
    in_words,
    next_state,
)
from penstock.monitor.figures import part
from penstock.monitor.log_line import say
from penstock.monitor.runs.format import Alert, Point

if TYPE_CHECKING:
    from penstock.monitor.recorder import Recorder

_HALF_A_POINT_S = 0.5
_RELEASED_PART = 4
"""A valve is turned down by a quarter at a time: single steps from a depth of 64 would take minutes, and half at once
would cost more speed than necessary."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The memory of one loader that has valves."""

    number: int
    """The loader's number in the run."""
    depth: int
    """Batches that may be ahead; 0: the loader has not been iterated yet and holds nothing."""
    workers: int
    in_flight_bytes: float
    """Memory of its batches."""
    workers_private_bytes: float


@dataclass(frozen=True, kw_only=True)
class ReleaseStep:
    """One valve that is turned down."""

    number: int
    """The loader's number."""
    valve: str
    """depth or workers."""
    to: int


def next_step(loaders: Sequence[Holding]) -> ReleaseStep | None:
    """The next valve to turn down: the depth of the loader whose batches use most memory, or workers if every depth is
    1. None if all valves are at 1.

    A loader without workers has nothing ahead that it could release.
    """
    loaders = [each for each in loaders if each.depth and each.workers]
    deep = [each for each in loaders if each.depth > 1]
    if deep:
        most = max(deep, key=lambda each: each.in_flight_bytes)
        return ReleaseStep(number=most.number, valve="depth", to=_less(most.depth))
    crowded = [each for each in loaders if each.workers > 1]
    if crowded:
        most = max(crowded, key=lambda each: each.workers_private_bytes)
        return ReleaseStep(number=most.number, valve="workers", to=_less(most.workers))
    return None


def _less(count: int) -> int:
    return count - max(1, count // _RELEASED_PART)


class _RuleState:
    """One rule and its state."""

    def __init__(self, rule: AlertRule) -> None:
        self.rule = rule
        self.watched = WatchedValue(rule)
        self.state = AlertState()
        self.releases_at_s: float | None = None
        """When the next release step is due; None if no step is due."""
        self.refused: set[int] = set()
        """Loaders whose valves could not be turned down since the alert was raised."""


class Alarm:
    """An observer of the recorder's points; see ``recorder.PointObserver``."""

    def __init__(self, rules: Iterable[AlertRule]) -> None:
        given = [rules] if isinstance(rules, AlertRule) else list(rules)
        for rule in given:
            if not isinstance(rule, AlertRule):
                raise ConfigError(f"alerts={rule!r} is not a rule; write penstock.monitor.AlertRule(on=..., at=...)")
        self._rules = [_RuleState(rule) for rule in given]
        self._runner: ActionRunner | None = None

    def observe(self, point: Point, recorder: Recorder) -> None:
        for each in self._rules:
            value = each.watched.value(point.figures, point.t_s)
            threshold = each.watched.threshold(point.figures)
            each.state, change = next_state(each.state, each.rule, value, threshold, point.t_s)
            if change is not None and value is not None and threshold is not None:
                self._act(each, change, value, threshold, point, recorder)
            is_due = each.releases_at_s is not None and point.t_s >= each.releases_at_s - _HALF_A_POINT_S
            # Well below its threshold the alert only waits to be over: lowering more would cost speed and help nothing.
            if is_due and value is not None and each.state.turning_s is None:
                self._release(each, point, recorder)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()

    # -- inside -----------------------------------------------------------------------------

    def _act(
        self, each: _RuleState, change: Transition, value: float, threshold: float, point: Point, recorder: Recorder
    ) -> None:  # fmt: skip
        rule = each.rule
        text = in_words(rule, value, threshold, point.figures, whose="this training")
        facts: dict[str, Any] = {
            "alert": rule.on, "state": change, "text": text, "value": value, "threshold": threshold, "t_s": point.t_s,
            "run": recorder.run_id, "pid": os.getpid(), "step": recorder.step,
        }  # fmt: skip
        actions = [str(action) for action in rule.then if not isinstance(action, Log)]
        details = {"value": value, "threshold": threshold, "step": recorder.step, "actions": actions}
        recorder.alert(Alert(t_s=point.t_s, rule=rule.on, state=change, what=text, details=details))
        each.releases_at_s = None
        each.refused.clear()
        is_raised = change == "raised"
        for action in rule.then:
            if isinstance(action, Log):
                say(logging.WARNING if is_raised else logging.INFO, f"{'ALERT' if is_raised else 'Alert over'}: {text}")
            elif isinstance(action, GiveBack):
                each.releases_at_s = point.t_s if is_raised else None
            elif isinstance(action, Webhook) or is_raised:
                self._perform(action, facts, recorder)

    def _perform(self, action: Command | Webhook, facts: dict[str, Any], recorder: Recorder) -> None:
        if self._runner is None:
            self._runner = ActionRunner(lambda result: recorder.note("alert", "action", result))
        self._runner.perform(action, facts)

    def _release(self, each: _RuleState, point: Point, recorder: Recorder) -> None:
        holdings = [
            _holding(loader.number, point)
            for loader in recorder.loaders
            if loader.is_penstock and loader.loader is not None and loader.number not in each.refused
        ]
        step = next_step(holdings)
        if step is None:
            if any(holding.workers and not holding.depth for holding in holdings):
                return  # a loader that is not iterated yet will have something to release
            each.releases_at_s = None
            recorder.note(
                "alert", "decision", f"{each.rule.on}: nothing is left to release, depth and workers are at 1"
            )
            return
        action = next(action for action in each.rule.then if isinstance(action, GiveBack))
        each.releases_at_s = point.t_s + action.every_s
        try:
            # The recorder notes the change and its source.
            recorder.turn(recorder.loaders[step.number], {step.valve: step.to}, who="alert")
            say(logging.WARNING, f"{each.rule.on} alert: {step.valve} of loader {step.number} lowered to {step.to}")
        except Exception as problem:
            # The loader is ending or refuses; other loaders can still release memory.
            each.refused.add(step.number)
            recorder.note("alert", "decision", f"{step.valve}={step.to} could not be set: {problem}")


def _holding(number: int, point: Point) -> Holding:
    figures = part(point.figures, f"loader.{number}")
    return Holding(
        number=number,
        depth=int(figures.get("depth", 0)),
        workers=int(figures.get("workers", 0)),
        in_flight_bytes=figures.get("in_flight_bytes", 0.0),
        workers_private_bytes=figures.get("workers_private_bytes", 0.0),
    )
