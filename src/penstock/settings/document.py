"""A settings source as a flat list of values, each with its path, its line and its position in the text.

In:  nested mappings.
Out: a ``Document`` of ``Leaf``s, which has the same form for YAML, TOML, JSON and a plain mapping.
Runs in: trainer, command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.errors import ConfigError

Format = Literal["yaml", "toml", "json", "mapping"]

DEEPEST = 100
"""The most levels of nesting. Deeper files are refused, because a parser would exhaust the stack."""
MOST_VALUES = 1_000_000
"""The most values in one source. Without a limit, a small file of YAML anchors could expand to more than memory
holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSpan:
    """The positions of a key and its value in the text, in characters."""

    key_start: int
    value_start: int
    value_end: int
    in_line: bool
    """Whether the key is between braces, where keys are separated by commas instead of line ends."""
    prefix: str = ""
    """The text before the last name of a dotted TOML key, including the dot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One value that is not a section."""

    path: tuple[str, ...]
    """The names of the sections and the key, as written in the source."""
    value: Any
    """The value: a number, a text, a flag, a date or None; ``ListValue`` for a list."""
    line: int | None = None
    """The number of the line, which begins at 1; None if unknown."""
    span: TextSpan | None = None
    """The position in the text; None if there is no text, or if a YAML anchor brings the value from another section."""
    template_depth: int | None = None
    """The depth of the section around this value that other sections use through a YAML anchor; None if no other
    section uses it."""

    @property
    def key(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class ListValue:
    """A list, of which only the keys of its mappings are kept."""

    keys: frozenset[str]

    def __repr__(self) -> str:
        return "[...]"


@dataclass(frozen=True, kw_only=True)
class Document:
    """All values of one source."""

    name: str
    """The path of the file, or "the mapping"."""
    format: Format
    leaves: list[Leaf]
    text: str = ""
    """The text of the file, without a byte order mark."""
    homes: dict[tuple[str, ...], TextSpan] = field(default_factory=dict)
    """Section -> the position of its last key after which a new key can be written."""

    def at(self, leaf: Leaf) -> str:
        """The file and the line of a leaf, for the beginning of a message."""
        return self.name if leaf.line is None else f"{self.name}, line {leaf.line}"


def flatten(nested: Mapping[Any, Any], name: str) -> list[Leaf]:
    """The leaves of nested mappings, in the order of the mappings."""
    leaves: list[Leaf] = []
    waiting: list[tuple[tuple[str, ...], Any, tuple[int, ...]]] = [((), nested, ())]
    visited = 0
    while waiting:
        path, value, above = waiting.pop()
        # Sections count too, because empty sections that are shared could be visited without end and give no value.
        visited += 1
        if visited > MOST_VALUES:
            raise too_many_values(name)
        if not isinstance(value, Mapping):
            leaves.append(Leaf(path=path, value=_list_value(value) if isinstance(value, list | tuple) else value))
            continue
        if id(value) in above:
            raise ConfigError(f"{name}: {'.'.join(path)} contains itself; remove the loop")
        if len(path) > DEEPEST:
            raise too_deep(name)
        inner = [((*path, str(key)), each, (*above, id(value))) for key, each in value.items()]
        waiting.extend(reversed(inner))
    return leaves


def _list_value(items: Any) -> ListValue:
    return ListValue(frozenset(str(key) for item in items if isinstance(item, Mapping) for key in item))


def too_deep(name: str) -> ConfigError:
    return ConfigError(f"{name} has more than {DEEPEST} levels of nesting, so it is not a settings file")


def too_many_values(name: str) -> ConfigError:
    return ConfigError(f"{name} has more than {MOST_VALUES:,} values, so it is not a settings file")
