"""YAML: every value with its place in the text.

In:  text.
Out: leaves, and where keys can be added.
Runs in: trainer, command line. Needs pyyaml, of which it uses the parser alone: nothing is constructed but numbers,
texts, flags and dates, and nesting is not followed by recursion, which a hostile file would turn into a crash.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError
from penstock.settings.document import DEEPEST, MOST_VALUES, Leaf, Listed, Place, too_deep, too_much

_PYTHON = "tag:yaml.org,2002:python/"
_MERGE = "tag:yaml.org,2002:merge"
_TEXT = "tag:yaml.org,2002:str"
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")
"""Anchor and tag before a value."""


@dataclass(slots=True)
class _Scalar:
    value: Any
    tag: str


@dataclass(slots=True)
class _Map:
    in_line: bool
    items: list[_Item] = field(default_factory=list)
    seen: set[tuple[str, str]] = field(default_factory=set)
    is_open: bool = True
    is_template: bool = False
    """Another section is, or takes in, this one."""


@dataclass(slots=True)
class _List:
    items: list[_Item] = field(default_factory=list)
    is_open: bool = True


_Node = _Scalar | _Map | _List


@dataclass(slots=True)
class _Item:
    """A key and its value; a list's have no key."""

    key: _Node | None
    key_start: int
    line: int
    node: _Node
    start: int
    end: int
    is_alias: bool


def read_yaml(text: str, name: str) -> tuple[list[Leaf], dict[tuple[str, ...], Place]]:
    root = _Builder(text, name).build()
    if root is None or (isinstance(root, _Scalar) and root.value is None):
        raise ConfigError(f"{name} is empty; there are no settings in it")
    if not isinstance(root, _Map):
        what = "a list" if isinstance(root, _List) else "a single value"
        raise ConfigError(f"{name} is {what} where keys and values are due")
    return _leaves(root, text, name)


class _Builder:
    """Makes nodes of the parser's events."""

    def __init__(self, text: str, name: str) -> None:
        try:
            import yaml
        except ImportError:
            raise ConfigError(
                f'{name}: YAML needs pyyaml, not installed here; run: pip install "penstock[settings]"'
            ) from None
        self._yaml: Any = yaml
        self._text, self._name = text, name
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        self._events = yaml.parse(text, Loader=loader)
        self._resolver = yaml.resolver.Resolver()
        self._constructor = yaml.constructor.SafeConstructor()
        self._anchors: dict[str, _Node] = {}
        self._open: list[_Map | _List] = []
        self._keys: list[tuple[_Node, int, int] | None] = []
        """Of each open node, the key that waits for its value."""
        self._root: _Node | None = None
        self._documents = 0

    def build(self) -> _Node | None:
        yaml = self._yaml
        try:
            for event in self._events:
                self._take(event)
        except yaml.YAMLError as problem:
            raise ConfigError(f"{self._name}{_where(problem, self._text)}") from None
        return self._root

    def _take(self, event: Any) -> None:
        yaml = self._yaml
        match event:
            case yaml.ScalarEvent():
                self._put(self._scalar(event), event)
            case yaml.AliasEvent():
                node = self._anchors.get(event.anchor)
                if node is None or (not isinstance(node, _Scalar) and node.is_open):
                    why = "is not defined before it" if node is None else "refers to itself"
                    raise self._error(event, f"*{event.anchor} {why}")
                self._put(node, event, is_alias=True)
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                self._check_tag(event)
                is_map = isinstance(event, yaml.MappingStartEvent)
                node = _Map(in_line=bool(event.flow_style)) if is_map else _List()
                self._put(node, event)
                self._open.append(node)
                self._keys.append(None)
                if len(self._open) > DEEPEST:
                    raise too_deep(self._name)
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                closed = self._open.pop()
                closed.is_open = False
                self._keys.pop()
                for item in closed.items:
                    _mark_templates(item)
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    raise self._error(event, "a second document begins; one file holds one set of settings")

    def _put(self, node: _Node, event: Any, *, is_alias: bool = False) -> None:
        if getattr(event, "anchor", None) is not None and not is_alias:
            self._anchors[event.anchor] = node
        start, end, line = event.start_mark.index, event.end_mark.index, event.start_mark.line + 1
        if not self._open:
            self._root = node
            return
        inside = self._open[-1]
        if isinstance(inside, _List):
            inside.items.append(_Item(None, start, line, node, start, end, is_alias))
            return
        waiting = self._keys[-1]
        if waiting is None:
            self._keys[-1] = (node, start, line)
            if isinstance(node, _Scalar):
                known = (node.tag, str(node.value))
                if known in inside.seen:
                    raise self._error(event, f"the key {node.value!r} is there twice in one section; keep one")
                inside.seen.add(known)
            return
        self._keys[-1] = None
        key, key_start, line = waiting
        inside.items.append(_Item(key, key_start, line, node, start, end, is_alias))

    def _scalar(self, event: Any) -> _Scalar:
        yaml = self._yaml
        self._check_tag(event)
        tag = event.tag
        if tag is None or tag == "!":
            tag = self._resolver.resolve(yaml.ScalarNode, event.value, event.implicit)
        if tag in (_TEXT, _MERGE):
            return _Scalar(event.value, tag)
        if tag not in self._constructor.yaml_constructors:
            return _Scalar(f"{tag} {event.value}", tag)
        try:
            return _Scalar(self._constructor.construct_object(yaml.ScalarNode(tag, event.value)), tag)
        except (yaml.YAMLError, ValueError, OverflowError):
            # Looks like a number or a date and is none, such as the 31st of June.
            return _Scalar(event.value, _TEXT)

    def _check_tag(self, event: Any) -> None:
        if event.tag is not None and event.tag.startswith(_PYTHON):
            shown = event.tag.removeprefix("tag:yaml.org,2002:")
            raise self._error(event, f"!!{shown} would run code; settings hold values only, take it out")

    def _error(self, event: Any, why: str) -> ConfigError:
        return ConfigError(f"{self._name}, line {event.start_mark.line + 1}: {why}")


def _mark_templates(item: _Item) -> None:
    is_merge = isinstance(item.key, _Scalar) and item.key.tag == _MERGE
    sources = item.node.items if is_merge and isinstance(item.node, _List) else [item]
    for source in sources:
        if source.is_alias and isinstance(source.node, _Map):
            source.node.is_template = True


def _where(problem: Any, text: str) -> str:
    mark = getattr(problem, "problem_mark", None)
    what = getattr(problem, "problem", None) or getattr(problem, "reason", None) or str(problem)
    what = " ".join(str(what).split())
    if mark is not None and text[mark.index : mark.index + 1] == "\t":
        what += ", a tab; YAML is indented with spaces, never with those"
    return f": {what}" if mark is None else f", line {mark.line + 1}: {what}"


def _leaves(root: _Map, text: str, name: str) -> tuple[list[Leaf], dict[tuple[str, ...], Place]]:
    leaves: list[Leaf] = []
    homes: dict[tuple[str, ...], Place] = {}
    merged: dict[int, dict[str, tuple[_Item, bool]]] = {}
    waiting: list[tuple[tuple[str, ...], _Map, bool, int | None]] = [((), root, False, None)]
    visited = 0
    while waiting:
        path, section, is_borrowed, template_depth = waiting.pop()
        if template_depth is None and section.is_template and not is_borrowed:
            template_depth = len(path)
        # Of sections too: those that are shared and empty can be visited for ever without a single value.
        visited += 1 + len(section.items)
        if visited > MOST_VALUES:
            raise too_much(name)
        if len(path) > DEEPEST:
            raise too_deep(name)
        inner: list[tuple[tuple[str, ...], _Map, bool, int | None]] = []
        for key, (item, is_merged) in _effective(section, merged, name).items():
            elsewhere = is_borrowed or is_merged
            node, way = item.node, (*path, key)
            if isinstance(node, _Map):
                inner.append((way, node, elsewhere or item.is_alias, template_depth))
                continue
            value = Listed(_keys_in(node)) if isinstance(node, _List) else node.value
            place = None if elsewhere else _place(item, section, text)
            leaves.append(
                Leaf(
                    path=way,
                    value=value,
                    line=item.line,
                    place=place,
                    is_borrowed=elsewhere,
                    template_depth=template_depth,
                )
            )
        if not is_borrowed:
            home = next((item for item in reversed(section.items) if _can_be_followed(item, text)), None)
            if home is not None:
                homes[path] = _place(home, section, text)
        waiting.extend(reversed(inner))
    return leaves, homes


def _can_be_followed(item: _Item, text: str) -> bool:
    """Whether another key can come after this one: it is written in one line."""
    is_short = item.is_alias or isinstance(item.node, _Scalar)
    return isinstance(item.key, _Scalar) and is_short and "\n" not in text[item.key_start : item.end]


def _place(item: _Item, section: _Map, text: str) -> Place:
    start, end = item.start, item.end
    if not item.is_alias and (properties := _PROPERTIES.match(text, start, end)):
        start = properties.end()
    return Place(key_start=item.key_start, value_start=start, value_end=end, in_line=section.in_line)


def _effective(
    section: _Map, known: dict[int, dict[str, tuple[_Item, bool]]], name: str, depth: int = 0
) -> dict[str, tuple[_Item, bool]]:
    """The keys of a section and those it merges in from others; its own ones win, then those merged first."""
    found = known.get(id(section))
    if found is not None:
        return found
    if depth > DEEPEST:
        raise too_deep(name)
    found = {}
    for item in section.items:
        if isinstance(item.key, _Scalar) and item.key.tag != _MERGE:
            found[str(item.key.value)] = (item, False)
    for item in section.items:
        if not (isinstance(item.key, _Scalar) and item.key.tag == _MERGE):
            continue
        sources = [each.node for each in item.node.items] if isinstance(item.node, _List) else [item.node]
        for source in sources:
            if not isinstance(source, _Map):
                raise ConfigError(f"{name}, line {item.line}: << merges sections, and this is none")
            for key, (inner, _) in _effective(source, known, name, depth + 1).items():
                found.setdefault(key, (inner, True))
    known[id(section)] = found
    return found


def _keys_in(node: _List) -> frozenset[str]:
    keys = [
        str(inner.key.value)
        for item in node.items
        if isinstance(item.node, _Map)
        for inner in item.node.items
        if isinstance(inner.key, _Scalar)
    ]
    return frozenset(keys)
