"""Figures as people read them.

In:  numbers.
Out: as many digits as tell something.
Runs in: anywhere; pure.
"""

from __future__ import annotations


def figure(value: float) -> str:
    """Whole where there are ten of it or more, else two digits."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def milliseconds(seconds: float) -> str:
    """Three digits of it, or all of a long one."""
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{1000 * seconds:,.0f} ms"
