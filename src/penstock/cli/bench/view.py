"""The bench's page: what was run, both loaders as a table, the verdict.

In:  ``BenchSettings``, ``Measured``.
Out: lines on a rich console.
Runs in: command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.lab.comparison import LoaderResult
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.lab.bench import BenchSettings, Measured


def show_bench(console: Console, settings: BenchSettings, measured: Measured) -> None:
    """Print the table and the verdict."""
    step = f", a step of {settings.step_time * 1000:g} ms" if settings.step_time else ""
    where = f", delivered on {settings.device}" if settings.device else ""
    ahead = f", prefetch_factor={settings.prefetch_factor}" if settings.prefetch_factor and settings.workers else ""
    workers = f"{settings.workers} worker{'s' * (settings.workers != 1)}"
    rounds = f"{settings.rounds} round{'s' * (settings.rounds > 1)}"
    console.print(
        Text(
            f"{settings.target}: batches of {settings.batch_size}, {workers}{ahead}{where}{step}; {rounds} of "
            f"{settings.seconds:g} s each, in turns; penstock with memory={settings.memory}."
        )
    )
    link = measured.link_bytes_per_s
    if link is not None:
        console.print(Text(f"The link to {settings.device} itself: {link / 1e9:.1f} GB/s from pinned memory."))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("DataLoader")
    for heading in ("samples/s", "GB/s", *(["of the link"] if link else []), "first batch", "memory growth"):
        table.add_column(heading, justify="right")
    for result in (measured.comparison.torch, measured.comparison.penstock):
        table.add_row(*_cells(result, link))
    console.print(table)
    console.print(Text(measured.comparison.verdict(), style="bold"))


def _cells(result: LoaderResult, link: float | None) -> list[str]:
    growth = "not known" if result.peak_growth_bytes is None else format_bytes(result.peak_growth_bytes)
    share = [] if link is None else [f"{100 * result.bytes_per_s / link:.0f}%"]
    rate = f"{result.samples_per_s:.0f}" if result.samples_per_s >= 10 else f"{result.samples_per_s:.2g}"
    return [result.name, rate, f"{result.bytes_per_s / 1e9:.3g}", *share, f"{result.first_batch_s:.2f} s", growth]
