"""Memory by batch size as a chart: an SVG file, or characters for a terminal.

In:  ``HostMemoryChart``: one line for each loader, the limit.
Out: text.
Runs in: command line; pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.charts.markup import tag
from penstock.charts.plane import MemoryFrame, words
from penstock.planner.components import MemoryLine
from penstock.units import format_bytes

_COLOURS = {"penstock": "#0b6e99", "torch": "#d9730d"}
_MOST_TIMES = 16
"""The largest batch size drawn, as a multiple of the requested batch size."""


@dataclass(frozen=True, kw_only=True)
class HostMemoryChart:
    title: str
    lines: Mapping[str, MemoryLine]
    """Loader -> memory by batch size."""
    limit_bytes: int
    """Memory available on this machine."""
    batch_size: int
    """The requested batch size."""

    @property
    def last_batch_size(self) -> int:
        """The largest batch size drawn: a little beyond the point where the first line reaches the limit."""
        reached = [at for at in (line.reaches(self.limit_bytes) for line in self.lines.values()) if at is not None]
        wanted = int(1.2 * min(reached, default=4 * self.batch_size)) + 1
        return max(2 * self.batch_size, min(_MOST_TIMES * self.batch_size, wanted))

    @property
    def frame(self) -> MemoryFrame:
        return MemoryFrame(
            title=f"Host memory by batch size: {self.title}",
            highest_bytes=max(line.at(self.last_batch_size) for line in self.lines.values()),
            limit_bytes=self.limit_bytes,
            last_batch_size=self.last_batch_size,
            note="dots: measured",
        )

    @property
    def ticks(self) -> list[int]:
        """Batch sizes that are labelled."""
        return sorted({max(1, round(self.last_batch_size * part)) for part in (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)})

    def svg(self) -> str:
        frame = self.frame
        plane = frame.plane
        parts = []
        label_y = {name: plane.y(line.at(self.last_batch_size)) + 4 for name, line in self.lines.items()}
        for number, (name, line) in enumerate(self.lines.items()):
            colour = _COLOURS.get(name, "#555555")
            sizes = [self.last_batch_size * step / 60 for step in range(61)]
            points = " ".join(f"{plane.x(size):.1f},{plane.y(line.at(size)):.1f}" for size in sizes)
            parts.append(tag("polyline", class_=name, points=points, fill="none", stroke=colour, stroke_width=2))
            for size, count in line.measured:
                parts.append(tag("circle", cx=f"{plane.x(size):.1f}", cy=f"{plane.y(count):.1f}", r=4, fill=colour))
            # The names of two lines that end together would overlap.
            is_crowded = any(abs(label_y[name] - y) < 13 for other, y in label_y.items() if other != name)
            y = label_y[name] + (14 * number if is_crowded else 0)
            parts.append(words(name, plane.left + plane.inner_width + 8, y, fill=colour))
        return frame.svg([(plane.x(size), str(size)) for size in self.ticks], parts)

    def bars(self, width: int) -> list[str]:
        """Lines of text: a bar for each loader at some batch sizes, with ``|`` at the limit."""
        frame, room = self.frame, max(10, width - 30)
        limit_at = round(room * self.limit_bytes / frame.y_max) if frame.shows_limit else room
        rows = []
        for size in self.ticks:
            for number, (name, line) in enumerate(self.lines.items()):
                filled = max(1, min(room, round(room * line.at(size) / frame.y_max)))
                drawn = list(("#" if name == "penstock" else "=") * filled + " " * (room - filled))
                if limit_at < room:
                    drawn[limit_at] = "|"
                heading = " " * 6 if number else f"{size:>6}"
                rows.append(f"{heading} {name:<8} {''.join(drawn)} {format_bytes(line.at(size))}".rstrip())
        return [*rows, f"       {frame.limit_in_words}"]
