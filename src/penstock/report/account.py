"""Everything a report is made of, read from a recorded run in one go.

In:  a ``Run``, going on or over.
Out: ``Account``: plain values; nothing after this touches a file or a clock.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.monitor.figures import part
from penstock.monitor.runs.format import Alert, Note, Point
from penstock.monitor.runs.reader import Run, RunSummary

MOST_POINTS = 480
"""About as many as a picture is wide: more cannot be seen, and make the page heavy."""


@dataclass(frozen=True, kw_only=True)
class Account:
    summary: RunSummary
    facts: Mapping[str, Any]
    """As in ``record_format.FACTS``; a reader must do without any of them."""
    totals: Mapping[str, float]
    points: Sequence[Point]
    """Oldest first, few enough to draw."""
    journal: Sequence[Note] = field(default=())
    alerts: Sequence[Alert] = field(default=())

    @property
    def began_s(self) -> float:
        return self.summary.started_s

    @property
    def ended_s(self) -> float:
        """When it ended; of a running one, when it was last heard of."""
        ended_s = self.summary.heard_s if self.summary.ended_s is None else self.summary.ended_s
        # A clock that was set back must not make a picture of negative width.
        return max(ended_s, self.began_s, self.points[-1].t_s if self.points else 0.0)

    @property
    def length_s(self) -> float:
        return self.ended_s - self.began_s

    @property
    def is_running(self) -> bool:
        return self.summary.state == "running"

    @property
    def active_s(self) -> float:
        """Time in which a loader was being read."""
        return self.totals.get("active_s", 0.0)

    @property
    def loaders(self) -> list[dict[str, Any]]:
        return [each if isinstance(each, dict) else {} for each in self.summary.loaders]

    @property
    def gpus(self) -> list[dict[str, Any]]:
        found = self.facts.get("gpus")
        return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []

    @property
    def machine(self) -> Mapping[str, Any]:
        found = self.facts.get("machine")
        return found if isinstance(found, dict) else {}

    @property
    def cores(self) -> float:
        """Those that may be used; 1 where that is not known."""
        return numeric(self.machine.get("cpu_usable")) or 1.0

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        size = numeric((self.summary.rank or {}).get("world_size"))
        return max(1, int(size)) if size else 1

    def keys_of(self, loader: int) -> dict[str, str]:
        """Argument -> what the user's own settings call it."""
        keys = self.loaders[loader].get("keys") if loader < len(self.loaders) else None
        return {str(name): str(key) for name, key in keys.items()} if isinstance(keys, dict) else {}

    def name_of(self, loader: int) -> str:
        return str(self.loaders[loader].get("name", loader)) if loader < len(self.loaders) else f"loader {loader}"

    def has(self, figure: str) -> bool:
        return any(figure in point.figures for point in self.points)

    def most(self, figure: str) -> float | None:
        return max((point.figures[figure] for point in self.points if figure in point.figures), default=None)

    def last(self, figure: str) -> float | None:
        return next((point.figures[figure] for point in reversed(self.points) if figure in point.figures), None)

    def first(self, figure: str) -> float | None:
        return next((point.figures[figure] for point in self.points if figure in point.figures), None)

    def mean(self, figure: str) -> float | None:
        """Over time."""
        known = [(point.span_s, point.figures[figure]) for point in self.points if figure in point.figures]
        total_s = sum(span_s for span_s, _ in known)
        return sum(span_s * value for span_s, value in known) / total_s if total_s > 0 else None

    def gpu_busy(self) -> float | None:
        """Share of the time, over the GPUs this training has memory on; of all, where it does not say."""
        numbers = [number for number in range(64) if self.has(f"gpu.{number}.busy_fraction")]
        own = [number for number in numbers if self.most(f"gpu.{number}.reserved_bytes")] or numbers
        busy = [value for number in own if (value := self.mean(f"gpu.{number}.busy_fraction")) is not None]
        return sum(busy) / len(busy) if busy else None

    def loader_peak_bytes(self, loader: int) -> float | None:
        """Most that a loader had of what ``memory=`` bounds: batches and its workers' own memory."""
        peaks = [
            own["in_flight_bytes"] + own.get("workers_private_bytes", 0.0)
            for own in (part(point.figures, f"loader.{loader}") for point in self.points)
            if "in_flight_bytes" in own
        ]
        return max(peaks, default=None)


def gather(run: Run) -> Account:
    """Raises PenstockError."""
    # First: what has ended by now is seen with all its points.
    summary = run.summary()
    return Account(
        summary=_sound(summary),
        facts=run.facts,
        totals=run.totals,
        points=[_finite(point) for point in run.points(most=MOST_POINTS)],
        journal=run.journal(),
        alerts=run.alerts(),
    )


def numeric(value: Any) -> float | None:
    """A fact as a number; None: it is none."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _sound(summary: RunSummary) -> RunSummary:
    """As the rest of the report relies on it: a record may come from elsewhere, and hold anything."""
    limit = numeric(summary.limit_bytes)
    return replace(
        summary,
        rank=summary.rank if isinstance(summary.rank, dict) else None,
        limit_bytes=None if limit is None else int(limit),
        loaders=summary.loaders if isinstance(summary.loaders, list) else [],
        tried=[each for each in summary.tried if isinstance(each.configuration, dict)],
    )


def _finite(point: Point) -> Point:
    """A record that was tampered with must not make a picture of infinite height."""
    return point._replace(figures={name: value for name, value in point.figures.items() if math.isfinite(value)})
