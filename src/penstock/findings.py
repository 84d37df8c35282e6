"""Findings: what is wrong with a machine, settings, a dataset or a run, and how to mend it.

In:  named checks and the facts they judge.
Out: ``Finding``s, worst first.
Runs in: trainer, command line; pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

Severity = Literal["hurts", "warning", "info", "good"]
"""hurts: expect a crash, a kill or a very slow run; warning: costs speed or memory, or misleads programs; info: good to
know; good: nothing to do."""

SEVERITIES: tuple[Severity, ...] = ("hurts", "warning", "info", "good")

Diagnosis = tuple[Severity, str, str] | None
"""What one check returns: severity, what, fix; None when all is well."""

_Facts = TypeVar("_Facts")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing worth acting on, or worth knowing."""

    id: str
    """Stable name, for programs."""
    severity: Severity
    what: str
    """The fact, with its numbers. May contain the user's text."""
    fix: str
    """The change to make; empty: none."""
    title: str = ""
    """The finding in a few words, for reports; empty: none."""

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "title" or value}


def run_checks(checks: Mapping[str, Callable[[_Facts], Diagnosis]], facts: _Facts) -> tuple[Finding, ...]:
    """What the checks find, worst first; the id of a finding is the name of its check."""
    found = []
    for name, check in checks.items():
        diagnosis = check(facts)
        if diagnosis is not None:
            severity, what, fix = diagnosis
            found.append(Finding(id=name, severity=severity, what=what, fix=fix))
    return worst_first(found)


def worst_first(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """By severity; findings of equal severity keep their order."""
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


def needs_action(found: Iterable[Finding]) -> bool:
    """Whether any finding is a warning or worse: the doctor then ends with exit status 1."""
    return any(finding.severity in ("hurts", "warning") for finding in found)
