"""The page of `penstock settings`: their keys and our arguments, then what will hurt.

In:  ``Settings`` and ``Finding``s.
Out: lines on a rich console, no colour needed to read them.
Runs in: command line.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from penstock.cli.console import make_grid
from penstock.cli.doctor.view import show_findings
from penstock.findings import Finding
from penstock.settings import Settings


def show_settings(console: Console, settings: Settings, found: Sequence[Finding]) -> None:
    """Print the whole page."""
    console.print(Text(f"What {settings.source} says ({settings.section})", style="bold"))
    if settings.entries:
        grid = make_grid("", "", "", "dim")
        grid.add_row("their key", "our argument", "value", "remark", style="dim")
        for entry in settings.explain():
            grid.add_row(entry.key, entry.argument, entry.shown, entry.remark)
        console.print(Padding(grid, (0, 0, 0, 2)))
    else:
        console.print("  nothing about loading", style="dim")
    console.print()
    show_findings(console, found)
