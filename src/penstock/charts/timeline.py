"""One picture over time: axes, stacked areas, lines, bounds and marks, as SVG that takes its colours from the page.

In:  ``Chart``: series of numbers by time.
Out: SVG.
Runs in: command line; pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from penstock.formatting import duration
from penstock.report.markup import Html, join, tag
from penstock.units import format_bytes

WIDTH, HEIGHT = 900, 240
LEFT, RIGHT, TOP, BOTTOM = 76, 14, 22, 26
INNER_WIDTH, INNER_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
_STEPS_S = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 4 * 3600, 6 * 3600, 12 * 3600, 86400, 2 * 86400,
    7 * 86400, 30 * 86400,
)  # fmt: skip
_GAP = 3.0
"""Points further apart than this many times what they stand for have nothing between them."""
_MARK_WIDTH = 15

Unit = Literal["bytes", "1/s", "share"]


@dataclass(frozen=True, kw_only=True)
class Series:
    name: str
    look: str
    """Its class in the page's style."""
    values: Sequence[float | None]
    """One for each time; None: not known then."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A line across: a limit, a budget."""

    name: str
    look: str
    values: Sequence[float | None]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that happened, at a time."""

    at_s: float
    number: int
    """What the journal's table calls it."""
    what: str
    look: str = "mark"


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    summary: str
    """What somebody reads who cannot see it."""
    unit: Unit
    times_s: Sequence[float]
    """Since the run began."""
    spans_s: Sequence[float]
    length_s: float
    stack: Sequence[Series] = field(default=())
    lines: Sequence[Series] = field(default=())
    bounds: Sequence[Bound] = field(default=())
    marks: Sequence[Mark] = field(default=())

    @property
    def highest(self) -> float:
        """What the axis goes up to: all that is drawn, and bounds where they come near it."""
        if self.unit == "share":
            return 1.0
        stacked = [sum(series.values[place] or 0.0 for series in self.stack) for place in range(len(self.times_s))]
        drawn = max((value for value in [*stacked, *_known(self.lines)]), default=0.0)
        near = [value for value in _known(self.bounds) if value <= 2.5 * drawn]
        return max(drawn, *near, 0.0) * 1.08 or 1.0

    def far_away(self) -> list[Bound]:
        """Bounds that are too far above to be drawn."""
        top = self.highest
        return [each for each in self.bounds if all(value is None or value > top for value in each.values)]

    def svg(self) -> Html:
        top, far = self.highest, self.far_away()
        below: list[float] = [0.0] * len(self.times_s)
        inside = [*self._grid(top)]
        for series in self.stack:
            above = [base + (value or 0.0) for base, value in zip(below, series.values, strict=True)]
            inside.append(tag("path", class_=f"area {series.look}", d=self._area(below, above, top)))
            below = above
        for series in (*self.lines, *(each for each in self.bounds if each not in far)):
            inside.append(tag("path", class_=f"line {series.look}", d=self._line(series.values, top)))
        inside += self._marks()
        return tag(
            "svg", tag("title", self.title), tag("desc", self.summary), *inside,
            viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=f"{self.title}. {self.summary}", class_="chart",
        )  # fmt: skip

    # -- inside -----------------------------------------------------------------------------

    def _x(self, t_s: float) -> float:
        return LEFT + INNER_WIDTH * min(1.0, max(0.0, t_s / max(1e-9, self.length_s)))

    @staticmethod
    def _y(value: float, top: float) -> float:
        return TOP + INNER_HEIGHT * (1 - min(1.0, max(0.0, value / top)))

    def _pieces(self, values: Sequence[float | None]) -> list[list[int]]:
        """Places that belong together: neither a value nor time is missing between them."""
        pieces: list[list[int]] = []
        for place, value in enumerate(values):
            if value is None:
                pieces.append([])
                continue
            gap_s = self.times_s[place] - self.times_s[place - 1] if place else 0.0
            if not pieces or (place and gap_s > _GAP * max(1.0, self.spans_s[place], self.spans_s[place - 1])):
                pieces.append([])
            pieces[-1].append(place)
        return [piece for piece in pieces if piece]

    def _line(self, values: Sequence[float | None], top: float) -> str:
        return "".join(
            "M" + "L".join(self._at(place, values[place] or 0.0, top) for place in _shown(piece))
            for piece in self._pieces(values)
        )

    def _at(self, place: int, value: float, top: float) -> str:
        return f"{self._x(self.times_s[place]):.1f} {self._y(value, top):.1f}"

    def _area(self, below: Sequence[float], above: Sequence[float], top: float) -> str:
        paths = []
        for piece in self._pieces(above):
            shown = _shown(piece)
            there = [self._at(place, above[place], top) for place in shown]
            back = [self._at(place, below[place], top) for place in reversed(shown)]
            paths.append(f"M{'L'.join(there + back)}Z")
        return "".join(paths)

    def _grid(self, top: float) -> list[Html]:
        parts = []
        for value in ticks(top, self.unit):
            at = self._y(value, top)
            parts.append(tag("path", class_="grid", d=f"M{LEFT} {at:.1f}h{INNER_WIDTH}"))
            parts.append(tag("text", label(value, self.unit), x=LEFT - 8, y=f"{at + 4:.1f}", text_anchor="end"))
        for at_s in time_ticks(self.length_s):
            x = self._x(at_s)
            parts.append(tag("path", class_="grid", d=f"M{x:.1f} {TOP + INNER_HEIGHT}v4"))
            anchor = "end" if x > WIDTH - RIGHT - 20 else "middle"
            parts.append(tag("text", duration(at_s), x=f"{x:.1f}", y=HEIGHT - 8, text_anchor=anchor))
        return parts

    def _marks(self) -> list[Html]:
        parts, free_from = [], -math.inf
        for mark in self.marks:
            x = self._x(mark.at_s)
            inside = [tag("title", f"{mark.number}: {mark.what}"), tag("path", d=f"M{x:.1f} {TOP}v{INNER_HEIGHT}")]
            # Numbers that would lie on one another are left out; the lines stay.
            if x >= free_from:
                inside.append(tag("text", str(mark.number), x=f"{x:.1f}", y=TOP - 7, text_anchor="middle"))
                free_from = x + _MARK_WIDTH
            parts.append(tag("g", *inside, class_=mark.look))
        return [tag("g", join(parts), class_="marks", aria_hidden="true")] if parts else []


def _shown(piece: list[int]) -> list[int]:
    # A single point is drawn as a dot: a line that goes nowhere, with round ends.
    return piece if len(piece) > 1 else piece * 2


def _known(series: Sequence[Series] | Sequence[Bound]) -> list[float]:
    return [value for each in series for value in each.values if value is not None]


def label(value: float, unit: Unit) -> str:
    if unit == "bytes":
        return format_bytes(value).replace(".00 ", " ").replace(".0 ", " ")
    if unit == "share":
        return f"{value:.0%}"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def ticks(top: float, unit: Unit) -> list[float]:
    """Round values, about four of them."""
    if unit == "share":
        return [0.0, 0.25, 0.5, 0.75, 1.0]
    if unit == "bytes":
        step = 2.0 ** math.floor(math.log2(max(1.0, top / 3)))
    else:
        rough = top / 4
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= rough * 0.999)
    return [step * number for number in range(int(top / step) + 1)]


def time_ticks(length_s: float) -> list[float]:
    """Round times, at most nine of them."""
    step = next(
        (each for each in _STEPS_S if length_s / each <= 8), _STEPS_S[-1] * math.ceil(length_s / _STEPS_S[-1] / 8)
    )
    return [float(step * number) for number in range(int(length_s / step) + 1)]
