"""What a rule is about, read off a run's figures: the value, the threshold, and both in words.

In:  figures over time.
Out: ``WatchedValue``: one value per look; sentences for people.
Runs in: trainer, command line. Does not import torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from penstock.formatting import duration
from penstock.monitor.alerts.rules import AlertRule
from penstock.monitor.figures import part
from penstock.units import format_bytes

_MOST_GPUS = 64
_LEVELS = {"memory": "used_bytes", "tree": "tree_bytes", "stall": "wait_fraction"}
_GROWTHS = {"swap": "swap_used_bytes", "restarts": "worker_restarts"}


class WatchedValue:
    """The value of one rule over time."""

    def __init__(self, rule: AlertRule) -> None:
        self._rule = rule
        self._lowest: deque[tuple[float, float]] = deque()
        """Levels of the last while that nothing lower came after: the first is the lowest."""

    def value(self, figures: Mapping[str, float], now_s: float) -> float | None:
        """Now; None: these figures do not say."""
        rule = self._rule
        if rule.on == "gpu-idle":
            return _gpu_idle(figures)
        if not rule.is_growth:
            return figures.get(_LEVELS[rule.on])
        level = figures.get(_GROWTHS[rule.on])
        return None if level is None else self._growth(level, now_s)

    def threshold(self, figures: Mapping[str, float]) -> float | None:
        """In the value's unit; None: a share of a limit that is not known."""
        rule = self._rule
        if rule.on == "restarts":
            return float(rule.count)
        size = rule.size
        if size.fixed_bytes is not None:
            return float(size.fixed_bytes)
        assert size.fraction is not None
        if rule.on in ("stall", "gpu-idle"):
            return size.fraction
        limit = figures.get("limit_bytes")
        return size.fraction * limit if limit else None

    def _growth(self, level: float, now_s: float) -> float:
        lowest = self._lowest
        while lowest and lowest[-1][1] >= level:
            lowest.pop()
        lowest.append((now_s, level))
        while lowest[0][0] < now_s - self._rule.within_s:
            lowest.popleft()
        return level - lowest[0][1]


def in_words(rule: AlertRule, value: float, threshold: float, figures: Mapping[str, float], *, whose: str) -> str:
    """Fact, number, line; ``whose`` is what has the memory of the tree: "this training", "process 4242"."""
    if rule.on in ("memory", "tree"):
        limit = figures.get("limit_bytes")
        of = f" of {format_bytes(limit)} ({value / limit:.1%})" if limit else ""
        subject = "memory in use is" if rule.on == "memory" else f"{whose} has"
        return f"{subject} {format_bytes(value)}{of}, alert at {format_bytes(threshold)}"
    within = duration(rule.within_s)
    if rule.on == "swap":
        return f"swap in use has grown by {format_bytes(value)} within {within}, alert at {format_bytes(threshold)}"
    if rule.on == "restarts":
        workers = f"{value:.0f} worker" + "s" * (value != 1)
        return f"{workers} of {whose} died within {within}, alert at {threshold:.0f}"
    doing = "waits for data" if rule.on == "stall" else "leaves its GPUs idle"
    return f"{whose} {doing} {value:.0%} of the time, alert at {threshold:.0%}"


def _gpu_idle(figures: Mapping[str, float]) -> float | None:
    """Over the GPUs this process has memory on; of somebody who does not say that, over all."""
    gpus = [each for number in range(_MOST_GPUS) if (each := part(figures, f"gpu.{number}"))]
    mine = [each for each in gpus if each.get("reserved_bytes")] or gpus
    busy = [each["busy_fraction"] for each in mine if "busy_fraction" in each]
    return 1 - sum(busy) / len(busy) if busy else None
