"""The pages of `penstock plan`: the table of plans, the recommended one with its reasons, notes; or starting points.

In:  ``PlanTable``, settings to compare with it, ``StartingPoint``.
Out: lines on a rich console, 80 columns wide, readable without colour.
Runs in: command line.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.console import indented, make_grid
from penstock.formatting import counted, milliseconds
from penstock.planner import wording
from penstock.planner.plans import Plan, PlanTable
from penstock.planner.starting_points import StartingPoint
from penstock.planner.stated_settings import Beside
from penstock.units import GIB, MIB, format_bytes

FULL_COLUMNS = 80
"""The width that the tables need. On narrower pages figures continue on the next line; they are never cut off."""


def show_plans(console: Console, table: PlanTable, chosen: Plan | None, beside: Sequence[Beside]) -> None:
    """Print the whole page. ``chosen``: the plan that the answers led to."""
    _show_head(console, table)
    console.print(_table_of(table, console.width))
    console.print(Text(f"* recommended for {format_bytes(table.budget_bytes)} per rank", style="dim"))
    if beside:
        _show_beside(console, table, beside)
    if chosen is not None:
        _show_plan(console, "Your answers lead to", chosen)
        if not chosen.fits and table.recommended.fits:
            console.print(
                indented(
                    "This plan may need more than the memory limit; memory= limits the loader, but makes it slower."
                )
            )
    if chosen is None or chosen.name != table.recommended.name:
        _show_plan(console, "Recommended", table.recommended)
    console.print()
    for note in table.notes:
        console.print(indented(note))


def _show_head(console: Console, table: PlanTable) -> None:
    profile, facts = table.profile, table.facts
    length = "" if profile.length is None else f", {counted(profile.length, 'sample')}"
    console.print(Text(f"Plans for {profile.name}{length}", style="bold"))
    largest = f" (largest {format_bytes(profile.largest_bytes)})" if profile.spread > 0.05 else ""
    gpu = "" if facts.gpu_bytes is None else f", a GPU of {format_bytes(facts.gpu_bytes)}"
    step = "" if table.step_s is None else f" A training step takes {milliseconds(table.step_s)}."
    source = "" if profile.is_measured else " (figures from the file)"
    ranks = ("each of " if facts.ranks > 1 else "") + counted(facts.ranks, "rank")
    console.print(
        Text(
            f"A sample is {format_bytes(profile.sample_bytes)}{largest} and takes "
            f"{milliseconds(profile.cpu_s)} of computing and {milliseconds(profile.wait_s)} of waiting{source}.{step}"
        )
    )
    console.print(
        Text(
            f"For {ranks}: {counted(facts.cores, 'core')}, "
            f"{format_bytes(table.budget_bytes)} of {format_bytes(facts.available_bytes)} free memory{gpu}."
        )
    )
    console.print()


def _table_of(table: PlanTable, columns: int) -> Table:
    has_step = table.step_s is not None
    grid = _grid("plan", "workers\n× depth", "batch", "in\nflight", "host memory", "torch\ntakes", "samples\n/s",
                 "of\nbest", *(["GPU\nwaits"] if has_step else []), "risk", columns=columns)  # fmt: skip
    for plan in table.plans:
        is_best = plan.name == table.recommended.name
        grid.add_row(
            f"{plan.name}{' *' if is_best else ''}",
            f"{plan.workers} × {plan.depth}",
            f"{plan.batch_size}",
            f"{plan.in_flight}",
            _span(plan.memory.low, plan.memory.high),
            _short(plan.torch_memory.expected),
            _rate(plan.samples_per_s.expected),
            f"{plan.speed:.0%}",
            *([f"{plan.wait:.0%}"] if plan.wait is not None else []),
            plan.risk if plan.fits else "over budget",
            style="bold" if is_best else "",
        )
    return grid


def _grid(*headings: str, columns: int) -> Table:
    """A table of figures between two columns of text. If there is room, only the columns of text are wrapped."""
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for number, heading in enumerate(headings):
        is_text = number in (0, len(headings) - 1)
        grid.add_column(
            heading,
            justify="left" if is_text else "right",
            vertical="bottom",
            no_wrap=not is_text and columns >= FULL_COLUMNS,
        )
    return grid


def _show_beside(console: Console, table: PlanTable, beside: Sequence[Beside]) -> None:
    console.print()
    console.print(Text("Compared with other settings", style="bold"))
    plans = {plan.name: plan for plan in table.plans}
    ours = [plans.get(each.stated.name) for each in beside]
    columns = {
        "settings": [each.stated.name for each in beside],
        "workers,\nprefetch": [f"{each.stated.workers} × {each.stated.prefetch_factor}" for each in beside],
        "batch": [f"{each.stated.batch_size}" for each in beside],
        "stated\nmemory": [_short(each.stated.memory_bytes) if each.stated.memory_bytes else "-" for each in beside],
        "torch\nmemory": [_short(each.memory_bytes) for each in beside],
        "stated\nspeed": ["-" if each.stated.speed is None else f"{each.stated.speed:.0%}" for each in beside],
        "torch\nspeed": [f"{each.speed:.0%}" for each in beside],
        "our\nplan": ["-" if plan is None else f"{plan.workers} × {plan.depth}" for plan in ours],
        "our\nmemory": ["-" if plan is None else _short(plan.memory.expected) for plan in ours],
        "our\nspeed": ["-" if plan is None else f"{plan.speed:.0%}" for plan in ours],
    }  # fmt: skip
    # Columns without any figure are left out.
    columns = {heading: cells for heading, cells in columns.items() if set(cells) != {"-"}}
    grid = _grid(*columns, columns=console.width)
    grid.columns[-1].justify = "right"
    for row in zip(*columns.values(), strict=True):
        grid.add_row(*row)
    console.print(grid)
    console.print(indented("Speeds are shares of the fastest plan's samples/s."))


def _show_plan(console: Console, heading: str, plan: Plan) -> None:
    console.print()
    console.print(Text(f"{heading}: {plan.name}", style="bold"))
    for line in wording.describe(plan):
        console.print(indented(line))


def show_starting_point(console: Console, point: StartingPoint, target: str | None) -> None:
    """Print settings to start with, and their source. ``target``: a dataset without data to measure."""
    console.print(Text("Starting points: nothing was measured", style="bold"))
    if target is None:
        console.print("Name a dataset (penstock plan TARGET) for plans made for its samples.")
    else:
        console.print(
            Text(
                f"{target} has no data to measure here; run penstock plan where the data is, to get plans for its "
                "samples."
            )
        )
    grid = make_grid("dim", "")
    torchs = "" if point.torch_workers == point.workers else f" (torch's DataLoader: {point.torch_workers})"
    up_to = f", up to {point.batch_high}" if point.batch_high > point.batch_size else ""
    grid.add_row("batch size", f"{point.batch_size}{up_to}")
    grid.add_row("workers", f"{point.workers} per rank, {point.workers_on_node} on this node{torchs}")
    grid.add_row("prefetch factor", f"{point.prefetch_factor}")
    grid.add_row("pinned memory", "yes" if point.pin_memory else "no: no GPU was found")
    grid.add_row("persistent workers", "yes")
    grid.add_row("cache", f"{_span(point.cache_low_bytes, point.cache_high_bytes)}, one for the node")
    console.print(indented(grid))
    console.print(Text("Sources", style="bold"))
    for line in point.why:
        console.print(indented(line))


def _span(low: float, high: float) -> str:
    scale, unit = (GIB, "GiB") if high >= GIB else (MIB, "MiB")
    return f"{_number(low / scale)}-{_number(high / scale)} {unit}"


def _short(size: float) -> str:
    return f"{_number(size / GIB)} GiB" if size >= GIB else f"{_number(size / MIB)} MiB"


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
