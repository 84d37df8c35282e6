"""`penstock top`: trainings live in the terminal, penstock's or any other.

In:  a run, a process id, a pattern, or nothing for all runs; keys.
Out: a page that is drawn again every second, one frame, or JSON.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from penstock.cli.options import echo
from penstock.cli.signals import sigterm_as_exit
from penstock.meter import Roots

if TYPE_CHECKING:
    from penstock.cli.top.trainings import TrainingSource


@click.command(epilog="Exit status: 0 after q or --once; 1 if there is no such run or process; 130 after Ctrl-C.")
@click.argument("run", required=False)
@click.option("--pid", type=click.IntRange(1), metavar="N",
              help="Show a process and its descendants, whether or not it uses penstock.")  # fmt: skip
@click.option("--match", metavar="REGEX", help="Show all processes whose command line matches, with descendants.")
@click.option("--every", type=click.FloatRange(0.2, 3600), metavar="SECONDS", default=1.0, show_default=True,
              help="Time between frames.")  # fmt: skip
@click.option("--once", is_flag=True, help="Print one frame and exit, as is always done if stdout is not a terminal.")
@click.option("--json", "json_wanted", is_flag=True, help="Print one snapshot as a JSON object and exit.")
@click.pass_obj
def command(
    roots: Roots, run: str | None, pid: int | None, match: str | None, every: float, once: bool, json_wanted: bool
) -> None:
    """Show RUN (an id or its beginning, a name, or "last"), or all running runs: memory by component against the
    limit, the workers and their activity, speed and waiting, GPUs, cache, and the latest events.

    \b
    + and -          one worker more or less
    [ and ]          one batch fewer or more ahead
    up and down      choose the run; left and right choose its loader
    q                quit

    --pid and --match show any training, with or without penstock, by its processes.
    """
    if sum(each is not None for each in (run, pid, match)) > 1:
        raise click.UsageError("RUN, --pid and --match each choose what to show; give one of them")
    from penstock.cli.console import make_console
    from penstock.monitor.system_levels import system_levels

    source = _source(run, pid, match, roots)
    console = make_console()
    try:
        if json_wanted:
            found = source.snapshots(None)
            answer = {
                "t_s": time.time(),
                "machine": system_levels(roots),
                "trainings": [asdict(each) for each in found],
            }
            echo(json.dumps(answer, indent=2))
            _end_without_a_match(match, found)
        elif once or not console.is_terminal:
            from penstock.cli.top.view import Page

            found = source.snapshots(None)
            console.print(Page(console, has_keys=False).once(system_levels(roots), found, source.nothing))
            _end_without_a_match(match, found)
        else:
            from penstock.cli.top.keys import terminal_keys
            from penstock.cli.top.live import run_live

            with sigterm_as_exit():
                run_live(source, console, terminal_keys(), roots, every_s=every)
    finally:
        source.close()


def _end_without_a_match(match: str | None, found: Sequence[object]) -> None:
    if match is not None and not found:
        raise click.exceptions.Exit(1)


def _source(run: str | None, pid: int | None, match: str | None, roots: Roots) -> TrainingSource:
    from penstock.cli.top.trainings import ProcessTrainings, RunningRuns
    from penstock.cli.watch.command import pattern_of
    from penstock.environment import state_folder

    if pid is None and match is None:
        return RunningRuns(state_folder(), run)
    return ProcessTrainings(pid, None if match is None else pattern_of(match), roots)
