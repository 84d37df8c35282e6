"""Finds the values of a document that set something about loading, and the phase for which each value counts.

In:  a ``Document``.
Out: ``Claim``s: a value, the argument or fact that the value sets, and the sections around the value.
Runs in: trainer, command line.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.settings.aliases import ALIASES, ARGUMENTS, Alias, probably_meant
from penstock.settings.document import Document, Leaf, ListValue
from penstock.settings.sections import Kind, Phase, kind_of, parts, phase_of, phase_of_key
from penstock.settings.values import Wrong, read_value


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One value that sets an argument or a fact."""

    leaf: Leaf
    alias: Alias
    phase: Phase | None
    """The phase that a section or the key names; None if neither names a phase, so that the claim counts for
    training."""
    sections: tuple[str, ...]
    """The sections around the value, outermost first, in the form of the table of aliases."""


def find_claims(document: Document) -> list[Claim]:
    """Every value of the document whose key is in the table of aliases. Raises ConfigError if a key is probably
    misspelt."""
    claims = []
    for leaf in document.leaves:
        *above, key = parts(leaf.path)
        sections = tuple(above)
        if leaf.template_depth is not None and phase_of(parts(leaf.path[: leaf.template_depth])) is None:
            # A template of defaults sets nothing by itself; the sections that use it do, and may override its values.
            continue
        alias, phase = _look_up(key)
        kind = kind_of(sections)
        _refuse_sections_for_values(document, leaf, sections)
        if isinstance(leaf.value, ListValue) and alias is None:
            _refuse_list_of_sections(document, leaf, (*sections, key))
        elif alias is None:
            _refuse_misspelt(document, leaf, key, kind)
        elif counts(alias, kind) and not _means_something_else(alias, leaf, kind):
            claims.append(Claim(leaf=leaf, alias=alias, phase=phase or phase_of(sections), sections=sections))
    return claims


def _look_up(key: str) -> tuple[Alias | None, Phase | None]:
    if key in ALIASES:
        return ALIASES[key], None
    bare, phase = phase_of_key(key)
    return (ALIASES.get(bare), phase) if phase else (None, None)


def counts(alias: Alias, kind: Kind) -> bool:
    """Whether a key is about loading in a section of this kind."""
    if alias.target == "sequence_length":
        return True
    match alias.where:
        case "anywhere":
            return kind != "foreign"
        case "loading":
            return kind in ("loading", "loader")
        case "loader":
            return kind == "loader"


def _means_something_else(alias: Alias, leaf: Leaf, kind: Kind) -> bool:
    """Whether a common word has another program's meaning: ``backend: nccl``, ``seeding: 42``, ``cache: /data``."""
    if kind == "loader" or leaf.value is None:
        return False
    if alias.reads in ("backend", "device"):
        try:
            read_value(alias, leaf.value)
        except Wrong:
            return True
    if alias.reads == "seeding":
        return not isinstance(leaf.value, str)
    if alias.key == "cache" and isinstance(leaf.value, str):
        return leaf.value.strip().lower() != "auto" and not leaf.value.strip()[:1].isdigit()
    return False


def _refuse_misspelt(document: Document, leaf: Leaf, key: str, kind: Kind) -> None:
    if kind not in ("loading", "loader"):
        return
    bare, _ = phase_of_key(key)
    meant = probably_meant(key) or (probably_meant(bare) if bare != key else None)
    if meant is not None:
        raise ConfigError(
            f"{document.at(leaf)}: {leaf.key} is unknown; {meant} was probably meant. Rename the key, or move it to a "
            "section of its own if it means something else"
        )


def _refuse_list_of_sections(document: Document, leaf: Leaf, sections: tuple[str, ...]) -> None:
    if not isinstance(leaf.value, ListValue) or kind_of(sections) not in ("loading", "loader"):
        return
    known = sorted(key for key in leaf.value.keys if (alias := _look_up(parts((key,))[-1])[0]) and _is_clear(alias))
    if known:
        raise ConfigError(
            f"{document.at(leaf)}: {leaf.key} is a list of sections, so {known[0]} could belong to any of them; pass "
            "the mapping of one item to penstock"
        )


def _refuse_sections_for_values(document: Document, leaf: Leaf, sections: tuple[str, ...]) -> None:
    for depth, name in enumerate(sections):
        alias = ALIASES.get(name)
        if alias is not None and _is_clear(alias) and kind_of(sections[:depth]) != "foreign":
            holder = ".".join(sections[: depth + 1])
            raise ConfigError(
                f"{document.at(leaf)}: {holder} is a section ({leaf.key}={leaf.value!r}), but one value is needed; "
                f"write {name} into the sections for training and evaluation"
            )


def _is_clear(alias: Alias) -> bool:
    """Whether the key alone shows that it is about loading."""
    return alias.where == "anywhere" and alias.target in ARGUMENTS
