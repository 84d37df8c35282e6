"""The gauges of a run, sampled together, and the figures between two samples.

In:  /proc, cgroups, NVML, the loaders.
Out: ``GaugeSample``; ``figures_between``.
Runs in: trainer: the monitor's thread once a second, the training thread for a log line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from penstock.meter import MemoryReport, Roots, TreeMeter, gpu_status
from penstock.meter.kernel_files import find_counter, read_text
from penstock.monitor.system_levels import gpu_levels, system_levels
from penstock.monitor.watched_loader import LoaderSample, WatchedLoader

_EXACT_UP_TO_BYTES = 8 << 30
"""Resident memory of the tree up to which PSS is read: reading takes 15 ms per GiB in every process that maps it."""
_REAL = Roots()


class GaugeSample(NamedTuple):
    """A run at one moment."""

    t_s: float
    """The time on the monotonic clock."""
    step: int
    levels: dict[str, float]
    """Figures that need no earlier sample: memory, counts, GPUs."""
    loaders: tuple[LoaderSample, ...]


class Gauges:
    """Samples this process, its descendants and its loaders. Only one thread may use it at a time."""

    def __init__(
        self, loaders: Sequence[WatchedLoader], *, clock: Callable[[], float], roots: Roots = _REAL, nvml: Any = None
    ) -> None:
        self._loaders = loaders
        self._clock = clock
        self._roots = roots
        self._nvml = nvml
        self._meter = TreeMeter(exact_up_to_bytes=_EXACT_UP_TO_BYTES, roots=roots)
        self._tree_levels: dict[str, float] = {}
        status = gpu_status(nvml=nvml, roots=roots)
        self.gpus = [
            {"index": gpu.index, "name": gpu.name, "uuid": gpu.uuid, "memory_total_bytes": gpu.memory_total_bytes}
            for gpu in status.gpus
        ]
        self.tree_measure = "rss"

    def read(self, step: int, *, in_haste: bool = False) -> GaugeSample:
        """``in_haste`` reuses the last sample of the processes: the training thread must not wait for /proc."""
        loaders = tuple(each.read() for each in self._loaders)
        levels = system_levels(self._roots)
        levels |= _shared(loaders)
        if not in_haste or not self._tree_levels:
            self._tree_levels = self._tree(levels, loaders)
        levels |= self._tree_levels
        levels |= self._gpus()
        if self._loaders:
            for name, source in _SUMS.items():
                levels[name] = sum(each.figures.get(source, 0.0) for each in loaders)
        return GaugeSample(self._clock(), step, levels, loaders)

    # -- inside -----------------------------------------------------------------------------

    def _tree(self, levels: dict[str, float], loaders: Sequence[LoaderSample]) -> dict[str, float]:
        """Memory of the tree, and its parts. The parts add up to the tree's memory as far as pages can be attributed to
        them."""
        report = self._meter.poll()
        own_bytes, files_bytes = self._own_bytes(report)
        arena_bytes, cache_bytes = levels["arena_bytes"], levels["cache_bytes"]
        private_bytes = sum(each.figures.get("workers_private_bytes", 0.0) for each in loaders)
        if report.pss_bytes is not None:
            self.tree_measure = "pss"
            # Other descendants, such as torch's workers, count with the memory that killing them would free.
            others = sum(each.uss_bytes or 0 for each in report.processes[1:]) if not private_bytes else 0
            workers_bytes, tree_bytes = private_bytes + others, float(report.pss_bytes)
        elif private_bytes or len(report.processes) < 2:
            self.tree_measure = "sum of parts"
            workers_bytes = private_bytes
            tree_bytes = own_bytes + files_bytes + workers_bytes + arena_bytes + cache_bytes
        else:
            self.tree_measure = "rss"
            workers_bytes = float(sum(each.rss_bytes for each in report.processes[1:]))
            tree_bytes = float(report.rss_bytes)
        parts_bytes = own_bytes + workers_bytes + arena_bytes + cache_bytes
        return {
            "tree_bytes": tree_bytes,
            "tree_is_exact": float(report.exact),
            "processes": float(len(report.processes)),
            "trainer_bytes": own_bytes,
            "workers_bytes": workers_bytes,
            "other_bytes": max(0.0, tree_bytes - parts_bytes),
        }

    def _own_bytes(self, report: MemoryReport) -> tuple[float, float]:
        """Heap and files of this process."""
        text = read_text(f"{self._roots.proc}/{os.getpid()}/status") if self._roots.is_linux else None
        if text is None:
            return float(report.processes[0].rss_bytes) if report.processes else 0.0, 0.0
        return float(find_counter(text, "RssAnon:") or 0), float(find_counter(text, "RssFile:") or 0)

    def _gpus(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            devices = range(torch.cuda.device_count())
            figures["gpu_allocated_bytes"] = float(sum(map(torch.cuda.memory_allocated, devices)))
            figures["gpu_reserved_bytes"] = float(sum(map(torch.cuda.memory_reserved, devices)))
        if not self.gpus:
            return figures
        numbers = {gpu["uuid"]: number for number, gpu in enumerate(self.gpus)}
        now = gpu_status(nvml=self._nvml, roots=self._roots).gpus
        # GPUs are matched by uuid: when a GPU fails, the numbers of the others change.
        return figures | gpu_levels((numbers[gpu.uuid], gpu) for gpu in now if gpu.uuid in numbers)


_SUMS = {"budget_bytes": "budget_bytes", "workers": "workers", "depth": "depth", "worker_restarts": "worker_restarts"}


def _shared(loaders: Sequence[LoaderSample]) -> dict[str, float]:
    """Memory that processes share; each cache counts once."""
    caches = {each.cache_key: each.figures for each in loaders if each.cache_key is not None}
    levels = {
        "arena_bytes": sum(each.figures.get("in_flight_bytes", 0.0) for each in loaders),
        "cache_bytes": sum(each.get("cache_bytes", 0.0) for each in caches.values()),
    }
    if caches:
        levels["cache_hits"] = sum(each.get("cache_hits", 0.0) for each in caches.values())
        levels["cache_misses"] = sum(each.get("cache_misses", 0.0) for each in caches.values())
    return levels


def figures_between(before: GaugeSample | None, now: GaugeSample) -> dict[str, float]:
    """All figures of a point: the levels at ``now``, and the rates since ``before``."""
    figures = {**now.levels, "step": float(now.step)}
    for number, loader in enumerate(now.loaders):
        figures |= {f"loader.{number}.{name}": value for name, value in loader.figures.items()}
    known = [each.samples for each in now.loaders if each.samples is not None]
    if known:
        figures["samples"] = float(sum(known))
    span_s = 0.0 if before is None else now.t_s - before.t_s
    if before is None or span_s <= 0:
        return figures
    figures["steps_per_s"] = (now.step - before.step) / span_s
    samples = waited = 0.0
    for number, (then, loader) in enumerate(zip(before.loaders, now.loaders, strict=True)):
        if loader.samples is None or loader.wait_s is None:
            continue
        more = max(0, loader.samples - (then.samples or 0))
        wait_s = min(span_s, max(0.0, loader.wait_s - (then.wait_s or 0.0)))
        figures[f"loader.{number}.samples_per_s"] = more / span_s
        figures[f"loader.{number}.wait_fraction"] = wait_s / span_s
        samples, waited = samples + more, waited + wait_s
    if known:
        figures["samples_per_s"], figures["wait_fraction"] = samples / span_s, min(1.0, waited / span_s)
    hits = figures.get("cache_hits", 0.0) - before.levels.get("cache_hits", 0.0)
    lookups = hits + figures.get("cache_misses", 0.0) - before.levels.get("cache_misses", 0.0)
    if lookups > 0 and hits >= 0:
        figures["cache_hit_rate"] = min(1.0, hits / lookups)
    return figures
