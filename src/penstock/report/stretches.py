"""Stretches of a run: when it waited for data, how long each pass over the dataset took, how long alerts lasted.

In:  an ``Account``.
Out: ``Stall``s, ``Epoch``s, ``AlertHistory``s.
Runs in: command line; pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.monitor.runs.format import Point
from penstock.planner.feeding import STARVED
from penstock.report.account import Account

MOST_STALLS, MOST_EPOCHS = 12, 200
_LEAST_S = 2.0
_LEAST_SHARE = 0.004
"""Share of the run's length; shorter stretches are not listed."""
_JUST_BEFORE_SHARE, _JUST_BEFORE_S = 0.01, 10.0


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A stretch in which the training loop waited for data more than 20% of the time."""

    began_s: float
    ended_s: float
    wait_s: float
    after: str
    """The journal's last entry before the stretch; empty if there is none."""

    @property
    def wait_fraction(self) -> float:
        return min(1.0, self.wait_s / max(1e-9, self.ended_s - self.began_s))


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One pass over a dataset, computed from the count of samples."""

    number: int
    """From 1."""
    began_s: float
    ended_s: float
    samples: float
    wait_fraction: float | None
    is_whole: bool
    """Whether the pass was completed."""


@dataclass(frozen=True, kw_only=True)
class AlertHistory:
    """All alerts of one rule."""

    rule: str
    raised: int
    stood_s: float
    """How long the alerts were raised, in total."""
    stands: bool
    """Whether an alert was raised at the end."""
    latest: str
    """The text of the latest alert."""


def stalls(account: Account) -> tuple[Stall, ...]:
    """The longest waits, in order of time."""
    least_s = max(_LEAST_S, _LEAST_SHARE * account.length_s)
    groups: list[list[Point]] = []
    is_open = False
    for point in account.points:
        waits = point.figures.get("wait_fraction")
        if waits is None or waits < STARVED:
            is_open = False
        elif is_open:
            groups[-1].append(point)
        else:
            groups.append([point])
            is_open = True
    found = [_stall(account, group) for group in groups]
    found = [each for each in found if each.wait_s >= least_s]
    worst = sorted(found, key=lambda each: -each.wait_s)[:MOST_STALLS]
    return tuple(sorted(worst, key=lambda each: each.began_s))


def _stall(account: Account, group: list[Point]) -> Stall:
    began_s = group[0].t_s - group[0].span_s
    wait_s = sum(point.span_s * point.figures["wait_fraction"] for point in group)
    before_s = max(_JUST_BEFORE_S, _JUST_BEFORE_SHARE * account.length_s)
    causes = [note.what for note in account.journal if began_s - before_s <= note.t_s <= began_s + 2.0]
    after = causes[-1] if causes else ""
    if not after and began_s - account.began_s < _JUST_BEFORE_S:
        after = "the start: workers start and make the first batch"
    return Stall(began_s=began_s, ended_s=group[-1].t_s, wait_s=wait_s, after=after)


def epochs(account: Account, loader: int) -> tuple[Epoch, ...]:
    """Passes over the dataset of one loader; no passes if the dataset's length is unknown or nothing was read."""
    length = samples_per_epoch(account, loader)
    counted = [
        (point.t_s, point.figures[f"loader.{loader}.samples"], point.figures.get(f"loader.{loader}.wait_s"))
        for point in account.points
        if f"loader.{loader}.samples" in point.figures
    ]
    if not length or len(counted) < 2:
        return ()
    total, found = counted[-1][1], []
    for number in range(min(MOST_EPOCHS, int(-(-total // length)))):
        first, last = number * length, min(total, (number + 1) * length)
        (began_s, waited), (ended_s, waits) = _when(counted, first), _when(counted, last)
        wait_s = None if waited is None or waits is None else waits - waited
        found.append(
            Epoch(
                number=number + 1,
                began_s=began_s,
                ended_s=ended_s,
                samples=last - first,
                wait_fraction=None if wait_s is None or ended_s <= began_s else _share(wait_s / (ended_s - began_s)),
                is_whole=last == (number + 1) * length,
            )
        )
    return tuple(found)


def samples_per_epoch(account: Account, loader: int) -> float | None:
    """The number of samples that one rank reads in a pass: the ranks divide the dataset among themselves."""
    length = account.loaders[loader].get("dataset_length") if loader < len(account.loaders) else None
    return float(-(-length // account.ranks)) if length else None


def _when(counted: list[tuple[float, float, float | None]], samples: float) -> tuple[float, float | None]:
    """The time at which this number of samples had been delivered, and the time waited until then; interpolated between
    two points."""
    before = counted[0]
    for t_s, count, wait_s in counted:
        # The first pass begins with the first samples, not in the idle time before them.
        if count > samples or (count == samples and samples > 0):
            share = (samples - before[1]) / (count - before[1]) if count > before[1] else 1.0
            share = _share(share)
            waited = None if wait_s is None or before[2] is None else before[2] + share * (wait_s - before[2])
            return before[0] + share * (t_s - before[0]), waited
        before = (t_s, count, wait_s)
    return before[0], before[2]


def alert_histories(account: Account) -> tuple[AlertHistory, ...]:
    """Alerts by rule."""
    found = []
    for rule in dict.fromkeys(alert.rule for alert in account.alerts):
        own = [alert for alert in account.alerts if alert.rule == rule]
        stood_s, since_s = 0.0, None
        for alert in own:
            if alert.state == "raised":
                since_s = alert.t_s if since_s is None else since_s
            elif since_s is not None:
                stood_s, since_s = stood_s + max(0.0, alert.t_s - since_s), None
        if since_s is not None:
            stood_s += max(0.0, account.ended_s - since_s)
        raised = [alert for alert in own if alert.state == "raised"]
        found.append(
            AlertHistory(
                rule=rule,
                raised=len(raised),
                stood_s=stood_s,
                stands=since_s is not None,
                latest=(raised or own)[-1].what,
            )
        )
    return tuple(found)


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
