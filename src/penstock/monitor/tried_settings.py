"""What a run has achieved: in all, and with each configuration that was tried.

In:  readings, one after another.
Out: totals; ``TriedSettings`` by configuration.
Runs in: trainer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.monitor.gauges import GaugeSample
from penstock.monitor.runs.format import TriedSettings

_MOST_TRIED = 200
"""Configurations that are told apart; a governor may try many."""


class Achievements:
    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self.tried: dict[str, TriedSettings] = {}
        self.changed: set[str] = set()
        """Keys of ``tried`` that are not written down yet."""
        self._active_s = self._wait_s = 0.0

    def note(
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
        more = [_samples(then, loader) for then, loader in zip(before.loaders, now.loaders, strict=True)]
        anybody = any(more)
        is_active = False
        for number, loader in enumerate(now.loaders):
            # A loop that was left in the middle never ends its iteration; that others are read instead tells.
            if not (more[number] or (loader.is_iterating and not anybody)):
                continue
            is_active = True
            wait_s = max(0.0, (loader.wait_s or 0.0) - (before.loaders[number].wait_s or 0.0))
            self._wait_s += wait_s
            self._note_tried(number, configurations[number], t_s, span_s, more[number], wait_s, tree_bytes)
        self._active_s += span_s if is_active else 0.0
        totals["active_s"], totals["wait_s"] = self._active_s, self._wait_s

    def _note_tried(
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


def _samples(then: Any, now: Any) -> float:
    return float(max(0, (now.samples or 0) - (then.samples or 0)))
