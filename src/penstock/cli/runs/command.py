"""`penstock runs`: recorded runs, listed, compared and removed.

In:  the runs recorded in this user's state folder.
Out: a table or JSON; files removed.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.console import make_console
from penstock.cli.options import echo
from penstock.cli.runs.view import comparison, listing
from penstock.environment import state_folder
from penstock.errors import PenstockError
from penstock.formatting import counted

if TYPE_CHECKING:
    from penstock.monitor.runs.reader import RunSummary

_COMPARED = 10
_AGES_S = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}

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
        echo(json.dumps([_as_json(each) for each in shown], indent=2))
        return
    if found.unreadable:
        echo(_passed_over(found.unreadable), err=True)
    if not found:
        echo(f"no runs are recorded in {home}; penstock.Monitor(loader) in a training records a run")
        return
    make_console().print(listing(shown))
    if len(found) > limit:
        echo(f"and {counted(len(found) - limit, 'older run')}; penstock runs -n {len(found)} lists all")


@command.command()
@click.argument("runs", nargs=-1)
@_json_array
def compare(runs: tuple[str, ...], json_wanted: bool) -> None:
    """Compare RUNS (ids or their beginnings, names, "last"; without RUNS, the newest ten): samples/s, waiting and
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
        echo(json.dumps(rows, indent=2))
        return
    if not rows:
        raise PenstockError("there is nothing to compare: no run has delivered samples yet")
    make_console().print(comparison(rows))


@command.command("rm")
@click.argument("runs", nargs=-1)
@click.option(
    "--older-than", metavar="AGE", help="Remove every run that ended longer ago than this, such as 30d, 12h or 2w."
)
def remove(runs: tuple[str, ...], older_than: str | None) -> None:
    """Remove the records of RUNS; a run that has not ended is refused."""
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
            echo(f"removed {run.id}")
    if not names:
        echo(f"no run is older than {older_than}")


def _passed_over(files: Sequence[Path]) -> str:
    several = "is not an intact record" if len(files) == 1 else "are not intact records"
    was = "was" if len(files) == 1 else "were"
    more = "" if len(files) == 1 else ", ..."
    return f"{counted(len(files), 'file')} in {files[0].parent} {several} and {was} left out: {files[0].name}{more}"


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
