"""Findings: what is wrong with a machine, settings, a dataset or a run, and how to mend it.

In:  named checks, and the facts that the checks judge.
Out: ``Finding``s, worst first.
Runs in: trainer, command line; pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

Severity = Literal["hurts", "warning", "info", "good"]
"""hurts: a crash, a kill or a very slow run is likely; warning: it costs speed or memory, or misleads programs; info:
it is worth knowing; good: no action is needed."""

SEVERITIES: tuple[Severity, ...] = ("hurts", "warning", "info", "good")

Diagnosis = tuple[Severity, str, str] | None
"""The result of one check: severity, what, fix. None if the check finds nothing."""

_Facts = TypeVar("_Facts")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact that the user should act on or know."""

    id: str
    """A name for programs, which does not change between versions."""
    severity: Severity
    what: str
    """The fact, with its numbers. May contain the user's text."""
    fix: str
    """The change to make; empty if no change is needed."""
    title: str = ""
    """The finding in a few words, for reports; empty if it has no title."""

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "title" or value}


def run_checks(checks: Mapping[str, Callable[[_Facts], Diagnosis]], facts: _Facts) -> tuple[Finding, ...]:
    """The findings of all checks, worst first; the id of a finding is the name of its check."""
    found = []
    for name, check in checks.items():
        diagnosis = check(facts)
        if diagnosis is not None:
            severity, what, fix = diagnosis
            found.append(Finding(id=name, severity=severity, what=what, fix=fix))
    return worst_first(found)


def worst_first(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings sorted by severity; findings of equal severity keep their order."""
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


def needs_action(found: Iterable[Finding]) -> bool:
    """Whether any finding is a warning or worse; if so, ``penstock doctor`` ends with exit status 1."""
    return any(finding.severity in ("hurts", "warning") for finding in found)
