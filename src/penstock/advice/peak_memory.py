"""Rules about the peak memory of a recorded run, against the limit and each loader's budget.

In:  an ``Account``.
Out: ``Finding``s: what could be raised, what must be lowered.
Runs in: command line; pure. ``memory_warning`` has the advice while a training runs.
"""

from __future__ import annotations

from penstock.advice.memory_warning import AdvisedLoader, Move, moves
from penstock.advice.run import CALM, DANGER
from penstock.findings import Finding
from penstock.monitor.figures import part
from penstock.monitor.runs.format import Point
from penstock.planner.feeding import FED
from penstock.report.account import Account
from penstock.units import MIB, format_bytes

_ROOMY = 0.5
"""A budget of which less than this share was used at the peak could be smaller."""
_SLACK = 1.25
_WORTH_BYTES = 64 * MIB


def headroom(account: Account) -> list[Finding]:
    return [*_of_limit(account), *_of_budgets(account)]


def _of_limit(account: Account) -> list[Finding]:
    limit = account.last("limit_bytes") or account.summary.limit_bytes
    used = account.totals.get("peak_used_bytes") or account.most("used_bytes")
    if not limit or not used:
        return []
    full = used / limit
    own = account.summary.peak_bytes
    mine = "" if own is None else f"; this training took {format_bytes(own)} at its own peak"
    what = f"{format_bytes(used)} of {format_bytes(limit)} in use at the peak ({full:.0%}){mine}."
    if full < CALM:
        title = "There is memory to spare"
        return [
            Finding(id="headroom", severity="good", title=title, what=f"{what} {_room(account, limit, used)}", fix="")
        ]
    excess = used - CALM * limit
    lowered = [
        f"{move.what} (frees about {format_bytes(move.frees_bytes)})"
        for move in sorted(_moves(account, excess), key=lambda move: -move.frees_bytes)
    ]
    fix = (
        f"lower {'; or '.join(lowered[:3])}" if lowered else "lower batch_size, or stop other programs on this machine"
    )
    title = "Memory is nearly full" if full >= DANGER else "Memory is tight"
    line = f" Up to {CALM:.0%} is safe, {DANGER:.0%} and more is too much."
    return [
        Finding(
            id="headroom", severity="hurts" if full >= DANGER else "warning", title=title, what=f"{what}{line}", fix=fix
        )
    ]


def _room(account: Account, limit: float, used: float) -> str:
    """How much more memory could be used and, if the training loop waits, what that memory would be enough for."""
    room = CALM * limit - used
    spare = f"{format_bytes(room)} more memory could be used before it gets tight"
    if (account.summary.wait_fraction or 0.0) < FED:
        return f"{spare}, but nothing in this run needs it."
    point, parts = _fullest(account), []
    for number in range(len(account.loaders)):
        own = part(point.figures, f"loader.{number}") if point is not None else {}
        batch = own.get("in_flight_bytes", 0.0) / (own.get("depth", 0.0) + 1)
        worker = own.get("workers_private_bytes", 0.0) / max(1.0, own.get("workers", 0.0))
        if batch >= MIB:
            parts.append(f"one more batch ahead in {account.name_of(number)} takes {format_bytes(batch)}")
        if worker >= MIB:
            parts.append(f"one more worker {format_bytes(worker)}")
    return f"{spare}: {', '.join(parts[:4])}." if parts else f"{spare}."


def _of_budgets(account: Account) -> list[Finding]:
    found = []
    for number, loader in enumerate(account.loaders):
        budget, peak = account.last(f"loader.{number}.budget_bytes"), account.loader_peak_bytes(number)
        if not budget or not peak:
            continue
        name, key = account.name_of(number), account.keys_of(number).get("memory", "memory")
        what = f"{name} took at most {format_bytes(peak)} of its {format_bytes(budget)} ({peak / budget:.0%})."
        spare = budget - _SLACK * peak
        arguments = loader.get("arguments")
        is_set = isinstance(arguments, dict) and arguments.get("memory") not in (None, "auto")
        if peak < _ROOMY * budget and spare > _WORTH_BYTES and is_set:
            fix = f"lower {key} to {format_bytes(_SLACK * peak)}, which leaves the rest to other programs"
            title = f"The budget of {name} is larger than needed"
        else:
            fix, title = "", f"{name} stayed within its budget" if peak <= budget else f"{name} exceeded its budget"
        severity = "good" if peak <= budget else "warning"
        found.append(Finding(id="budget", severity="info" if fix else severity, title=title, what=what, fix=fix))
    return found


def _moves(account: Account, excess_bytes: float) -> list[Move]:
    point = _fullest(account)
    if point is None:
        return []
    found = []
    for number in range(len(account.loaders)):
        latest = [each for each in account.summary.tried if each.loader == number]
        loader = AdvisedLoader(
            name=account.name_of(number),
            is_only=len(account.loaders) == 1,
            configuration=max(latest, key=lambda each: each.ended_s).configuration if latest else {},
            keys=account.keys_of(number),
        )
        found += moves(loader, part(point.figures, f"loader.{number}"), excess_bytes)
    return found


def _fullest(account: Account) -> Point | None:
    """The point with the most memory in use."""
    known = [point for point in account.points if "used_bytes" in point.figures]
    return max(known, key=lambda point: point.figures["used_bytes"], default=None)
