"""A settings source taken apart: every value in it, with its way down, its line and its place in the text.

In:  nested mappings.
Out: ``Document`` of ``Leaf``s, the same for YAML, TOML, JSON and a plain mapping.
Runs in: trainer, command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.errors import ConfigError

Format = Literal["yaml", "toml", "json", "mapping"]

DEEPEST = 100
"""Sections within sections; what is deeper is no settings file, and would end in a recursion."""
MOST_VALUES = 1_000_000
"""A small file of anchors can hold more values than memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a key and its value stand in the text, in characters."""

    key_start: int
    value_start: int
    value_end: int
    in_line: bool
    """Between braces, where commas and not line ends part the keys."""
    prefix: str = ""
    """TOML: what stands before the last name of a dotted key, with the dot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One value that is no section."""

    path: tuple[str, ...]
    """Sections and key, as written."""
    value: Any
    """A number, text, flag, date or None; ``Listed`` for a list."""
    line: int | None = None
    """From 1; None where it is not known."""
    place: Place | None = None
    """None where there is no text, or where it is another section's."""
    is_borrowed: bool = False
    """It stands elsewhere and is used here: a YAML anchor."""
    template_depth: int | None = None
    """How many sections down it is in one that others are made of by YAML's anchors; None: in none."""

    @property
    def key(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class Listed:
    """A list, of which only the keys of the mappings in it are known."""

    keys: frozenset[str]

    def __repr__(self) -> str:
        return "[...]"


@dataclass(frozen=True, kw_only=True)
class Document:
    """Everything in one source."""

    name: str
    """The file's path, or "the mapping"."""
    format: Format
    leaves: list[Leaf]
    text: str = ""
    """The file's text, without a byte order mark."""
    homes: dict[tuple[str, ...], Place] = field(default_factory=dict)
    """Section -> the last key of its own that another one can be written after."""
    has_mark: bool = False
    """Whether the file begins with a byte order mark."""

    def at(self, leaf: Leaf) -> str:
        """Where a leaf is, for the beginning of a message."""
        return self.name if leaf.line is None else f"{self.name}, line {leaf.line}"


def flatten(nested: Mapping[Any, Any], name: str) -> list[Leaf]:
    """The leaves of nested mappings, in their order."""
    leaves: list[Leaf] = []
    waiting: list[tuple[tuple[str, ...], Any, tuple[int, ...]]] = [((), nested, ())]
    visited = 0
    while waiting:
        path, value, above = waiting.pop()
        # Of sections too: what is shared and empty can be visited for ever without a single value.
        visited += 1
        if visited > MOST_VALUES:
            raise too_much(name)
        if not isinstance(value, Mapping):
            leaves.append(Leaf(path=path, value=listed(value) if isinstance(value, list | tuple) else value))
            continue
        if id(value) in above:
            raise ConfigError(f"{name}: {'.'.join(path)} holds itself; take the loop out")
        if len(path) > DEEPEST:
            raise too_deep(name)
        inner = [((*path, str(key)), each, (*above, id(value))) for key, each in value.items()]
        waiting.extend(reversed(inner))
    return leaves


def listed(items: Any) -> Listed:
    return Listed(frozenset(str(key) for item in items if isinstance(item, Mapping) for key in item))


def too_deep(name: str) -> ConfigError:
    return ConfigError(f"{name}: more than {DEEPEST} sections within each other; this is no settings file")


def too_much(name: str) -> ConfigError:
    return ConfigError(f"{name}: more than {MOST_VALUES:,} values; this is no settings file")
