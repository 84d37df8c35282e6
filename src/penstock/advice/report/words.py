"""The shape of a finding, and which come first.

In:  nothing.
Out: ``Finding``; ``order``.
Runs in: command line; pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["hurts", "warning", "info", "good"]
"""hurts: it crashed or will; warning: costs speed or memory; info: good to know; good: nothing to do."""
SEVERITIES: tuple[Severity, ...] = ("hurts", "warning", "info", "good")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing a run says, with what says it and what to do about it."""

    id: str
    """Stable name, for programs."""
    severity: Severity
    title: str
    """In a few words."""
    what: str
    """The evidence, with its numbers. May hold text of the user's."""
    fix: str
    """The change to make; empty: none."""


def order(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Worst first, and otherwise as they were found."""
    return tuple(sorted(found, key=lambda each: SEVERITIES.index(each.severity)))
