"""The table of figures: each number that is recorded about a run, with its unit, its help text and its names.

In:  nothing.
Out: ``FIGURES``; ``figure_of`` a recorded name; ``merged`` for several points.
Runs in: trainer, command line, web page.

A figure is a number with a flat name. ``loader.0.samples_per_s`` belongs to the first loader of the run,
``gpu.0.used_bytes`` to its first GPU; the run's facts list both in the same order. The recorder, Prometheus, the log
line, the sinks and the web page take names, units and help texts from here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

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
    label: str = ""
    """In the legends and tables of the web page; "" where the page does not show the figure."""
    metric: str | None = None
    """Prometheus name without ``penstock_``. None: not exported, because other metrics give it as their rate or sum."""
    component: str | None = None
    """Value of the label ``component``, where several figures share one metric."""
    log: str | None = None
    """Format of its part of the log line. None: not part of it, or part of the fixed beginning."""

    @property
    def kind(self) -> Literal["counter", "gauge"]:
        """Type of the metric."""
        return "counter" if self.metric is not None and self.metric.endswith("_total") else "gauge"


def _bytes(help: str, label: str = "", metric: str | None = None, *, merge: Merge = "max") -> Figure:
    return Figure(unit="bytes", merge=merge, help=help, label=label, metric=metric)


def _part(help: str, component: str) -> Figure:
    return Figure(
        unit="bytes", merge="max", help=help, label=component, metric="memory_bytes", component=component
    )  # fmt: skip


def _counter(help: str, metric: str | None, *, unit: Unit = "count", log: str | None = None) -> Figure:
    return Figure(unit=unit, merge="last", help=help, metric=metric, log=log)


def _setting(help: str, metric: str | None = None, *, label: str = "") -> Figure:
    return Figure(unit="count", merge="last", help=help, label=label, metric=metric)


def _rate(unit: Unit, help: str, label: str = "", *, metric: str | None = None, log: str | None = None) -> Figure:
    return Figure(unit=unit, merge="mean", help=help, label=label, metric=metric, log=log)


FIGURES = {
    # -- the run as a whole -------------------------------------------------------------------
    "step": _counter("Training steps.", "steps_total"),
    "steps_per_s": _rate("1/s", "Training steps per second.", log="Steps: {:.2f}/s"),
    "samples": _counter("Samples delivered by all loaders.", None),
    "samples_per_s": _rate("1/s", "Samples per second, all loaders.", "samples/s", log="Samples: {:.1f}/s"),
    "wait_fraction": _rate(
        "fraction", "Share of the time the training loop waits for data.", "waiting", log="Wait: {:.1%}"
    ),
    "tree_bytes": _bytes(
        "Memory of the training process and its descendants; shared pages count once.", "memory", "tree_memory_bytes"
    ),
    "tree_is_exact": _rate("fraction", "1 where every page was counted, 0 where growth since then was added."),
    "processes": Figure(
        unit="count", merge="max", help="Processes of the training, itself included.", metric="processes"
    ),
    "trainer_bytes": _part("Heap and stacks of the training process.", "trainer"),
    "workers_bytes": _part("Private memory of its descendants.", "workers"),
    "arena_bytes": _part("Batches being filled, ready and lent, all loaders.", "arena"),
    "cache_bytes": _part("Caches in memory; one per node, however many ranks share it.", "cache"),
    "other_bytes": _part("The rest: libraries, mapped files, other shared memory.", "other"),
    "limit_bytes": _bytes(
        "The smallest memory limit: the container's, or the machine's memory.", "limit", "memory_limit_bytes",
        merge="last",
    ),
    "used_bytes": _bytes("Memory in use within that limit, by all processes.", "in use", "memory_used_bytes"),
    "available_bytes": _bytes("Memory still available.", "available", "memory_available_bytes", merge="min"),
    "swap_used_bytes": _bytes("Swap in use within the limit.", "swap", "swap_used_bytes"),
    "budget_bytes": _bytes("Memory budget of all loaders together.", "budget", "budget_bytes", merge="last"),
    "workers": _setting("Workers of all loaders.", label="workers"),
    "depth": _setting("Batches prepared ahead, all loaders.", label="depth"),
    "cache_hits": _counter("Cache lookups that found the sample, whole node.", "cache_hits_total"),
    "cache_misses": _counter("Cache lookups that loaded the sample, whole node.", "cache_misses_total"),
    "cache_hit_rate": _rate(
        "fraction", "Share of cache lookups that found the sample.", "hits", log="Cache hit rate: {:.2%}"
    ),
    "worker_restarts": _counter("Workers that crashed and were replaced.", None, log="Worker restarts: {:.0f}"),
    "gpu_allocated_bytes": _bytes("Live tensors of the training, all GPUs.", "tensors", "torch_allocated_bytes"),
    "gpu_reserved_bytes": _bytes(
        "Memory reserved by torch's allocator, all GPUs.", "reserved by torch", "torch_reserved_bytes"
    ),
    "processors_busy": _rate("count", "Processors kept busy; only of process trees watched from outside."),
    "read_bytes_per_s": _rate("bytes/s", "Bytes read per second; only of process trees watched from outside."),
    # -- one loader ---------------------------------------------------------------------------
    "loader.N.samples": _counter("Samples delivered.", "samples_total"),
    "loader.N.batches": _counter("Batches delivered.", "batches_total"),
    "loader.N.samples_per_s": _rate("1/s", "Samples per second.", "samples/s"),
    "loader.N.wait_fraction": _rate("fraction", "Share of the time spent waiting in next().", "waiting"),
    "loader.N.workers": _setting("Workers, as set.", "workers"),
    "loader.N.depth": _setting("Batches prepared ahead, as set.", "depth_batches"),
    "loader.N.in_flight_bytes": _bytes("Batches being filled, ready, lent, or kept for reuse.", "", "in_flight_bytes"),
    "loader.N.lent_bytes": _bytes("Batches in flight that the training loop holds.", "", "lent_bytes"),
    "loader.N.workers_private_bytes": _bytes("Private memory of the workers.", "", "workers_private_bytes"),
    "loader.N.budget_bytes": _bytes("Memory budget of the loader.", "budget", "loader_budget_bytes", merge="last"),
    "loader.N.worker_restarts": _counter("Workers that crashed and were replaced.", "worker_restarts_total"),
    "loader.N.device_ahead_bytes": _bytes("Batches copied to the GPU in advance.", "", "device_ahead_bytes"),
    "loader.N.wait_s": _counter("Time the training loop waited for data.", "wait_seconds_total", unit="s"),
    "loader.N.fetch_s": _counter("Time in the dataset, summed over the workers.", "fetch_seconds_total", unit="s"),
    "loader.N.collate_s": _counter("Time in collating, summed over the workers.", "collate_seconds_total", unit="s"),
    "loader.N.cache_bytes": _bytes("Memory of its cache, whole node.", "cache"),
    "loader.N.cache_limit_bytes": _bytes("Memory limit of its cache.", "limit", "cache_limit_bytes", merge="last"),
    "loader.N.cache_hits": _counter("Lookups in its cache that found the sample, whole node.", None),
    "loader.N.cache_misses": _counter("Lookups in its cache that loaded the sample, whole node.", None),
    # -- one GPU ------------------------------------------------------------------------------
    "gpu.N.used_bytes": _bytes("GPU memory in use, by all processes.", "used", "gpu_memory_used_bytes"),
    "gpu.N.total_bytes": _bytes("Memory of the GPU.", "of the GPU", "gpu_memory_total_bytes", merge="last"),
    "gpu.N.busy_fraction": _rate("fraction", "Share of the time a kernel ran.", "busy", metric="gpu_busy_ratio"),
    "gpu.N.allocated_bytes": _bytes("Live tensors of the training on the GPU.", "tensors", "gpu_allocated_bytes"),
    "gpu.N.reserved_bytes": _bytes(
        "Memory reserved by torch's allocator on the GPU.", "reserved by torch", "gpu_reserved_bytes"
    ),
}  # fmt: skip
"""By name; N stands for a number. A figure with an unknown value is absent from a point, never 0."""

_NUMBERED = re.compile(r"^(loader|gpu)\.\d+\.")


def figure_of(name: str) -> Figure:
    """The figure with a recorded name. For a name that is not in the table, the ending gives the unit."""
    found = FIGURES.get(_NUMBERED.sub(r"\1.N.", name))
    if found is not None:
        return found
    is_bytes = name.endswith("_bytes")
    return Figure(unit="bytes" if is_bytes else "count", merge="max" if is_bytes else "mean", help=name)


def part(figures: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The figures of one loader or GPU, without their prefix: ``part(figures, "loader.0")``."""
    head = f"{prefix}."
    return {name.removeprefix(head): value for name, value in figures.items() if name.startswith(head)}


def merged(points: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """One set of figures for several consecutive ones, each given with its span in seconds."""
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
