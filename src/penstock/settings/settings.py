"""The result of reading settings: the arguments, and for each argument its key and a remark.

In:  the decisions of the reader.
Out: ``Settings``, with rows that can be printed as a table.
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
    """One key of the file that is in the table of aliases."""

    key: str
    """The key of the file with its sections; "(call)" for an argument that is given in the call."""
    argument: str
    """What the key sets: an argument of ``penstock.DataLoader``, or a fact for planning."""
    value: Any
    """The value of the argument; None if the argument is not set, for the reason in the remark."""
    given: Any
    """The value in the file."""
    remark: str
    """The reason why ``value`` differs from ``given``; empty if both are the same."""
    line: int | None
    """The line in the file; None if unknown."""
    is_argument: bool
    """Whether ``argument`` is an argument of the loader; if not, it is a fact."""

    @property
    def shown(self) -> str:
        """The value as it is shown to people."""
        if self.argument in ("cache", "memory") and isinstance(self.value, int) and self.value >= MIB:
            return format_bytes(self.value)
        return "-" if self.value is None else str(self.value)


class SettingsTable(tuple[SettingsEntry, ...]):
    """Rows of a file's key, penstock's argument and the argument's value; ``print`` shows them as a table."""

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
    """The path of the file, or "the mapping"."""
    section: str
    """The requested phase: train, eval, val or test."""
    arguments: dict[str, Any]
    """The arguments for ``penstock.DataLoader``; an absent argument keeps the loader's default."""
    facts: dict[str, Any]
    """Values that are not arguments, but decide an argument or are needed for planning, such as accumulation_steps."""
    entries: tuple[SettingsEntry, ...]
    """Every key of the file that is in the table of aliases, and how the key was used."""
    warnings: tuple[str, ...]
    """Settings of the file that were dropped, and settings that are missing."""

    def explain(self) -> SettingsTable:
        """Rows of the file's key, penstock's argument and the argument's value; ``print`` shows them as a table."""
        return SettingsTable(self.entries)

    def loader_arguments(self) -> dict[str, Any]:
        """The arguments for the loader. If num_workers is not set, arguments that need workers are left out."""
        if "num_workers" in self.arguments:
            return dict(self.arguments)
        kept, dropped = without_workers(self.arguments)
        if dropped:
            warnings.warn(f"{self.source} does not set num_workers, so {dropped} dropped", stacklevel=3)
        return kept


def without_workers(arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The arguments for a loader without workers, and the dropped arguments as a text such as "a=1 and b=True are"; the
    text is "" if no argument is dropped."""
    dropped = {name: arguments[name] for name in NEED_WORKERS if arguments.get(name)}
    kept = {name: value for name, value in arguments.items() if name not in dropped}
    named = " and ".join(f"{name}={value}" for name, value in dropped.items())
    return kept, f"{named} {'are' if len(dropped) > 1 else 'is'}" if dropped else ""
