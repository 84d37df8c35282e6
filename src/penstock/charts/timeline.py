"""One chart over time: axes, stacked areas, lines, bounds and marks, as SVG that takes its colours from the page.

In:  ``Timeline``: series of numbers by time.
Out: SVG.
Runs in: command line; pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.charts.markup import Html, join, tag
from penstock.charts.plane import Plane, Unit, words
from penstock.formatting import duration

_STEPS_S = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 4 * 3600, 6 * 3600, 12 * 3600, 86400, 2 * 86400,
    7 * 86400, 30 * 86400,
)  # fmt: skip
_GAP = 3.0
"""Points further apart than this multiple of their spans are not connected."""
_MARK_WIDTH = 15


@dataclass(frozen=True, kw_only=True)
class Series:
    """One figure over time: a line, a layer of a stack, or a bound such as a limit."""

    name: str
    look: str
    """The class of the series in the page's style."""
    values: Sequence[float | None]
    """One value for each time; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An event, at its time."""

    at_s: float
    number: int
    """The number of the event in the table of the journal."""
    what: str
    look: str = "mark"


@dataclass(frozen=True, kw_only=True)
class Timeline:
    title: str
    summary: str
    """A description for readers who cannot see the chart."""
    unit: Unit
    times_s: Sequence[float]
    """Seconds since the run began."""
    spans_s: Sequence[float]
    length_s: float
    stack: Sequence[Series] = field(default=())
    lines: Sequence[Series] = field(default=())
    bounds: Sequence[Series] = field(default=())
    marks: Sequence[Mark] = field(default=())

    @property
    def plane(self) -> Plane:
        return Plane(
            width=900, height=240, left=76, right=14, top=22, bottom=26, unit=self.unit,
            x_max=max(1e-9, self.length_s), y_max=self.highest,
        )  # fmt: skip

    @property
    def highest(self) -> float:
        """The upper end of the axis: above everything drawn, and above bounds that are near."""
        if self.unit == "share":
            return 1.0
        stacked = [sum(series.values[place] or 0.0 for series in self.stack) for place in range(len(self.times_s))]
        drawn = max([*stacked, *_known(self.lines)], default=0.0)
        near = [value for value in _known(self.bounds) if value <= 2.5 * drawn]
        return max(drawn, *near, 0.0) * 1.08 or 1.0

    def far_away(self) -> list[Series]:
        """Bounds that are too far above to be drawn."""
        top = self.highest
        return [each for each in self.bounds if all(value is None or value > top for value in each.values)]

    def svg(self) -> Html:
        plane, far = self.plane, self.far_away()
        below: list[float] = [0.0] * len(self.times_s)
        inside = [*plane.grid(), *self._times(plane)]
        for series in self.stack:
            above = [base + (value or 0.0) for base, value in zip(below, series.values, strict=True)]
            inside.append(tag("path", class_=f"area {series.look}", d=self._area(plane, below, above)))
            below = above
        for series in (*self.lines, *(each for each in self.bounds if each not in far)):
            inside.append(tag("path", class_=f"line {series.look}", d=self._line(plane, series.values)))
        return tag(
            "svg", tag("title", self.title), tag("desc", self.summary), *inside, *self._marks(plane),
            viewBox=f"0 0 {plane.width} {plane.height}", role="img", aria_label=f"{self.title}. {self.summary}",
            class_="chart",
        )  # fmt: skip

    # -- inside -----------------------------------------------------------------------------

    def _pieces(self, values: Sequence[float | None]) -> list[list[int]]:
        """Lists of consecutive indices without an unknown value or a gap in time between them."""
        pieces: list[list[int]] = []
        for place, value in enumerate(values):
            if value is None:
                pieces.append([])
                continue
            gap_s = self.times_s[place] - self.times_s[place - 1] if place else 0.0
            if not pieces or (place and gap_s > _GAP * max(1.0, self.spans_s[place], self.spans_s[place - 1])):
                pieces.append([])
            pieces[-1].append(place)
        # A single point is drawn as a dot: a line of length 0 with round ends.
        return [piece if len(piece) > 1 else piece * 2 for piece in pieces if piece]

    def _points(self, plane: Plane, places: Sequence[int], values: Sequence[float | None]) -> list[str]:
        return [f"{plane.x(self.times_s[place]):.1f} {plane.y(values[place] or 0.0):.1f}" for place in places]

    def _line(self, plane: Plane, values: Sequence[float | None]) -> str:
        return "".join("M" + "L".join(self._points(plane, piece, values)) for piece in self._pieces(values))

    def _area(self, plane: Plane, below: Sequence[float], above: Sequence[float]) -> str:
        return "".join(
            f"M{'L'.join([*self._points(plane, piece, above), *self._points(plane, piece[::-1], below)])}Z"
            for piece in self._pieces(above)
        )

    def _times(self, plane: Plane) -> list[Html]:
        parts = []
        for at_s in time_ticks(self.length_s):
            x = plane.x(at_s)
            anchor = "end" if x > plane.width - plane.right - 20 else "middle"
            parts.append(tag("path", class_="grid", d=f"M{x:.1f} {plane.height - plane.bottom}v4"))
            parts.append(words(duration(at_s), x, plane.height - 8, anchor=anchor))
        return parts

    def _marks(self, plane: Plane) -> list[Html]:
        parts, free_from = [], -math.inf
        for mark in self.marks:
            x = plane.x(mark.at_s)
            line = f"M{x:.1f} {plane.top}v{plane.inner_height}"
            inside = [tag("title", f"{mark.number}: {mark.what}"), tag("path", d=line)]
            # A number that would overlap the previous one is left out; its line stays.
            if x >= free_from:
                inside.append(words(str(mark.number), x, plane.top - 7, anchor="middle"))
                free_from = x + _MARK_WIDTH
            parts.append(tag("g", *inside, class_=mark.look))
        return [tag("g", join(parts), class_="marks", aria_hidden="true")] if parts else []


def _known(series: Sequence[Series]) -> list[float]:
    return [value for each in series for value in each.values if value is not None]


def time_ticks(length_s: float) -> list[float]:
    """Round times, at most nine of them."""
    step = next(
        (each for each in _STEPS_S if length_s / each <= 8), _STEPS_S[-1] * math.ceil(length_s / _STEPS_S[-1] / 8)
    )
    return [float(step * number) for number in range(int(length_s / step) + 1)]
