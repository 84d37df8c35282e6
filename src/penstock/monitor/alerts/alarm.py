"""The alerts of a run: looks at every point, raises, acts, writes down.

In:  rules; points, from the monitor's thread.
Out: rows in the run's alerts, log lines, commands, webhooks, valves turned down.
Runs in: trainer.

Nothing here waits, and nothing that goes wrong here reaches the training.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.monitor.alerts.actions import ActionRunner
from penstock.monitor.alerts.debounce import AlertState, Transition, next_state
from penstock.monitor.alerts.release_steps import Holding, next_step
from penstock.monitor.alerts.rules import AlertRule, Command, GiveBack, Log, Webhook
from penstock.monitor.alerts.values import WatchedValue, in_words
from penstock.monitor.figures import part
from penstock.monitor.log_line import say
from penstock.monitor.runs.format import Alert, Point

if TYPE_CHECKING:
    from penstock.monitor.recorder import Recorder

_WHOSE = "this training"
_HALF_A_POINT_S = 0.5


class _Rule:
    """One rule and how it stands."""

    def __init__(self, rule: AlertRule) -> None:
        self.rule = rule
        self.watched = WatchedValue(rule)
        self.standing = AlertState()
        self.gives_at_s: float | None = None
        """When the next step back is due; None: none is."""
        self.refused: set[int] = set()
        """Loaders that would not be turned down since it was raised."""


class Alarm:
    """A watcher of the recorder's; see ``recorder.Watcher``."""

    def __init__(self, rules: Iterable[AlertRule]) -> None:
        self._rules = [_Rule(rule) for rule in _checked(rules)]
        self._performer: ActionRunner | None = None

    def observe(self, point: Point, recorder: Recorder) -> None:
        for each in self._rules:
            value = each.watched.value(point.figures, point.t_s)
            threshold = each.watched.threshold(point.figures)
            each.standing, news = next_state(each.standing, each.rule, value, threshold, point.t_s)
            if news is not None and value is not None and threshold is not None:
                self._tell(each, news, value, threshold, point, recorder)
            if each.gives_at_s is not None and point.t_s >= each.gives_at_s - _HALF_A_POINT_S:
                self._give_back(each, point, recorder)

    def close(self) -> None:
        if self._performer is not None:
            self._performer.close()

    # -- inside -----------------------------------------------------------------------------

    def _tell(
        self, each: _Rule, news: Transition, value: float, threshold: float, point: Point, recorder: Recorder
    ) -> None:  # fmt: skip
        rule = each.rule
        text = in_words(rule, value, threshold, point.figures, whose=_WHOSE)
        facts: dict[str, Any] = {
            "alert": rule.on, "state": news, "text": text, "value": value, "threshold": threshold, "t_s": point.t_s,
            "run": recorder.run_id, "pid": os.getpid(), "step": recorder.step,
        }  # fmt: skip
        actions = [str(action) for action in rule.then if not isinstance(action, Log)]
        details = {"value": value, "threshold": threshold, "step": recorder.step, "actions": actions}
        recorder.alert(Alert(t_s=point.t_s, rule=rule.on, state=news, what=text, details=details))
        each.gives_at_s = None
        each.refused.clear()
        for action in rule.then:
            if isinstance(action, Log):
                is_raised = news == "raised"
                say(logging.WARNING if is_raised else logging.INFO, f"{'ALERT' if is_raised else 'Alert over'}: {text}")
            elif isinstance(action, GiveBack):
                each.gives_at_s = point.t_s if news == "raised" else None
            elif isinstance(action, Webhook) or news == "raised":
                self._perform(action, facts, recorder)

    def _perform(self, action: Command | Webhook, facts: dict[str, Any], recorder: Recorder) -> None:
        if self._performer is None:
            self._performer = ActionRunner(lambda said: recorder.note("alert", "action", said))
        self._performer.perform(action, facts)

    def _give_back(self, each: _Rule, point: Point, recorder: Recorder) -> None:
        held = [
            loader
            for loader in recorder.loaders
            if loader.is_penstock and loader.loader is not None and loader.number not in each.refused
        ]
        holdings = [_holding(loader.number, point) for loader in held]
        step = next_step(holdings)
        if step is None:
            if any(holding.workers and not holding.depth for holding in holdings):
                return  # not read yet: it will have something to give
            each.gives_at_s = None
            recorder.note(
                "alert", "decision", f"{each.rule.on}: nothing is left to give back, depth and workers are at 1"
            )
            return
        waits = next(action for action in each.rule.then if isinstance(action, GiveBack))
        each.gives_at_s = point.t_s + waits.every_s
        try:
            # The recorder writes down what has changed, and on whose behalf.
            recorder.turn(recorder.loaders[step.number], {step.valve: step.to}, who="alert")
        except Exception as problem:
            # A loader that ends just now, or refuses: the others still have something to give.
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


def _checked(rules: Iterable[AlertRule]) -> list[AlertRule]:
    found: list[AlertRule] = [rules] if isinstance(rules, AlertRule) else list(rules)
    for rule in found:
        if not isinstance(rule, AlertRule):
            raise ConfigError(f"alerts={rule!r} is no rule; write penstock.monitor.AlertRule(on=..., at=...)")
    return found
