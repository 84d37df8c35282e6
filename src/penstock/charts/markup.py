"""HTML and SVG elements: everything that is not ``Html`` is escaped, so that a run's name cannot become markup.

In:  any text, attributes, elements.
Out: ``Html``.
Runs in: command line; pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_VOID = frozenset({"meta", "br", "hr", "col"})


class Html(str):
    """Text that already is markup; only ``tag``, ``join`` and ``text`` make it."""

    __slots__ = ()


def text(value: object) -> Html:
    """Any value as escaped text, without the characters that XML forbids."""
    if isinstance(value, Html):
        return value
    plain = "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in str(value))
    return Html(escape(plain, quote=True))


def tag(name: str, /, *inside: object, **attributes: object) -> Html:
    """An element. ``class_`` becomes the attribute class, ``aria_label`` becomes aria-label; None leaves an attribute
    out."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{pairs}>")
    return Html(f"<{name}{pairs}>{''.join(text(each) for each in inside)}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Html:
    return Html(text(between).join(text(each) for each in parts))


def table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str, words_from: int = 99, class_: str = ""
) -> Html:
    """A table whose first column names the row. The other columns are numbers; from column ``words_from`` on they are
    words."""
    titles = [
        tag("th", heading, scope="col", class_=_class(place, words_from)) for place, heading in enumerate(headings)
    ]
    head = tag("tr", *titles)
    body = [
        tag(
            "tr",
            *(
                tag("td" if place else "th", cell, scope=None if place else "row", class_=_class(place, words_from))
                for place, cell in enumerate(row)
            ),
        )
        for row in rows
    ]
    inside = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body), class_=class_ or None)
    # A table wider than a phone scrolls by itself; tabindex lets the keyboard scroll it.
    return tag("div", inside, class_="wide", tabindex="0", role="region", aria_label=caption)


def _class(place: int, words_from: int) -> str | None:
    return "number" if 0 < place < words_from else None
