"""The page of `penstock doctor`: a table of facts, what a dataset holds, then the findings.

In:  ``MachineFacts`` and ``Finding``s, of a machine and perhaps of a dataset.
Out: lines on a rich console, readable without colour.
Runs in: command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from penstock.advice.machine import MachineFacts
from penstock.cli.console import indented, make_grid, show_findings
from penstock.findings import Finding
from penstock.meter import Gpu
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.advice.dataset import DatasetFacts


def show_doctor(
    console: Console, facts: MachineFacts, found: Sequence[Finding], dataset: DatasetFacts | None = None
) -> None:
    """Print the facts, each with its number and its source, then the findings."""
    console.print("What this machine allows", style="bold")
    grid = make_grid("dim", "", "")
    for name, number, note in _rows(facts):
        grid.add_row(name, number, note)
    console.print(indented(grid))
    console.print()
    if dataset is not None:
        _show_dataset(console, dataset)
        console.print()
    show_findings(console, found)


def _show_dataset(console: Console, dataset: DatasetFacts) -> None:
    """Print the large containers of a dataset: the path to each, its size, what a worker copies of it."""
    console.print("What the dataset holds", style="bold")
    length = "length unknown" if dataset.length is None else f"{dataset.length:,} samples"
    grid = make_grid("dim", "", "")
    grid.add_row(dataset.type, length, "" if dataset.containers.complete else "too large to be searched completely")
    for container in dataset.containers.found:
        holds = f" × {container.holds}" if container.holds else ""
        cost = f"{format_bytes(container.per_worker_bytes)} in each worker" if container.per_worker_bytes else "shared"
        size = f"{container.kind}, {container.items:,}{holds}, {format_bytes(container.bytes)}"
        grid.add_row(container.path, size, cost)
    if not dataset.containers.found:
        grid.add_row("", "no large containers", "")
    console.print(indented(grid))


def _rows(facts: MachineFacts) -> Iterator[tuple[str, str, str]]:
    limits, pressure = facts.limits, facts.pressure
    limit, available = limits.memory_limit_bytes, limits.memory_available_bytes
    of_limit = f"{100 * available / limit:.0f}%" if limit else "0%"
    yield (
        "memory limit",
        format_bytes(limit),
        "the host's memory"
        if limit >= limits.host_memory_bytes
        else f"{limits.memory_limit_source}; the host has {format_bytes(limits.host_memory_bytes)}",
    )
    working_set = format_bytes(limits.working_set_bytes)
    yield "memory available", format_bytes(available), f"{of_limit} of the limit; working set {working_set}"
    if limits.swap_total_bytes:
        total = format_bytes(limits.swap_total_bytes)
        yield "swap in use", format_bytes(limits.swap_used_bytes), f"of {total}"
    else:
        yield "swap", "none", ""
    if pressure.full_avg10 is not None:
        yield "memory stalls", f"{pressure.full_avg10:.1f}%", f"of the last 10 s ({pressure.stall_source})"
    if pressure.oom_kills is not None:
        yield "memory kills", f"{pressure.oom_kills:,}", "processes killed because memory ran out"
    if limits.shm_size_bytes is None:
        yield "/dev/shm", "none", ""
    else:
        used = "use unknown" if limits.shm_used_bytes is None else f"{format_bytes(limits.shm_used_bytes)} in use"
        yield "/dev/shm", format_bytes(limits.shm_size_bytes), used
    yield "CPUs usable", f"{limits.cpu_usable:g}", _cpu_note(facts)
    soft = "no known limit" if limits.open_files_soft is None else f"{limits.open_files_soft:,}"
    hard = "" if limits.open_files_hard is None else f"may be raised to {limits.open_files_hard:,}"
    yield "open files", soft, hard
    if not facts.gpu.gpus:
        yield "GPU", "none", facts.gpu.reason
    for gpu in facts.gpu.gpus:
        total = "unknown" if gpu.memory_total_bytes is None else format_bytes(gpu.memory_total_bytes)
        yield f"GPU {gpu.index}", total, _gpu_note(gpu)
    yield "cgroups", limits.cgroup, ""
    for unknown in limits.unknown:
        yield "unknown", "", unknown


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
