"""Turns claims into arguments: it decides which key takes precedence, which keys must agree, and which values follow
from others.

In:  a source, a phase, and arguments that are given in the call.
Out: ``Settings``.
Runs in: trainer, command line.

Training uses the keys in sections for training and the keys in no section for a phase. Evaluation uses its own keys
first and training's keys for everything else, so that the loader for evaluation takes no more memory than the loader
for training, unless keys for evaluation demand more.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import ConfigError
from penstock.settings.aliases import ARGUMENTS, FACTS
from penstock.settings.claims import Claim, find_claims
from penstock.settings.document import Document
from penstock.settings.files import Source, read_source
from penstock.settings.sections import CHAINS, Phase, kind_of, phase_asked_for
from penstock.settings.settings import Settings, SettingsEntry, without_workers
from penstock.settings.values import Wrong, read_value
from penstock.units import parse_size

IN_THE_CALL = "(call)"

TRAINING_ONLY = ("shuffle", "drop_last", "name")
"""Arguments that evaluation does not inherit from training: evaluation must read every sample once, and needs a name of
its own."""

_TRAINING: tuple[Phase | None, ...] = ("train", None)
_ORIGINS: dict[tuple[Phase, tuple[Phase | None, ...]], str] = {
    ("eval", _TRAINING): "from training", ("val", _TRAINING): "from training", ("test", _TRAINING): "from training",
    ("test", ("val",)): "from validation",
}  # fmt: skip
"""Requested phase, phases that set a value -> a remark that says where the value comes from."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The value chosen for one argument or fact."""

    value: Any
    used: tuple[Claim, ...]
    """The keys that set this value."""
    unused: tuple[tuple[Claim, str], ...]
    """The keys that set another value, each with the reason why it does not count."""
    remark: str
    origin: str
    """The phase that set the value, such as "from training"; empty if this is the requested phase."""


def load(source: Source, section: str = "train", *, overrides: Mapping[str, Any] | None = None) -> Settings:
    """The loading settings of a file or mapping.

    ``section`` is "train", "eval", "val", "validation" or "test". A phase of evaluation inherits the values that it
    does not set from training. ``overrides`` holds arguments of the loader that replace arguments of the file.
    """
    settings = read(source, section, overrides=overrides)
    for warning in settings.warnings:
        warnings.warn(warning, stacklevel=2)
    return settings


def read(source: Source, section: str = "train", *, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Like ``load``, but without Python warnings. This is for commands, which show ``Settings.warnings`` as
    findings."""
    return settings_of(Reader(read_source(source), phase_asked_for(section), overrides or {}))


class Reader:
    """Chooses among the claims of one document for one phase."""

    def __init__(
        self, document: Document, phase: Phase, overrides: Mapping[str, Any], *, rewritten: Collection[str] = ()
    ) -> None:
        """``rewritten`` names arguments and facts that will be replaced, so that their present values are not
        checked."""
        self.document = document
        self.phase: Phase = phase
        self.overrides = overrides
        self._rewritten = rewritten
        self._claims: dict[str, list[Claim]] = {}
        for claim in find_claims(document):
            self._claims.setdefault(claim.alias.target, []).append(claim)
        self._levels: list[tuple[Phase | None, ...]] = [(each,) for each in CHAINS[phase]]
        self._levels.append(_TRAINING)

    def claims(self, target: str) -> list[Claim]:
        """Every claim of the document about an argument or fact, whatever its phase."""
        return self._claims.get(target, [])

    def choose(self, target: str) -> Chosen | None:
        """The value for this phase; None if the document sets no value. Raises ConfigError if two keys disagree."""
        for phases in self._levels:
            claims = [claim for claim in self.claims(target) if claim.phase in phases]
            origin = _ORIGINS.get((self.phase, phases), "")
            if claims and not (origin and target in TRAINING_ONLY):
                return replace(self._settle(target, claims), origin=origin)
        return None

    def choose_batch(self) -> tuple[str, Chosen] | None:
        """Which of batch_size and images_per_gpu counts, and the value for the batch. If both are set, the more
        specific phase decides."""
        nearest = None
        for phases in self._levels:
            here = [
                target
                for target in ("batch_size", "images_per_gpu")
                if any(claim.phase in phases and claim.leaf.value is not None for claim in self.claims(target))
            ]
            if here:
                nearest = here
                break
        if nearest is None:
            return None
        chosen = [(target, self.choose(target)) for target in nearest]
        found = [(target, each if target == "batch_size" else self._batch_of(each)) for target, each in chosen if each]
        known = [(target, each) for target, each in found if each.value is not None]
        if len(known) == 2 and known[0][1].value != known[1][1].value:
            first, second = known[0][1], known[1][1]
            raise ConfigError(
                f"{self.document.name}: {_said(first.used[0])} and {_said(second.used[0])} ({second.remark}) disagree "
                "about batch_size; keep one, or give batch_size in the call"
            )
        return (known or found)[0]

    def _batch_of(self, images: Chosen) -> Chosen:
        """The number of samples in a batch, computed from the images per GPU."""
        sequence = self.choose("sequence_length")
        key = images.used[0].leaf.key
        if sequence is None or sequence.value is None:
            return replace(images, value=None, remark="needs sequence_length")
        length, name = sequence.value, sequence.used[0].leaf.key
        batch = images.value // length
        if batch < 1:
            raise ConfigError(
                f"{self.document.name}: {key}={images.value} images are fewer than one sample has ({name}={length}); "
                f"raise {key} or lower {name}"
            )
        rest = images.value % length
        remark = f"{images.value} / {name} {length} = {batch} samples" + (f", {rest} images unused" if rest else "")
        return replace(images, value=batch, remark=remark, used=(*images.used, *sequence.used))

    def _settle(self, target: str, claims: list[Claim]) -> Chosen:
        """Choose one value from several keys for the same argument."""
        unused: list[tuple[Claim, str]] = []
        near = []
        for claim in claims:
            nearer = next((other for other in claims if _is_default_of(claim, other)), None)
            if nearer is None:
                near.append(claim)
            else:
                unused.append((claim, f"{nearer.leaf.key} is more specific"))
        if target == "batch_size" and any("micro" in claim.alias.key for claim in near):
            # DeepSpeed's train_batch_size is the total of all GPUs and accumulation steps.
            unused += [(claim, "total of all GPUs") for claim in near if "micro" not in claim.alias.key]
            near = [claim for claim in near if "micro" in claim.alias.key]
        read = [(claim, *self._read(claim)) for claim in near]
        said = [each for each in read if each[1] is not None] or read
        unused += [
            (claim, remark) for claim, value, remark in read if value is None and (claim, value, remark) not in said
        ]
        (first, value, remark), *others = said
        for other, differing, _ in others:
            if target not in self._rewritten and not same(target, value, differing):
                raise ConfigError(
                    f"{self.document.name}: {_said(first)} and {_said(other)} disagree about {target}; keep one, or "
                    f"give {target} in the call"
                )
        used = tuple(claim for claim, _, _ in said)
        return Chosen(value=value, used=used, unused=tuple(unused), remark=remark, origin="")

    def _read(self, claim: Claim) -> tuple[Any, str]:
        if claim.alias.target in self._rewritten:
            return claim.leaf.value, ""
        try:
            return read_value(claim.alias, claim.leaf.value)
        except Wrong as wrong:
            raise ConfigError(f"{self.document.at(claim.leaf)}: {_said(claim)} {wrong}") from None


def settings_of(reader: Reader) -> Settings:
    """All settings of the document for the reader's phase, and the values that follow from them."""
    arguments: dict[str, Any] = {}
    entries: list[SettingsEntry] = []
    notes: list[str] = []
    name = reader.document.name
    for target in ARGUMENTS:
        if target in reader.overrides:
            entries += _overridden(reader, target)
            continue
        if target == "batch_size":
            found = reader.choose_batch()
            if found is not None and found[1].value is None and found[0] == "images_per_gpu":
                key = found[1].used[0].leaf.key
                notes.append(
                    f"{name}: {key} gives batch_size only together with sequence_length; add "
                    "sequence_length, or set batch_size"
                )
            chosen = found[1] if found is not None else None
        else:
            chosen = reader.choose(target)
        if chosen is not None:
            entries += _entries(target, chosen)
            if chosen.value is not None:
                arguments[target] = chosen.value
    facts = {}
    for fact in FACTS:
        try:
            chosen = reader.choose(fact)
        except ConfigError:
            if not _decides(reader, fact):
                continue
            raise
        if chosen is not None and chosen.value is not None:
            facts[fact] = chosen.value
            if not any(_is_entry_of(chosen.used[0], entry) for entry in entries):
                entries += _entries(fact, chosen)
    _switch_cache(reader, arguments, entries, facts)
    arguments = _with_overrides(reader, arguments, entries)
    if arguments.get("num_workers") == 0:
        arguments, dropped = without_workers(arguments)
        if dropped:
            notes.append(
                f"{name}: num_workers=0, so {dropped} dropped: there are no workers that could prefetch or be kept"
            )
            _mark(entries, arguments, "dropped: no workers", targets=("prefetch_factor", "persistent_workers"))
    return Settings(
        source=name, section=reader.phase, arguments=arguments, facts=facts, entries=tuple(entries),
        warnings=tuple(notes),
    )  # fmt: skip


def _decides(reader: Reader, fact: str) -> bool:
    """Whether an argument depends on this fact. A mistake in any other fact must not stop a loader."""
    match fact:
        case "images_per_gpu":
            return "batch_size" not in reader.overrides
        case "sequence_length":
            return "batch_size" not in reader.overrides and bool(reader.claims("images_per_gpu"))
        case "use_cache":
            return "cache" not in reader.overrides
    return False


def _switch_cache(
    reader: Reader, arguments: dict[str, Any], entries: list[SettingsEntry], facts: dict[str, Any]
) -> None:
    if "cache" in reader.overrides or "use_cache" not in facts:
        return
    switch = next(entry.key for entry in entries if entry.argument == "use_cache")
    if not facts["use_cache"]:
        if arguments.pop("cache", None) is not None:
            _mark(entries, arguments, f"dropped: {switch} is false", targets=("cache",))
    elif "cache" not in arguments and not any(entry.argument == "cache" for entry in entries):
        arguments["cache"] = "auto"
        entries.append(
            SettingsEntry(key=switch, argument="cache", value="auto", given=True, line=None, is_argument=True,
                  remark="no size given: chosen for the machine")
        )  # fmt: skip


def _with_overrides(reader: Reader, arguments: dict[str, Any], entries: list[SettingsEntry]) -> dict[str, Any]:
    """The arguments of the file and of the call together. If the call gives a sampler, the file's arguments that torch
    refuses together with a sampler are dropped."""
    overrides = reader.overrides
    clashing: tuple[str, ...] = ()
    if overrides.get("batch_sampler") is not None:
        clashing = ("batch_size", "shuffle", "drop_last")
    elif overrides.get("sampler") is not None:
        clashing = ("shuffle",)
    if "batch_size" in overrides and overrides["batch_size"] is None:
        clashing = (*clashing, "drop_last")
    kept = {name: value for name, value in arguments.items() if name not in clashing}
    _mark(entries, kept, "dropped: the call gives a sampler or its own batches", targets=clashing)
    return {**kept, **overrides}


def _mark(entries: list[SettingsEntry], kept: dict[str, Any], why: str, *, targets: tuple[str, ...]) -> None:
    """Write the reason into the remarks of the dropped arguments."""
    for number, entry in enumerate(entries):
        if entry.argument in targets and entry.argument not in kept and entry.value:
            entries[number] = replace(entry, value=None, remark=why)


def _entries(target: str, chosen: Chosen) -> list[SettingsEntry]:
    remark = chosen.remark
    if chosen.origin:
        remark = f"{remark}; {chosen.origin}" if remark else chosen.origin
    found = []
    for claim in chosen.used:
        # batch_size is computed from sequence_length, but sequence_length stays a fact of its own.
        own = target if claim.alias.target in (target, "images_per_gpu") else claim.alias.target
        value = chosen.value if own == target else read_value(claim.alias, claim.leaf.value)[0]
        found.append(_entry(claim, own, value, remark if own == target else ""))
    return [*found, *(_entry(claim, target, None, f"not used: {why}") for claim, why in chosen.unused)]


def _entry(claim: Claim, argument: str, value: Any, remark: str) -> SettingsEntry:
    leaf = claim.leaf
    return SettingsEntry(
        key=leaf.key, argument=argument, value=value, given=leaf.value, remark=remark, line=leaf.line,
        is_argument=argument in ARGUMENTS,
    )  # fmt: skip


def _overridden(reader: Reader, target: str) -> list[SettingsEntry]:
    value = reader.overrides[target]
    entry = SettingsEntry(
        key=IN_THE_CALL, argument=target, value=value, given=value, remark="given in the call", line=None,
        is_argument=True,
    )  # fmt: skip
    return [entry, *(_entry(claim, target, None, "not used: given in the call") for claim in reader.claims(target))]


def _is_entry_of(claim: Claim, entry: SettingsEntry) -> bool:
    return entry.key == claim.leaf.key and entry.line == claim.leaf.line


def _is_default_of(outer: Claim, inner: Claim) -> bool:
    """Whether ``inner`` is the same key as ``outer``, in a section inside ``outer``'s section."""
    depth = len(outer.sections)
    if outer.alias.key != inner.alias.key or len(inner.sections) <= depth or inner.sections[:depth] != outer.sections:
        return False
    return kind_of(inner.sections[depth:]) in ("loading", "loader")


def same(target: str, one: Any, other: Any) -> bool:
    """Whether two values of an argument have the same meaning."""
    if target in ("cache", "memory") and one is not None and other is not None:
        return parse_size(one) == parse_size(other)
    return one == other


def _said(claim: Claim) -> str:
    shown = repr(claim.leaf.value)
    return f"{claim.leaf.key}={shown if len(shown) <= 60 else shown[:57] + '...'}"
