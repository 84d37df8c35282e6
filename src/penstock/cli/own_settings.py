"""The user's settings file beside the command line's own options.

In:  ``--settings FILE``, ``--section``.
Out: arguments of the loader, and the file's own name for each.
Runs in: command line.
"""

from __future__ import annotations

import warnings
from typing import Any

import click

from penstock.errors import ConfigError
from penstock.settings import load
from penstock.settings.sections import phase_asked_for


def check_section(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    """A callback of click's: a name that is no section is wrong usage, whatever the file says."""
    try:
        phase_asked_for(value)
    except ConfigError as wrong:
        raise click.BadParameter(str(wrong)) from None
    return value


section_option = click.option(
    "--section", default="train", show_default=True, metavar="SECTION", callback=check_section,
    help="With --settings: train, eval, val or test.",
)  # fmt: skip


def read_own_settings(file: str | None, section: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Argument -> value, and argument -> the key it has in the file. Both are empty without a file."""
    if file is None:
        return {}, {}
    with warnings.catch_warnings():
        # What they say is among the findings of penstock settings.
        warnings.simplefilter("ignore")
        settings = load(file, section)
    keys = {entry.argument: entry.key for entry in settings.entries if entry.key != "(call)"}
    return dict(settings.arguments), keys
