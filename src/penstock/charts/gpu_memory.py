"""GPU memory by batch size as a picture, stacked by component: an SVG file, or characters for a terminal.

In:  ``Picture``: components at every batch size, the card's memory.
Out: text.
Runs in: command line; pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.charts.drawing import INNER_WIDTH, LEFT, Frame, height_for
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
"""Component -> its letter in a terminal, its colour in a file; in the order of stacking, from below."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    title: str
    columns: Sequence[tuple[int, Mapping[str, int]]]
    """Batch size, and component -> bytes."""
    limit_bytes: int | None
    """What the card has; None: not known."""

    @property
    def top_bytes(self) -> float:
        return height_for(max(_total(parts) for _, parts in self.columns), self.limit_bytes)


def svg(picture: Picture) -> str:
    """One column for each batch size."""
    frame = Frame(
        title=f"GPU memory by batch size: {picture.title}", top_bytes=picture.top_bytes,
        limit_bytes=picture.limit_bytes, note="estimated",
    )  # fmt: skip
    room = INNER_WIDTH / len(picture.columns)
    wide = min(90.0, room * 0.7)
    parts, below = [], []
    for number, (size, counts) in enumerate(picture.columns):
        middle = LEFT + room * (number + 0.5)
        below.append((middle, str(size)))
        under = 0
        for name, (_, colour) in _LOOKS.items():
            count = max(0, counts.get(name, 0))
            low, high = frame.y(under), frame.y(under + count)
            under += count
            if low - high >= 0.05:
                parts.append(
                    f'<rect class="{name}" x="{middle - wide / 2:.1f}" y="{high:.1f}" width="{wide:.1f}" '
                    f'height="{low - high:.1f}" fill="{colour}"><title>{_words(name)}: {format_bytes(count)}</title>'
                    f"</rect>"
                )
        parts.append(
            f'<text x="{middle:.1f}" y="{frame.y(under) - 4:.1f}" text-anchor="middle">{format_bytes(under)}</text>'
        )
    shown = [name for name in _LOOKS if any(counts.get(name, 0) > 0 for _, counts in picture.columns)]
    for number, name in enumerate(reversed(shown)):
        at = 60 + 18 * number
        parts.append(f'<rect x="{LEFT + INNER_WIDTH + 6}" y="{at - 9}" width="9" height="9" fill="{_LOOKS[name][1]}"/>')
        parts.append(f'<text x="{LEFT + INNER_WIDTH + 18}" y="{at}" font-size="10">{_words(name)}</text>')
    return frame.svg(below, parts)


def bars(picture: Picture, width: int) -> list[str]:
    """A bar for each batch size, a letter for each component, ``|`` where the card's memory ends."""
    room = max(10, width - 18)
    scale = room / picture.top_bytes
    limit = picture.limit_bytes
    limit_at = None if limit is None or limit > picture.top_bytes else min(room - 1, round(limit * scale))
    rows, used = [], set()
    for size, counts in picture.columns:
        drawn, under = "", 0
        for name, (letter, _) in _LOOKS.items():
            under += max(0, counts.get(name, 0))
            more = round(under * scale) - len(drawn)
            if more > 0:
                drawn += letter * more
                used.add(name)
        cells = list(drawn.ljust(room)[:room])
        if limit_at is not None:
            cells[limit_at] = "|"
        rows.append(f"{size:>6} {''.join(cells)} {format_bytes(under)}")
    legend = [f"{letter} {_words(name)}" for name, (letter, _) in _LOOKS.items() if name in used]
    if limit_at is not None:
        legend.append(f"| the {format_bytes(limit or 0)} there are")
    elif limit is not None:
        legend.append(f"the {format_bytes(limit)} there are lie far to the right")
    return [*rows, *_folded(legend, width)]


def _folded(words: list[str], width: int) -> list[str]:
    lines = [""]
    for word in words:
        longer = f"{lines[-1]}, {word}" if lines[-1] else f"       {word}"
        if lines[-1] and len(longer) > width:
            lines.append(f"       {word}")
        else:
            lines[-1] = longer
    return lines


def _total(parts: Mapping[str, int]) -> int:
    return sum(max(0, count) for count in parts.values())


def _words(name: str) -> str:
    return name.replace("_", " ")
