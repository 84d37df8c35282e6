"""`penstock runs`: recorded runs, listed, compared and removed.

In:  the runs recorded in this user's state folder.
Out: a table or JSON; files removed.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table
from rich.text import Text

from penstock.cli.console import make_console, make_table
from penstock.environment import state_folder
from penstock.errors import PenstockError
from penstock.formatting import configuration, counted, duration, memory, one_line, rate, share

if TYPE_CHECKING:
    from penstock.monitor.runs.reader import RunSummary

_COMPARED = 10
_AGES_S = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_STYLES = {"running": "green", "finished": "", "failed": "red", "killed": "red"}
_BRIEF_S = 10.0
"""Rates over a shorter time mean little: the workers were still starting."""

_json_array = click.option("--json", "json_wanted", is_flag=True, help="Print one JSON array instead of a table.")


@click.group(invoke_without_command=True)
@_json_array
@click.option("--limit", "-n", type=click.IntRange(1), default=20, show_default=True,
              help="List at most this many runs, newest first.")  # fmt: skip
@click.pass_context
def command(ctx: click.Context, json_wanted: bool, limit: int) -> None:
    """List recorded runs, newest first: state, duration, samples per second, waiting and peak memory."""
    if ctx.invoked_subcommand is not None:
        return
    from penstock.monitor.runs.reader import list_runs

    home = state_folder()
    found = list_runs(home)
    shown = found[:limit]
    if json_wanted:
        click.echo(json.dumps([_as_json(each) for each in shown], indent=2))
        return
    if not found:
        click.echo(f"no runs are recorded in {home}; penstock.Monitor(loader) in a training records one")
        return
    make_console().print(listing(shown))
    if len(found) > limit:
        click.echo(f"and {counted(len(found) - limit, 'older run')}; penstock runs -n {len(found)} lists all")


@command.command()
@click.argument("runs", nargs=-1)
@_json_array
def compare(runs: tuple[str, ...], json_wanted: bool) -> None:
    """Compare RUNS (ids, beginnings of ids, names, "last"; the newest ten if none is given): samples/s, waiting and
    peak memory of every configuration that was tried, fastest first."""
    from penstock.monitor.runs.reader import list_runs, open_run

    home = state_folder()
    found: list[RunSummary] = []
    for which in dict.fromkeys(runs):
        with open_run(home, which) as run:
            found.append(run.summary())
    if not runs:
        found = list_runs(home)[:_COMPARED]
    rows = [row for each in found for row in _tried(each)]
    rows.sort(key=lambda row: -(row["samples_per_s"] or 0.0))
    if json_wanted:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        raise PenstockError("there is nothing to compare: no run has delivered samples yet")
    make_console().print(comparison(rows))


@command.command("rm")
@click.argument("runs", nargs=-1)
@click.option("--older-than", metavar="AGE", help="Remove every run that ended longer ago: 30d, 12h, 2w.")
def remove(runs: tuple[str, ...], older_than: str | None) -> None:
    """Remove the records of RUNS that have ended."""
    from penstock.monitor.runs.reader import delete_run, list_runs, open_run

    if not runs and older_than is None:
        raise click.UsageError("give the runs to remove, or --older-than 30d")
    home, names = state_folder(), list(runs)
    if older_than is not None:
        before_s = time.time() - _age_s(older_than)
        names += [each.id for each in list_runs(home) if each.ended_s is not None and each.ended_s < before_s]
    for which in dict.fromkeys(names):
        with open_run(home, which) as run:
            delete_run(run)
            click.echo(f"removed {run.id}")
    if not names:
        click.echo(f"no run is older than {older_than}")


def _age_s(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([mhdw])\s*", text)
    if match is None:
        raise click.UsageError(f"--older-than {text}: write a number and m, h, d or w, such as 30d")
    return float(match.group(1)) * _AGES_S[match.group(2)]


def _as_json(run: RunSummary) -> dict[str, Any]:
    tried = [{**asdict(each), **_achieved(each)} for each in run.tried]
    return {**asdict(run), "duration_s": run.duration_s, "tried": tried}


def _tried(run: RunSummary) -> list[dict[str, Any]]:
    names = [each.get("name") for each in run.loaders]
    return [
        {
            "run": run.id,
            "name": run.name,
            "state": run.state,
            "loader": names[each.loader] if each.loader < len(names) else str(each.loader),
            "configuration": each.configuration,
            "samples": int(each.samples),
            "active_s": each.active_s,
            "peak_bytes": int(each.peak_bytes),
            **_achieved(each),
        }
        for each in run.tried
        if each.samples
    ]


def _achieved(tried: Any) -> dict[str, Any]:
    return {"samples_per_s": tried.samples_per_s, "wait_fraction": tried.wait_fraction}


# -- tables -----------------------------------------------------------------------------------------------------------


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
