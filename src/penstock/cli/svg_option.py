"""Drawings asked for on the command line.

In:  ``--plot FILE.svg``.
Out: the path, checked before anything runs; the file.
Runs in: command line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from penstock.errors import PenstockError


def svg_option(help_text: str) -> Callable[[Any], Any]:
    """``--plot``, with what it draws."""
    return click.option("--plot", callback=_svg, metavar="FILE.svg", help=help_text)


def check_folder(plot: Path | None) -> None:
    """Wrong usage if the file could not be made: better said before minutes of measuring."""
    if plot is not None and not plot.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {plot.absolute().parent}", param_hint="--plot")


def write_svg(plot: Path, drawing: str) -> None:
    try:
        plot.write_text(drawing, encoding="utf-8")
    except OSError as refused:
        raise PenstockError(f"{plot} cannot be written: {refused.strerror}") from None


def _svg(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    if value is not None and not value.endswith(".svg"):
        raise click.BadParameter(f"{value} is no .svg: that is what is drawn")
    return None if value is None else Path(value)
