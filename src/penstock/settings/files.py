"""Settings files are read, decoded, and parsed in the format that the file name shows.

In:  a path, or a mapping.
Out: ``Document``, or a ConfigError of one line if the source cannot be read.
Runs in: trainer, command line.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.settings.document import Document, Format, flatten, too_deep
from penstock.settings.toml_reader import read_toml
from penstock.settings.yaml_reader import read_yaml
from penstock.units import MIB, format_bytes

LARGEST_FILE_BYTES = 64 * MIB
"""The size above which a file is refused, because parsing a data file that is given by mistake would take minutes."""

FORMATS: dict[str, Format] = {".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}

Source = str | PathLike[str] | Mapping[str, Any]
"""The types from which settings can be read."""


def read_source(source: Source) -> Document:
    if isinstance(source, Mapping):
        return Document(name="the mapping", format="mapping", leaves=flatten(source, "the mapping"))
    if not isinstance(source, str | PathLike):
        raise ConfigError(
            f"settings come from a file path or a mapping, not from {type(source).__name__}; "
            "for a dataclass or a namespace, give vars(config)"
        )
    return read_file(Path(source))


def read_file(path: Path) -> Document:
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(f"{path}: the name of a settings file must end in {', '.join(FORMATS)}")
    return read_text(_decoded(path), name=str(path), kind=kind)


def read_text(text: str, *, name: str, kind: Format) -> Document:
    if not text.strip():
        raise ConfigError(f"{name} is empty: it has no settings")
    if kind == "json":
        nested = parse_json(text, name)
        return Document(name=name, format=kind, text=text, leaves=flatten(nested, name))
    leaves, homes = read_yaml(text, name) if kind == "yaml" else read_toml(text, name)
    return Document(name=name, format=kind, text=text, leaves=leaves, homes=homes)


def _decoded(path: Path) -> str:
    """The text of the file without a byte order mark. Line ends stay unchanged."""
    try:
        size_bytes = path.stat().st_size
        raw = path.read_bytes() if size_bytes <= LARGEST_FILE_BYTES else b""
    except (OSError, ValueError) as problem:
        why = getattr(problem, "strerror", None) or str(problem)
        raise ConfigError(f"{path} cannot be read: {why}") from None
    if size_bytes > LARGEST_FILE_BYTES:
        raise ConfigError(f"{path} has {format_bytes(size_bytes)}, so it is not a settings file")
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(f"{path} is UTF-16; save it as UTF-8")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{path} is not UTF-8 text (byte {problem.start:,}); save it as UTF-8") from None


def parse_json(text: str, name: str) -> dict[str, Any]:
    def section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigError(f"{name}: the key {key!r} appears twice in one section; keep one of the two")
            found[key] = value
        return found

    try:
        nested = json.loads(text, object_pairs_hook=section)
    except json.JSONDecodeError as problem:
        raise ConfigError(f"{name}, line {problem.lineno}: {problem.msg}") from None
    except RecursionError:
        raise too_deep(name) from None
    except ConfigError:
        raise
    except ValueError as problem:
        raise ConfigError(f"{name}: {problem}") from None
    if not isinstance(nested, dict):
        what = "a list" if isinstance(nested, list) else "a single value"
        raise ConfigError(f"{name} is {what}, but keys and values are needed")
    if not nested:
        raise ConfigError(f"{name} is empty: it has no settings")
    return nested
