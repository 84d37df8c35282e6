"""The sections of a report's page.

In:  an ``Account``, and what the other files of this folder compute from it.
Out: ``Html``; all text of the run passes through ``markup.text``.
Runs in: command line; pure.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from penstock.advice.verdict import BRIEF_S, Verdict
from penstock.charts.markup import Html, join, table, tag
from penstock.charts.timeline import Series, Timeline
from penstock.findings import Finding
from penstock.formatting import configuration, duration, memory, one_line, rate, share
from penstock.report.account import Account
from penstock.report.predictions import Compared
from penstock.report.stretches import AlertHistory, Epoch, Stall
from penstock.report.timelines import ReportChart, RunEvent

_MOST_TRIED = 40
_SEVERITY_WORDS = {"hurts": "hurts", "warning": "change this", "info": "to know", "good": "good"}


def section(title: str, *inside: object) -> Html:
    return tag("section", tag("h2", title), *inside)


def opening(account: Account, name: str) -> Html:
    summary = account.summary
    began = _when(account.began_s)
    ranks = f", rank {summary.rank.get('rank')} of {summary.rank.get('world_size')}" if summary.rank else ""
    ended = "still running" if account.is_running else f"ended {_when(account.ended_s)}"
    about = (
        f"{summary.id} on {one_line(summary.host, 80)}{ranks}. Began {began}, {ended}, {duration(account.length_s)}."
    )
    state = tag("span", summary.state, class_=f"state {summary.state}")
    return tag("header", tag("h1", name), tag("p", state, about, class_="about"))


def tiles(account: Account) -> Html:
    summary = account.summary
    used, limit = account.totals.get("peak_used_bytes"), account.last("limit_bytes") or summary.limit_bytes
    shown: list[tuple[str, str, str]] = [
        ("samples/s", rate(summary.samples_per_s), f"{summary.samples:,} samples, {summary.step:,} steps"),
        ("waiting for data", share(summary.wait_fraction), f"of {duration(account.active_s)} of reading"),
        ("peak memory", memory(summary.peak_bytes), "the training and its workers"),
    ]
    if used and limit:
        shown.append(("of the limit", f"{used / limit:.0%}", f"{memory(used)} of {memory(limit)}, all processes"))
    busy = account.gpu_busy()
    if busy is not None:
        shown.append(("GPU busy", share(busy), f"{len(account.gpus)} GPU{'s' * (len(account.gpus) != 1)}"))
    hits, misses = account.last("cache_hits") or 0.0, account.last("cache_misses") or 0.0
    if hits + misses:
        shown.append(("cache hit rate", share(hits / (hits + misses)), f"of {hits + misses:,.0f} lookups"))
    if summary.worker_restarts:
        shown.append(("workers crashed", str(summary.worker_restarts), "and were replaced"))
    boxes = [tag("div", tag("dt", what), tag("dd", value, tag("span", more))) for what, value, more in shown]
    return tag("dl", *boxes, class_="tiles")


def findings(verdict: Verdict) -> Html:
    return tag("ul", *(_finding(each) for each in verdict.findings), class_="findings")


def _finding(each: Finding) -> Html:
    word = tag("span", _SEVERITY_WORDS[each.severity], class_="severity")
    parts = [tag("h3", each.title, word)]
    if each.what:
        parts.append(tag("p", each.what))
    if each.fix:
        parts.append(tag("p", tag("b", "Change: "), f"{each.fix}.", class_="fix"))
    return tag("li", *parts, class_=each.severity)


def figure(chart: ReportChart) -> Html:
    timeline = chart.timeline
    legend = tag("ul", *(tag("li", _swatch(each, timeline), each.name) for each in chart.drawn), class_="legend")
    numbers = table(chart.headings, chart.rows, caption=f"{timeline.title}, in numbers")
    label = f"{timeline.title}, drawn"
    drawn = tag("div", timeline.svg(), class_="wide", tabindex="0", role="region", aria_label=label)
    return tag(
        "figure", tag("h3", timeline.title), legend, drawn,
        tag("figcaption", chart.caption), tag("details", tag("summary", "As a table"), numbers), id=chart.id,
    )  # fmt: skip


def _swatch(series: Series, timeline: Timeline) -> Html:
    kind, path = ("area", "M0 0h18v10h-18Z") if series in timeline.stack else ("line", "M1 5h16")
    drawn = tag("path", class_=f"{kind} {series.look}", d=path)
    return tag("svg", drawn, viewBox="0 0 18 10", aria_hidden="true")


def predictions(rows: Sequence[Compared]) -> Html:
    if not rows:
        return Html()
    several = len({row.loader for row in rows}) > 1
    return table(
        ["figure", "predicted", "measured", "off by", ""],
        [
            [
                f"{one_line(row.loader, 40)}: {row.what}" if several else row.what,
                _predicted(row),
                _shown(row.measured, row.unit),
                _error(row),
                _kept(row),
            ]
            for row in rows
        ],
        caption="Predicted before the run, and measured in it",
        words_from=4,
    )


def _predicted(row: Compared) -> str:
    expected = _shown(row.predicted, row.unit)
    if row.is_bound:
        return f"at most {expected}"
    return (
        expected
        if row.low is None
        else f"{expected} ({_shown(row.low, row.unit)} to {_shown(row.high or 0.0, row.unit)})"
    )


def _error(row: Compared) -> str:
    if row.error is None:
        return "-"
    return f"{100 * row.error:+.1f} points" if row.unit == "share" else f"{row.error:+.0%}"


def _kept(row: Compared) -> str:
    if row.remark or row.holds is None:
        return row.remark
    if row.is_bound:
        used = f"{row.measured / row.predicted:.0%} of it"
        return f"kept: {used}" if row.holds else f"broken: {used}"
    return "within the prediction" if row.holds else "outside the prediction"


def _shown(value: float, unit: str) -> str:
    return memory(value) if unit == "bytes" else share(value) if unit == "share" else rate(value)


def tried(account: Account) -> Html:
    known = sorted(
        (each for each in account.summary.tried if each.samples), key=lambda each: -(each.samples_per_s or 0)
    )
    if not known:
        return tag("p", "No penstock loader delivered samples.")
    several = len({each.loader for each in known}) > 1
    best = known[0] if len(known) > 1 and not several else None
    rows = [
        [
            (f"{one_line(account.name_of(each.loader), 40)}: " if several else "")
            + (configuration(each.configuration) or "unknown")
            + (" (fastest)" if each is best else ""),
            rate(each.samples_per_s) + ("?" if each.active_s < BRIEF_S else ""),
            share(each.wait_fraction),
            memory(each.peak_bytes),
            duration(each.active_s),
        ]
        for each in known[:_MOST_TRIED]
    ]
    brief = f"; ?: read for less than {BRIEF_S:.0f} s" if any(each.active_s < BRIEF_S for each in known) else ""
    more = f"; {len(known) - _MOST_TRIED} slower ones are left out" if len(known) > _MOST_TRIED else ""
    headings = ["settings", "samples/s", "waiting", "memory of the training", "time"]
    return table(headings, rows, caption=f"Fastest first{brief}{more}")


def stalled(account: Account, stalls: Sequence[Stall]) -> Html:
    if not stalls:
        known = account.has("wait_fraction")
        return tag(
            "p", "The training loop never waited for long." if known else "It is not known how long this run waited."
        )
    rows = [
        [
            f"{_since(account, each.began_s)} to {_since(account, each.ended_s)}",
            duration(each.ended_s - each.began_s),
            share(each.wait_fraction),
            one_line(each.after, 160),
        ]
        for each in stalls
    ]
    headings = ["since the start", "length", "waited", "just before"]
    caption = "The longest stretches in which the loop waited over 20% of the time"
    return table(headings, rows, caption=caption, words_from=3)


def passes(account: Account, epochs: Mapping[int, Sequence[Epoch]]) -> Html:
    tables = []
    for number, own in epochs.items():
        rows = [
            [
                f"{each.number}" + ("" if each.is_whole else " (part of it)"),
                f"{each.samples:,.0f}",
                duration(each.ended_s - each.began_s),
                rate(each.samples / (each.ended_s - each.began_s)) if each.ended_s > each.began_s else "-",
                share(each.wait_fraction),
            ]
            for each in own
        ]
        shown = rows if len(rows) <= 30 else [*rows[:15], *rows[-15:]]
        cut = "" if shown is rows else f", the first and the last 15 of {len(rows)}"
        caption = f"{one_line(account.name_of(number), 60)}: approximate, from the samples delivered{cut}"
        tables.append(table(["pass", "samples", "time", "samples/s", "waiting"], shown, caption=caption))
    return join(tables)


def alerts(histories: Sequence[AlertHistory]) -> Html:
    rows = [
        [
            one_line(each.rule, 40),
            str(each.raised),
            duration(each.stood_s),
            "still raised" if each.stands else "over",
            one_line(each.latest, 200),
        ]
        for each in histories
    ]
    return table(["rule", "raised", "lasted", "at the end", "latest"], rows, caption="By rule", words_from=3)


def journal(account: Account, events: Sequence[RunEvent]) -> Html:
    if not events:
        return tag("p", "The journal is empty, and there were no alerts.")
    rows = [[str(each.number), _since(account, each.t_s), each.who, each.kind, each.what] for each in events]
    left = len(account.journal) + len(account.alerts) - len(events)
    more = f"; {left:,} less important entries are left out" if left > 0 else ""
    caption = f"Numbered as on the charts; times since the start{more}"
    return table(["", "time", "who", "kind", "what"], rows, caption=caption, words_from=0)


def facts(account: Account) -> Html:
    found = account.facts
    versions = found.get("python") or {}
    rows: list[tuple[str, object]] = [
        ("command", shlex.join(map(str, found.get("command") or []))),
        ("folder", found.get("folder")),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("machine", _machine(account.machine)),
        ("GPUs", "; ".join(f"{each.get('name')}, {memory(each.get('memory_total_bytes'))}" for each in account.gpus)),
        ("memory is measured as", found.get("tree_measure")),
        ("process", account.summary.pid),
    ]
    for number, loader in enumerate(account.loaders):
        arguments = json.dumps(loader.get("arguments") or {})[1:-1].replace('"', "")
        length = loader.get("dataset_length")
        of = "" if length is None else f" of {length:,} samples"
        name = f"loader {account.name_of(number)}"
        rows.append((name, f"{loader.get('kind')}, {loader.get('dataset')}{of}; {arguments}"))
    known = [[one_line(name, 60), one_line(str(value), 600)] for name, value in rows if value not in (None, "")]
    return table(["", ""], known, caption="As recorded at the start", words_from=0, class_="facts")


def _machine(machine: Mapping[str, Any]) -> str:
    cores, limit = machine.get("cpu_usable"), machine.get("memory_limit_bytes")
    parts = [
        machine.get("platform") or "",
        "" if cores is None else f"{cores:g} usable cores",
        "" if limit is None else f"{memory(limit)} of memory ({machine.get('memory_limit_source')})",
    ]
    return ", ".join(each for each in parts if each)


def _since(account: Account, t_s: float) -> str:
    return duration(max(0.0, t_s - account.began_s))


def _when(t_s: float) -> str:
    return datetime.fromtimestamp(t_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
