"""A settings source as a flat list: every value with its path, its line and its position in the text.

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
"""Most levels of nesting; deeper files are refused, because parsers would exhaust the stack."""
MOST_VALUES = 1_000_000
"""Most values in one source; a small file of YAML anchors can expand to more than memory holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSpan:
    """Where a key and its value are in the text, in characters."""

    key_start: int
    value_start: int
    value_end: int
    in_line: bool
    """Between braces, where commas and not line ends separate the keys."""
    prefix: str = ""
    """TOML: the text before the last name of a dotted key, with the dot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One value that is not a section."""

    path: tuple[str, ...]
    """Sections and key, as written."""
    value: Any
    """A number, text, flag, date or None; ``ListValue`` for a list."""
    line: int | None = None
    """From 1; None if unknown."""
    span: TextSpan | None = None
    """None if there is no text, or if the value is written in another section and used here through a YAML anchor."""
    template_depth: int | None = None
    """The depth of the section around this value that others use through YAML anchors; None if there is none."""

    @property
    def key(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class ListValue:
    """A list; only the keys of the mappings in it are kept."""

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
    homes: dict[tuple[str, ...], TextSpan] = field(default_factory=dict)
    """Section -> the last of its keys after which a new key can be written."""

    def at(self, leaf: Leaf) -> str:
        """File and line of a leaf, for the beginning of a message."""
        return self.name if leaf.line is None else f"{self.name}, line {leaf.line}"


def flatten(nested: Mapping[Any, Any], name: str) -> list[Leaf]:
    """The leaves of nested mappings, in their order."""
    leaves: list[Leaf] = []
    waiting: list[tuple[tuple[str, ...], Any, tuple[int, ...]]] = [((), nested, ())]
    visited = 0
    while waiting:
        path, value, above = waiting.pop()
        # Sections count too: shared empty sections could be visited without end and give no value.
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
    return ConfigError(f"{name}: nested more than {DEEPEST} levels deep; this is not a settings file")


def too_many_values(name: str) -> ConfigError:
    return ConfigError(f"{name}: more than {MOST_VALUES:,} values; this is not a settings file")
