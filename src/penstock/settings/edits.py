"""Changes of single values, made in the text of a file so that everything around them stays as it was.

In:  a ``Document`` and ``Change``s.
Out: the new text.
Runs in: trainer, command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError
from penstock.settings.document import Document, Place
from penstock.settings.files import parse_json

_PLAIN = re.compile(r"[A-Za-z0-9_.%/:+-]*[A-Za-z0-9_%]")
_WORDS = {
    "True": ("True", "False"), "False": ("True", "False"), "TRUE": ("TRUE", "FALSE"), "FALSE": ("TRUE", "FALSE"),
    "yes": ("yes", "no"), "no": ("yes", "no"), "Yes": ("Yes", "No"), "No": ("Yes", "No"), "on": ("on", "off"),
    "off": ("on", "off"), "On": ("On", "Off"), "Off": ("On", "Off"),
}  # fmt: skip
"""How a flag was written -> how its kind writes true and false."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One value to be written."""

    path: tuple[str, ...]
    """Sections and key, as they are or are to be written."""
    value: Any
    place: Place | None
    """Of the value itself, or of the key that a new one comes after; None for a section that is not there yet."""
    is_new: bool
    after: str | None = None
    """JSON: the key that a new one comes after."""


def apply(document: Document, changes: list[Change]) -> str:
    """The document's text with the changes made."""
    if document.format == "json":
        return _printed_anew(document, changes)
    pieces: dict[tuple[int, int], str] = {}
    sections: dict[tuple[str, ...], list[Change]] = {}
    for change in changes:
        if change.place is None:
            sections.setdefault(change.path[:-1], []).append(change)
            continue
        (start, end), text = _added(document, change) if change.is_new else _replaced(document, change)
        # Several new keys may come after the same one.
        pieces[start, end] = pieces.get((start, end), "") + text
    text = document.text
    for (start, end), piece in sorted(pieces.items(), reverse=True):
        text = text[:start] + piece + text[end:]
    for path, new in sections.items():
        text = _with_section(document, text, path, new)
    return text


def _replaced(document: Document, change: Change) -> tuple[tuple[int, int], str]:
    place, text = change.place, document.text
    assert place is not None
    start, end = place.value_start, place.value_end
    if change.value is None and document.format == "toml":
        # TOML has no null: what is not given is not there.
        if place.in_line:
            raise ConfigError(
                f"{document.name}: {'.'.join(change.path)} cannot be taken out of its line; do it by hand"
            )
        return (_line_start(text, place.key_start), _line_end(text, end)), ""
    written = _scalar(document, change.value, old=text[start:end])
    # An empty value begins right behind the colon.
    return (start, end), f" {written}" if start == end else written


def _added(document: Document, change: Change) -> tuple[tuple[int, int], str]:
    place, text = change.place, document.text
    assert place is not None
    pair = _pair(document, place.prefix + change.path[-1], change.value)
    if place.in_line:
        return (place.value_end, place.value_end), f", {pair}"
    at, newline = _line_end(text, place.value_end), _newline(text)
    indent = re.sub(r"\S", " ", text[_line_start(text, place.key_start) : place.key_start])
    is_ended = text[at - 1 : at] == "\n"
    return (at, at), f"{indent}{pair}{newline}" if is_ended else f"{newline}{indent}{pair}"


def _with_section(document: Document, text: str, path: tuple[str, ...], changes: Iterable[Change]) -> str:
    newline = _newline(text)
    ending = "" if text.endswith("\n") else newline
    pairs = [_pair(document, change.path[-1], change.value) for change in changes]
    head = f"{'.'.join(path)}:" if document.format == "yaml" else f"{newline}[{'.'.join(path)}]"
    lines = [f"  {pair}" for pair in pairs] if document.format == "yaml" else pairs
    return text + ending + newline.join([head, *lines]) + newline


def _pair(document: Document, key: str, value: Any) -> str:
    return f"{key}: {_scalar(document, value)}" if document.format == "yaml" else f"{key} = {_scalar(document, value)}"


def _scalar(document: Document, value: Any, *, old: str = "") -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        true, false = _WORDS.get(old, ("true", "false")) if document.format == "yaml" else ("true", "false")
        return true if value else false
    if isinstance(value, str):
        # Text that YAML would take for a number or a flag begins with a digit or is one of a few words.
        is_plain = _PLAIN.fullmatch(value) and not re.fullmatch(
            r"[-+.\d:_e]+|true|false|yes|no|on|off|null|y|n", value, re.I
        )
        return value if document.format == "yaml" and is_plain else _quoted(value)
    return repr(value)


def _quoted(text: str) -> str:
    """In double quotes, as YAML and TOML both read it."""
    shown = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in shown)


def _printed_anew(document: Document, changes: list[Change]) -> str:
    text = document.text
    nested = parse_json(text, document.name)
    for change in changes:
        section = nested
        for name in change.path[:-1]:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{document.name}: {name} is a value where a section is due; rename it")
        if change.is_new and change.after is not None:
            pairs = list(section.items())
            at = list(section).index(change.after) + 1
            section.clear()
            section.update([*pairs[:at], (change.path[-1], change.value), *pairs[at:]])
        else:
            section[change.path[-1]] = change.value
    indent = re.search(r"\n([ \t]+)\S", text)
    separators = (",", ": ") if indent else (", ", ": ") if re.search(r'":\s', text) else (",", ":")
    printed = json.dumps(
        nested, indent=indent.group(1) if indent else None, separators=separators, ensure_ascii=text.isascii()
    )
    return printed.replace("\n", _newline(text)) + text[len(text.rstrip()) :]


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def _line_end(text: str, at: int) -> int:
    """Behind the line's end, or the text's."""
    found = text.find("\n", at)
    return len(text) if found < 0 else found + 1
