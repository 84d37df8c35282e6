"""Reads YAML: every value with its position in the text.

In:  text.
Out: leaves, and the positions where keys can be added.
Runs in: trainer, command line. Needs pyyaml.

PyYAML composes nodes from the text. Only numbers, texts, flags and dates are constructed from these nodes, never
objects. Before nodes are composed, the nesting depth is checked in the parser's events, because PyYAML composes by
recursion in C, which a hostile file could crash.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from penstock.errors import ConfigError
from penstock.settings.document import DEEPEST, MOST_VALUES, Leaf, ListValue, TextSpan, too_deep, too_many_values

_TAGS = "tag:yaml.org,2002:"
_PYTHON, _MERGE, _TEXT, _NULL = (_TAGS + name for name in ("python/", "merge", "str", "null"))
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")
"""The anchor and the tag before a value."""
_ALIAS_NAME = re.compile(r"\*[^\s,\]}]+")
_ALIAS = re.compile(r"\s*:\s*(" + _ALIAS_NAME.pattern + ")")
"""The alias that follows a key."""

_Pair = tuple[Any, Any, bool]
"""The node of the key, the node of the value, and whether the pair is merged from another section."""


def read_yaml(text: str, name: str) -> tuple[list[Leaf], dict[tuple[str, ...], TextSpan]]:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f'{name}: reading YAML needs pyyaml, which is not installed; run: pip install "penstock[settings]"'
        ) from None
    parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_events(yaml.parse(text, Loader=parser), name)
        root = yaml.compose(text, Loader=parser)
    except yaml.YAMLError as problem:
        raise ConfigError(f"{name}{_explained(problem, text)}") from None
    if root is None or root.tag == _NULL:
        raise ConfigError(f"{name} is empty: it has no settings")
    if not isinstance(root, yaml.MappingNode):
        what = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise ConfigError(f"{name} is {what}, but keys and values are needed")
    return _YamlReader(text, name).read(root)


def _check_events(events: Any, name: str) -> None:
    """Refuse deep nesting, Python objects and a second document, none of which may be composed."""
    depth = documents = 0
    for event in events:
        kind = type(event).__name__
        depth += (kind in ("MappingStartEvent", "SequenceStartEvent")) - (
            kind in ("MappingEndEvent", "SequenceEndEvent")
        )
        documents += kind == "DocumentStartEvent"
        if depth > DEEPEST:
            raise too_deep(name)
        if documents > 1:
            raise _error(name, event, "a second document begins, but a settings file holds only one")
        tag = getattr(event, "tag", None)
        if tag is not None and tag.startswith(_PYTHON):
            raise _error(
                name, event, f"!!{tag.removeprefix(_TAGS)} would run code, but a settings file holds only values"
            )


def _error(name: str, at: Any, why: str) -> ConfigError:
    return ConfigError(f"{name}, line {at.start_mark.line + 1}: {why}")


def _explained(problem: Any, text: str) -> str:
    mark = getattr(problem, "problem_mark", None)
    what = getattr(problem, "problem", None) or getattr(problem, "reason", None) or str(problem)
    what = " ".join(str(what).split())
    if mark is not None and text[mark.index : mark.index + 1] == "\t":
        what += ", a tab; indent YAML with spaces"
    if mark is not None and (alias := _ALIAS_NAME.match(text, mark.index)):
        what += f" {alias[0]}"
    return f": {what}" if mark is None else f", line {mark.line + 1}: {what}"


def _is_alias(value: Any, after: Any) -> bool:
    """Whether a node is written before ``after``, which is the key or the list that holds the node."""
    return value.start_mark.index < after.start_mark.index


class _YamlReader:
    """Converts the nodes of one document to leaves."""

    def __init__(self, text: str, name: str) -> None:
        import yaml

        self._text, self._name = text, name
        self._constructor: Any = yaml.constructor.SafeConstructor()
        self._pairs: dict[int, dict[str, _Pair]] = {}
        """The effective pairs of each visited section, by the id of the section."""
        self._templates: set[int] = set()
        """The ids of sections that other sections use or merge."""

    def read(self, root: Any) -> tuple[list[Leaf], dict[tuple[str, ...], TextSpan]]:
        for section in _sections(root):
            self._check_section(section)
        leaves: list[Leaf] = []
        homes: dict[tuple[str, ...], TextSpan] = {}
        waiting: list[tuple[tuple[str, ...], Any, bool, int | None]] = [((), root, False, None)]
        visited = 0
        while waiting:
            path, section, is_borrowed, template_depth = waiting.pop()
            if template_depth is None and id(section) in self._templates and not is_borrowed:
                template_depth = len(path)
            # Sections count too, because empty sections that refer to each other could be visited without end.
            visited += 1 + len(section.value)
            if visited > MOST_VALUES:
                raise too_many_values(self._name)
            inner: list[tuple[tuple[str, ...], Any, bool, int | None]] = []
            for name, (key, value, is_merged) in self._effective(section).items():
                elsewhere, below = is_borrowed or is_merged, (*path, name)
                if value.id == "mapping":
                    inner.append((below, value, elsewhere or _is_alias(value, key), template_depth))
                    continue
                leaves.append(
                    Leaf(
                        path=below,
                        value=ListValue(_keys_in(value)) if value.id == "sequence" else self._scalar(value),
                        line=key.start_mark.line + 1,
                        span=None if elsewhere else self._span(section, key, value),
                        template_depth=template_depth,
                    )
                )
            if not is_borrowed and (last := self._last_short_pair(section)) is not None:
                homes[path] = self._span(section, *last)
            waiting.extend(reversed(inner))
        return leaves, homes

    def _check_section(self, section: Any) -> None:
        """Refuse duplicate keys and sections inside themselves, and record which sections are templates."""
        seen: set[tuple[str, str]] = set()
        for key, value in section.value:
            if key.id == "scalar":
                known = (key.tag, key.value)
                if known in seen:
                    raise _error(
                        self._name, key, f"the key {key.value!r} appears twice in one section; keep one of the two"
                    )
                seen.add(known)
            is_merge_list = key.tag == _MERGE and value.id == "sequence"
            for holder, used in [(value, each) for each in value.value] if is_merge_list else [(key, value)]:
                if used.id == "mapping" and _is_alias(used, holder):
                    if used.end_mark.index > key.start_mark.index:
                        raise _error(self._name, key, f"{key.value!r} refers to the section that it is in")
                    self._templates.add(id(used))

    def _effective(self, section: Any, depth: int = 0) -> dict[str, _Pair]:
        """The keys of a section, and the keys that it merges from other sections. A section's own key takes precedence
        over a merged key, and a key that is merged first takes precedence over later ones."""
        found = self._pairs.get(id(section))
        if found is not None:
            return found
        if depth > DEEPEST:
            raise too_deep(self._name)
        own = [(key, value) for key, value in section.value if key.id == "scalar"]
        found = {str(self._scalar(key)): (key, value, False) for key, value in own if key.tag != _MERGE}
        for key, value in own:
            if key.tag != _MERGE:
                continue
            for source in value.value if value.id == "sequence" else [value]:
                if source.id != "mapping":
                    raise _error(self._name, key, "<< merges sections, but its value is not a section")
                for name, (inner, merged, _) in self._effective(source, depth + 1).items():
                    found.setdefault(name, (inner, merged, True))
        self._pairs[id(section)] = found
        return found

    def _scalar(self, node: Any) -> Any:
        if node.tag in (_TEXT, _MERGE):
            return node.value
        if node.tag not in self._constructor.yaml_constructors:
            return f"{node.tag} {node.value}"
        try:
            return self._constructor.construct_object(node)
        except Exception:  # the text looks like a number or a date but is not one, such as the 31st of June
            return node.value

    def _last_short_pair(self, section: Any) -> tuple[Any, Any] | None:
        """The last pair that is written on one line, after which another key can be added."""
        for key, value in reversed(section.value):
            is_short = value.id == "scalar" or _is_alias(value, key)
            if key.id == "scalar" and is_short:
                span = self._span(section, key, value)
                if "\n" not in self._text[span.key_start : span.value_end]:
                    return key, value
        return None

    def _span(self, section: Any, key: Any, value: Any) -> TextSpan:
        key_start, in_line = key.start_mark.index, bool(section.flow_style)
        start, end = value.start_mark.index, value.end_mark.index
        if _is_alias(value, key):
            written = _ALIAS.match(self._text, key.end_mark.index)
            # A complex key ("? a") has its alias on another line, where nothing is replaced.
            start, end = written.span(1) if written is not None else (key.end_mark.index, key.end_mark.index)
        elif properties := _PROPERTIES.match(self._text, start, end):
            start = properties.end()
        return TextSpan(key_start=key_start, value_start=start, value_end=end, in_line=in_line)


def _sections(root: Any) -> Iterator[Any]:
    """Every section of a document, including sections inside lists, each once."""
    waiting, seen = [root], {id(root)}
    while waiting:
        node = waiting.pop()
        if node.id == "mapping":
            yield node
        for inner in node.value if node.id == "sequence" else [value for _, value in node.value]:
            if inner.id != "scalar" and id(inner) not in seen:
                seen.add(id(inner))
                waiting.append(inner)


def _keys_in(node: Any) -> frozenset[str]:
    sections = [item for item in node.value if item.id == "mapping"]
    return frozenset(str(key.value) for section in sections for key, _ in section.value if key.id == "scalar")
