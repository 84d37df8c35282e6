"""The doctor's page: a table of facts, then what will hurt and how to fix it.

In:  ``MachineFacts`` and ``Finding``s, of a machine and perhaps of a dataset.
Out: lines on a rich console, no colour needed to read them.
Runs in: command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from penstock.advice.machine_facts import MachineFacts
from penstock.cli.console import make_grid
from penstock.findings import Finding
from penstock.meter import Gpu
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.advice.dataset import DatasetFacts

_STYLES = {"hurts": "bold red", "warning": "yellow", "info": "cyan"}


def show_doctor(
    console: Console, facts: MachineFacts, found: Sequence[Finding], dataset: DatasetFacts | None = None
) -> None:
    """Print the whole page."""
    console.print(Text("What this machine allows", style="bold"))
    show_facts(console, facts)
    console.print()
    if dataset is not None:
        console.print(Text("What the dataset holds", style="bold"))
        show_dataset(console, dataset)
        console.print()
    show_findings(console, found)


def show_facts(console: Console, facts: MachineFacts) -> None:
    """Print the facts: name, number, where it comes from."""
    grid = make_grid("dim", "", "")
    for name, number, note in _rows(facts):
        grid.add_row(name, number, note)
    console.print(Padding(grid, (0, 0, 0, 2)))


def show_dataset(console: Console, dataset: DatasetFacts) -> None:
    """Print the large containers in a dataset: the way to each, its size, what a worker copies of it."""
    length = "length not known" if dataset.length is None else f"{dataset.length:,} samples"
    grid = make_grid("dim", "", "")
    grid.add_row(dataset.type, length, "" if dataset.containers.complete else "too much in it to look at everything")
    for container in dataset.containers.found:
        holds = f" × {container.holds}" if container.holds else ""
        cost = f"{format_bytes(container.per_worker_bytes)} in each worker" if container.per_worker_bytes else "shared"
        size = f"{container.kind}, {container.items:,}{holds}, {format_bytes(container.bytes)}"
        grid.add_row(container.path, size, cost)
    if not dataset.containers.found:
        grid.add_row("", "no large containers", "")
    console.print(Padding(grid, (0, 0, 0, 2)))


def show_findings(console: Console, found: Sequence[Finding]) -> None:
    """Print the findings, worst first, each with its fix."""
    bad = sum(finding.severity != "info" for finding in found)
    if bad:
        console.print(Text(f"{bad} thing{'s' * (bad > 1)} here will hurt", style="bold red"))
    else:
        console.print(Text("Nothing here will hurt", style="bold green"))
    grid = make_grid("", "")
    for finding in found:
        severity = Text(finding.severity, style=_STYLES[finding.severity])
        grid.add_row(severity, Text(f"{finding.id}: {finding.what}"))
        grid.add_row("", Text.assemble(("fix: ", "bold"), finding.fix))
    console.print(Padding(grid, (0, 0, 0, 2)))


def _rows(facts: MachineFacts) -> Iterable[tuple[str, str, str]]:
    limits, pressure = facts.limits, facts.pressure
    yield (
        "memory limit",
        format_bytes(limits.memory_limit_bytes),
        "the host's memory"
        if limits.memory_limit_bytes >= limits.host_memory_bytes
        else f"{limits.memory_limit_source}; the host has {format_bytes(limits.host_memory_bytes)}",
    )
    yield (
        "memory available",
        format_bytes(limits.memory_available_bytes),
        f"{_percent(limits.memory_available_bytes, limits.memory_limit_bytes)} of the limit; "
        f"working set {format_bytes(limits.working_set_bytes)}",
    )
    if limits.swap_total_bytes:
        total = format_bytes(limits.swap_total_bytes)
        yield "swap in use", format_bytes(limits.swap_used_bytes), f"of {total}"
    else:
        yield "swap", "none", ""
    if pressure.full_avg10 is not None:
        yield "memory stalls", f"{pressure.full_avg10:.1f}%", f"of the last 10 s ({pressure.stall_source})"
    if pressure.oom_kills is not None:
        yield "memory kills", f"{pressure.oom_kills:,}", "processes killed for want of memory"
    if limits.shm_size_bytes is None:
        yield "/dev/shm", "none", ""
    else:
        used = "use not known" if limits.shm_used_bytes is None else f"{format_bytes(limits.shm_used_bytes)} in use"
        yield "/dev/shm", format_bytes(limits.shm_size_bytes), used
    yield "CPUs usable", f"{limits.cpu_usable:g}", _cpu_note(facts)
    hard = "" if limits.open_files_hard is None else f"may be raised to {limits.open_files_hard:,}"
    yield "open files", _count(limits.open_files_soft), hard
    yield from _gpu_rows(facts)
    yield "cgroups", limits.cgroup, ""
    for unknown in limits.unknown:
        yield "not known", "", unknown


def _gpu_rows(facts: MachineFacts) -> Iterable[tuple[str, str, str]]:
    if not facts.gpu.gpus:
        yield "GPU", "none", facts.gpu.reason
    for gpu in facts.gpu.gpus:
        yield f"GPU {gpu.index}", _gpu_memory(gpu), _gpu_note(gpu)


def _gpu_memory(gpu: Gpu) -> str:
    if gpu.memory_total_bytes is None:
        return "not known"
    return format_bytes(gpu.memory_total_bytes)


def _gpu_note(gpu: Gpu) -> str:
    parts = [gpu.name]
    if gpu.memory_used_bytes is not None:
        parts.append(f"{format_bytes(gpu.memory_used_bytes)} in use")
    if gpu.utilisation_percent is not None:
        parts.append(f"{gpu.utilisation_percent}% busy")
    return ", ".join(parts)


def _cpu_note(facts: MachineFacts) -> str:
    limits = facts.limits
    parts = [f"{limits.cpu_count} online"]
    if limits.cpu_affinity is not None:
        parts.append(f"this process may run on {limits.cpu_affinity}")
    parts.append("no quota" if limits.cpu_quota is None else f"quota {limits.cpu_quota:g}")
    return ", ".join(parts)


def _count(limit: int | None) -> str:
    return "no known limit" if limit is None else f"{limit:,}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "0%"
