"""The figures of a run: their names, their units, and what becomes of several when they are made one.

In:  nothing.
Out: ``FIGURES``; ``merged``.
Runs in: trainer, command line.

A figure is a number with a name. Names are flat. Those of one loader are ``loader.0.samples_per_s``, of one GPU
``gpu.0.used_bytes``; which loader or GPU that is, the facts of the run say, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Rule = Literal["mean", "most", "least", "last"]
"""What several become: rates their mean over time, memory the most there was, counters the latest."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One kind of figure."""

    unit: Literal["bytes", "1/s", "fraction", "count", "s"]
    rule: Rule
    what: str


def _figure(unit: Literal["bytes", "1/s", "fraction", "count", "s"], rule: Rule, what: str) -> Figure:
    return Figure(unit=unit, rule=rule, what=what)


FIGURES = {
    "step": _figure("count", "last", "training steps so far"),
    "steps_per_s": _figure("1/s", "mean", "training steps a second"),
    "samples": _figure("count", "last", "samples handed out so far, by all loaders"),
    "samples_per_s": _figure("1/s", "mean", "samples a second, all loaders"),
    "wait_fraction": _figure("fraction", "mean", "share of the time the training loop waited for data"),
    "tree_bytes": _figure("bytes", "most", "memory of the process and its descendants; facts tell how it was taken"),
    "tree_is_exact": _figure("fraction", "mean", "1 where every page was looked at, 0 where growth was carried on"),
    "processes": _figure("count", "most", "processes of the tree"),
    "trainer_bytes": _figure("bytes", "most", "heap and stacks of the training process"),
    "workers_bytes": _figure("bytes", "most", "private memory of its descendants"),
    "arena_bytes": _figure("bytes", "most", "batches in flight, ready and lent, of all loaders"),
    "cache_bytes": _figure("bytes", "most", "caches in memory, one per node"),
    "other_bytes": _figure("bytes", "most", "what the tree has besides: libraries, files, other shared memory"),
    "limit_bytes": _figure("bytes", "last", "the smallest memory limit: a container's, or the machine's memory"),
    "used_bytes": _figure("bytes", "most", "in use of that limit, by everybody inside it"),
    "available_bytes": _figure("bytes", "least", "what could still be used"),
    "swap_used_bytes": _figure("bytes", "most", "swap in use where the limit is set"),
    "budget_bytes": _figure("bytes", "last", "what the loaders may take together"),
    "workers": _figure("count", "last", "workers of all loaders"),
    "depth": _figure("count", "last", "batches that may be ahead, all loaders"),
    "worker_restarts": _figure("count", "last", "workers that died and were started again, so far"),
    "cache_hits": _figure("count", "last", "lookups that needed no load, so far"),
    "cache_misses": _figure("count", "last", "lookups that did, so far"),
    "cache_hit_rate": _figure("fraction", "mean", "share of hits among the lookups of the time since the last point"),
    "gpu_allocated_bytes": _figure("bytes", "most", "live tensors of this process, all devices"),
    "gpu_reserved_bytes": _figure("bytes", "most", "what torch's allocator of this process keeps, all devices"),
}
"""Figures of a run as a whole. A figure that is not known here is left out, never 0."""

LOADER_FIGURES = {
    "samples": _figure("count", "last", "samples handed out so far"),
    "batches": _figure("count", "last", "batches handed out so far"),
    "samples_per_s": _figure("1/s", "mean", "samples a second since the last point"),
    "wait_fraction": _figure("fraction", "mean", "share of the time since the last point spent waiting in next()"),
    "workers": _figure("count", "last", "workers there are to be"),
    "depth": _figure("count", "last", "batches that may be ahead"),
    "in_flight_bytes": _figure("bytes", "most", "batches being filled, ready, lent, or kept for reuse"),
    "lent_bytes": _figure("bytes", "most", "batches the user holds"),
    "workers_private_bytes": _figure("bytes", "most", "private memory of its workers"),
    "budget_bytes": _figure("bytes", "last", "what it may take"),
    "worker_restarts": _figure("count", "last", "workers that died and were started again, so far"),
    "device_ahead_bytes": _figure("bytes", "most", "batches copied ahead to the GPU"),
    "wait_s": _figure("s", "last", "time in next() so far"),
    "fetch_s": _figure("s", "last", "time in the dataset so far, all workers together"),
    "collate_s": _figure("s", "last", "time in collating so far, all workers together"),
    "cache_bytes": _figure("bytes", "most", "its cache, the whole node's"),
    "cache_limit_bytes": _figure("bytes", "last", "what that cache may take"),
    "cache_hits": _figure("count", "last", "lookups that needed no load, so far, the whole node's"),
    "cache_misses": _figure("count", "last", "lookups that did, so far, the whole node's"),
}
"""Figures of one loader, behind ``loader.N.``."""

GPU_FIGURES = {
    "used_bytes": _figure("bytes", "most", "memory in use on the device, by anyone"),
    "total_bytes": _figure("bytes", "last", "memory of the device"),
    "busy_fraction": _figure("fraction", "mean", "share of the time a kernel ran"),
    "allocated_bytes": _figure("bytes", "most", "live tensors of this process"),
    "reserved_bytes": _figure("bytes", "most", "what torch's allocator of this process keeps"),
}
"""Figures of one GPU, behind ``gpu.N.``."""


def figure_of(name: str) -> Figure:
    """What is known of a figure; of one with a new name, its unit from its ending."""
    kind, _, rest = name.partition(".")
    last = rest.partition(".")[2]
    found = {"loader": LOADER_FIGURES, "gpu": GPU_FIGURES}.get(kind, {}).get(last) if rest else FIGURES.get(name)
    if found is not None:
        return found
    is_bytes = name.endswith("_bytes")
    return Figure(unit="bytes" if is_bytes else "count", rule="most" if is_bytes else "mean", what=name)


def part(figures: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The figures of one loader or GPU, without their prefix: ``part(figures, "loader.0")``."""
    head = f"{prefix}."
    return {name.removeprefix(head): value for name, value in figures.items() if name.startswith(head)}


def merged(points: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """One set of figures for several in a row, each given with the seconds it stands for."""
    result: dict[str, float] = {}
    weights: dict[str, float] = {}
    rules: dict[str, Rule] = {}
    for span_s, figures in points:
        for name, value in figures.items():
            if name not in result:
                result[name], weights[name] = value, span_s
                rules[name] = figure_of(name).rule
                continue
            rule = rules[name]
            if rule == "last":
                result[name] = value
            elif rule == "most":
                result[name] = max(result[name], value)
            elif rule == "least":
                result[name] = min(result[name], value)
            else:
                total = weights[name] + span_s
                if total > 0:
                    result[name] += (value - result[name]) * span_s / total
                weights[name] = total
    return result
