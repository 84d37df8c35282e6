"""`penstock report`: a report on a run, as one HTML file.

In:  a recorded run, running or ended; a plan to compare it with.
Out: an HTML file, or JSON; the verdict in a few lines.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.options import echo
from penstock.drafts import open_draft
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.report.page import Report
    from penstock.report.predictions import Prediction

_LARGEST_PLAN_BYTES = 16 << 20


@click.command(no_args_is_help=True)
@click.argument("run")
@click.option(
    "--out", "-o", metavar="FILE", help="Write to this file; - for stdout.  [default: penstock-report-ID.html]"
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option("--plan", "plan", metavar="FILE", help="Compare the run with the output of penstock plan TARGET --json.")
@click.option("--json", "json_wanted", is_flag=True, help="Print one JSON object; with -o, write the page too.")
@click.option("--open", "open_wanted", is_flag=True, help="Open the report in a web browser.")
def command(run: str, out: str | None, force: bool, plan: str | None, json_wanted: bool, open_wanted: bool) -> None:
    """Write a report on RUN (an id or its beginning, a name, or "last"): the bottleneck, the headroom, what to
    change, charts of memory, speed and waiting, and predictions compared with measurements.

    \b
    penstock report last --open
    penstock report 261116 -o report.html --plan plan.json
    """
    from penstock.environment import state_folder
    from penstock.monitor.runs.reader import open_run
    from penstock.report.account import gather
    from penstock.report.page import Report

    if open_wanted and (out == "-" or (json_wanted and out is None)):
        raise click.UsageError("--open needs a file; name one with -o, or leave out --json and -o -")
    if json_wanted and out == "-":
        raise click.UsageError("--json and -o - both write to stdout; name a file with -o")
    plans = () if plan is None else _read_plans(Path(plan))
    with open_run(state_folder(), run) as found:
        file = None if out == "-" or (json_wanted and out is None) else Path(out or f"penstock-report-{found.id}.html")
        if file is not None:
            # The file is checked before the run is read, because reading a week of points takes a while.
            _check(file, force=force)
        report = Report(gather(found), plans, time.time())
    if file is not None:
        _write(file, report.html(), force=force)
    if json_wanted:
        echo(json.dumps(report.as_json(), indent=2))
    elif file is None:
        echo(report.html(), nl=False)
    else:
        _print_verdict(report, file)
    if open_wanted and file is not None:
        _open(file)


def _print_verdict(report: Report, file: Path) -> None:
    from penstock.cli.console import make_console

    console = make_console()
    console.print(report.verdict.headline)
    for each in report.verdict.changes:
        console.print(f"  {each.title}: {each.fix}")
    echo(f"{file}")


def _read_plans(file: Path) -> tuple[Prediction, ...]:
    from penstock.report.predictions import read_plans

    try:
        if file.stat().st_size > _LARGEST_PLAN_BYTES:
            raise PenstockError(f"{file} is too large for a plan; give the output of penstock plan TARGET --json")
        answer = json.loads(file.read_text(encoding="utf-8"))
    except OSError as refused:
        raise PenstockError(f"{file} cannot be read: {refused.strerror}") from None
    except (ValueError, RecursionError):
        raise PenstockError(f"{file} is not JSON; give the output of penstock plan TARGET --json") from None
    return read_plans(answer, file.name)


def _check(file: Path, *, force: bool) -> None:
    if file.is_dir():
        raise PenstockError(f"{file} is a folder; name a file in it with -o")
    if file.exists() and not force:
        raise PenstockError(f"{file} exists already; overwrite it with --force, or name another file with -o")
    if not file.absolute().parent.is_dir():
        raise PenstockError(f"there is no folder {file.absolute().parent}; create it, or name another file with -o")


def _write(file: Path, html: str, *, force: bool) -> None:
    """Write the whole file or nothing, and never over a file that was created in the meantime."""
    draft = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        try:
            with open_draft(draft) as page:
                page.write(html.encode("utf-8"))
            if force:
                draft.replace(file)
            else:
                with file.open("xb"):
                    draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)
    except FileExistsError:
        raise PenstockError(f"{file} exists already; overwrite it with --force, or name another file with -o") from None
    except OSError as refused:
        raise PenstockError(f"{file} cannot be written: {refused.strerror}; name another file with -o") from None


def _open(file: Path) -> None:
    import webbrowser

    if not webbrowser.open(file.absolute().as_uri()):
        raise PenstockError(f"no web browser could be started here; the report is {file.absolute()}")
