"""The frame around a drawing of memory: title, sizes on the left, a line for the limit; an SVG file.

In:  how high the picture is, in bytes; what is drawn inside.
Out: text.
Runs in: command line; pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from penstock.units import format_bytes

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 90, 110, 44, 50
INNER_WIDTH, INNER_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
_OPENING = re.compile(r"<svg xmlns=\S+ ")


@dataclass(frozen=True, kw_only=True)
class Frame:
    title: str
    top_bytes: float
    """The picture's height."""
    limit_bytes: int | None
    """What there is; None: not known."""
    note: str = ""
    """Small, in the lower right corner."""

    @property
    def shows_limit(self) -> bool:
        return self.limit_bytes is not None and self.limit_bytes <= self.top_bytes

    def y(self, count: float) -> float:
        return TOP + INNER_HEIGHT * (1 - min(1.0, count / self.top_bytes))

    def svg(self, below: Sequence[tuple[float, str]], inside: Sequence[str]) -> str:
        """A file of its own: no script, no font, nothing from elsewhere. ``below``: x and words under the axis."""
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12" role="img">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            f'<text x="{LEFT}" y="24" font-size="15">{escape(self.title)}</text>',
        ]
        for count in _ticks(self.top_bytes):
            at = self.y(count)
            parts.append(f'<path d="M{LEFT} {at:.1f}h{INNER_WIDTH}" stroke="#e3e3e3"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{format_bytes(count)}</text>')
        parts += [
            f'<text x="{x:.1f}" y="{HEIGHT - 28}" text-anchor="middle">{escape(words)}</text>' for x, words in below
        ]
        middle = LEFT + INNER_WIDTH / 2
        parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">samples in a batch</text>')
        parts.append(f'<path d="M{LEFT} {TOP}v{INNER_HEIGHT}h{INNER_WIDTH}" fill="none" stroke="#333333"/>')
        parts += [*inside, *self._limit()]
        parts.append(f'<text x="{WIDTH - 8}" y="{HEIGHT - 10}" text-anchor="end" fill="#777777">{self.note}</text>')
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _limit(self) -> list[str]:
        if self.limit_bytes is None:
            return []
        if not self.shows_limit:
            words = f"the limit is far above: {format_bytes(self.limit_bytes)}"
            return [f'<text x="{LEFT + 6}" y="{TOP + 14}" fill="#c4314b">{words}</text>']
        at = self.y(self.limit_bytes)
        words = f"limit {format_bytes(self.limit_bytes)}"
        return [
            f'<path class="limit" d="M{LEFT} {at:.1f}h{INNER_WIDTH}" stroke="#c4314b" stroke-dasharray="6 4"/>',
            f'<text x="{LEFT + 6}" y="{at - 5:.1f}" fill="#c4314b">{words}</text>',
        ]


def height_for(highest_bytes: float, limit_bytes: int | None) -> float:
    """What is drawn, and the limit where it comes near it."""
    if limit_bytes is not None and highest_bytes > 0.25 * limit_bytes:
        return max(highest_bytes, limit_bytes) * 1.05
    return highest_bytes * 1.15


def one_below_the_other(drawings: Sequence[str]) -> str:
    """Several drawings as one file."""
    placed = [_OPENING.sub(f'<svg y="{HEIGHT * number}" ', each, count=1) for number, each in enumerate(drawings)]
    high = HEIGHT * len(drawings)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{high}" viewBox="0 0 {WIDTH} {high}">',
            *placed,
            "</svg>\n",
        ]
    )


def _ticks(top: float) -> list[float]:
    """Round sizes, about five of them."""
    step = 2.0 ** math.floor(math.log2(max(1.0, top / 4)))
    return [step * number for number in range(int(top / step) + 1)]
