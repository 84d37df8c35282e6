"""Arguments written into a copy of a team's own settings file, under the team's own keys.

In:  a settings file, arguments of the loader.
Out: a file of the same layout; all that was not asked for is as it was. JSON is printed anew with its indentation.
Runs in: trainer, command line.

Nothing is written before the new text has been read back: it must give the arguments, and change no other value.
"""

from __future__ import annotations

import codecs
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.settings.aliases import ALIASES, ARGUMENTS, FACTS, Alias
from penstock.settings.claims import Claim, counts
from penstock.settings.document import Document, Leaf, Place
from penstock.settings.edits import Change, apply
from penstock.settings.files import read_file, read_text
from penstock.settings.loaded import NEED_WORKERS, Settings
from penstock.settings.reading import Chosen, Reader, same, settings_of
from penstock.settings.sections import kind_of, parts, phase_asked_for, phase_of
from penstock.settings.values import Wrong, read_value
from penstock.units import GIB, parse_size

_RELATIVES = (
    "num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "batch_size", "images_per_gpu", "cache",
    "use_cache", "memory", "shuffle", "drop_last", "accumulation_steps",
)  # fmt: skip
"""Beside which of their keys a new one is written, the first that is there."""

_DECIDED_BY = {"batch_size": ("images_per_gpu",), "cache": ("use_cache",)}
"""Facts that are written along with an argument."""


def write_like(
    source_path: str | PathLike[str],
    out_path: str | PathLike[str],
    arguments: Mapping[str, Any],
    *,
    section: str = "train",
) -> Settings:
    """Write ``arguments`` into a copy of a settings file, in its layout and under its keys; what it then says.

    An argument that the file has no key for is added beside its relatives, under penstock's name. ``out_path`` may be
    the file itself.
    """
    document = read_file(Path(source_path))
    wanted = _checked(arguments)
    rewritten = {*wanted, *(fact for target in wanted for fact in _DECIDED_BY.get(target, ()))}
    reader = Reader(document, phase_asked_for(section), {}, rewritten=rewritten)
    changes = [change for target, value in wanted.items() for change in _changes(reader, target, value)]
    text = apply(document, changes)
    settings = _read_back(document, text, changes, reader, wanted)
    _write(Path(source_path), Path(out_path), (codecs.BOM_UTF8 if document.has_mark else b"") + text.encode())
    return settings


def _checked(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as a file can say them."""
    wanted = {}
    for target, value in arguments.items():
        if target not in ARGUMENTS and target not in FACTS:
            raise ConfigError(f"{target} is nothing a settings file can say; there are {', '.join(ARGUMENTS)}")
        alias = ALIASES.get(target) or next(each for each in ALIASES.values() if each.target == target)
        try:
            wanted[target] = read_value(alias, value)[0]
        except Wrong as wrong:
            raise ConfigError(f"{target}={value!r} {wrong}") from None
    if wanted.get("num_workers") == 0:
        # A file that still asks for them would be read with a warning for ever.
        wanted |= dict.fromkeys(NEED_WORKERS)
    return wanted


def _changes(reader: Reader, target: str, value: Any) -> list[Change]:
    """What to write where, so that the file gives an argument."""
    carriers = _carriers(reader, target)
    changes = [_carried(reader, claim, value) for claim in carriers]
    if target == "cache" and (switch := _own(reader, "use_cache")) is not None:
        changes += [_carried(reader, claim, value is not None) for claim in switch.used]
    if not carriers and value is not None:
        changes.append(_added(reader, target, value))
    return changes


def _carriers(reader: Reader, target: str) -> tuple[Claim, ...]:
    """The file's keys for an argument."""
    own = _own(reader, target)
    carriers = own.used if own is not None else ()
    if target != "batch_size" or (images := _own(reader, "images_per_gpu")) is None:
        return carriers
    sequence = reader.choose("sequence_length")
    return carriers if sequence is None or sequence.value is None else (*carriers, *images.used)


def _own(reader: Reader, target: str) -> Chosen | None:
    chosen = reader.choose(target)
    return None if chosen is None or chosen.whose else chosen


def _carried(reader: Reader, claim: Claim, value: Any) -> Change:
    leaf, document = claim.leaf, reader.document
    written = _as_key_says(reader, claim, value)
    if document.format == "json" or (leaf.place is not None and not leaf.is_borrowed):
        return Change(path=leaf.path, value=written, place=leaf.place, is_new=False)
    # The value stands in an anchor that others use too: this section gets a key of its own, which wins.
    home = document.homes.get(leaf.path[:-1])
    if home is None:
        raise ConfigError(
            f"{document.at(leaf)}: {leaf.key} stands in a section that is another's; give it keys of its own first"
        )
    return Change(path=leaf.path, value=written, place=home, is_new=True)


def _as_key_says(reader: Reader, claim: Claim, value: Any) -> Any:
    """An argument's value in the unit of their key."""
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
            f"{claim.alias.target}={value!r} cannot be said by {claim.leaf.key}, which is a number of GiB; give a size"
        )
    gib = size_bytes / GIB
    return int(gib) if gib == int(gib) and type(claim.leaf.value) is int else gib


@dataclass(frozen=True, kw_only=True)
class _Home:
    """Where a new key can go."""

    sections: tuple[str, ...]
    place: Place | None
    """None: the section is new, or the file is JSON."""
    after: str | None = None
    """The key that it comes after."""
    prefix: str = ""
    """Sections that are written as a part of the key, with the dot."""


def _added(reader: Reader, target: str, value: Any) -> Change:
    home = _home(reader, ALIASES.get(target) or next(each for each in ALIASES.values() if each.target == target))
    name = target if target in ALIASES else next(key for key, each in ALIASES.items() if each.target == target)
    if reader.phase != "train" and phase_of(parts((*home.sections, home.prefix))) in (None, "train"):
        # Without the word it would be training's.
        name = f"{reader.phase}_{name}"
    return Change(
        path=(*home.sections, home.prefix + name), value=value, place=home.place, is_new=True, after=home.after
    )


def _home(reader: Reader, alias: Alias) -> _Home:
    document = reader.document
    for relative in ("use_cache", *_RELATIVES) if alias.target == "cache" else _RELATIVES:
        own = _own(reader, relative)
        if own is None:
            continue
        leaf = own.used[0].leaf
        if not counts(alias, kind_of(parts(leaf.path)[:-1])):
            continue
        place = document.homes.get(leaf.path[:-1]) if leaf.is_borrowed else leaf.place
        if place is not None or document.format == "json":
            prefix, dot, _ = leaf.path[-1].rpartition(".") if document.format != "toml" else ("", "", "")
            return _Home(sections=leaf.path[:-1], place=place, after=leaf.path[-1], prefix=prefix + dot)
    own_section = "penstock" if reader.phase == "train" else reader.phase
    if reader.phase != "train" and alias.where == "loader":
        own_section += "_loader"
    for sections, place in document.homes.items():
        if parts(sections) == (own_section,):
            return _Home(sections=sections, place=place)
    return _Home(sections=(own_section,), place=None)


def _read_back(
    document: Document, text: str, changes: list[Change], reader: Reader, wanted: dict[str, Any]
) -> Settings:
    """What the new text says. Raises ConfigError if it is not exactly what was asked for."""
    try:
        new = read_text(text, name=document.name, kind=document.format)
    except ConfigError as problem:
        raise ConfigError(
            f"{document.name} has a layout that cannot be added to ({problem}); add the keys by hand"
        ) from None
    asked = {change.path for change in changes}
    before, after = _values(document.leaves), _values(new.leaves)
    for path in before.keys() | after.keys():
        if path not in asked and before.get(path) != after.get(path):
            raise ConfigError(
                f"{document.name}: {'.'.join(path)} shares its value with a key that is to change; give it one of its "
                "own first"
            )
    settings = settings_of(Reader(new, reader.phase, {}))
    found = {**settings.facts, **settings.arguments}
    for target, value in wanted.items():
        # Of a flag that is not there, nothing was asked for that is not so.
        if not same(target, found.get(target), value) and (found.get(target) or value):
            if target in NEED_WORKERS and settings.arguments.get("num_workers") == 0:
                raise ConfigError(
                    f"{document.name}: {target}={value!r} needs workers, and the file has num_workers=0; "
                    "give num_workers too"
                )
            raise ConfigError(
                f"{document.name}: {target}={value!r} cannot be said in its layout; it would be read as "
                f"{found.get(target)!r}"
            )
    return settings


def _values(leaves: list[Leaf]) -> dict[tuple[str, ...], str]:
    # As text: 8 and 8.0 and True are not the same setting, and nan is the same as nan.
    return {leaf.path: repr(leaf.value) for leaf in leaves}


def _write(source: Path, out: Path, content: bytes) -> None:
    """All of it or nothing: ``out`` may be the settings somebody trains with."""
    target = Path(os.path.realpath(out))
    draft = target.with_name(f"{target.name}.{os.getpid()}.draft")
    try:
        draft.write_bytes(content)
        shutil.copymode(target if target.exists() else source, draft)
        draft.replace(target)
    except OSError as problem:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"{out} cannot be written: {problem.strerror or problem}") from None
