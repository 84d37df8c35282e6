"""What pages consist of: a console, tables that fit 80 columns, findings, progress bars.

In:  the environment (COLUMNS, NO_COLOR, TERM), whether stdout is a terminal.
Out: rich consoles, tables and progress bars.
Runs in: command line.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from penstock.findings import Finding
from penstock.formatting import counted, visible

NARROWEST_COLUMNS = 20
"""The least width of a page: with fewer columns rich cuts words away, and some terminals without a window report
COLUMNS=0."""
_STYLES = {"hurts": "bold red", "warning": "yellow", "info": "cyan"}


def make_console(*, stderr: bool = False) -> Console:
    """A console for pages, on stdout; with ``stderr`` a console for progress, which must not be written into a pipe."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    console.push_render_hook(_VisibleHook())
    if console.width < NARROWEST_COLUMNS:
        console.width = NARROWEST_COLUMNS
    return console


class Visible:
    """Anything that rich can print, with the control characters of its text shown as symbols. The control codes of rich
    itself are in segments of their own and stay."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._content, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


class _VisibleHook(RenderHook):
    """Makes everything that a console prints visible."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [Visible(each) for each in renderables]


def make_grid(*columns: str) -> Table:
    """A table without lines: one left-aligned column for each style. Long text continues on the next line."""
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for style in columns:
        grid.add_column(style=style, overflow="fold")
    return grid


def make_table(first: str, *figures: str, last: str | None = None, padding: int = 1) -> Table:
    """A table with a rule below its head: a column of text, columns of figures, and perhaps a last column of text."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, padding))
    table.add_column(first, overflow="fold")
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    if last is not None:
        table.add_column(last, overflow="fold")
    return table


def indented(grid: Table | Text | str) -> Padding:
    return Padding(Text(grid) if isinstance(grid, str) else grid, (0, 0, 0, 2))


def show_findings(console: Console, found: Sequence[Finding]) -> None:
    """Print the findings, worst first, each with its fix."""
    bad = sum(finding.severity != "info" for finding in found)
    if bad:
        console.print(Text(f"{counted(bad, 'thing')} here will hurt", style="bold red"))
    else:
        console.print(Text("Nothing here will hurt", style="bold green"))
    grid = make_grid("", "")
    for finding in found:
        severity = Text(finding.severity, style=_STYLES[finding.severity])
        grid.add_row(severity, Text(f"{finding.id}: {finding.what}"))
        grid.add_row("", Text.assemble(("fix: ", "bold"), finding.fix))
    console.print(indented(grid))


def make_progress(console: Console) -> Progress:
    """A bar that is drawn only on refresh(): a thread that draws would hold rich's lock while workers are forked."""
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
