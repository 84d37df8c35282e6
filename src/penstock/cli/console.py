"""How pages look: one console for stdout, one for progress, plain tables that fit 80 columns.

In:  the environment (COLUMNS, NO_COLOR, TERM), whether stdout is a terminal.
Out: rich consoles, tables and progress bars.
Runs in: command line.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

NARROWEST_COLUMNS = 20
"""Below this rich cuts words to nothing; COLUMNS=0 is what some terminals without a window say."""


def make_console(*, stderr: bool = False) -> Console:
    """A console for pages, or for progress on stderr, which must not end up in a pipe."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if console.width < NARROWEST_COLUMNS:
        console.width = NARROWEST_COLUMNS
    return console


def make_grid(*columns: str) -> Table:
    """A table without lines: one left-aligned column per style, the last one folds."""
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for style in columns:
        grid.add_column(style=style, overflow="fold")
    return grid


def make_progress(console: Console) -> Progress:
    """A bar that draws only when told to: a drawing thread would hold its lock while workers are forked."""
    return Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f}%"),
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_terminal,
    )
