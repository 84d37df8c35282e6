"""Sizes on the command line, checked before anything runs.

In:  an option's text, such as 4GB, 50% or auto.
Out: the same text, or bytes; wrong usage if it is no size.
Runs in: command line.
"""

from __future__ import annotations

import click

from penstock.errors import ConfigError
from penstock.units import parse_bytes, parse_size


def check_size(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A callback of click's; an option that was left out passes."""
    try:
        if value is not None:
            parse_size(value)
    except ConfigError as wrong:
        raise click.BadParameter(str(wrong)) from None
    return value


def check_bytes(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """The same for a size that must be absolute: bytes."""
    try:
        return None if value is None else parse_bytes(value, name=parameter.name or "size")
    except ConfigError as wrong:
        raise click.BadParameter(str(wrong)) from None
