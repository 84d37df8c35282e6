"""Settings as they were understood: the arguments, and for each the key it came from and why.

In:  what the reader decided.
Out: ``Settings``, its rows and their printed form.
Runs in: trainer, command line.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from penstock.units import MIB, format_bytes

NEED_WORKERS = ("prefetch_factor", "persistent_workers")
"""Arguments that torch refuses where there are no workers."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One key that was understood."""

    key: str
    """Theirs, with its sections; "(call)" for an argument given in the call."""
    argument: str
    """Ours: an argument of ``penstock.DataLoader``, or a fact that planning wants."""
    value: Any
    """What the argument gets; None: nothing, for the reason in the remark."""
    given: Any
    """What the file says."""
    remark: str
    """Why the value is what it is; empty where it is simply what the file says."""
    line: int | None
    """Where it stands; None where that is not known."""
    is_argument: bool
    """Whether the loader gets it."""

    @property
    def shown(self) -> str:
        """The value for people."""
        if self.argument in ("cache", "memory") and isinstance(self.value, int) and self.value >= MIB:
            return format_bytes(self.value)
        return "-" if self.value is None else str(self.value)


class Explanation(tuple[Entry, ...]):
    """Rows of their key, our argument and its value; printed, they are a table."""

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
    """What a settings source says about loading, for training or for evaluation."""

    source: str
    """The file's path, or "the mapping"."""
    section: str
    """The phase that was asked for: train, eval, val or test."""
    arguments: dict[str, Any]
    """For ``penstock.DataLoader``; what is not here is the loader's own default."""
    facts: dict[str, Any]
    """What is no argument but decides one, or is wanted for planning: accumulation_steps, max_steps, ..."""
    entries: tuple[Entry, ...]
    """Every key that was understood, and what became of it."""
    warnings: tuple[str, ...]
    """What was left out although the file says it, and what is missing."""

    def explain(self) -> Explanation:
        """Their key -> our argument -> value, as rows; ``print`` shows a table."""
        return Explanation(self.entries)

    def loader_arguments(self) -> dict[str, Any]:
        """The arguments, less those that need workers where nobody asked for any: the loader would refuse them."""
        if "num_workers" in self.arguments:
            return dict(self.arguments)
        kept, dropped = without_workers(self.arguments)
        if dropped:
            warnings.warn(f"{self.source} sets no num_workers, so {dropped} left out", stacklevel=3)
        return kept


def without_workers(arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Arguments for a loader without workers, and which were dropped, as "a=1 and b=True are"; "" if none was."""
    dropped = {name: arguments[name] for name in NEED_WORKERS if arguments.get(name)}
    kept = {name: value for name, value in arguments.items() if name not in dropped}
    named = " and ".join(f"{name}={value}" for name, value in dropped.items())
    return kept, f"{named} {'are' if len(dropped) > 1 else 'is'}" if dropped else ""
