"""The charts of a report: memory, speed, waiting, GPUs, cache, each with the run's events marked on it.

In:  an ``Account``.
Out: ``ReportChart``s: a timeline, its legend in words, and the table behind it; the numbered ``RunEvent``s.
Runs in: command line; pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.charts.plane import Unit
from penstock.charts.timeline import Mark, Series, Timeline
from penstock.formatting import duration, memory, one_line, rate, share
from penstock.monitor.figures import figure_of, merged
from penstock.report.account import Account

MOST_MARKS = 60
MOST_GPUS = 8
_TABLE_ROWS = 16
_URGENT = ("restart", "warning", "resize", "memory", "cache", "decision", "action")
"""Kinds of entries that are marked first if there are too many entries to mark all."""
_LAYERS = ("arena", "workers", "cache", "trainer", "other")
"""Layers of memory, from the bottom: the parts that the budget limits come first, so that the budget's line can be
compared with their sum."""


@dataclass(frozen=True, kw_only=True)
class ReportChart:
    id: str
    timeline: Timeline
    caption: str
    drawn: Sequence[Series]
    """All series that are drawn, in the order of the legend."""
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The series as numbers, for a few times of the run."""


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """An entry of the journal or an alert, numbered as on the charts."""

    number: int
    t_s: float
    who: str
    kind: str
    what: str
    is_alert: bool


def run_events(account: Account) -> tuple[RunEvent, ...]:
    """Journal and alerts in order of time, numbered; if there are too many to mark, only the important ones."""
    notes = [(note.t_s, note.who, note.kind, note.what, False) for note in account.journal]
    alerts = [(alert.t_s, alert.rule, f"alert {alert.state}", alert.what, True) for alert in account.alerts]
    every = sorted([*notes, *alerts], key=lambda each: each[0])
    if len(every) > MOST_MARKS:
        # Both kinds keep their latest entries: the end of a run matters more than its beginning.
        urgent = [each for each in every if each[4] or each[2] in _URGENT][-MOST_MARKS:]
        others = [each for each in every if not (each[4] or each[2] in _URGENT)]
        every = sorted([*others[len(others) - (MOST_MARKS - len(urgent)) :], *urgent], key=lambda each: each[0])
    return tuple(
        RunEvent(
            number=number, t_s=t_s, who=one_line(who, 40), kind=one_line(kind, 40), what=one_line(what, 240),
            is_alert=is_alert,
        )
        for number, (t_s, who, kind, what, is_alert) in enumerate(every, start=1)
    )  # fmt: skip


def report_charts(account: Account) -> tuple[ReportChart, ...]:
    """The charts of all figures that were recorded."""
    if not account.points:
        return ()
    found = [_memory(account), _speed(account), _waiting(account), *_gpus(account), _cache_rate(account)]
    return tuple(each for each in found if each is not None)


# -- each -----------------------------------------------------------------------------------


def _memory(account: Account) -> ReportChart | None:
    if not account.has("tree_bytes"):
        return None
    peak, limit = account.summary.peak_bytes, account.last("limit_bytes")
    of = f" of a limit of {memory(limit)}" if limit else ""
    # Parts that were 0 throughout are left out of the legend, too.
    stack = [_series(account, f"{part}_bytes", part) for part in _LAYERS if account.most(f"{part}_bytes")]
    whole = [] if stack else [_series(account, "tree_bytes", "tree")]
    return _chart(
        account,
        "memory",
        "Memory",
        "bytes",
        f"The training and its workers used at most {memory(peak or account.most('tree_bytes'))}{of}.",
        stack=stack,
        lines=[*whole, _series(account, "used_bytes", "used", "in use, all processes")],
        bounds=[_series(account, "limit_bytes", "limit"), _series(account, "budget_bytes", "budget")],
    )


def _speed(account: Account) -> ReportChart | None:
    if account.has("samples_per_s"):
        several = [
            number for number in range(len(account.loaders)) if account.most(f"loader.{number}.samples_per_s")
        ]  # fmt: skip
        lines = [_series(account, "samples_per_s", "speed")]
        if len(several) > 1:
            lines = [
                _series(
                    account, f"loader.{each}.samples_per_s", f"speed{each % 4}", one_line(account.name_of(each), 40)
                )
                for each in several
            ]
        summary = f"{rate(account.summary.samples_per_s)} samples/s while data was read."
        return _chart(account, "speed", "Samples per second", "1/s", summary, lines=lines)
    if not account.most("steps_per_s"):
        return None
    summary = f"{rate(account.mean('steps_per_s'))} steps/s on average."
    lines = [_series(account, "steps_per_s", "speed")]
    return _chart(account, "speed", "Steps per second", "1/s", summary, lines=lines)


def _waiting(account: Account) -> ReportChart | None:
    if not account.has("wait_fraction"):
        return None
    waited = share(account.summary.wait_fraction)
    summary = (
        f"The training loop waited {waited} of the time in which data was read. Below 5% loading keeps up; above 20% "
        "it does not."
    )
    lines = [_series(account, "wait_fraction", "waiting")]
    return _chart(account, "waiting", "Waiting for data", "share", summary, lines=lines)


def _gpus(account: Account) -> list[ReportChart | None]:
    numbers = [number for number in range(MOST_GPUS) if account.has(f"gpu.{number}.used_bytes")]
    if not numbers and not account.most("gpu_reserved_bytes"):
        return []
    busy = [number for number in numbers if account.has(f"gpu.{number}.busy_fraction")]
    found: list[ReportChart | None] = []
    if busy:
        lines = [_series(account, f"gpu.{each}.busy_fraction", f"gpu{each % 4}", f"GPU {each}") for each in busy]
        summary = f"A kernel ran {share(account.gpu_busy())} of the time."
        found.append(_chart(account, "gpu-busy", "GPU busy", "share", summary, lines=lines))
    peak, bounds = account.most("gpu_reserved_bytes") or 0.0, []
    lines = [_series(account, "gpu_reserved_bytes", "reserved", "reserved by torch, all GPUs")]
    if numbers:
        peak = max(account.most(f"gpu.{each}.used_bytes") or 0.0 for each in numbers)
        lines = [
            *(
                _series(account, f"gpu.{each}.used_bytes", f"gpu{each % 4}", f"GPU {each}, in use")
                for each in numbers
            ),
            *lines,
        ]  # fmt: skip
        bounds = [_series(account, f"gpu.{numbers[0]}.total_bytes", "limit", f"memory of GPU {numbers[0]}")]
    else:
        lines.append(_series(account, "gpu_allocated_bytes", "gpu0"))
    summary = f"At most {memory(peak)} on one GPU."
    return [*found, _chart(account, "gpu-memory", "GPU memory", "bytes", summary, lines=lines, bounds=bounds)]


def _cache_rate(account: Account) -> ReportChart | None:
    if not account.has("cache_hit_rate"):
        return None
    hits, misses = account.last("cache_hits") or 0.0, account.last("cache_misses") or 0.0
    summary = (
        f"{share(hits / (hits + misses) if hits + misses else None)} of {hits + misses:,.0f} lookups needed no load; "
        f"the cache used at most {memory(account.most('cache_bytes'))}."
    )
    lines = [_series(account, "cache_hit_rate", "hits")]
    return _chart(account, "cache", "Cache hit rate", "share", summary, lines=lines)


# -- inside ---------------------------------------------------------------------------------


def _chart(
    account: Account, name: str, title: str, unit: Unit, summary: str, *, stack: Sequence[Series] = (),
    lines: Sequence[Series] = (), bounds: Sequence[Series] = (),
) -> ReportChart:  # fmt: skip
    lines = [each for each in lines if any(value is not None for value in each.values)]
    bounds = [each for each in bounds if any(each.values)]
    timeline = Timeline(
        title=title,
        summary=summary,
        unit=unit,
        times_s=[point.t_s - account.began_s for point in account.points],
        spans_s=[point.span_s for point in account.points],
        length_s=max(1.0, account.length_s),
        stack=stack,
        lines=lines,
        bounds=bounds,
        marks=[
            Mark(
                at_s=each.t_s - account.began_s,
                number=each.number,
                what=f"{each.kind}: {each.what}",
                look="alert" if each.is_alert or each.kind in ("restart", "warning") else "mark",
            )
            for each in run_events(account)
        ],
    )
    far = timeline.far_away()
    last = {each.look: next(value for value in reversed(each.values) if value is not None) for each in far}
    beyond = "".join(f" The {each.name}, {memory(last[each.look])}, is far above the chart." for each in far)
    drawn = [*stack, *lines, *(each for each in bounds if each not in far)]
    return ReportChart(
        id=name,
        timeline=timeline,
        caption=f"{summary}{beyond}",
        drawn=drawn,
        headings=["time", *(each.name for each in drawn)],
        rows=_rows(timeline, drawn),
    )


def _rows(timeline: Timeline, drawn: Sequence[Series]) -> list[list[str]]:
    """A row for each of a few stretches of the run, with the peak of memory or the mean of a rate, as in thinned
    records."""
    count = len(timeline.times_s)
    every = max(1, -(-count // _TABLE_ROWS))
    # merged() decides by the ending of a name.
    ending = "_bytes" if timeline.unit == "bytes" else "_rate"
    show = {"bytes": memory, "1/s": rate, "share": share}[timeline.unit]
    rows = []
    for start in range(0, count, every):
        places = range(start, min(count, start + every))
        named = (
            {f"{n}{ending}": value for n, each in enumerate(drawn) if (value := each.values[place]) is not None}
            for place in places
        )
        found = merged(zip((timeline.spans_s[place] for place in places), named, strict=True))
        cells = [show(found.get(f"{number}{ending}")) for number in range(len(drawn))]
        rows.append([duration(max(0.0, timeline.times_s[places[-1]])), *cells])
    return rows


def _series(account: Account, figure: str, look: str, name: str | None = None) -> Series:
    """The series of a figure; without ``name``, its name comes from the table of figures."""
    values = [point.figures.get(figure) for point in account.points]
    return Series(name=figure_of(figure).label if name is None else name, look=look, values=values)
