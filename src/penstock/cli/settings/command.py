"""`penstock settings`: how a team's own settings file maps to arguments, and what in it will hurt here.

In:  a settings file, ``Roots``.
Out: a page or JSON; exit status 1 when the file cannot be used.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict

import click

from penstock.advice.machine_facts import gather_facts
from penstock.advice.settings import find_in_settings
from penstock.cli.own_settings import check_section
from penstock.meter import Roots
from penstock.settings import load


@click.command(epilog="Exit status: 1 when the file cannot be used, 0 otherwise, whatever it says. 2 is wrong usage.")
@click.argument("file", type=click.Path())
@click.option("--section", default="train", show_default=True, metavar="SECTION", callback=check_section,
              help="train, eval, val or test; the last three take from training what they do not set.")  # fmt: skip
@click.option("--json", "json_wanted", is_flag=True, help="Print everything as one JSON object.")
@click.pass_obj
def command(roots: Roots, file: str, section: str, json_wanted: bool) -> None:
    """Show what a settings file (YAML, TOML or JSON) says about loading: its key, the argument of penstock.DataLoader
    that it gives, the value and why; then what of that will hurt on this machine, with the change to make."""
    with warnings.catch_warnings():
        # What they say is among the remarks and findings.
        warnings.simplefilter("ignore")
        settings = load(file, section)
    found = find_in_settings(settings, gather_facts(roots))
    if json_wanted:
        answer = {**asdict(settings), "file": file, "findings": [finding.as_json() for finding in found]}
        # A date in the place of a number is shown as it is written.
        click.echo(json.dumps(answer, indent=2, default=str))
        return
    from penstock.cli.console import make_console
    from penstock.cli.settings.view import show_settings

    show_settings(make_console(), settings, found)
