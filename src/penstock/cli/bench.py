"""`penstock bench`: the user's dataset through torch's DataLoader and penstock's, side by side.

In:  a TARGET, arguments of the loaders, a settings file.
Out: a page or JSON.
Runs in: command line; imports torch when it measures.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from penstock.advice.machine import gather_facts
from penstock.cli.options import (
    FiniteRange,
    dataset_options,
    filled,
    json_option,
    print_json,
    read_own_settings,
)
from penstock.cli.progress import measuring
from penstock.formatting import counted, rate
from penstock.meter import Roots
from penstock.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.lab.bench import BenchResult, BenchSettings
    from penstock.lab.comparison import LoaderResult


@click.command(epilog="Exit status: 1 if TARGET cannot be read or gives no batch, 2 for wrong usage, 0 otherwise.")
@dataset_options
@click.option("--workers", type=click.IntRange(min=0), help="Number of workers of each loader.  [default: usable CPUs]")
@click.option("--device", help="Deliver batches to this device, such as cuda; also shows how fast copies to it can be.")
@click.option("--shuffle", is_flag=True, help="Read in random order.")
@click.option("--step-time", type=FiniteRange(min=0), default=0.0, metavar="SECONDS",
              help="Length of a simulated training step.  [default: 0]")  # fmt: skip
@click.option("--seconds", type=FiniteRange(min=0.1), default=3.0, show_default=True, help="Length of one round.")
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True,
              help="Number of rounds of each loader; the two loaders take turns.")  # fmt: skip
@json_option
@click.pass_obj
def command(
    roots: Roots, target: str, collate: str | None, settings_file: str | None, section: str, json_wanted: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Load TARGET with torch's DataLoader and with penstock's, in turns and with the same arguments. Compare samples
    and bytes per second, the time to the first batch and the growth of memory.

    TARGET is module:attribute or file.py:attribute: a dataset, or a function that returns one.
    """
    from penstock.cli.console import make_console
    from penstock.cli.target import load_function, load_target, prints_to_stderr, unreadable

    facts = gather_facts(roots)
    own, _ = read_own_settings(settings_file, section)
    given |= filled(given, own, max(1, int(facts.limits.cpu_usable)))
    given["shuffle"] = given["shuffle"] or bool(own.get("shuffle"))
    with prints_to_stderr(), measuring() as on_progress:
        from penstock.lab.bench import BenchSettings, bench, check_device

        settings = BenchSettings(target=target, **given)
        check_device(settings.device)
        on_progress(f"loading {target}", 0.0)
        dataset = load_target(target)
        collate_fn = None if collate is None else load_function(collate)
        try:
            measured = bench(dataset, collate_fn, settings, on_progress=on_progress)
        except Exception as error:
            raise unreadable(target, error, has_collate=collate is not None) from error

    if json_wanted:
        print_json({"machine": facts.as_json(), "settings": asdict(settings), **measured.as_json()})
    else:
        show_bench(make_console(), settings, measured)


def show_bench(console: Console, settings: BenchSettings, measured: BenchResult) -> None:
    """Print what was run, the table and the verdict."""
    from penstock.cli.console import make_table

    step = f", a step of {settings.step_time * 1000:g} ms" if settings.step_time else ""
    where = f", delivered to {settings.device}" if settings.device else ""
    ahead = f", prefetch_factor={settings.prefetch_factor}" if settings.prefetch_factor and settings.workers else ""
    console.print(
        f"{settings.target}: batches of {settings.batch_size}, {counted(settings.workers, 'worker')}{ahead}{where}"
        f"{step}. The loaders take turns: {counted(settings.rounds, 'round')} of {settings.seconds:g} s for each. "
        f"penstock's DataLoader has memory={settings.memory}."
    )
    link = measured.link_bytes_per_s
    if link is not None:
        console.print(f"The link to {settings.device} carries {link / 1e9:.1f} GB/s from pinned memory.")
    headings = ("samples/s", "GB/s", *(["of the link"] if link else []), "first batch", "memory growth")
    table = make_table("DataLoader", *headings)
    for result in (measured.comparison.torch, measured.comparison.penstock):
        table.add_row(*_cells(result, link))
    console.print(table)
    console.print(measured.comparison.verdict(), style="bold")


def _cells(result: LoaderResult, link: float | None) -> list[str]:
    growth = "unknown" if result.peak_growth_bytes is None else format_bytes(result.peak_growth_bytes)
    share = [] if link is None else [f"{100 * result.bytes_per_s / link:.0f}%"]
    slowest, fastest = min(result.rates), max(result.rates)
    span = f" ({rate(slowest)}-{rate(fastest)})" if fastest > 1.1 * slowest else ""
    return [
        result.name,
        rate(result.samples_per_s) + span,
        f"{result.bytes_per_s / 1e9:.3g}",
        *share,
        f"{result.first_batch_s:.2f} s",
        growth,
    ]
