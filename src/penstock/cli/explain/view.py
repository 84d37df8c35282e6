"""The explanation's page: components side by side, differences, the picture, the verdict, what to change.

In:  ``Explanation``.
Out: lines on a rich console.
Runs in: command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from penstock.cli.console import make_table, show_findings
from penstock.formatting import counted
from penstock.planner.components import Change, Component
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.cli.gpu.view import GpuMemory
    from penstock.lab.explain.explanation import Explanation
    from penstock.lab.explain.job import Job


def show_explanation(console: Console, explanation: Explanation, gpu: GpuMemory | None = None) -> None:
    """Print the whole page."""
    console.print(Text(f"{_words(explanation.job)}: host memory of process and workers, with all batches ahead"))
    _show_components(console, explanation)
    console.print(Text(explanation.answer))
    console.print()
    if explanation.against is not None:
        console.print(Text(f"Against {_words(explanation.against[0])}", style="bold"))
        for name, found in explanation.changes().items():
            _show_changes(console, name, found)
    console.print(Text("Memory by batch size (calculated from this measurement)", style="bold"))
    for row in explanation.chart().bars(console.width):
        console.print(Text(row), no_wrap=True, crop=True)
    console.print()
    if gpu is not None:
        from penstock.cli.gpu.view import show_bars, show_estimates

        show_estimates(console, gpu)
        show_bars(console, gpu)
        console.print()
    console.print(Text("Is loading the bottleneck?", style="bold"))
    console.print(Text(explanation.feeding.verdict()))
    console.print()
    show_findings(console, explanation.found)


def _words(job: Job) -> str:
    settings = job.settings
    depth = f", {settings['depth']} ahead" if settings["depth"] else ""
    pinned = ", pinned" if settings["pin_memory"] else ""
    memory = "" if settings["memory"] == "auto" else f", memory={settings['memory']}"
    workers = counted(settings["workers"], "worker")
    return f"{job.target}, batches of {settings['batch_size']}, {workers}{depth}{pinned}{memory}"


def _show_components(console: Console, explanation: Explanation) -> None:
    table = make_table("component", "penstock", "torch", last="grows with (torch's, if different)")
    for ours, theirs in zip(explanation.ours, explanation.torchs, strict=True):
        table.add_row(ours.what, format_bytes(ours.bytes), format_bytes(theirs.bytes), _grows(ours, theirs))
    runs = explanation.explained.ours.reading, explanation.explained.torchs.reading
    table.add_section()
    table.add_row("together", *(format_bytes(each.total_bytes) for each in runs), "")
    building = (format_bytes(each.building_bytes) for each in runs)
    table.add_row("at times, also", *building, "samples of batches that workers build")
    files = ["unknown" if each.page_cache_bytes is None else format_bytes(each.page_cache_bytes) for each in runs]
    table.add_row("page cache", *files, "not counted: the kernel can free it")
    console.print(table)


def _grows(ours: Component, theirs: Component) -> str:
    one, other = (", ".join(each.grows_with) or "none" for each in (ours, theirs))
    return one if one == other else f"{one} ({other})"


def _show_changes(console: Console, name: str, found: Sequence[Change]) -> None:
    table = make_table(name, "this", "the other", "difference")
    for each in found:
        table.add_row(
            each.what, format_bytes(each.before_bytes), format_bytes(each.after_bytes), _signed(each.change_bytes)
        )
    table.add_section()
    before, after = sum(each.before_bytes for each in found), sum(each.after_bytes for each in found)
    table.add_row("together", format_bytes(before), format_bytes(after), _signed(after - before))
    console.print(table)


def _signed(count: int) -> str:
    return "0 B" if not count else f"{'+' if count > 0 else '-'}{format_bytes(abs(count))}"
