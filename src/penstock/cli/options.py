"""Options that several commands have: finite numbers, sizes, a drawing.

In:  an option's text, such as 0.1, 4GB, 50%, chart.svg.
Out: a checked value; wrong usage before anything runs.
Runs in: command line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from penstock.errors import ConfigError, PenstockError
from penstock.units import parse_bytes, parse_size


class FiniteRange(click.FloatRange):
    """A number. click's own class accepts nan and inf, which make a later search or sleep fail."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def check_size(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A callback for click: the text of a size, unchanged. None, an option that was left out, passes."""
    try:
        if value is not None:
            parse_size(value)
    except ConfigError as wrong:
        raise click.BadParameter(str(wrong)) from None
    return value


def check_bytes(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """A callback for click: an absolute size, in bytes."""
    try:
        return None if value is None else parse_bytes(value, name=parameter.name or "size")
    except ConfigError as wrong:
        raise click.BadParameter(str(wrong)) from None


def svg_option(help_text: str) -> Callable[[Any], Any]:
    """``--plot FILE.svg``."""
    return click.option("--plot", callback=_check_svg, metavar="FILE.svg", help=help_text)


def check_folder(plot: Path | None) -> None:
    """Wrong usage if the folder of the file is missing: reported before minutes of measuring."""
    if plot is not None and not plot.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {plot.absolute().parent}", param_hint="--plot")


def write_svg(plot: Path, drawing: str) -> None:
    try:
        plot.write_text(drawing, encoding="utf-8")
    except OSError as refused:
        raise PenstockError(f"{plot} cannot be written: {refused.strerror}") from None


def _check_svg(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    if value is not None and not value.endswith(".svg"):
        raise click.BadParameter(f"{value} does not end in .svg; the drawing is an SVG file")
    return None if value is None else Path(value)
