"""Memory by batch size as a picture: an SVG file, or characters for a terminal.

In:  ``Picture``: one line for each loader, the limit.
Out: text.
Runs in: command line; pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.charts.drawing import INNER_WIDTH, LEFT, Frame, height_for
from penstock.planner.components import Line
from penstock.units import format_bytes

_COLOURS = {"penstock": "#0b6e99", "torch": "#d9730d"}
_MOST_TIMES = 16
"""How many times the batch size asked for the picture goes at the most."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    title: str
    lines: Mapping[str, Line]
    """Loader -> memory by batch size."""
    limit_bytes: int
    """What this machine has for it."""
    batch_size: int
    """The one asked for."""

    @property
    def last_batch_size(self) -> int:
        """As far as it is drawn: just past where the first line reaches the limit, but not beyond all measure."""
        reached = [at for at in (line.reaches(self.limit_bytes) for line in self.lines.values()) if at is not None]
        wanted = int(1.2 * min(reached, default=4 * self.batch_size)) + 1
        return max(2 * self.batch_size, min(_MOST_TIMES * self.batch_size, wanted))

    @property
    def top_bytes(self) -> float:
        """The picture's height: the lines, and the limit where they come near it."""
        highest = max(line.at(self.last_batch_size) for line in self.lines.values())
        return height_for(highest, self.limit_bytes)

    @property
    def shows_limit(self) -> bool:
        return self.limit_bytes <= self.top_bytes


def svg(picture: Picture) -> str:
    """A drawing as a file."""
    frame = Frame(
        title=f"Host memory by batch size: {picture.title}", top_bytes=picture.top_bytes,
        limit_bytes=picture.limit_bytes, note="dots: measured",
    )  # fmt: skip

    def x(batch_size: float) -> float:
        return LEFT + INNER_WIDTH * batch_size / picture.last_batch_size

    parts = []
    label_y = {name: frame.y(line.at(picture.last_batch_size)) + 4 for name, line in picture.lines.items()}
    for number, (name, line) in enumerate(picture.lines.items()):
        colour = _COLOURS.get(name, "#555555")
        sizes = [picture.last_batch_size * step / 60 for step in range(61)]
        points = " ".join(f"{x(size):.1f},{frame.y(line.at(size)):.1f}" for size in sizes)
        parts.append(f'<polyline class="{name}" points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for size, count in line.measured:
            parts.append(f'<circle cx="{x(size):.1f}" cy="{frame.y(count):.1f}" r="4" fill="{colour}"/>')
        # Two lines that end together would have their names on top of each other.
        nudge = (
            14 * number if any(abs(label_y[name] - at) < 13 for other, at in label_y.items() if other != name) else 0
        )
        parts.append(
            f'<text x="{LEFT + INNER_WIDTH + 8}" y="{label_y[name] + nudge:.1f}" fill="{colour}">{name}</text>'
        )
    return frame.svg([(x(size), str(size)) for size in _batch_ticks(picture.last_batch_size)], parts)


def bars(picture: Picture, width: int) -> list[str]:
    """Lines of text: a bar for each loader at some batch sizes, ``|`` where the limit is."""
    sizes = _batch_ticks(picture.last_batch_size)
    room = max(10, width - 30)
    limit_at = round(room * picture.limit_bytes / picture.top_bytes) if picture.shows_limit else None
    rows = []
    for size in sizes:
        for name, line in picture.lines.items():
            filled = max(1, min(room, round(room * line.at(size) / picture.top_bytes)))
            drawn = list(("#" if name == "penstock" else "=") * filled + " " * (room - filled))
            if limit_at is not None and limit_at < room:
                drawn[limit_at] = "|"
            heading = f"{size:>6}" if name == "penstock" else " " * 6
            rows.append(f"{heading} {name:<8} {''.join(drawn)} {format_bytes(line.at(size))}".rstrip())
    limit = f"| is the {format_bytes(picture.limit_bytes)} there are" if picture.shows_limit else (
        f"the {format_bytes(picture.limit_bytes)} there are lie far to the right"
    )  # fmt: skip
    return [*rows, f"       {limit}"]


def _batch_ticks(last: int) -> list[int]:
    return sorted({max(1, round(last * part)) for part in (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)})
