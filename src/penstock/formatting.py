"""Text for people, made of numbers, durations, rates and foreign text: for a terminal, a report or a page.

In:  numbers that may be unknown (None); text that may hold any characters.
Out: short printable text.
Runs in: anywhere; pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.units import format_bytes

UNKNOWN = "-"
_SYMBOLS = {
    # Unicode has a symbol for each ASCII control character (␛ for ESC), but none for the control characters from 0x80.
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"},
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
}


def one_line(text: str, longest: int = 60) -> str:
    """Any text on one line: control characters become spaces, and text beyond ``longest`` characters is cut."""
    # A name may have ten thousand characters, so only twice as many characters as are shown are cleaned.
    plain = "".join(letter if letter.isprintable() else " " for letter in text[: 2 * longest + 2])
    plain = " ".join(plain.split())
    return plain if len(plain) <= longest and len(text) <= 2 * longest + 2 else plain[: longest - 1] + "…"


def visible(text: str) -> str:
    """The text with a symbol for every control character except tab and newline, so that a terminal gets no other
    controls.

    Names in files, archives and records may hold any text; a terminal would obey an escape sequence in a name.
    """
    return text.translate(_SYMBOLS)


def counted(number: float, one: str, many: str = "") -> str:
    """``1 worker``, ``4 workers``, ``2 batches``."""
    return f"{number:,g} {one if number == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """``2:05``, ``1:02:05``, ``3d 04:00``."""
    whole = int(seconds)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def milliseconds(seconds: float) -> str:
    """A duration below one second has three significant digits; a longer one is in whole milliseconds."""
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{1000 * seconds:,.0f} ms"


def rate(per_s: float | None) -> str:
    """A rate below 100 has three significant digits; a higher rate is a whole number."""
    return UNKNOWN if per_s is None else f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def share(fraction: float | None) -> str:
    """A share in percent, such as ``45%``. A share below a tenth has one decimal, as in ``4.5%``."""
    if fraction is None:
        return UNKNOWN
    return f"{fraction:.0%}" if fraction >= 0.1 or not fraction else f"{fraction:.1%}"


def memory(count: float | None) -> str:
    return UNKNOWN if count is None else format_bytes(count)


def configuration(settings: Mapping[str, Any]) -> str:
    """``4 workers, depth 3, 6GB, batch 32, cache 20.0 GiB``: the settings that are present."""
    workers = settings.get("workers")
    parts = [] if workers is None else [f"{workers} worker" + "s" * (workers != 1)]
    if settings.get("depth") is not None:
        parts.append(f"depth {settings['depth']}")
    elif settings.get("prefetch_factor") is not None:
        parts.append(f"prefetch {settings['prefetch_factor']}")
    held = settings.get("memory")
    if held is not None and held != "auto":
        parts.append(held if isinstance(held, str) else format_bytes(held) if held > 1 else f"{held:.0%}")
    if settings.get("batch_size") is not None:
        parts.append(f"batch {settings['batch_size']}")
    if settings.get("cache_bytes"):
        parts.append(f"cache {format_bytes(settings['cache_bytes'])}")
    return one_line(", ".join(parts), 80)
