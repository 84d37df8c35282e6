"""When an alert is raised and when it is over: debounced both ways, once per crossing. Pure.

In:  how it stands, a value, a threshold, the time.
Out: how it stands now, and whether that is news.
Runs in: trainer, command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.monitor.alerts.rules import AlertRule

Transition = Literal["raised", "cleared"]


@dataclass(frozen=True, kw_only=True)
class AlertState:
    """Where one alert stands."""

    is_raised: bool = False
    turning_s: float | None = None
    """Since when the value has been where it would change that, without a break; None: it is not there."""


def next_state(
    standing: AlertState, rule: AlertRule, value: float | None, threshold: float | None, now_s: float
) -> tuple[AlertState, Transition | None]:
    """One look. A value that is not known is neither above nor below, and no time passes for it."""
    if value is None or threshold is None:
        return AlertState(is_raised=standing.is_raised), None
    is_raised = standing.is_raised
    # Well below, not just below: a value that trembles around the line would raise it every few seconds.
    is_turning = value < threshold * (1 - rule.margin) if is_raised else value >= threshold
    if not is_turning:
        return AlertState(is_raised=is_raised), None
    since_s = now_s if standing.turning_s is None else standing.turning_s
    if now_s - since_s < (rule.calm_s if is_raised else rule.for_s):
        return AlertState(is_raised=is_raised, turning_s=since_s), None
    return AlertState(is_raised=not is_raised), "cleared" if is_raised else "raised"
