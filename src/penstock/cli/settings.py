"""`penstock settings`: how a team's own settings file maps to arguments, and what in it will hurt here.

In:  a settings file, ``Roots``.
Out: a page or JSON; exit status 1 if the file cannot be used.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from penstock.advice.machine import gather_facts
from penstock.advice.settings import find_in_settings
from penstock.cli.options import check_section, echo, json_option
from penstock.findings import Finding
from penstock.meter import Roots
from penstock.settings import Settings
from penstock.settings.reader import read

if TYPE_CHECKING:
    from rich.console import Console

_REMARK_COLUMNS = 14


@click.command(epilog="Exit status: 1 if the file cannot be used, 2 for wrong usage, 0 otherwise, also with findings.")
@click.argument("file", type=click.Path())
@click.option("--section", default="train", show_default=True, metavar="SECTION", callback=check_section,
              help="train, eval, val or test. Settings that the last three lack come from train.")  # fmt: skip
@json_option
@click.pass_obj
def command(roots: Roots, file: str, section: str, json_wanted: bool) -> None:
    """Show what a settings file (YAML, TOML or JSON) sets about loading: for each key the argument of
    penstock.DataLoader, the value and the reason. Then show the settings that will hurt on this machine, each with its
    fix."""
    settings = read(file, section)
    found = find_in_settings(settings, gather_facts(roots))
    if json_wanted:
        answer = {**asdict(settings), "file": file, "findings": [finding.as_json() for finding in found]}
        # A date in place of a number is printed as it is written.
        echo(json.dumps(answer, indent=2, default=str))
        return
    from penstock.cli.console import make_console

    show_settings(make_console(), settings, found)


def show_settings(console: Console, settings: Settings, found: Sequence[Finding]) -> None:
    """Print the file's keys with the arguments they set, then what will hurt."""
    from penstock.cli.console import indented, make_grid, show_findings

    console.print(f"What {settings.source} sets ({settings.section})", style="bold")
    if settings.entries:
        rows = [("their key", "our argument", "value")]
        rows += [(each.key, each.argument, each.shown) for each in settings.entries]
        widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
        grid = make_grid("", "", "", "dim")
        for column in grid.columns[:3]:
            # Only the remark is wrapped, if the other columns leave enough room for it.
            column.no_wrap = sum(widths) + _REMARK_COLUMNS <= console.width
        remarks = ("remark", *(each.remark for each in settings.entries))
        for number, (row, remark) in enumerate(zip(rows, remarks, strict=True)):
            grid.add_row(*row, remark, style="" if number else "dim")
        console.print(indented(grid))
    else:
        console.print("  nothing about loading", style="dim")
    console.print()
    show_findings(console, found)
