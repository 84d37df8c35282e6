"""GPU memory by batch size as a chart, stacked by component: an SVG file, or characters for a terminal.

In:  ``GpuMemoryChart``: components at each batch size, the memory of the GPU.
Out: text.
Runs in: command line; pure.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.charts.markup import Html, tag
from penstock.charts.plane import MemoryFrame, words
from penstock.units import format_bytes

_LOOKS = {
    "parameters": ("P", "#0b6e99"),
    "gradients": ("G", "#5aa9c9"),
    "optimizer_state": ("O", "#6940a5"),
    "inputs": ("I", "#4d6461"),
    "activations": ("#", "#d9730d"),
    "temporaries": ("t", "#f2b279"),
    "workspaces": ("w", "#dfab01"),
    "allocator_overhead": (".", "#bcbcbc"),
    "cuda_context": ("C", "#7a7a7a"),
}
"""Component -> its letter in a terminal and its colour in a file; components are stacked in this order from below."""


@dataclass(frozen=True, kw_only=True)
class GpuMemoryChart:
    title: str
    columns: Sequence[tuple[int, Mapping[str, int]]]
    """Each batch size with its memory: component -> bytes."""
    limit_bytes: int | None
    """Memory of the GPU; None: unknown."""

    @property
    def frame(self) -> MemoryFrame:
        return MemoryFrame(
            title=f"GPU memory by batch size: {self.title}",
            highest_bytes=max(sum(max(0, count) for count in counts.values()) for _, counts in self.columns),
            limit_bytes=self.limit_bytes,
            note="estimated",
        )

    def svg(self) -> str:
        """One column for each batch size."""
        frame = self.frame
        plane = frame.plane
        room = plane.inner_width / len(self.columns)
        wide = min(90.0, room * 0.7)
        parts: list[Html] = []
        below = []
        for number, (size, counts) in enumerate(self.columns):
            middle = plane.left + room * (number + 0.5)
            below.append((middle, str(size)))
            under = 0
            for name, (_, colour) in _LOOKS.items():
                count = max(0, counts.get(name, 0))
                low, high = plane.y(under), plane.y(under + count)
                under += count
                if low - high >= 0.05:
                    parts.append(
                        tag(
                            "rect", tag("title", f"{_words(name)}: {format_bytes(count)}"), class_=name,
                            x=f"{middle - wide / 2:.1f}", y=f"{high:.1f}", width=f"{wide:.1f}",
                            height=f"{low - high:.1f}", fill=colour,
                        )
                    )  # fmt: skip
            parts.append(words(format_bytes(under), middle, plane.y(under) - 4, anchor="middle"))
        shown = [name for name in _LOOKS if any(counts.get(name, 0) > 0 for _, counts in self.columns)]
        x = plane.left + plane.inner_width + 6
        for number, name in enumerate(reversed(shown)):
            y = 60 + 18 * number
            parts.append(tag("rect", x=x, y=y - 9, width=9, height=9, fill=_LOOKS[name][1]))
            parts.append(words(_words(name), x + 12, y, font_size=10))
        return frame.svg(below, parts)

    def bars(self, width: int) -> list[str]:
        """A bar for each batch size, a letter for each component, ``|`` where the memory of the GPU ends."""
        frame, room = self.frame, max(10, width - 18)
        scale = room / frame.y_max
        rows, used = [], set()
        for size, counts in self.columns:
            drawn, under = "", 0
            for name, (letter, _) in _LOOKS.items():
                under += max(0, counts.get(name, 0))
                more = round(under * scale) - len(drawn)
                if more > 0:
                    drawn += letter * more
                    used.add(name)
            cells = list(drawn.ljust(room)[:room])
            if frame.shows_limit and self.limit_bytes is not None:
                cells[min(room - 1, round(self.limit_bytes * scale))] = "|"
            rows.append(f"{size:>6} {''.join(cells)} {format_bytes(under)}")
        legend = [f"{letter} {_words(name)}" for name, (letter, _) in _LOOKS.items() if name in used]
        text = ", ".join([*legend, *([frame.limit_in_words] if frame.limit_in_words else [])])
        return [*rows, *textwrap.wrap(text, width, initial_indent=" " * 7, subsequent_indent=" " * 7)]


def _words(name: str) -> str:
    return name.replace("_", " ")
