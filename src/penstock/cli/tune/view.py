"""The pages of `penstock tune`: the measurements and the winner; earlier records side by side.

In:  ``Tuned``, or records.
Out: lines on a rich console.
Runs in: command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.formatting import counted, rate
from penstock.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from penstock.lab.tune import Tuned, TuneSettings


def show_tuned(console: Console, settings: TuneSettings, tuned: Tuned) -> None:
    """Print the table of measurements and the verdict."""
    step = f", a step of {settings.step_time * 1000:g} ms" if settings.step_time else ""
    console.print(
        f"{settings.target}: batches of {settings.batch_size}{step}, on {counted(tuned.cores, 'CPU')}, within "
        f"{format_bytes(tuned.budget_bytes)}; {counted(len(tuned.trials), 'measurement')} in {tuned.elapsed_s:.0f} s."
    )
    if tuned.trials:
        console.print(_trials(tuned, with_wait=bool(settings.step_time)))
    console.print(tuned.verdict(), style="bold")
    winner = tuned.winner
    if winner is not None:
        console.print(
            f"In your program: penstock.DataLoader(..., num_workers={winner.workers}), and "
            f"loader.resize(depth={winner.depth})."
        )
        console.print(tuned.model_words())


def _trials(tuned: Tuned, *, with_wait: bool) -> Table:
    from penstock.cli.console import make_table

    headings = ["workers", "ahead", "samples/s", "±", "model", "memory", "model", *(["waits"] if with_wait else [])]
    table = make_table("", *headings, last="why", padding=0)
    table.pad_edge = True
    for trial, why in zip(tuned.trials, tuned.reasons, strict=True):
        expected = tuned.expected[trial.setting]
        waits = [] if not with_wait else ["-" if trial.wait_fraction is None else f"{trial.wait_fraction:.0%}"]
        measured = ("over", "") if trial.is_over else (rate(trial.samples_per_s), f"{trial.noise:.0%}")
        table.add_row(
            "*" if trial.setting == tuned.winner else "",
            str(trial.setting.workers),
            str(trial.setting.depth),
            *measured,
            rate(expected.samples_per_s),
            format_bytes(trial.memory_bytes),
            format_bytes(expected.memory_bytes),
            *waits,
            why,
        )
    return table


def show_records(console: Console, target: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Print earlier winners, oldest first."""
    from penstock.cli.console import make_table

    console.print(f"{target}: {counted(len(records), 'record')}, oldest first")
    headings = ("batch", "step", "CPUs", "budget", "workers", "ahead", "samples/s", "memory")
    table = make_table("when", *headings, padding=0)
    table.columns[0].no_wrap = True
    for record in records:
        settings, winner = record["settings"], record["winner"]
        table.add_row(
            str(record["time"])[:16].replace("T", " "),
            str(settings["batch_size"]),
            f"{1000 * settings['step_time']:g} ms",
            f"{record['cores']:g}",
            format_bytes(record["budget_bytes"]),
            str(winner["workers"]),
            str(winner["depth"]),
            rate(winner["samples_per_s"]),
            format_bytes(winner["memory_bytes"]),
        )
    console.print(table)
