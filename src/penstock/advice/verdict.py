"""The verdict on a recorded run: its bottleneck, its headroom, what went wrong, and what to change.

In:  an ``Account``.
Out: ``Verdict``: one sentence, and ``Finding``s with their evidence, worst first.
Runs in: command line; pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.advice.peak_memory import headroom
from penstock.advice.run import DANGER, GPU_IDLE, Evidence, find_in_run
from penstock.findings import Finding, Severity, worst_first
from penstock.formatting import configuration, counted, duration, one_line, rate, share
from penstock.planner.feeding import FED, STARVED
from penstock.report.account import Account
from penstock.report.stretches import alert_histories
from penstock.units import format_bytes

Bottleneck = Literal["loading", "gpu", "neither", "unknown"]

BRIEF_S = 10.0
"""Active time below which the figures of a run mean little, because its workers were still starting."""
_FASTER = 1.05
_COVERED = frozenset({"data-starved", "gpu-use", "no-workers", "out-of-memory", "workers-over-cores"})
"""Findings of ``advice.run`` that a report leaves out. The findings on bottleneck and headroom replace them; the last
finding depends on the share of a sample's time that is spent computing, which is not recorded."""

_SHOWN_ENDINGS = 3
_FIXES = {
    "memory": "lower the settings that the finding on memory names, or let an alert do it: AlertRule(on='memory', "
    "then=GiveBack(), ...)",
    "tree": "lower depth, workers or the cache of this training",
    "swap": "lower memory= or batch_size until swap stops growing",
    "restarts": "find out why the workers crashed",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of all rules about a run."""

    bottleneck: Bottleneck
    headline: str
    """The bottleneck, in one sentence."""
    findings: tuple[Finding, ...]

    @property
    def changes(self) -> tuple[Finding, ...]:
        """The findings with a change to make."""
        return tuple(each for each in self.findings if each.fix)


def verdict(account: Account) -> Verdict:
    kind, headline, first = _bottleneck(account)
    found = [
        first,
        *headroom(account),
        *_ending(account),
        *_restarts(account),
        *_alerts(account),
        *_best_tried(account),
        *_run_findings(account),
    ]
    return Verdict(bottleneck=kind, headline=headline, findings=worst_first(found))


# -- the bottleneck -------------------------------------------------------------------------


def _bottleneck(account: Account) -> tuple[Bottleneck, str, Finding]:
    judged, busy = judge(account), account.gpu_busy()
    gpu = "" if busy is None else f" The GPU was busy {share(busy)} of the time."
    if judged is None:
        return _unknown(account, busy)
    if judged.active_s < BRIEF_S:
        headline = f"Too short for a verdict: data was read for {judged.active_s:.0f} s."
        return (
            "unknown",
            headline,
            _bottleneck_finding("info", headline, gpu.strip(), "let the training run for a few minutes"),
        )
    waited = judged.wait_fraction
    numbers = (
        f"{judged.settings}the training loop waited for data {share(waited)} of {duration(judged.active_s)}, at "
        f"{rate(judged.samples_per_s)} samples/s"
    )
    what = f"{numbers[0].upper()}{numbers[1:]}"
    whole = (
        f" In the whole run the loop waited {share(account.summary.wait_fraction)} of the time."
        if judged.settings
        else ""
    )
    if waited >= FED:
        without = rate(judged.samples_per_s / max(0.01, 1 - waited))
        title = "Loading is the bottleneck" if waited >= STARVED else "Loading costs a little"
        what = f"{what}; without waiting, the loop would reach about {without}.{whole}{gpu}"
        severity = "warning" if waited >= STARVED else "info"
        kind: Bottleneck = "loading" if waited >= STARVED else "neither"
        return kind, f"{title}: {numbers}.", _bottleneck_finding(severity, title, what, _faster(account))
    what = f"{what}.{whole}{gpu}"
    if busy is not None and busy >= GPU_IDLE:
        title = "The GPU is the bottleneck, as it should be"
        return "gpu", f"{title}: {numbers}.", _bottleneck_finding("good", title, what, "")
    if busy is None:
        title = "Loading is not the bottleneck"
        return "neither", f"{title}: {numbers}.", _bottleneck_finding("good", title, what, "")
    title = "Neither loading nor the GPU is the bottleneck"
    fix = f"profile the training step (CPU work, waits for GPU results), or raise {_key(account)}"
    return "neither", f"{title}: {numbers}.", _bottleneck_finding("info", title, what, fix)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What the verdict judges: the whole run, or only its last settings if several settings ran long enough."""

    wait_fraction: float
    samples_per_s: float
    active_s: float
    settings: str
    """The settings, as the beginning of a sentence; empty if the whole run is judged."""


def judge(account: Account) -> Judged | None:
    """The part of the run to judge; None if the time spent waiting is unknown."""
    waited, speed = account.summary.wait_fraction, account.summary.samples_per_s
    if waited is None:
        return None
    number = _main_loader(account)
    tried = [each for each in account.summary.tried if each.loader == number and each.samples]
    last = max(tried, key=lambda each: each.ended_s, default=None)
    # Waiting under earlier settings must not count against the last settings, which may have ended the waiting.
    if last is None or len(tried) < 2 or last.active_s < BRIEF_S or last.wait_fraction is None:
        return Judged(wait_fraction=waited, samples_per_s=speed or 0.0, active_s=account.active_s, settings="")
    return Judged(
        wait_fraction=last.wait_fraction,
        samples_per_s=last.samples_per_s or 0.0,
        active_s=last.active_s,
        settings=f"with {configuration(last.configuration)}, ",
    )


def _unknown(account: Account, busy: float | None) -> tuple[Bottleneck, str, Finding]:
    torchs = [each for each in account.loaders if each.get("kind") == "torch"]
    if torchs:
        why = "torch's own DataLoader does not measure how long the training loop waits"
        fix = "use penstock.DataLoader: it takes the same arguments and measures the waiting"
    elif not account.loaders:
        why, fix = (
            "the monitor has no loader",
            "pass a loader, penstock.Monitor(loader), to record speed and waiting too",
        )
    else:
        why, fix = "no data was read", ""
    if busy is not None and busy >= GPU_IDLE:
        headline = f"The GPU was busy {share(busy)} of the time: it is the bottleneck, as it should be."
        return "gpu", headline, _bottleneck_finding("good", "The GPU is the bottleneck", headline, "")
    headline = f"The bottleneck is unknown: {why}."
    what = "" if busy is None else f"The GPU was busy {share(busy)} of the time."
    return (
        "unknown",
        headline,
        _bottleneck_finding("info", "The bottleneck is unknown", f"{why}. {what}".strip(), fix),
    )


def _bottleneck_finding(severity: Severity, title: str, what: str, fix: str) -> Finding:
    return Finding(id="bottleneck", severity=severity, title=title.rstrip("."), what=what, fix=fix)


def _faster(account: Account) -> str:
    """The change that shortens the waiting; empty if no such change is known."""
    seen = evidence(account)
    fixes = {each.id: each.fix for each in find_in_run(seen)} if seen is not None else {}
    fix = fixes.get("no-workers") or fixes.get("data-starved") or ""
    budget, peak = (seen.budget_bytes if seen else 0), account.loader_peak_bytes(_main_loader(account)) or 0.0
    if budget and peak >= 0.95 * budget:
        raised = f"raise {_key(account, 'memory')}: the loader has used {share(peak / budget)} of it"
        return f"{raised}; then {fix}" if fix else raised
    return fix


# -- the rules about runs -------------------------------------------------------------------


def evidence(account: Account) -> Evidence | None:
    """The run as ``advice.run`` judges it, by the loader that was busiest at the end; None if too little is known."""
    number = _main_loader(account)
    loader = account.loaders[number] if number < len(account.loaders) else {}
    limit = account.last("limit_bytes") or account.summary.limit_bytes
    judged = judge(account)
    if not limit or judged is None or loader.get("kind") == "torch":
        return None

    def last(name: str) -> float:
        return account.last(f"loader.{number}.{name}") or 0.0

    given = loader.get("arguments")
    arguments: dict[str, Any] = given if isinstance(given, dict) else {}
    depth, batches = int(_last_in_force(account, number, "depth")), last("batches")
    hits, misses = account.last("cache_hits"), account.last("cache_misses")
    lookups = (hits or 0.0) + (misses or 0.0)
    swap = (account.most("swap_used_bytes") or 0.0) - (account.first("swap_used_bytes") or 0.0)
    batch_size = arguments.get("batch_size")
    return Evidence(
        batch_size=batch_size if isinstance(batch_size, int) and batch_size > 0 else 1,
        workers=int(_last_in_force(account, number, "workers")),
        depth=depth,
        cores=account.cores,
        limit_bytes=int(limit),
        used_bytes=int(account.totals.get("peak_used_bytes") or account.most("used_bytes") or 0),
        budget_bytes=int(_last_in_force(account, number, "budget_bytes")),
        batch_bytes=int((account.most(f"loader.{number}.in_flight_bytes") or 0.0) / (depth + 1)),
        # This is not recorded; True leaves out the finding that depends on it.
        shared_batches=True,
        samples_per_s=judged.samples_per_s,
        wait_fraction=judged.wait_fraction,
        fetch_s=last("fetch_s") / batches if batches else None,
        gpu_busy=account.gpu_busy(),
        has_gpu=bool(account.gpus),
        pins=bool(arguments.get("pin_memory")),
        cache_hit_rate=(hits or 0.0) / lookups if lookups else None,
        cache_lookups=int(lookups),
        cache_bytes=int(account.most("cache_bytes") or 0.0),
        cache_limit_bytes=int(last("cache_limit_bytes")),
        swap_growth_bytes=int(max(0.0, swap)),
        keys=account.keys_of(number),
    )


def _run_findings(account: Account) -> list[Finding]:
    seen = evidence(account)
    if seen is None or account.active_s < BRIEF_S:
        return []
    return [
        replace(each, title=_TITLES.get(each.id, each.id), what=f"{each.what[0].upper()}{each.what[1:]}.")
        for each in find_in_run(seen)
        if each.id not in _COVERED
    ]


_TITLES = {
    "swap-growth": "Memory was swapped to disk",
    "cache-hit-rate": "The cache misses often",
    "tiny-batches": "Batches are tiny",
    "pin-without-gpu": "pin_memory without a GPU",
}


def _best_tried(account: Account) -> list[Finding]:
    """Whether the last settings were the best of those tried."""
    found = []
    for number in range(len(account.loaders)):
        tried = [each for each in account.summary.tried if each.loader == number and each.active_s >= BRIEF_S]
        known = [each for each in tried if each.samples_per_s]
        if len(known) < 2:
            continue
        best, last = max(known, key=lambda each: each.samples_per_s or 0.0), max(known, key=lambda each: each.ended_s)
        faster = (best.samples_per_s or 0.0) / (last.samples_per_s or 1.0)
        name = account.name_of(number)
        what = (
            f"{name}: {configuration(best.configuration)} gave {rate(best.samples_per_s)} samples/s over "
            f"{duration(best.active_s)}"
        )
        if best is last or faster < _FASTER:
            title = "The last settings were as fast as any tried"
            found.append(Finding(id="best-tried", severity="good", title=title, what=f"{what}.", fix=""))
            continue
        ended = f"the last settings, {configuration(last.configuration)}, gave {rate(last.samples_per_s)}"
        title, fix = "Earlier settings were faster", f"go back to {configuration(best.configuration)}"
        found.append(Finding(id="best-tried", severity="info", title=title, what=f"{what}; {ended}.", fix=fix))
    return found


# -- failures, crashes, alerts -----------------------------------------------------------------


def _ending(account: Account) -> list[Finding]:
    summary = account.summary
    if summary.state == "failed":
        what = one_line(summary.what or "an exception", 300)
        memory = "out of memory" in what.lower()
        fix = (
            "lower batch_size: penstock gpu MODEL finds the largest batch size that fits"
            if memory and "CUDA" in what
            else ""
        )
        return [Finding(id="failed", severity="hurts", title="The run failed", what=what, fix=fix)]
    if summary.state != "killed":
        return []
    used, limit = account.last("used_bytes"), account.last("limit_bytes")
    last = ""
    if used and limit:
        last = f" At the last sample, {format_bytes(used)} of {format_bytes(limit)} were in use ({used / limit:.0%})."
    is_full = bool(used and limit and used / limit >= DANGER)
    fix = (
        "memory was full: lower the settings that the finding on memory names; penstock doctor shows how many "
        "processes the kernel killed"
        if is_full
        else "find the cause in the log of the machine or its scheduler; penstock doctor shows whether the "
        "kernel killed processes because memory ran out"
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
        fix = "compiled code of the dataset crashed: run the dataset with num_workers=0 and python -X faulthandler"
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


# -- the main loader ------------------------------------------------------------------------


def _main_loader(account: Account) -> int:
    """The number of the loader that delivered the most samples."""
    counts = {number: account.last(f"loader.{number}.samples") or 0.0 for number in range(len(account.loaders))}
    return max(counts, key=lambda number: counts[number], default=0)


def _last_in_force(account: Account, number: int, name: str) -> float:
    """The last value of a setting other than zero, because a closed loader has no workers any more."""
    values = [point.figures.get(f"loader.{number}.{name}", 0.0) for point in account.points]
    return next((value for value in reversed(values) if value), 0.0)


def _key(account: Account, argument: str = "batch_size") -> str:
    return account.keys_of(_main_loader(account)).get(argument, argument)
