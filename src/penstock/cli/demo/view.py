"""The demo's page: the machine in a line, a progress bar, the comparison as a table, the verdict.

In:  ``MachineFacts``, ``Finding``s, ``Comparison``.
Out: lines on a rich console.
Runs in: command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.advice.machine_facts import MachineFacts
from penstock.findings import Finding
from penstock.lab.comparison import Comparison, LoaderResult
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.lab.demo import DemoSettings


def show_machine(console: Console, facts: MachineFacts, found: Sequence[Finding]) -> None:
    """Print what matters of the doctor's page, in short."""
    limits = facts.limits
    shm = "none" if limits.shm_size_bytes is None else format_bytes(limits.shm_size_bytes)
    console.print(
        Text(
            f"This machine: {format_bytes(limits.memory_available_bytes)} of "
            f"{format_bytes(limits.memory_limit_bytes)} memory available, {limits.cpu_usable:g} CPUs usable, "
            f"/dev/shm {shm}, {_gpu_words(facts)}."
        )
    )
    bad = [finding.id for finding in found if finding.severity != "info"]
    if bad:
        console.print(Text(f"Will hurt: {', '.join(bad)}. For fixes run: penstock doctor", style="yellow"))
    console.print()


def show_comparison(console: Console, settings: DemoSettings, comparison: Comparison) -> None:
    """Print the table and the verdict."""
    console.print(
        Text(
            f"Batches of {settings.batch_size} samples of {format_bytes(settings.sample_bytes)}, each "
            f"{settings.wait_s * 1000:.0f} ms to arrive, {settings.workers} workers, a training step of "
            f"{settings.step_s * 1000:.0f} ms; {settings.rounds} rounds of {settings.round_s:g} s each, "
            f"in turns; penstock with memory={format_bytes(settings.memory_bytes)}."
        )
    )
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("DataLoader")
    for heading in ("samples/s", "first batch", "memory growth"):
        table.add_column(heading, justify="right")
    for result in (comparison.torch, comparison.penstock):
        table.add_row(*_cells(result))
    console.print(table)
    console.print(Text(comparison.verdict(), style="bold"))


def _cells(result: LoaderResult) -> tuple[str, str, str, str]:
    growth = "not known" if result.peak_growth_bytes is None else format_bytes(result.peak_growth_bytes)
    return result.name, f"{result.samples_per_s:.0f}", f"{result.first_batch_s:.2f} s", growth


def _gpu_words(facts: MachineFacts) -> str:
    count = len(facts.gpu.gpus)
    return "no GPU" if count == 0 else "1 GPU" if count == 1 else f"{count} GPUs"
