"""Numbers on the command line that must be finite.

In:  an option's text, such as 0.1.
Out: a float; wrong usage if it is nan, infinite or out of range.
Runs in: command line.
"""

from __future__ import annotations

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """click's own takes nan and inf, which compare as in range and end a search or a sleep much later."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number
