"""The result of reading settings: the arguments, and for each the key it came from and why.

In:  the reader's decisions.
Out: ``Settings``, its rows and their printed form.
Runs in: trainer, command line.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from penstock.units import MIB, format_bytes

NEED_WORKERS = ("prefetch_factor", "persistent_workers")
"""Arguments that torch refuses without workers."""


@dataclass(frozen=True, kw_only=True)
class SettingsEntry:
    """One key that penstock knows."""

    key: str
    """The file's key with its sections; "(call)" for an argument given in the call."""
    argument: str
    """The argument of ``penstock.DataLoader``, or the fact for planning, that the key sets."""
    value: Any
    """The argument's value; None if it is not set, for the reason in the remark."""
    given: Any
    """The value in the file."""
    remark: str
    """Why ``value`` differs from ``given``; empty if it does not."""
    line: int | None
    """Line in the file; None if unknown."""
    is_argument: bool
    """Whether ``argument`` is an argument of the loader, not a fact."""

    @property
    def shown(self) -> str:
        """The value for people."""
        if self.argument in ("cache", "memory") and isinstance(self.value, int) and self.value >= MIB:
            return format_bytes(self.value)
        return "-" if self.value is None else str(self.value)


class SettingsTable(tuple[SettingsEntry, ...]):
    """Rows of the file's key, penstock's argument and its value; ``print`` shows a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [("their key", "our argument", "value", "remark")]
        rows += [(each.key, each.argument, each.shown, each.remark) for each in self]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
        ]
        return "\n".join(line.rstrip() for line in lines)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The loading settings of one source, for training or for evaluation."""

    source: str
    """The file's path, or "the mapping"."""
    section: str
    """The requested phase: train, eval, val or test."""
    arguments: dict[str, Any]
    """For ``penstock.DataLoader``; an argument that is absent keeps the loader's default."""
    facts: dict[str, Any]
    """Values that are no arguments but decide one, or that planning needs: accumulation_steps, max_steps, ..."""
    entries: tuple[SettingsEntry, ...]
    """Every key that penstock knows, and how it was used."""
    warnings: tuple[str, ...]
    """Settings of the file that were dropped, and settings that are missing."""

    def explain(self) -> SettingsTable:
        """The file's key -> penstock's argument -> value, as rows; ``print`` shows a table."""
        return SettingsTable(self.entries)

    def loader_arguments(self) -> dict[str, Any]:
        """The arguments; if num_workers is not set, without those that the loader refuses without workers."""
        if "num_workers" in self.arguments:
            return dict(self.arguments)
        kept, dropped = without_workers(self.arguments)
        if dropped:
            warnings.warn(f"{self.source} does not set num_workers, so {dropped} dropped", stacklevel=3)
        return kept


def without_workers(arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Arguments for a loader without workers, and the dropped ones as "a=1 and b=True are"; "" if there are none."""
    dropped = {name: arguments[name] for name in NEED_WORKERS if arguments.get(name)}
    kept = {name: value for name, value in arguments.items() if name not in dropped}
    named = " and ".join(f"{name}={value}" for name, value in dropped.items())
    return kept, f"{named} {'are' if len(dropped) > 1 else 'is'}" if dropped else ""
