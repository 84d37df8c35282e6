"""Writes arguments into a copy of a team's own settings file, under the team's own keys.

In:  a settings file, arguments of the loader.
Out: a file with the same layout, in which only the requested values change. JSON is printed again with the indentation
     of the original file.
Runs in: trainer, command line.

Values are replaced in the text itself, because a YAML library that loads and dumps the file would change braces,
indentation and comments. Before anything is written, the new text is read back: it must give the arguments, and no
other value may differ.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.drafts import open_draft
from penstock.errors import ConfigError
from penstock.settings.aliases import ALIASES, ARGUMENTS, FACTS, Alias
from penstock.settings.claims import Claim, counts
from penstock.settings.document import Document, Leaf, TextSpan
from penstock.settings.files import parse_json, read_file, read_text
from penstock.settings.reader import Chosen, Reader, same, settings_of
from penstock.settings.sections import kind_of, parts, phase_asked_for, phase_of
from penstock.settings.settings import NEED_WORKERS, Settings
from penstock.settings.values import Wrong, read_value
from penstock.units import GIB, parse_size

_RELATED = (
    "num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "batch_size", "images_per_gpu", "cache",
    "use_cache", "memory", "shuffle", "drop_last", "accumulation_steps",
)  # fmt: skip
"""A new key is written after the first of these keys that the file has."""

_DECIDED_BY = {"batch_size": ("images_per_gpu",), "cache": ("use_cache",)}
"""Argument -> facts that are written together with the argument."""

_PLAIN = re.compile(r"[A-Za-z0-9_.%/:+-]*[A-Za-z0-9_%]")
_NOT_TEXT = re.compile(r"[-+.\d:_e]+|true|false|yes|no|on|off|null|y|n", re.IGNORECASE)
"""Plain words that YAML reads as a number or a flag."""
_FLAG_WORDS = (("True", "False"), ("TRUE", "FALSE"), ("yes", "no"), ("Yes", "No"), ("on", "off"), ("On", "Off"))


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """One value to be written."""

    path: tuple[str, ...]
    """The names of the sections and the key."""
    value: Any
    span: TextSpan | None
    """The position of the value, or of the key that a new key follows; None if the section is new or the file is
    JSON."""
    is_new: bool
    after: str | None = None
    """The key that a new key follows in JSON."""


def write_like(
    source_path: str | PathLike[str],
    out_path: str | PathLike[str],
    arguments: Mapping[str, Any],
    *,
    section: str = "train",
) -> Settings:
    """Write ``arguments`` into a copy of a settings file, with the layout and the keys of the file. Returns the new
    settings.

    If the file has no key for an argument, the argument is added next to related keys under penstock's name.
    ``out_path`` may be the path of the file itself.
    """
    document = read_file(Path(source_path))
    wanted = _checked(arguments)
    rewritten = {*wanted, *(fact for target in wanted for fact in _DECIDED_BY.get(target, ()))}
    reader = Reader(document, phase_asked_for(section), {}, rewritten=rewritten)
    changes = [change for target, value in wanted.items() for change in _changes(reader, target, value)]
    text = _printed_json(document, changes) if document.format == "json" else _edited_text(document, changes)
    settings = _read_back(document, text, changes, reader, wanted)
    mark = codecs.BOM_UTF8 if Path(source_path).read_bytes().startswith(codecs.BOM_UTF8) else b""
    _write(Path(source_path), Path(out_path), mark + text.encode())
    return settings


# -- which values change --------------------------------------------------------------------------------------------


def _alias_of(target: str) -> Alias:
    return ALIASES.get(target) or next(each for each in ALIASES.values() if each.target == target)


def _checked(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in the form that they have in a file."""
    wanted = {}
    for target, value in arguments.items():
        if target not in ARGUMENTS and target not in FACTS:
            raise ConfigError(f"{target} cannot be set in a settings file; these arguments can: {', '.join(ARGUMENTS)}")
        try:
            wanted[target] = read_value(_alias_of(target), value)[0]
        except Wrong as wrong:
            raise ConfigError(f"{target}={value!r} {wrong}") from None
    if wanted.get("num_workers") == 0:
        # Without workers, these arguments would cause a warning whenever the file is read.
        wanted |= dict.fromkeys(NEED_WORKERS)
    return wanted


def _changes(reader: Reader, target: str, value: Any) -> list[SettingChange]:
    """The changes after which the file sets ``target`` to ``value``."""
    carriers = _carriers(reader, target)
    changes = [_replacement(reader, claim, value) for claim in carriers]
    if target == "cache" and (switch := _own(reader, "use_cache")) is not None:
        changes += [_replacement(reader, claim, value is not None) for claim in switch.used]
    if not carriers and value is not None:
        changes.append(_addition(reader, target, value))
    return changes


def _carriers(reader: Reader, target: str) -> tuple[Claim, ...]:
    """The keys of the file that set an argument."""
    own = _own(reader, target)
    carriers = own.used if own is not None else ()
    if target != "batch_size" or (images := _own(reader, "images_per_gpu")) is None:
        return carriers
    sequence = reader.choose("sequence_length")
    return carriers if sequence is None or sequence.value is None else (*carriers, *images.used)


def _own(reader: Reader, target: str) -> Chosen | None:
    """The value chosen for an argument; None if another phase sets the argument."""
    chosen = reader.choose(target)
    return None if chosen is None or chosen.origin else chosen


def _replacement(reader: Reader, claim: Claim, value: Any) -> SettingChange:
    leaf, document = claim.leaf, reader.document
    written = _in_unit_of_key(reader, claim, value)
    if document.format == "json" or leaf.span is not None:
        return SettingChange(path=leaf.path, value=written, span=leaf.span, is_new=False)
    # The value is in an anchor that other sections use too, so this section gets a key of its own, which takes
    # precedence.
    home = document.homes.get(leaf.path[:-1])
    if home is None:
        raise ConfigError(
            f"{document.at(leaf)}: {leaf.key} is in a section that is only an alias of another section; give the "
            "section keys of its own first"
        )
    return SettingChange(path=leaf.path, value=written, span=home, is_new=True)


def _in_unit_of_key(reader: Reader, claim: Claim, value: Any) -> Any:
    """The value of an argument in the unit of the team's key."""
    if claim.alias.target == "images_per_gpu" and value is not None:
        sequence = reader.choose("sequence_length")
        assert sequence is not None
        return value * sequence.value
    if claim.alias.reads == "flag" and value is None:
        return False
    if claim.alias.reads != "gib":
        return value
    if value is None:
        return 0 if claim.alias.target == "cache" else None
    size_bytes = parse_size(value).fixed_bytes
    if size_bytes is None:
        raise ConfigError(
            f"{claim.alias.target}={value!r} cannot be written to {claim.leaf.key}, which is a number of GiB; "
            "give a size"
        )
    gib = size_bytes / GIB
    return int(gib) if gib == int(gib) and type(claim.leaf.value) is int else gib


def _addition(reader: Reader, target: str, value: Any) -> SettingChange:
    """A new key, next to a related key if the file has one."""
    alias = _alias_of(target)
    sections, prefix, span, after = _place_for(reader, alias)
    name = target if target in ALIASES else alias.key
    if reader.phase != "train" and phase_of(parts((*sections, prefix))) in (None, "train"):
        # A key without the name of the phase would count for training.
        name = f"{reader.phase}_{name}"
    return SettingChange(path=(*sections, prefix + name), value=value, span=span, is_new=True, after=after)


def _place_for(reader: Reader, alias: Alias) -> tuple[tuple[str, ...], str, TextSpan | None, str | None]:
    """The place for a new key: its sections, its prefix with the dot, and the span and the name of the key before
    it."""
    document = reader.document
    for related in ("use_cache", *_RELATED) if alias.target == "cache" else _RELATED:
        own = _own(reader, related)
        if own is None:
            continue
        leaf = own.used[0].leaf
        if not counts(alias, kind_of(parts(leaf.path)[:-1])):
            continue
        span = leaf.span or document.homes.get(leaf.path[:-1])
        if span is not None or document.format == "json":
            prefix, dot, _ = leaf.path[-1].rpartition(".") if document.format != "toml" else ("", "", "")
            return leaf.path[:-1], prefix + dot, span, leaf.path[-1]
    own_section = "penstock" if reader.phase == "train" else reader.phase
    if reader.phase != "train" and alias.where == "loader":
        own_section += "_loader"
    for sections, span in document.homes.items():
        if parts(sections) == (own_section,):
            return sections, "", span, None
    return (own_section,), "", None, None


# -- the new text -----------------------------------------------------------------------------------------------------


def _edited_text(document: Document, changes: list[SettingChange]) -> str:
    """The text of a YAML or TOML file after the changes."""
    pieces: dict[tuple[int, int], str] = {}
    sections: dict[tuple[str, ...], list[SettingChange]] = {}
    for change in changes:
        if change.span is None:
            sections.setdefault(change.path[:-1], []).append(change)
            continue
        edit = _inserted if change.is_new else _replaced
        where, piece = edit(document, change, change.span)
        # More than one new key may follow the same key.
        pieces[where] = pieces.get(where, "") + piece
    text = document.text
    for (start, end), piece in sorted(pieces.items(), reverse=True):
        text = text[:start] + piece + text[end:]
    for path, new in sections.items():
        text = _with_section(document, text, path, new)
    return text


def _replaced(document: Document, change: SettingChange, span: TextSpan) -> tuple[tuple[int, int], str]:
    text, start, end = document.text, span.value_start, span.value_end
    if change.value is None and document.format == "toml":
        # TOML has no null: the key is removed.
        if span.in_line:
            raise ConfigError(
                f"{document.name}: {'.'.join(change.path)} is inside braces, where no key can be removed; "
                "remove it by hand"
            )
        return (_line_start(text, span.key_start), _line_end(text, end)), ""
    written = _scalar(document, change.value, old=text[start:end])
    # An empty YAML value begins right after the colon.
    return (start, end), f" {written}" if start == end else written


def _inserted(document: Document, change: SettingChange, span: TextSpan) -> tuple[tuple[int, int], str]:
    text = document.text
    pair = _pair(document, span.prefix + change.path[-1], change.value)
    if span.in_line:
        return (span.value_end, span.value_end), f", {pair}"
    at, newline = _line_end(text, span.value_end), _newline(text)
    indent = re.sub(r"\S", " ", text[_line_start(text, span.key_start) : span.key_start])
    is_ended = text[at - 1 : at] == "\n"
    return (at, at), f"{indent}{pair}{newline}" if is_ended else f"{newline}{indent}{pair}"


def _with_section(document: Document, text: str, path: tuple[str, ...], changes: list[SettingChange]) -> str:
    newline = _newline(text)
    ending = "" if text.endswith("\n") else newline
    pairs = [_pair(document, change.path[-1], change.value) for change in changes]
    head = f"{'.'.join(path)}:" if document.format == "yaml" else f"{newline}[{'.'.join(path)}]"
    lines = [f"  {pair}" for pair in pairs] if document.format == "yaml" else pairs
    return text + ending + newline.join([head, *lines]) + newline


def _pair(document: Document, key: str, value: Any) -> str:
    return f"{key}{': ' if document.format == 'yaml' else ' = '}{_scalar(document, value)}"


def _scalar(document: Document, value: Any, *, old: str = "") -> str:
    is_yaml = document.format == "yaml"
    if value is None:
        return "null"
    if isinstance(value, bool):
        words = next((pair for pair in _FLAG_WORDS if is_yaml and old in pair), ("true", "false"))
        return words[not value]
    if isinstance(value, str):
        if is_yaml and _PLAIN.fullmatch(value) and not _NOT_TEXT.fullmatch(value):
            return value
        # The text is written in double quotes, which YAML and TOML read alike.
        shown = json.dumps(value, ensure_ascii=False)
        return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in shown)
    return repr(value)


def _printed_json(document: Document, changes: list[SettingChange]) -> str:
    text = document.text
    nested = parse_json(text, document.name)
    for change in changes:
        section = nested
        for name in change.path[:-1]:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{document.name}: {name} is a value, but a section is needed; rename it")
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
    """The position after the end of the line, or after the end of the text."""
    found = text.find("\n", at)
    return len(text) if found < 0 else found + 1


# -- checked and written ----------------------------------------------------------------------------------------------


def _read_back(
    document: Document, text: str, changes: list[SettingChange], reader: Reader, wanted: dict[str, Any]
) -> Settings:
    """Read the settings of the new text. Raises ConfigError unless these are exactly the requested settings."""
    try:
        new = read_text(text, name=document.name, kind=document.format)
    except ConfigError as problem:
        raise ConfigError(
            f"{document.name} has a layout to which no key can be added ({problem}); add the keys by hand"
        ) from None
    requested = {change.path for change in changes}
    before, after = _values(document.leaves), _values(new.leaves)
    for path in before.keys() | after.keys():
        if path not in requested and before.get(path) != after.get(path):
            raise ConfigError(
                f"{document.name}: {'.'.join(path)} uses the value of a key that changes, through an anchor; give "
                "this key a value of its own first"
            )
    settings = settings_of(Reader(new, reader.phase, {}))
    found = {**settings.facts, **settings.arguments}
    for target, value in wanted.items():
        # A flag that is absent means the same as a flag that is false.
        if not same(target, found.get(target), value) and (found.get(target) or value):
            if target in NEED_WORKERS and settings.arguments.get("num_workers") == 0:
                raise ConfigError(
                    f"{document.name}: {target}={value!r} needs workers, but the file has num_workers=0; "
                    "give num_workers too"
                )
            raise ConfigError(
                f"{document.name}: {target}={value!r} cannot be written in this layout; it would be read as "
                f"{found.get(target)!r}"
            )
    return settings


def _values(leaves: list[Leaf]) -> dict[tuple[str, ...], str]:
    # Values are compared as text, so that 1, 1.0 and True are different settings, and nan equals nan.
    return {leaf.path: repr(leaf.value) for leaf in leaves}


def _write(source: Path, out: Path, content: bytes) -> None:
    """Replace the file in one step, because a training may be reading ``out``."""
    target = Path(os.path.realpath(out))
    draft = target.with_name(f"{target.name}.{os.getpid()}.draft")
    try:
        with open_draft(draft) as file:
            file.write(content)
            # The mode is set through the descriptor, because the name may be a link by now.
            if hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), stat.S_IMODE((target if target.exists() else source).stat().st_mode))
        draft.replace(target)
    except OSError as problem:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"{out} cannot be written: {problem.strerror or problem}") from None
