"""The page of `penstock gpu`: components by batch size, other choices, the largest batch, the picture.

In:  ``Answer``.
Out: lines on a rich console; JSON.
Runs in: command line.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from penstock.charts.gpu_memory import GpuMemoryChart
from penstock.cli.console import make_table
from penstock.cli.gpu.model import Model
from penstock.gpu import COMPONENTS, BatchSize, Estimate, WhatIf
from penstock.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """The memory that training one model needs, by batch size."""

    model: Model
    estimates: list[Estimate]
    memory_bytes: int | None
    """Memory of the GPU; None: unknown."""

    def chart(self) -> GpuMemoryChart:
        columns = [(each.batch_size, each.components) for each in self.estimates]
        return GpuMemoryChart(title=self.model.name, columns=columns, limit_bytes=self.memory_bytes)

    def as_json(self) -> dict[str, Any]:
        model = self.model
        return {
            "model": model.name,
            "training": {
                "optimizer": model.optimizer, "precision": model.precision, "checkpointing": model.checkpointing,
            },
            "memory_bytes": self.memory_bytes,
            "estimates": [asdict(each) for each in self.estimates],
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Answer(GpuMemory):
    """All results of the command for one model."""

    what_ifs: list[WhatIf]
    """The effects of other choices at the largest of the batch sizes."""
    found: BatchSize | None
    """The largest batch size that fits; None if it was not requested."""

    def as_json(self) -> dict[str, Any]:
        return {
            **super().as_json(),
            "what_ifs": [
                {**asdict(each), "saved_allocated_bytes": self._saved_allocated(each)} for each in self.what_ifs
            ],
            "found": None if self.found is None else asdict(self.found),
        }

    def _saved_allocated(self, choice: WhatIf) -> int:
        now = self.estimates[-1].uncalibrated or self.estimates[-1]
        return now.allocated_bytes - choice.estimate.allocated_bytes

    def choices(self) -> list[tuple[str, str, str, str]]:
        """A row for each choice: its name, the reserved bytes it saves, the allocated bytes it saves, its cost in
        time."""
        return [
            (each.name, _signed(each.saved_bytes), _signed(self._saved_allocated(each)), each.time_cost)
            for each in self.what_ifs
        ]


def show_answer(console: Console, answer: Answer) -> None:
    """Print the whole page."""
    show_estimates(console, answer)
    console.print(Text(f"Other choices, at batch size {answer.estimates[-1].batch_size}", style="bold"))
    table = make_table("change", "reserved", "allocated", last="time (typical, not measured)")
    for row in answer.choices():
        table.add_row(*row)
    console.print(table)
    if answer.found is not None:
        _show_found(console, answer.found)
    show_bars(console, answer)


def show_estimates(console: Console, memory: GpuMemory) -> None:
    """Print the table by component."""
    model, estimates, memory_bytes = memory.model, memory.estimates, memory.memory_bytes
    more = ", checkpointing" if model.checkpointing else ""
    state = "estimated, corrected by real steps" if estimates[0].correction is not None else "estimated"
    console.print(Text(f"{model.name}, {model.optimizer}, {model.precision}{more}: GPU memory by batch size, {state}"))
    table = make_table("component", *(str(each.batch_size) for each in estimates), last="grows")
    table.columns[0].no_wrap = True
    for name in COMPONENTS:
        if any(each.components.get(name, 0) for each in estimates):
            counts = [format_bytes(each.components.get(name, 0)) for each in estimates]
            table.add_row(name.replace("_", " "), *counts, _growth(estimates[0], name))
    table.add_section()
    table.add_row("allocated", *(format_bytes(each.allocated_bytes) for each in estimates), "")
    table.add_row("reserved", *(format_bytes(each.reserved_bytes) for each in estimates), "")
    for words, end in (("  at least", 0), ("  at most", 1)):
        table.add_row(words, *(format_bytes(each.reserved_range[end]) for each in estimates), "")
    table.add_row("nvidia-smi shows", *(format_bytes(each.device_bytes) for each in estimates), "")
    if estimates[0].correction is not None:
        traced = [each.uncalibrated or each for each in estimates]
        table.add_row("reserved, uncorrected", *(format_bytes(each.reserved_bytes) for each in traced), "")
    table.add_row("peak is in", *(each.peak_phase for each in estimates), "")
    if memory_bytes is not None:
        fits = ("yes" if each.fits else "no" for each in estimates)
        table.add_row(f"fits {format_bytes(memory_bytes)}", *fits, "")
    console.print(table)
    for trial in estimates[0].correction.trials if estimates[0].correction is not None else ():
        console.print(
            Text(
                f"Run at batch size {trial.batch_size}: {format_bytes(trial.allocated_bytes)} allocated (estimated "
                f"{format_bytes(trial.estimated_allocated_bytes)}), {format_bytes(trial.reserved_bytes)} reserved "
                f"(estimated {format_bytes(trial.estimated_reserved_bytes)})"
            )
        )
    for words in estimates[0].assumptions:
        console.print(Text(f"Assumed: {words}"))


def show_bars(console: Console, memory: GpuMemory) -> None:
    """Print only the picture."""
    console.print(Text("GPU memory by batch size", style="bold"))
    for row in memory.chart().bars(console.width):
        console.print(Text(row), no_wrap=True, crop=True)


def _show_found(console: Console, found: BatchSize) -> None:
    if not found.batch_size:
        console.print(Text(found.reason, style="bold"))
    else:
        pieces = f" × {found.accumulation_steps} accumulated" if found.accumulation_steps > 1 else ""
        console.print(Text(f"Largest batch: {found.batch_size}{pieces}", style="bold"))
        console.print(Text(found.reason))
    console.print()


def _growth(estimate: Estimate, name: str) -> str:
    growth = estimate.growth.get(name)
    return "irregular" if growth is None else growth.change


def _signed(saved_bytes: int) -> str:
    return "0 B" if not saved_bytes else f"{'-' if saved_bytes > 0 else '+'}{format_bytes(abs(saved_bytes))}"
