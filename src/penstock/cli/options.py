"""Options that several commands share: sizes, numbers, a dataset's options, a settings file, drawings, JSON.

In:  an option's text, such as 0.1, 4GB, 50%, chart.svg, train.yaml.
Out: a checked value; wrong usage before anything runs.
Runs in: command line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from penstock._version import __version__
from penstock.errors import ConfigError, PenstockError
from penstock.formatting import visible
from penstock.units import parse_bytes, parse_size

_BATCH_SIZE = 32

json_option = click.option("--json", "json_wanted", is_flag=True, help="Print one JSON object instead of a page.")


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text that may quote files, records or other programs; its escape sequences do not reach the terminal."""
    click.echo(visible(str(text)), err=err, nl=nl)


def print_json(answer: Mapping[str, Any]) -> None:
    """Print an answer, with penstock's version as its first entry."""
    echo(json.dumps({"penstock": __version__, **answer}, indent=2))


# -- numbers and sizes ------------------------------------------------------------------------------------------------


class FiniteRange(click.FloatRange):
    """A finite number. click's own class accepts nan and inf, which make a later search or sleep fail."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def check_size(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A click callback: the text of a size, unchanged; None for an option that is not given."""
    try:
        if value is not None:
            parse_size(value)
    except ConfigError as wrong:
        raise click.BadParameter(str(wrong)) from None
    return value


def check_bytes(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """A click callback: an absolute size, in bytes."""
    try:
        return None if value is None else parse_bytes(value, name=parameter.name or "size")
    except ConfigError as wrong:
        raise click.BadParameter(str(wrong)) from None


# -- a dataset and the user's settings file ---------------------------------------------------------------------------


def dataset_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """TARGET and the options of every command that runs a dataset."""
    for option in (
        section_option,
        click.option("--settings", "settings_file", metavar="FILE",
                     help="Read options that are not given here from a settings file."),
        click.option("--collate", metavar="TARGET", help="Your own collate function."),
        click.option("--memory", callback=check_size, metavar="SIZE",
                     help="Memory limit of penstock's loader, such as 4GB.  [default: auto, half of the free memory]"),
        click.option("--batch-size", type=click.IntRange(min=1), help=f"Samples in a batch.  [default: {_BATCH_SIZE}]"),
        click.argument("target"),
    ):  # fmt: skip
        command = option(command)
    return command


def check_section(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    """A click callback: an unknown section is wrong usage."""
    from penstock.settings.sections import phase_asked_for

    try:
        phase_asked_for(value)
    except ConfigError as wrong:
        raise click.BadParameter(str(wrong)) from None
    return value


section_option = click.option(
    "--section", default="train", show_default=True, metavar="SECTION", callback=check_section,
    help="Section of the settings file: train, eval, val or test.",
)  # fmt: skip


def read_own_settings(file: str | None, section: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Argument -> value, and argument -> its key in the file. Both are empty without a file."""
    from penstock.settings.reader import read

    if file is None:
        return {}, {}
    settings = read(file, section)
    keys = {entry.argument: entry.key for entry in settings.entries if entry.key != "(call)"}
    return dict(settings.arguments), keys


def filled(given: Mapping[str, Any], own: Mapping[str, Any], cores: int) -> dict[str, Any]:
    """Batch size, workers, memory and prefetch factor: as given, else from the settings file, else the default."""
    workers = own.get("num_workers") if given.get("workers") is None else given["workers"]
    return {
        "batch_size": given["batch_size"] or own.get("batch_size") or _BATCH_SIZE,
        "workers": workers if isinstance(workers, int) else cores,
        "memory": given["memory"] or own.get("memory", "auto"),
        "prefetch_factor": own.get("prefetch_factor"),
    }


# -- files to write ---------------------------------------------------------------------------------------------------


def svg_option(help_text: str) -> Callable[[Any], Any]:
    """The option ``--plot FILE.svg``."""
    return click.option("--plot", callback=_check_svg, metavar="FILE.svg", help=help_text)


def _check_svg(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    if value is not None and not value.endswith(".svg"):
        raise click.BadParameter(f"{value} does not end in .svg; the drawing is an SVG file")
    return check_folder(ctx, parameter, None if value is None else Path(value))


def check_folder(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """A click callback: a file to be written after minutes of measuring must have an existing folder."""
    if value is not None and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"{value} cannot be written: there is no folder {value.absolute().parent}")
    return value


def write_text(file: Path, text: str) -> None:
    """Write a text to a file. Raises PenstockError if that fails."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as refused:
        raise PenstockError(f"{file} cannot be written: {refused.strerror or refused}") from None
