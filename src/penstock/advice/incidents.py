"""Rules about what went wrong in a recorded run: a failure or kill, crashed workers, alerts.

In:  an ``Account``.
Out: ``Finding``s.
Runs in: command line; pure.
"""

from __future__ import annotations

from penstock.advice.run import DANGER
from penstock.findings import Finding
from penstock.formatting import counted, duration, one_line
from penstock.report.account import Account
from penstock.report.stretches import alert_histories
from penstock.units import format_bytes

_SHOWN_ENDINGS = 3
_FIXES = {
    "memory": "lower what the finding on memory names, or let an alert do it: AlertRule(on='memory', "
    "then=GiveBack(), ...)",
    "tree": "lower depth, workers or the cache of this training",
    "swap": "lower memory= or batch_size until swap stops growing",
    "restarts": "find out why the workers crashed",
}


def incidents(account: Account) -> list[Finding]:
    return [*_ending(account), *_restarts(account), *_alerts(account)]


def _ending(account: Account) -> list[Finding]:
    summary = account.summary
    if summary.state == "failed":
        what = one_line(summary.what or "an exception", 300)
        memory = "out of memory" in what.lower()
        fix = "lower batch_size: penstock gpu MODEL finds the largest that fits" if memory and "CUDA" in what else ""
        return [Finding(id="failed", severity="hurts", title="The run failed", what=what, fix=fix)]
    if summary.state != "killed":
        return []
    used, limit = account.last("used_bytes"), account.last("limit_bytes")
    last = ""
    if used and limit:
        last = f" At the last sample, {format_bytes(used)} of {format_bytes(limit)} were in use ({used / limit:.0%})."
    is_full = bool(used and limit and used / limit >= DANGER)
    fix = (
        "memory was full: lower what the finding on memory names; penstock doctor shows how many processes the "
        "kernel killed"
        if is_full
        else "find the cause in the log of the machine or its scheduler; penstock doctor shows whether the "
        "kernel killed for memory"
    )
    return [
        Finding(
            id="killed", severity="hurts", title="The run was killed", fix=fix,
            what=f"The process ended {duration(account.length_s)} after the start without recording an end.{last}",
        )
    ]  # fmt: skip


def _restarts(account: Account) -> list[Finding]:
    count = account.summary.worker_restarts
    if not count:
        return []
    notes = [one_line(note.what, 200) for note in account.journal if note.kind == "restart"]
    endings = "; ".join(dict.fromkeys(reversed(notes[-_SHOWN_ENDINGS:])))
    what = f"{counted(count, 'worker')} crashed and {'were' if count != 1 else 'was'} replaced"
    if any("SIGKILL" in note for note in notes):
        fix = "SIGKILL often means that memory ran out: lower num_workers or memory=, and run penstock doctor"
    elif any("SIGSEGV" in note or "SIGBUS" in note or "SIGABRT" in note for note in notes):
        fix = "compiled code of the dataset crashed: run it with num_workers=0 and python -X faulthandler"
    else:
        fix = "run the dataset with num_workers=0 to see its error"
    what = f"{what}: {endings}." if endings else f"{what}."
    return [Finding(id="worker-restarts", severity="warning", title="Workers crashed", what=what, fix=fix)]


def _alerts(account: Account) -> list[Finding]:
    found = []
    for each in alert_histories(account):
        if not each.raised:
            continue
        times = "once" if each.raised == 1 else f"{each.raised} times"
        still = ", and still raised at the end" if each.stands else ""
        what = f"Raised {times}, for {duration(each.stood_s)} in total{still}: {one_line(each.latest, 200)}."
        found.append(
            Finding(
                id="alert", severity="warning", title=f"Alert: {one_line(each.rule, 40)}", what=what,
                fix=_FIXES.get(each.rule, ""),
            )
        )  # fmt: skip
    return found
