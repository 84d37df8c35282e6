"""The pages of `penstock plan`: the table of plans, the one to take and why, what to know; or starting points.

In:  ``PlanTable``, settings beside it, ``StartingPoint``.
Out: lines on a rich console, 80 columns wide, no colour needed to read them.
Runs in: command line.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from penstock.cli.console import make_grid
from penstock.formatting import milliseconds
from penstock.planner import wording
from penstock.planner.plans import Plan, PlanTable
from penstock.planner.starting_points import StartingPoint
from penstock.planner.stated_settings import Beside
from penstock.units import GIB, MIB, format_bytes

FULL_COLUMNS = 80
"""In narrower pages figures fold rather than being cut off."""


def show_plans(console: Console, table: PlanTable, chosen: Plan | None, beside: Sequence[Beside]) -> None:
    """Print the whole page. ``chosen``: what the answers led to."""
    _show_head(console, table)
    console.print(_table_of(table, console.width))
    console.print(Text(f"* recommended for {format_bytes(table.budget_bytes)} a rank", style="dim"))
    if beside:
        _show_beside(console, table, beside)
    if chosen is not None:
        _show_plan(console, "Your answers lead to", chosen)
        if not chosen.fits and table.recommended.fits:
            console.print(_item("It may take more than was allowed: memory= holds it to that, at the cost of speed."))
    if chosen is None or chosen.name != table.recommended.name:
        _show_plan(console, "Recommended", table.recommended)
    console.print()
    for note in table.notes:
        console.print(_item(note))


def _show_head(console: Console, table: PlanTable) -> None:
    profile, facts = table.profile, table.facts
    length = "" if profile.length is None else f", {profile.length:,} sample{'s' * (profile.length != 1)}"
    console.print(Text(f"Plans for {profile.name}{length}", style="bold"))
    largest = f" (largest {format_bytes(profile.largest_bytes)})" if profile.spread > 0.05 else ""
    gpu = "" if facts.gpu_bytes is None else f", a GPU of {format_bytes(facts.gpu_bytes)}"
    step = "" if table.step_s is None else f" A step takes {milliseconds(table.step_s)}."
    verb = "takes" if profile.is_measured else "is said to take"
    console.print(
        Text(
            f"A sample is {format_bytes(profile.sample_bytes)}{largest} and {verb} "
            f"{milliseconds(profile.cpu_s)} of a processor and {milliseconds(profile.wait_s)} of "
            f"waiting.{step}"
        )
    )
    console.print(
        Text(
            f"For each of {facts.ranks} rank{'s' * (facts.ranks > 1)}: {facts.cores:g} cores, "
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
    """A table of figures between a name and a word: where there is room, only those two fold."""
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
    console.print(Text("Beside others' settings", style="bold"))
    grid = _grid("settings", "workers ×\nprefetch", "batch", "they\nsay", "torch\ntakes", "they\nsay",
                 "torch\ndoes", "penstock", "takes", "does", "", columns=console.width)  # fmt: skip
    plans = {plan.name: plan for plan in table.plans}
    for each in beside:
        stated, ours = each.stated, plans.get(each.stated.name)
        grid.add_row(
            stated.name,
            f"{stated.workers} × {stated.prefetch_factor}",
            f"{stated.batch_size}",
            "-" if stated.memory_bytes is None else _short(stated.memory_bytes),
            _short(each.memory_bytes),
            "-" if stated.speed is None else f"{stated.speed:.0%}",
            f"{each.speed:.0%}",
            "-" if ours is None else f"{ours.workers} × {ours.depth}",
            "-" if ours is None else _short(ours.memory.expected),
            "-" if ours is None else f"{ours.speed:.0%}",
            "",
        )
    console.print(grid)


def _show_plan(console: Console, heading: str, plan: Plan) -> None:
    console.print()
    console.print(Text(f"{heading}: {plan.name}", style="bold"))
    for line in wording.describe(plan):
        console.print(_item(line))


def _item(line: str) -> Padding:
    return Padding(Text(line), (0, 0, 0, 2))


def show_starting_point(console: Console, point: StartingPoint, target: str | None) -> None:
    """Print where to begin, and from where that comes. ``target``: the dataset that had nothing to measure."""
    console.print(Text("Starting points: nothing was measured", style="bold"))
    if target is None:
        console.print("Name a dataset (penstock plan TARGET) for plans of its own samples.")
    else:
        console.print(Text(f"{target} has nothing to measure here; with its data there are plans of its own samples."))
    grid = make_grid("dim", "")
    torchs = "" if point.torch_workers == point.workers else f" (torch's DataLoader: {point.torch_workers})"
    up_to = f", up to {point.batch_high}" if point.batch_high > point.batch_size else ""
    grid.add_row("batch size", f"{point.batch_size}{up_to}")
    grid.add_row("workers", f"{point.workers} per rank, {point.workers_on_node} on this node{torchs}")
    grid.add_row("prefetch factor", f"{point.prefetch_factor}")
    grid.add_row("pinned memory", "yes" if point.pin_memory else "no: no GPU is known")
    grid.add_row("persistent workers", "yes")
    grid.add_row("cache", f"{_span(point.cache_low_bytes, point.cache_high_bytes)}, one for the node")
    console.print(Padding(grid, (0, 0, 0, 2)))
    console.print(Text("Where they come from", style="bold"))
    for line in point.why:
        console.print(_item(line))


def _span(low: float, high: float) -> str:
    scale, unit = (GIB, "GiB") if high >= GIB else (MIB, "MiB")
    return f"{_number(low / scale)}-{_number(high / scale)} {unit}"


def _short(size: float) -> str:
    return f"{_number(size / GIB)} GiB" if size >= GIB else f"{_number(size / MIB)} MiB"


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
