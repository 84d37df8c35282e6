"""`penstock demo`: torch's DataLoader and penstock's on this machine, on a built-in dataset.

In:  ``Roots`` for the machine.
Out: a page or JSON.
Runs in: command line; imports torch when it measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from penstock.advice.machine import MachineFacts, find_in_machine, gather_facts
from penstock.cli.options import json_option, print_json
from penstock.cli.progress import measuring
from penstock.findings import Finding
from penstock.formatting import counted
from penstock.meter import Roots
from penstock.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.lab.comparison import LoaderComparison
    from penstock.lab.demo import DemoSettings


@click.command()
@json_option
@click.pass_obj
def command(roots: Roots, json_wanted: bool) -> None:
    """Run torch's DataLoader and penstock's side by side for about 20 seconds, on a built-in dataset of large samples
    that arrive slowly. Both get the same arguments; penstock's also gets a memory limit.
    """
    from penstock.cli.console import make_console

    facts = gather_facts(roots)
    page = make_console()
    if not json_wanted:
        show_machine(page, facts, find_in_machine(facts))

    with measuring() as on_progress:
        from penstock.lab.demo import DemoSettings, compare

        def on_turn(name: str, done: float) -> None:
            on_progress(f"{name}'s DataLoader", done)

        on_turn("torch", 0.0)
        settings = DemoSettings()
        comparison = compare(settings, on_progress=on_turn)

    if json_wanted:
        print_json({"machine": facts.as_json(), "settings": asdict(settings), **comparison.as_json()})
    else:
        show_comparison(page, settings, comparison)


def show_machine(console: Console, facts: MachineFacts, found: Sequence[Finding]) -> None:
    """Print the machine in a line, and the ids of the findings that hurt."""
    limits, gpus = facts.limits, len(facts.gpu.gpus)
    shm = "none" if limits.shm_size_bytes is None else format_bytes(limits.shm_size_bytes)
    console.print(
        f"This machine: {format_bytes(limits.memory_available_bytes)} of "
        f"{format_bytes(limits.memory_limit_bytes)} memory available, {limits.cpu_usable:g} CPUs usable, "
        f"/dev/shm {shm}, {counted(gpus, 'GPU') if gpus else 'no GPU'}."
    )
    bad = [finding.id for finding in found if finding.severity != "info"]
    if bad:
        console.print(f"Will hurt here: {', '.join(bad)}. penstock doctor shows the fixes.", style="yellow")
    console.print()


def show_comparison(console: Console, settings: DemoSettings, comparison: LoaderComparison) -> None:
    """Print the table and the verdict."""
    from penstock.cli.console import make_table

    console.print(
        f"Batches of {counted(settings.batch_size, 'sample')} of {format_bytes(settings.sample_bytes)} that take "
        f"{settings.wait_s * 1000:.0f} ms to arrive, {counted(settings.workers, 'worker')}, a training step of "
        f"{settings.step_s * 1000:.0f} ms. The loaders take turns: {counted(settings.rounds, 'round')} of "
        f"{settings.round_s:g} s for each. penstock's DataLoader has memory={format_bytes(settings.memory_bytes)}."
    )
    table = make_table("DataLoader", "samples/s", "first batch", "memory growth")
    for result in (comparison.torch, comparison.penstock):
        growth = "unknown" if result.peak_growth_bytes is None else format_bytes(result.peak_growth_bytes)
        table.add_row(result.name, f"{result.samples_per_s:.0f}", f"{result.first_batch_s:.2f} s", growth)
    console.print(table)
    console.print(comparison.verdict(), style="bold")
