"""The pictures of a report: memory, speed, waiting, GPUs, cache, each with what happened marked on it.

In:  an ``Account``.
Out: ``Picture``s: a chart, its legend in words, and the table behind it.
Runs in: command line; pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.charts.timeline import Bound, Chart, Mark, Series, Unit
from penstock.formatting import duration, memory, one_line, rate, share
from penstock.monitor.figures import merged
from penstock.report.account import Account

MOST_MARKS = 60
MOST_GPUS = 8
_TABLE_ROWS = 16
_URGENT = ("restart", "warning", "resize", "memory", "cache", "decision", "action")
"""Kinds that are marked before moments and the like, where there are too many."""
_PARTS = {
    "arena_bytes": ("batches (arena)", "arena"),
    "workers_bytes": ("workers", "workers"),
    "cache_bytes": ("cache", "cache"),
    "trainer_bytes": ("training process", "trainer"),
    "other_bytes": ("libraries and other", "other"),
}
"""From the bottom: what the budget bounds first, so that its line can be compared."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    id: str
    chart: Chart
    caption: str
    legend: Sequence[tuple[str, str]]
    """Look and name of all that is drawn."""
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The same as numbers, a few times of the run."""


@dataclass(frozen=True, kw_only=True)
class Happening:
    """An entry of the journal or an alert, numbered as on the pictures."""

    number: int
    t_s: float
    who: str
    kind: str
    what: str
    is_alert: bool


def happenings(account: Account) -> tuple[Happening, ...]:
    """Journal and alerts in the order they came, numbered; the most telling where there are too many to mark."""
    notes = [(note.t_s, note.who, note.kind, note.what, False) for note in account.journal]
    alerts = [(alert.t_s, alert.rule, f"alert {alert.state}", alert.what, True) for alert in account.alerts]
    every = sorted([*notes, *alerts], key=lambda each: each[0])
    if len(every) > MOST_MARKS:
        telling = [each for each in every if each[4] or each[2] in _URGENT]
        others = [each for each in every if not (each[4] or each[2] in _URGENT)]
        # The latest: what a run came to counts more than how it began.
        kept = [*others[-max(0, MOST_MARKS - len(telling)) or len(others) :], *telling[-MOST_MARKS:]]
        every = sorted(kept, key=lambda each: each[0])[-MOST_MARKS:]
    return tuple(
        Happening(
            number=number, t_s=t_s, who=one_line(who, 40), kind=one_line(kind, 40), what=one_line(what, 240),
            is_alert=is_alert,
        )
        for number, (t_s, who, kind, what, is_alert) in enumerate(every, start=1)
    )  # fmt: skip


def pictures(account: Account) -> tuple[Picture, ...]:
    """Those there are figures for."""
    if not account.points:
        return ()
    found = [_memory(account), _speed(account), _waiting(account), *_gpus(account), _cache_rate(account)]
    return tuple(each for each in found if each is not None)


# -- each -----------------------------------------------------------------------------------


def _memory(account: Account) -> Picture | None:
    if not account.has("tree_bytes"):
        return None
    # Parts that were never there are not in the legend either.
    parts = {name: look for name, look in _PARTS.items() if account.most(name)}
    peak, limit = account.summary.peak_bytes, account.last("limit_bytes")
    of = f" of a limit of {memory(limit)}" if limit else ""
    stack = [_series(account, name, *look) for name, look in parts.items()]
    whole = [_series(account, "tree_bytes", "all of it", "tree")]
    return _picture(
        account,
        "memory",
        "Memory",
        "bytes",
        f"The training and its workers had at most {memory(peak or account.most('tree_bytes'))}{of}.",
        stack=stack,
        lines=[*([] if stack else whole), _series(account, "used_bytes", "in use by everybody", "used")],
        bounds=[
            _bound(account, "limit_bytes", "limit", "limit"),
            _bound(account, "budget_bytes", "budget of the loaders (batches and workers)", "budget"),
        ],
    )


def _speed(account: Account) -> Picture | None:
    unit: Unit = "1/s"
    if account.has("samples_per_s"):
        names = [f"loader.{number}.samples_per_s" for number in range(len(account.loaders))]
        several = [name for name in names if account.most(name)]
        mean = rate(account.summary.samples_per_s)
        lines = [_series(account, "samples_per_s", "samples/s", "speed")]
        if len(several) > 1:
            numbers = [int(name.split(".")[1]) for name in several]
            lines = [
                _series(account, name, one_line(account.name_of(number), 40), f"speed{number % 4}")
                for name, number in zip(several, numbers, strict=True)
            ]
        summary = f"{mean} samples/s while data was read."
        return _picture(account, "speed", "Samples per second", unit, summary, lines=lines)
    if not account.most("steps_per_s"):
        return None
    lines = [_series(account, "steps_per_s", "steps/s", "speed")]
    mean = rate(account.mean("steps_per_s"))
    return _picture(account, "speed", "Steps per second", unit, f"{mean} steps/s in the mean.", lines=lines)


def _waiting(account: Account) -> Picture | None:
    if not account.has("wait_fraction"):
        return None
    waited = share(account.summary.wait_fraction)
    lines = [_series(account, "wait_fraction", "waiting for data", "waiting")]
    summary = f"The training loop waited {waited} of the time data was read; under 5% it is fed, over 20% it is not."
    return _picture(account, "waiting", "Waiting for data", "share", summary, lines=lines)


def _gpus(account: Account) -> list[Picture | None]:
    numbers = [number for number in range(MOST_GPUS) if account.has(f"gpu.{number}.used_bytes")]
    if not numbers and not account.most("gpu_reserved_bytes"):
        return []
    busy = [number for number in numbers if account.has(f"gpu.{number}.busy_fraction")]
    found: list[Picture | None] = []
    if busy:
        lines = [_series(account, f"gpu.{each}.busy_fraction", f"GPU {each}", f"gpu{each % 4}") for each in busy]
        summary = f"A kernel ran {share(account.gpu_busy())} of the time."
        found.append(_picture(account, "gpu-busy", "GPU busy", "share", summary, lines=lines))
    if numbers:
        peak = max(account.most(f"gpu.{each}.used_bytes") or 0.0 for each in numbers)
        lines = [
            _series(account, f"gpu.{each}.used_bytes", f"GPU {each}, in use", f"gpu{each % 4}") for each in numbers
        ]
        lines.append(_series(account, "gpu_reserved_bytes", "reserved by torch, all GPUs", "reserved"))
        bounds = [_bound(account, f"gpu.{numbers[0]}.total_bytes", f"memory of GPU {numbers[0]}", "limit")]
    else:
        peak, bounds = account.most("gpu_reserved_bytes") or 0.0, []
        lines = [
            _series(account, "gpu_reserved_bytes", "reserved by torch", "reserved"),
            _series(account, "gpu_allocated_bytes", "live tensors", "gpu0"),
        ]
    summary = f"At most {memory(peak)} on one GPU."
    found.append(_picture(account, "gpu-memory", "GPU memory", "bytes", summary, lines=lines, bounds=bounds))
    return found


def _cache_rate(account: Account) -> Picture | None:
    if not account.has("cache_hit_rate"):
        return None
    hits, misses = account.last("cache_hits") or 0.0, account.last("cache_misses") or 0.0
    of_all = hits / (hits + misses) if hits + misses else None
    lines = [_series(account, "cache_hit_rate", "hit rate", "hits")]
    summary = f"{share(of_all)} of {hits + misses:,.0f} lookups needed no load; it took at most " + (
        f"{memory(account.most('cache_bytes'))}."
    )
    return _picture(account, "cache", "Cache hit rate", "share", summary, lines=lines)


# -- inside ---------------------------------------------------------------------------------


def _picture(
    account: Account, name: str, title: str, unit: Unit, summary: str, *, stack: Sequence[Series] = (),
    lines: Sequence[Series] = (), bounds: Sequence[Bound] = (),
) -> Picture:  # fmt: skip
    lines = [each for each in lines if any(value is not None for value in each.values)]
    bounds = [each for each in bounds if any(value for value in each.values)]
    chart = Chart(
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
            for each in happenings(account)
        ],
    )
    far = chart.far_away()
    beyond = "".join(f" The {each.name}, {memory(_last(each.values))}, is far above." for each in far)
    drawn = [*stack, *lines, *(each for each in bounds if each not in far)]
    return Picture(
        id=name,
        chart=chart,
        caption=f"{summary}{beyond}",
        legend=[(each.look, each.name) for each in drawn],
        headings=["time", *(each.name for each in drawn)],
        rows=_rows(chart, drawn),
    )


def _rows(chart: Chart, drawn: Sequence[Series | Bound]) -> list[list[str]]:
    """A few stretches of the run; memory at its fullest, rates in the mean, as thinning does."""
    count = len(chart.times_s)
    every = max(1, -(-count // _TABLE_ROWS))
    # Merging goes by names' endings: bytes keep their peak, others their mean.
    ending = "_bytes" if chart.unit == "bytes" else "_rate"
    show = {"bytes": memory, "1/s": rate, "share": share}[chart.unit]
    rows = []
    for start in range(0, count, every):
        places = range(start, min(count, start + every))
        points = [(chart.spans_s[place], _named(drawn, place, ending)) for place in places]
        found = merged(points)
        cells = [show(found.get(f"{number}{ending}")) for number in range(len(drawn))]
        rows.append([duration(max(0.0, chart.times_s[places[-1]])), *cells])
    return rows


def _named(drawn: Sequence[Series | Bound], place: int, ending: str) -> dict[str, float]:
    values = ((f"{number}{ending}", each.values[place]) for number, each in enumerate(drawn))
    return {name: value for name, value in values if value is not None}


def _series(account: Account, figure: str, name: str, look: str) -> Series:
    return Series(name=name, look=look, values=_values(account, figure))


def _bound(account: Account, figure: str, name: str, look: str) -> Bound:
    return Bound(name=name, look=look, values=_values(account, figure))


def _values(account: Account, figure: str) -> list[float | None]:
    return [point.figures.get(figure) for point in account.points]


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)
