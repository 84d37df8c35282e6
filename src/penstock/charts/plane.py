"""The SVG engine: the plane between two axes, its scales, grid and labels. Every drawing of penstock lies on such a
plane.

In:  the size of the drawing, the largest values of both axes, the unit of the upright axis.
Out: positions; elements for grid, labels and limit; a whole SVG file.
Runs in: command line; pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.charts.markup import Html, tag
from penstock.units import format_bytes

Unit = Literal["bytes", "1/s", "share"]


@dataclass(frozen=True, kw_only=True)
class Plane:
    """Positions are in pixels from the upper left corner; values beyond the axes lie on the edge."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    """The four margins."""
    x_max: float
    y_max: float
    unit: Unit = "bytes"

    @property
    def inner_width(self) -> int:
        return self.width - self.left - self.right

    @property
    def inner_height(self) -> int:
        return self.height - self.top - self.bottom

    def x(self, value: float) -> float:
        return self.left + self.inner_width * min(1.0, max(0.0, value / self.x_max))

    def y(self, value: float) -> float:
        return self.top + self.inner_height * (1 - min(1.0, max(0.0, value / self.y_max)))

    def grid(self, **attributes: object) -> list[Html]:
        """A line and a label for each tick of the upright axis."""
        parts = []
        for value in ticks(self.y_max, self.unit):
            y = self.y(value)
            parts.append(tag("path", class_="grid", d=f"M{self.left} {y:.1f}h{self.inner_width}", **attributes))
            parts.append(words(label(value, self.unit), self.left - 8, y + 4, anchor="end"))
        return parts


@dataclass(frozen=True, kw_only=True)
class MemoryFrame:
    """A drawing of memory by batch size as an SVG file without scripts, fonts or external resources."""

    title: str
    highest_bytes: float
    """The largest value drawn."""
    limit_bytes: int | None
    """The memory of the machine or GPU; None: unknown."""
    last_batch_size: float = 1.0
    note: str = ""
    """Small text in the lower right corner."""

    @property
    def y_max(self) -> float:
        """The upper end of the axis: above everything drawn, and above the limit if that is near."""
        if self.limit_bytes is not None and self.highest_bytes > 0.25 * self.limit_bytes:
            return max(self.highest_bytes, self.limit_bytes) * 1.05
        return self.highest_bytes * 1.15

    @property
    def shows_limit(self) -> bool:
        return self.limit_bytes is not None and self.limit_bytes <= self.y_max

    @property
    def limit_in_words(self) -> str:
        """The limit, for a drawing made of characters, in which ``|`` marks it; empty if the limit is unknown."""
        if self.limit_bytes is None:
            return ""
        size = format_bytes(self.limit_bytes)
        return f"| the limit, {size}" if self.shows_limit else f"the limit, {size}, is far to the right"

    @property
    def plane(self) -> Plane:
        return Plane(
            width=760, height=440, left=90, right=110, top=44, bottom=50, x_max=self.last_batch_size, y_max=self.y_max
        )

    def svg(self, batch_sizes: Iterable[tuple[float, str]], inside: Sequence[Html]) -> str:
        """``batch_sizes``: the positions and texts of the labels below the drawing."""
        plane = self.plane
        axes = f"M{plane.left} {plane.top}v{plane.inner_height}h{plane.inner_width}"
        return standalone(
            plane.width,
            plane.height,
            [
                words(self.title, plane.left, 24, font_size=15),
                *plane.grid(stroke="#e3e3e3"),
                *(words(text, x, plane.height - 28, anchor="middle") for x, text in batch_sizes),
                words("samples in a batch", plane.left + plane.inner_width / 2, plane.height - 10, anchor="middle"),
                tag("path", d=axes, fill="none", stroke="#333333"),
                *inside,
                *self._limit(plane),
                words(self.note, plane.width - 8, plane.height - 10, anchor="end", fill="#777777"),
            ],
        )

    def _limit(self, plane: Plane) -> list[Html]:
        if self.limit_bytes is None:
            return []
        size = format_bytes(self.limit_bytes)
        if not self.shows_limit:
            return [words(f"the limit, {size}, is far above", plane.left + 6, plane.top + 14, fill="#c4314b")]
        y = plane.y(self.limit_bytes)
        line = f"M{plane.left} {y:.1f}h{plane.inner_width}"
        return [
            tag("path", class_="limit", d=line, stroke="#c4314b", stroke_dasharray="6 4"),
            words(f"limit {size}", plane.left + 6, y - 5, fill="#c4314b"),
        ]


def standalone(width: int, height: int, inside: Iterable[object]) -> Html:
    """An SVG file."""
    return tag(
        "svg", tag("rect", width=width, height=height, fill="#ffffff"), *inside,
        xmlns="http://www.w3.org/2000/svg", width=width, height=height, viewBox=f"0 0 {width} {height}",
        font_family="sans-serif", font_size=12, role="img",
    )  # fmt: skip


def stacked(drawings: Sequence[str]) -> str:
    """Drawings of ``MemoryFrame``, one below the other in one file."""
    height = 440
    placed = [Html(each.replace("<svg", f'<svg y="{height * number}"', 1)) for number, each in enumerate(drawings)]
    return standalone(760, height * len(drawings), placed)


def words(text: str, x: float, y: float, *, anchor: str | None = None, **attributes: object) -> Html:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, **attributes)


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
