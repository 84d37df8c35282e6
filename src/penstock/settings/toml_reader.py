"""Reads TOML: every value with its position in the text.

In:  text.
Out: leaves, and the positions where keys can be added.
Runs in: trainer, command line.

The standard library parses the text and gives the values, but not their positions. ``_TomlScanner`` then goes through
the valid text and finds the position of each value.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace

from penstock.errors import ConfigError
from penstock.settings.document import Leaf, TextSpan, flatten, too_deep

_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_STRINGS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (r'"""(?:[^\\]|\\.)*?"{3,5}', r"'''.*?'{3,5}", r'"(?:[^"\\]|\\.)*"', r"'[^']*'")
)
_BARE_VALUE = re.compile(r"[^,\]}#\r\n]*")


def read_toml(text: str, name: str) -> tuple[list[Leaf], dict[tuple[str, ...], TextSpan]]:
    try:
        values = tomllib.loads(text)
        scanner = _TomlScanner(text)
        scanner.scan()
    except ValueError as problem:
        # The text is invalid TOML, or has a number of thousands of digits.
        raise ConfigError(f"{name}: {' '.join(str(problem).split())}") from None
    except RecursionError:
        raise too_deep(name) from None
    if not values:
        raise ConfigError(f"{name} is empty: it has no settings")
    leaves, homes, line, at = [], {}, 1, 0
    lines: dict[tuple[str, ...], int] = {}
    for path, span in sorted(scanner.spans.items(), key=lambda each: each[1].key_start):
        line, at = line + text.count("\n", at, span.key_start), span.key_start
        lines[path] = line
    for leaf in flatten(values, name):
        span = scanner.spans.get(leaf.path)
        leaves.append(replace(leaf, span=span, line=lines.get(leaf.path)))
        if span is not None:
            homes[leaf.path[:-1]] = span
    return leaves, homes


class _TomlScanner:
    """Goes through valid TOML once, key by key."""

    def __init__(self, text: str) -> None:
        self.spans: dict[tuple[str, ...], TextSpan] = {}
        self._text = text
        self._at = 0
        self._last_name = 0
        """The position where the last name of the current key begins."""

    def scan(self) -> None:
        table: tuple[str, ...] | None = ()
        lists: set[tuple[str, ...]] = set()
        while True:
            self._skip(_BLANK)
            if self._at >= len(self._text):
                return
            if self._text[self._at] == "[":
                is_list = self._text.startswith("[[", self._at)
                self._at += 2 if is_list else 1
                table = self._key()
                self._at = self._text.find("]", self._at) + (2 if is_list else 1)
                if is_list:
                    lists.add(table)
                # A table inside a list of tables belongs to one item of the list, so the table has no path of its own.
                if any(table[:length] in lists for length in range(1, len(table) + 1)):
                    table = None
            else:
                self._pair(table, in_line=False)

    def _pair(self, table: tuple[str, ...] | None, *, in_line: bool) -> None:
        start = self._at
        key = self._key()
        prefix = self._text[start : self._last_name]
        self._at = self._text.index("=", self._at) + 1
        self._skip(_SPACE)
        value_start = self._at
        path = None if table is None else (*table, *key)
        self._value(path)
        if path is not None:
            self.spans[path] = TextSpan(
                key_start=start, value_start=value_start, value_end=self._at, in_line=in_line, prefix=prefix
            )

    def _key(self) -> tuple[str, ...]:
        names: list[str] = []
        while True:
            self._skip(_SPACE)
            self._last_name = self._at
            end = self._string_end() if self._text[self._at] in "\"'" else self._match(_BARE_KEY)
            written = self._text[self._at : end]
            names.append(tomllib.loads(f"k = {written}")["k"] if written[0] in "\"'" else written)
            self._at = end
            after = self._match(_SPACE)
            if self._text[after : after + 1] != ".":
                return tuple(names)
            self._at = after + 1

    def _value(self, path: tuple[str, ...] | None) -> None:
        match self._text[self._at]:
            case '"' | "'":
                self._at = self._string_end()
            case "[":
                self._at += 1
                while self._skip(_BLANK) != "]":
                    self._value(None)
                    if self._skip(_BLANK) == ",":
                        self._at += 1
                self._at += 1
            case "{":
                self._at += 1
                while self._skip(_BLANK) != "}":
                    self._pair(path, in_line=True)
                    if self._skip(_BLANK) == ",":
                        self._at += 1
                self._at += 1
            case _:
                written = self._text[self._at : self._match(_BARE_VALUE)]
                self._at += len(written.rstrip())

    def _string_end(self) -> int:
        return next(found.end() for string in _STRINGS if (found := string.match(self._text, self._at)))

    def _match(self, pattern: re.Pattern[str]) -> int:
        found = pattern.match(self._text, self._at)
        return self._at if found is None else found.end()

    def _skip(self, pattern: re.Pattern[str]) -> str:
        """Skip the pattern, and return the character that follows it."""
        self._at = self._match(pattern)
        return self._text[self._at : self._at + 1]
