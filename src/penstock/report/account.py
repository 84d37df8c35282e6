"""The data of a report, read from a recorded run at once.

In:  a ``Run``, running or ended.
Out: ``Account``: plain values. The rest of the report needs neither file nor clock.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.monitor.figures import part
from penstock.monitor.runs.format import Alert, Note, Point
from penstock.monitor.runs.reader import Run, RunSummary

MOST_POINTS = 480
"""About one point for every two pixels of a chart; more points would enlarge the page and could not be seen."""


@dataclass(frozen=True, kw_only=True)
class Account:
    summary: RunSummary
    facts: Mapping[str, Any]
    """The facts that ``runs.format.FACTS`` describes; any fact may be missing."""
    totals: Mapping[str, float]
    points: Sequence[Point]
    """The figures over time, oldest first."""
    journal: Sequence[Note] = field(default=())
    alerts: Sequence[Alert] = field(default=())

    @property
    def began_s(self) -> float:
        return self.summary.started_s

    @property
    def ended_s(self) -> float:
        """End of the run; while it is running, the time of its last write."""
        ended_s = self.summary.heard_s if self.summary.ended_s is None else self.summary.ended_s
        # A clock that was set back must not make a chart of negative width.
        return max(ended_s, self.began_s, self.points[-1].t_s if self.points else 0.0)

    @property
    def length_s(self) -> float:
        return self.ended_s - self.began_s

    @property
    def is_running(self) -> bool:
        return self.summary.state == "running"

    @property
    def active_s(self) -> float:
        """Time during which a loader was being iterated."""
        return self.totals.get("active_s", 0.0)

    @property
    def loaders(self) -> list[dict[str, Any]]:
        return self.summary.loaders

    @property
    def gpus(self) -> list[dict[str, Any]]:
        return self.facts.get("gpus") or []

    @property
    def machine(self) -> Mapping[str, Any]:
        return self.facts.get("machine") or {}

    @property
    def cores(self) -> float:
        """Cores that may be used; 1 if their number is unknown."""
        return self.machine.get("cpu_usable") or 1.0

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        return max(1, (self.summary.rank or {}).get("world_size") or 1)

    def keys_of(self, loader: int) -> dict[str, str]:
        """Argument -> its name in the user's own settings."""
        return self.loaders[loader].get("keys") or {} if loader < len(self.loaders) else {}

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
        """The mean of a figure, weighted by time."""
        known = [(point.span_s, point.figures[figure]) for point in self.points if figure in point.figures]
        total_s = sum(span_s for span_s, _ in known)
        return sum(span_s * value for span_s, value in known) / total_s if total_s > 0 else None

    def gpu_busy(self) -> float | None:
        """Share of the time in which a kernel ran, over the GPUs on which this training has memory; if these are
        unknown, over all GPUs."""
        numbers = [number for number in range(64) if self.has(f"gpu.{number}.busy_fraction")]
        own = [number for number in numbers if self.most(f"gpu.{number}.reserved_bytes")] or numbers
        busy = [value for number in own if (value := self.mean(f"gpu.{number}.busy_fraction")) is not None]
        return sum(busy) / len(busy) if busy else None

    def loader_peak_bytes(self, loader: int) -> float | None:
        """Peak of the memory that ``memory=`` limits: batches and the private memory of the workers."""
        peaks = [
            own["in_flight_bytes"] + own.get("workers_private_bytes", 0.0)
            for own in (part(point.figures, f"loader.{loader}") for point in self.points)
            if "in_flight_bytes" in own
        ]
        return max(peaks, default=None)


def gather(run: Run) -> Account:
    """Read a run. Raises PenstockError."""
    # The summary is read first: if the run has ended by then, all its points have been written.
    summary = run.summary()
    return Account(
        summary=summary,
        facts=run.facts,
        totals=run.totals,
        points=run.points(most=MOST_POINTS),
        journal=run.journal(),
        alerts=run.alerts(),
    )
