"""The tables of `penstock runs`.

In:  summaries of runs, rows of a comparison.
Out: rich tables.
Runs in: command line.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from penstock.cli.console import make_table
from penstock.formatting import configuration, duration, memory, one_line, rate, share

if TYPE_CHECKING:
    from penstock.monitor.runs.reader import RunSummary

_STYLES = {"running": "green", "finished": "", "failed": "red", "killed": "red"}
_BRIEF_S = 10.0
"""Rates measured over less than this time mean little, because the workers were still starting."""


def listing(runs: Sequence[RunSummary]) -> Table:
    table = make_table("run", "state", "time", "samples/s", "waits", "memory")
    for run in runs:
        cell = Text(run.id, style="bold")
        rank = "" if not run.rank else f" (rank {run.rank.get('rank')} of {run.rank.get('world_size')})"
        for line in (one_line(run.name, 60) + rank, _settings(run)):
            cell.append(f"\n  {line}", style="not bold")
        if run.what:
            cell.append(f"\n  {one_line(run.what, 120)}", style="not bold red")
        table.add_row(
            cell,
            Text(run.state, style=_STYLES[run.state]),
            duration(max(0.0, time.time() - run.started_s) if run.ended_s is None else run.duration_s),
            rate(run.samples_per_s),
            share(run.wait_fraction),
            memory(run.peak_bytes),
        )
    return table


def comparison(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = make_table("configuration", "samples/s", "waits", "memory", "time")
    several = len({row["loader"] for row in rows}) > 1
    for row in rows:
        name = one_line(str(row["name"]), 40) + (f", {one_line(str(row['loader']), 20)}" if several else "")
        cell = Text(configuration(row["configuration"]) or "unknown", style="bold")
        cell.append(f"\n  {row['run']} {name}", style="not bold")
        table.add_row(
            cell,
            rate(row["samples_per_s"]) + ("?" if row["active_s"] < _BRIEF_S else ""),
            share(row["wait_fraction"]),
            memory(row["peak_bytes"]),
            duration(row["active_s"]),
        )
    if any(row["active_s"] < _BRIEF_S for row in rows):
        table.caption = f"?: measured for less than {_BRIEF_S:.0f} s"
    return table


def _settings(run: RunSummary) -> str:
    """The latest settings of each loader."""
    latest = {each.loader: each.configuration for each in sorted(run.tried, key=lambda each: each.ended_s)}
    shown = []
    for number, loader in enumerate(run.loaders):
        arguments = loader.get("arguments") or {}
        settings = latest.get(number) or {**arguments, "workers": arguments.get("num_workers")}
        shown.append((f"{loader.get('name')}: " if len(run.loaders) > 1 else "") + configuration(settings))
    return one_line("; ".join(shown), 160)
