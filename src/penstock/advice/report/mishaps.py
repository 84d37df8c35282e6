"""What went wrong in a run: how it ended, workers that died, alerts.

In:  an ``Account``.
Out: ``Finding``s.
Runs in: command line; pure.
"""

from __future__ import annotations

from penstock.advice.report.words import Finding
from penstock.advice.run import DANGER
from penstock.formatting import duration, one_line
from penstock.report.account import Account
from penstock.report.stretches import standing
from penstock.units import format_bytes

_SHOWN_ENDINGS = 3
_FIXES = {
    "memory": "lower what the finding on memory names, or have that done: AlertRule(on='memory', then=GiveBack(), ...)",
    "tree": "lower depth, workers or the cache of this training",
    "swap": "lower memory= or batch_size until swap stands still",
    "restarts": "find out what the workers died of",
}


def mishaps(account: Account) -> list[Finding]:
    return [*_ending(account), *_restarts(account), *_alerts(account)]


def _ending(account: Account) -> list[Finding]:
    summary = account.summary
    if summary.state == "failed":
        what = one_line(summary.what or "an exception", 300)
        memory = "out of memory" in what.lower()
        fix = "lower batch_size: penstock gpu MODEL tells the largest that fits" if memory and "CUDA" in what else ""
        return [Finding(id="failed", severity="hurts", title="It failed", what=what, fix=fix)]
    if summary.state != "killed":
        return []
    used, limit = account.last("used_bytes"), account.last("limit_bytes")
    last = ""
    if used and limit:
        last = f" When last heard of, {format_bytes(used)} of {format_bytes(limit)} were in use ({used / limit:.0%})."
    is_full = bool(used and limit and used / limit >= DANGER)
    fix = (
        "memory was full: lower what the finding on memory names; penstock doctor shows the kernel's kills"
        if is_full
        else "look for who ended it in the log of the machine or its scheduler; penstock doctor shows kills for memory"
    )
    return [
        Finding(
            id="killed", severity="hurts", title="It was killed", fix=fix,
            what=f"The process was gone without a word, {duration(account.length_s)} after it began.{last}",
        )
    ]  # fmt: skip


def _restarts(account: Account) -> list[Finding]:
    count = account.summary.worker_restarts
    if not count:
        return []
    notes = [one_line(note.what, 200) for note in account.journal if note.kind == "restart"]
    endings = "; ".join(dict.fromkeys(reversed(notes[-_SHOWN_ENDINGS:])))
    what = f"{count} worker{'s' * (count != 1)} died and {'were' if count != 1 else 'was'} replaced"
    if any("SIGKILL" in note for note in notes):
        fix = "SIGKILL is often the kernel short of memory: lower num_workers or memory=, and see penstock doctor"
    elif any("SIGSEGV" in note or "SIGBUS" in note or "SIGABRT" in note for note in notes):
        fix = "a crash in compiled code of the dataset: run it with num_workers=0 and python -X faulthandler"
    else:
        fix = "run the dataset with num_workers=0 to see its error"
    what = f"{what}: {endings}." if endings else f"{what}."
    return [Finding(id="worker-restarts", severity="warning", title="Workers died", what=what, fix=fix)]


def _alerts(account: Account) -> list[Finding]:
    found = []
    for each in standing(account):
        if not each.raised:
            continue
        times = "once" if each.raised == 1 else f"{each.raised} times"
        still = ", and stood at the end" if each.stands else ""
        what = f"Raised {times}, for {duration(each.stood_s)} in all{still}: {one_line(each.latest, 200)}."
        found.append(
            Finding(
                id="alert", severity="warning", title=f"Alert: {one_line(each.rule, 40)}", what=what,
                fix=_FIXES.get(each.rule, ""),
            )
        )  # fmt: skip
    return found
