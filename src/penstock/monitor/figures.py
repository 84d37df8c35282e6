"""The table of figures: each number that is recorded about a run, with its unit, its help text and its names.

In:  nothing.
Out: ``FIGURES``; ``figure_of`` a recorded name; ``shown`` for people, ``as_json`` for the page; ``merged`` points.
Runs in: trainer, command line, web page; pure.

A figure is a number with a flat name. ``loader.0.samples_per_s`` belongs to the first loader of the run,
``gpu.0.used_bytes`` to its first GPU; the run's facts list both in the same order. The recorder, Prometheus, the log
line, the sinks, the web page, the report and ``penstock top`` take names, units and help texts from here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.formatting import UNKNOWN, duration, rate, share
from penstock.units import format_bytes

Unit = Literal["bytes", "bytes/s", "1/s", "fraction", "count", "s"]
Merge = Literal["mean", "max", "min", "last"]
"""How several values become one: rates as their mean over time, memory as its peak, counters as the last value."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One kind of figure."""

    unit: Unit
    merge: Merge
    help: str
    """One sentence, for Prometheus and the web page."""
    label: str
    """The figure's name in legends and tables."""
    metric: str | None = None
    """Prometheus name without ``penstock_``. None: not exported, because other metrics give it as their rate or sum."""
    component: str | None = None
    """Value of the label ``component``, where several figures share one metric."""
    log: str | None = None
    """Format of the figure's part of the log line. None: the figure is not in the log line, or is in its fixed
    beginning."""

    @property
    def kind(self) -> Literal["counter", "gauge"]:
        """Type of the metric."""
        return "counter" if self.metric is not None and self.metric.endswith("_total") else "gauge"


def _bytes(label: str, help: str, metric: str | None = None, *, merge: Merge = "max") -> Figure:
    return Figure(unit="bytes", merge=merge, help=help, label=label, metric=metric)


def _part(label: str, help: str, component: str) -> Figure:
    return Figure(unit="bytes", merge="max", help=help, label=label, metric="memory_bytes", component=component)


def _counter(
    label: str, help: str, metric: str | None = None, *, unit: Unit = "count", log: str | None = None
) -> Figure:  # fmt: skip
    return Figure(unit=unit, merge="last", help=help, label=label, metric=metric, log=log)


def _rate(label: str, unit: Unit, help: str, metric: str | None = None, *, log: str | None = None) -> Figure:
    return Figure(unit=unit, merge="mean", help=help, label=label, metric=metric, log=log)


FIGURES = {
    # -- the run as a whole -------------------------------------------------------------------
    "step": _counter("step", "Training steps.", "steps_total"),
    "steps_per_s": _rate("steps/s", "1/s", "Training steps per second.", log="Steps: {:.2f}/s"),
    "samples": _counter("samples", "Samples delivered by all loaders."),
    "samples_per_s": _rate("samples/s", "1/s", "Samples per second of all loaders.", log="Samples: {:.1f}/s"),
    "wait_fraction": _rate(
        "waiting", "fraction", "Share of the time that the training loop waits for data.", log="Wait: {:.1%}"
    ),
    "tree_bytes": _bytes(
        "memory", "Memory of the training process and its descendants; shared pages count once.", "tree_memory_bytes"
    ),
    "tree_is_exact": _rate("exact", "fraction", "1 if the memory was counted, 0 if it was estimated."),
    "processes": Figure(
        unit="count", merge="max", label="processes", help="Processes of the training, including itself.",
        metric="processes",
    ),
    "trainer_bytes": _part("trainer", "Heap and stacks of the training process.", "trainer"),
    "workers_bytes": _part("workers", "Private memory of the descendants of the training process.", "workers"),
    "arena_bytes": _part("batches", "Batches of all loaders that are filled, ready or held by the training.", "arena"),
    "cache_bytes": _part("cache", "Caches in memory; one per node, however many ranks share it.", "cache"),
    "other_bytes": _part("other", "The rest of the memory: libraries, mapped files, other shared memory.", "other"),
    "limit_bytes": _bytes(
        "limit", "The smallest memory limit: the container's limit or the machine's memory.", "memory_limit_bytes",
        merge="last",
    ),
    "used_bytes": _bytes("in use", "Memory in use within the limit, by all processes.", "memory_used_bytes"),
    "available_bytes": _bytes("available", "Memory still available.", "memory_available_bytes", merge="min"),
    "swap_used_bytes": _bytes("swap", "Swap in use within the limit.", "swap_used_bytes"),
    "budget_bytes": _bytes("budget", "Memory budget of all loaders together.", "budget_bytes", merge="last"),
    "workers": _counter("workers", "Workers of all loaders."),
    "depth": _counter("depth", "Batches that all loaders prepare ahead."),
    "cache_hits": _counter("hits", "Cache lookups on this node that found the sample.", "cache_hits_total"),
    "cache_misses": _counter("misses", "Cache lookups on this node that missed the sample.", "cache_misses_total"),
    "cache_hit_rate": _rate(
        "hit rate", "fraction", "Share of cache lookups that found the sample.", log="Cache hit rate: {:.2%}"
    ),
    "worker_restarts": _counter("restarted", "Workers that crashed and were replaced.", log="Worker restarts: {:.0f}"),
    "gpu_allocated_bytes": _bytes("tensors", "Live tensors of the training on all its GPUs.", "torch_allocated_bytes"),
    "gpu_reserved_bytes": _bytes(
        "reserved by torch", "Memory that torch's allocator reserves on all GPUs.", "torch_reserved_bytes"
    ),
    "processors_busy": _rate(
        "processors busy", "count", "Processors kept busy; only for process trees watched from outside."
    ),
    "read_bytes_per_s": _rate(
        "read", "bytes/s", "Bytes read per second; only for process trees watched from outside."
    ),
    # -- one loader ---------------------------------------------------------------------------
    "loader.N.samples": _counter("samples", "Samples delivered.", "samples_total"),
    "loader.N.batches": _counter("batches", "Batches delivered.", "batches_total"),
    "loader.N.samples_per_s": _rate("samples/s", "1/s", "Samples per second."),
    "loader.N.wait_fraction": _rate("waiting", "fraction", "Share of the time spent waiting in next()."),
    "loader.N.workers": _counter("workers", "Configured number of workers.", "workers"),
    "loader.N.depth": _counter("depth", "Configured number of batches to prepare ahead.", "depth_batches"),
    "loader.N.in_flight_bytes": _bytes(
        "in flight", "Batches that are being filled, ready, held by the training or kept for reuse.", "in_flight_bytes"
    ),
    "loader.N.lent_bytes": _bytes("lent", "Batches in flight that the training loop holds.", "lent_bytes"),
    "loader.N.workers_private_bytes": _bytes(
        "workers", "Private memory of the workers.", "workers_private_bytes"
    ),
    "loader.N.budget_bytes": _bytes("budget", "Memory budget of the loader.", "loader_budget_bytes", merge="last"),
    "loader.N.worker_restarts": _counter(
        "restarted", "Workers that crashed and were replaced.", "worker_restarts_total"
    ),
    "loader.N.device_ahead_bytes": _bytes(
        "on the GPU", "Batches copied to the GPU in advance.", "device_ahead_bytes"
    ),
    "loader.N.wait_s": _counter("waited", "Time that the training waited for data.", "wait_seconds_total", unit="s"),
    "loader.N.fetch_s": _counter(
        "fetching", "Time spent in the dataset, summed over the workers.", "fetch_seconds_total", unit="s"
    ),
    "loader.N.collate_s": _counter(
        "collating", "Time spent collating, summed over the workers.", "collate_seconds_total", unit="s"
    ),
    "loader.N.cache_bytes": _bytes("cache", "Memory of the loader's cache, which the whole node shares."),
    "loader.N.cache_limit_bytes": _bytes(
        "limit", "Memory limit of the loader's cache.", "cache_limit_bytes", merge="last"
    ),
    "loader.N.cache_hits": _counter("hits", "Lookups in the loader's cache, on this node, that found the sample."),
    "loader.N.cache_misses": _counter("misses", "Lookups in the loader's cache, on this node, that loaded the sample."),
    # -- one GPU ------------------------------------------------------------------------------
    "gpu.N.used_bytes": _bytes("in use", "GPU memory in use, by all processes.", "gpu_memory_used_bytes"),
    "gpu.N.total_bytes": _bytes("of the GPU", "Memory of the GPU.", "gpu_memory_total_bytes", merge="last"),
    "gpu.N.busy_fraction": _rate("busy", "fraction", "Share of the time in which a kernel ran.", "gpu_busy_ratio"),
    "gpu.N.allocated_bytes": _bytes("tensors", "Live tensors of the training on the GPU.", "gpu_allocated_bytes"),
    "gpu.N.reserved_bytes": _bytes(
        "reserved by torch", "Memory reserved by torch's allocator on the GPU.", "gpu_reserved_bytes"
    ),
}  # fmt: skip
"""The figures by name, in which N stands for a number. A figure with an unknown value is absent from a point, never
0."""

MEMORY_PARTS = tuple(name for name, figure in FIGURES.items() if figure.component is not None)
"""The figures that add up to ``tree_bytes``."""

_NUMBERED = re.compile(r"^(loader|gpu)\.\d+\.")


def figure_of(name: str) -> Figure:
    """The figure with a recorded name. For a name that is not in the table, the ending gives the unit."""
    found = FIGURES.get(_NUMBERED.sub(r"\1.N.", name))
    if found is not None:
        return found
    is_bytes = name.endswith("_bytes")
    return Figure(unit="bytes" if is_bytes else "count", merge="max" if is_bytes else "mean", label=name, help=name)


def as_json() -> dict[str, dict[str, str]]:
    """Unit, label and help text of each figure, for the web page."""
    return {name: {"unit": each.unit, "label": each.label, "help": each.help} for name, each in FIGURES.items()}


def shown(name: str, value: float | None) -> str:
    """A value in its unit, as people read it: ``1.50 GiB``, ``45%``, ``120``; "-" where it is unknown."""
    if value is None:
        return UNKNOWN
    unit = figure_of(name).unit
    if unit == "s":
        return duration(value)
    if unit in ("bytes", "bytes/s"):
        return format_bytes(value) + ("/s" if unit == "bytes/s" else "")
    return share(value) if unit == "fraction" else rate(value) if unit == "1/s" else f"{value:,.0f}"


def part(figures: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The figures of one loader or GPU, without their prefix: ``part(figures, "loader.0")``."""
    head = f"{prefix}."
    return {name.removeprefix(head): value for name, value in figures.items() if name.startswith(head)}


def merged(points: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """One set of figures for several consecutive sets, each of which is given with its span in seconds."""
    result: dict[str, float] = {}
    weights: dict[str, float] = {}
    merges: dict[str, Merge] = {}
    for span_s, figures in points:
        for name, value in figures.items():
            if name not in result:
                result[name], weights[name], merges[name] = value, span_s, figure_of(name).merge
                continue
            merge = merges[name]
            if merge == "last":
                result[name] = value
            elif merge == "max":
                result[name] = max(result[name], value)
            elif merge == "min":
                result[name] = min(result[name], value)
            else:
                total = weights[name] + span_s
                if total > 0:
                    result[name] += (value - result[name]) * span_s / total
                weights[name] = total
    return result
