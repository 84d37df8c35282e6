"""What a run says about itself, in words: the bottleneck, the headroom, what went wrong, and the change to make.

In:  an ``Account``.
Out: ``Verdict``: one sentence, and ``Finding``s with their evidence, worst first.
Runs in: command line; pure: the same account gives the same words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from penstock.advice.report.headroom import headroom
from penstock.advice.report.mishaps import mishaps
from penstock.advice.report.words import Finding, order
from penstock.advice.run import GPU_IDLE, Evidence, troubles
from penstock.formatting import configuration, duration, rate, share
from penstock.planner.feeding import FED, STARVED
from penstock.report.account import Account

Bottleneck = Literal["loading", "gpu", "neither", "unknown"]

BRIEF_S = 10.0
"""Below this a run says little: workers were starting."""
_FASTER = 1.05
_SPOKEN_FOR = frozenset({"data-starved", "gpu-use", "no-workers", "out-of-memory", "workers-over-cores"})
"""Troubles that the bottleneck and the headroom say in their own words, with the run's figures; and one that needs to
know how much of a sample's time is computing, which is not recorded."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    bottleneck: Bottleneck
    headline: str
    """The bottleneck, in one sentence."""
    findings: tuple[Finding, ...]

    @property
    def changes(self) -> tuple[Finding, ...]:
        """Those that ask for a change."""
        return tuple(each for each in self.findings if each.fix)


def verdict(account: Account) -> Verdict:
    kind, headline, first = _bottleneck(account)
    found = [first, *headroom(account), *mishaps(account), *_best_tried(account), *_troubles(account)]
    return Verdict(bottleneck=kind, headline=headline, findings=order(found))


# -- the bottleneck -------------------------------------------------------------------------


def _bottleneck(account: Account) -> tuple[Bottleneck, str, Finding]:
    judged, busy = judge(account), account.gpu_busy()
    gpu = "" if busy is None else f" The GPU was busy {share(busy)} of the time."
    if judged is None:
        return _unknown(account, busy)
    if judged.active_s < BRIEF_S:
        headline = f"Too short to tell: data was read for {judged.active_s:.0f} s."
        return "unknown", headline, _bottleneck_finding("info", headline, gpu.strip(), "let it run for minutes")
    waited = judged.wait_fraction
    numbers = (
        f"{judged.settings}the training loop waited for data {share(waited)} of {duration(judged.active_s)}, at "
        f"{rate(judged.samples_per_s)} samples/s"
    )
    what = f"{numbers[0].upper()}{numbers[1:]}"
    whole = f" Over the whole run it was {share(account.summary.wait_fraction)}." if judged.settings else ""
    if waited >= FED:
        without = rate(judged.samples_per_s / max(0.01, 1 - waited))
        title = "Loading is the bottleneck" if waited >= STARVED else "Loading costs a little"
        what = f"{what}; without waiting it would be about {without}.{whole}{gpu}"
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
    fix = f"look at the step itself (work on the CPU, waiting for the GPU's answers), or raise {_key(account)}"
    return "neither", f"{title}: {numbers}.", _bottleneck_finding("info", title, what, fix)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What the verdict is about: the run, or its last settings where several were tried for long enough."""

    wait_fraction: float
    samples_per_s: float
    active_s: float
    settings: str
    """The settings in words, to begin a sentence with; empty: the whole run."""


def judge(account: Account) -> Judged | None:
    """None: waiting is not known."""
    waited, speed = account.summary.wait_fraction, account.summary.samples_per_s
    if waited is None:
        return None
    number = _main_loader(account)
    tried = [each for each in account.summary.tried if each.loader == number and each.samples]
    last = max(tried, key=lambda each: each.ended_s, default=None)
    # Waiting that a change has cured must not be held against the settings that cured it.
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
        why = "torch's own DataLoader does not say how long the loop waits for it"
        fix = "penstock.DataLoader takes the same arguments, and does"
    elif not account.loaders:
        why, fix = "no loader was given to the monitor", "penstock.Monitor(loader) also sees speed and waiting"
    else:
        why, fix = "no data was read", ""
    if busy is not None and busy >= GPU_IDLE:
        headline = f"The GPU was busy {share(busy)} of the time: it is the bottleneck, as it should be."
        return "gpu", headline, _bottleneck_finding("good", "The GPU is the bottleneck", headline, "")
    headline = f"The bottleneck is not known: {why}."
    what = "" if busy is None else f"The GPU was busy {share(busy)} of the time."
    return (
        "unknown",
        headline,
        _bottleneck_finding("info", "The bottleneck is not known", f"{why}. {what}".strip(), fix),
    )


def _bottleneck_finding(severity: Any, title: str, what: str, fix: str) -> Finding:
    return Finding(id="bottleneck", severity=severity, title=title.rstrip("."), what=what, fix=fix)


def _faster(account: Account) -> str:
    """What the planner would have somebody do whose loop waits."""
    seen = evidence(account)
    named = {each.id: each.fix for each in troubles(seen)} if seen is not None else {}
    said = named.get("no-workers") or named.get("data-starved") or ""
    budget, peak = (seen.budget_bytes if seen else 0), account.loader_peak_bytes(_main_loader(account)) or 0.0
    if budget and peak >= 0.95 * budget:
        raised = f"raise {_key(account, 'memory')}: the loader has used {share(peak / budget)} of it"
        return f"{raised}; then {said}" if said else raised
    return said


# -- what else the planner knows ------------------------------------------------------------


def evidence(account: Account) -> Evidence | None:
    """The run in the planner's terms, as its busiest loader was at the end; None where too little is known."""
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
    depth, batches = int(_most_in_force(account, number, "depth")), last("batches")
    hits, misses = account.last("cache_hits"), account.last("cache_misses")
    lookups = (hits or 0.0) + (misses or 0.0)
    swap = (account.most("swap_used_bytes") or 0.0) - (account.first("swap_used_bytes") or 0.0)
    batch_size = arguments.get("batch_size")
    return Evidence(
        batch_size=batch_size if isinstance(batch_size, int) and batch_size > 0 else 1,
        workers=int(_most_in_force(account, number, "workers")),
        depth=depth,
        cores=account.cores,
        limit_bytes=int(limit),
        used_bytes=int(account.totals.get("peak_used_bytes") or account.most("used_bytes") or 0),
        budget_bytes=int(_most_in_force(account, number, "budget_bytes")),
        batch_bytes=int((account.most(f"loader.{number}.in_flight_bytes") or 0.0) / (depth + 1)),
        # Not recorded; what follows from it is left out.
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


def _troubles(account: Account) -> list[Finding]:
    seen = evidence(account)
    if seen is None or account.active_s < BRIEF_S:
        return []
    return [
        Finding(
            id=each.id,
            severity=each.severity,
            title=_TITLES.get(each.id, each.id),
            what=f"{each.what[0].upper()}{each.what[1:]}.",
            fix=each.fix,
        )
        for each in troubles(seen)
        if each.id not in _SPOKEN_FOR
    ]


_TITLES = {
    "swap-growth": "Memory went to disk",
    "cache-hit-rate": "The cache seldom has what is asked for",
    "tiny-batches": "Batches are tiny",
    "pin-without-gpu": "Page-locked memory without a GPU",
}


def _best_tried(account: Account) -> list[Finding]:
    """Where several settings were tried: whether the last one was the best."""
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
            title = "The settings it ended with were as fast as any tried"
            found.append(Finding(id="best-tried", severity="good", title=title, what=f"{what}.", fix=""))
            continue
        ended = f"it ended with {configuration(last.configuration)} at {rate(last.samples_per_s)}"
        title, fix = "Faster settings were tried", f"go back to {configuration(best.configuration)}"
        found.append(Finding(id="best-tried", severity="info", title=title, what=f"{what}; {ended}.", fix=fix))
    return found


# -- the loader it is about -----------------------------------------------------------------


def _main_loader(account: Account) -> int:
    """The one that handed out the most."""
    counts = {number: account.last(f"loader.{number}.samples") or 0.0 for number in range(len(account.loaders))}
    return max(counts, key=lambda number: counts[number], default=0)


def _most_in_force(account: Account, number: int, name: str) -> float:
    """A setting as it was last in force: a loader that is dropped has no workers any more."""
    values = [point.figures.get(f"loader.{number}.{name}", 0.0) for point in account.points]
    return next((value for value in reversed(values) if value), 0.0)


def _key(account: Account, argument: str = "batch_size") -> str:
    return account.keys_of(_main_loader(account)).get(argument, argument)
