"""Rules about a settings file: what in it will hurt on this machine, and what to write instead.

In:  ``Settings``, ``MachineFacts``.
Out: ``Finding``s, worst first.
Runs in: command line; pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.advice.machine import MachineFacts
from penstock.findings import Diagnosis, Finding, run_checks
from penstock.settings import Settings
from penstock.units import GIB, MIB, format_bytes, parse_size

WORKERS_PER_GPU = 4
"""Workers for each GPU of a node with several GPUs; a single GPU can use up to twice as many workers."""
MANY_BATCHES = 32
"""Batches ahead on a node; more batches than this take memory without making loading faster."""
CACHE_FRACTION = 0.5
"""Share of physical memory; a larger cache leaves too little for model, batches and page cache."""
CACHE_ADVICE = 0.25
"""Advised share of physical memory. Usual are 50-80 GB of 256 GB, 20-40 GB of 128 GB, 10-20 GB of 64 GB."""


@dataclass(frozen=True, kw_only=True)
class SettingsHere:
    """One settings file on one machine."""

    settings: Settings
    facts: MachineFacts

    def get(self, argument: str) -> Any:
        return self.settings.arguments.get(argument)

    def key(self, argument: str) -> str:
        """The file's key for an argument; the argument's own name if the file has no key for it."""
        found = (entry.key for entry in self.settings.entries if entry.argument == argument)
        return next(found, argument)

    @property
    def workers(self) -> int:
        given = self.get("num_workers")
        return given if isinstance(given, int) else 0

    @property
    def ranks(self) -> int:
        """Training processes on this node: the number in the file, or one process per GPU."""
        return self.settings.facts.get("gpus_per_node") or max(1, len(self.facts.gpu.gpus))

    @property
    def usable(self) -> float:
        return self.facts.limits.cpu_usable

    @property
    def advised_workers(self) -> int:
        per_rank = WORKERS_PER_GPU if self.ranks > 1 else 2 * WORKERS_PER_GPU
        return max(1, min(per_rank, int(self.usable / 2 / self.ranks)))


def find_in_settings(settings: Settings, facts: MachineFacts) -> tuple[Finding, ...]:
    """All findings about the file on this machine, worst first."""
    return run_checks(CHECKS, SettingsHere(settings=settings, facts=facts))


def _nothing(case: SettingsHere) -> Diagnosis:
    if case.settings.entries:
        return None
    return (
        "info",
        "the file has no key about loading",
        "name the file that has num_workers, batch_size and so on, or add them; until then penstock's defaults apply",
    )


def _batch_missing(case: SettingsHere) -> Diagnosis:
    if "images_per_gpu" not in case.settings.facts or "batch_size" in case.settings.arguments:
        return None
    key = case.key("batch_size")
    return (
        "warning",
        f"{key}={case.settings.facts['images_per_gpu']} gives no batch size, because the number of images in a "
        f"sample is unknown",
        "add sequence_length to the file, or pass batch_size in the call; otherwise batch_size is 1",
    )


def _dropped(case: SettingsHere) -> Diagnosis:
    dropped = [entry for entry in case.settings.entries if entry.remark.startswith("dropped: no workers")]
    if not dropped:
        return None
    keys = " and ".join(f"{entry.key}={entry.given}" for entry in dropped)
    return (
        "warning",
        f"{case.key('num_workers')}=0, so nothing uses {keys}",
        f"set {case.key('num_workers')} to {case.advised_workers}, or remove {keys}",
    )


def _workers_over_cpus(case: SettingsHere) -> Diagnosis:
    on_node = case.workers * case.ranks
    if case.workers == 0 or on_node <= case.usable:
        return None
    return (
        "hurts" if on_node > 2 * case.usable else "warning",
        f"{case.key('num_workers')}={_per_node(case)} for {case.usable:g} usable CPUs: the workers take turns, "
        "and each worker takes memory",
        f"set {case.key('num_workers')} to {case.advised_workers} per rank: at most half of the CPUs in total",
    )


def _workers_over_half(case: SettingsHere) -> Diagnosis:
    on_node = case.workers * case.ranks
    if not case.usable / 2 < on_node <= case.usable:
        return None
    return (
        "info",
        f"{case.key('num_workers')}={_per_node(case)}: that is more than half of the {case.usable:g} usable CPUs",
        f"try {case.advised_workers} per rank first; the training process and its libraries need CPUs too",
    )


def _per_rank(case: SettingsHere) -> Diagnosis:
    on_node = case.workers * case.ranks
    if case.ranks == 1 or case.workers <= WORKERS_PER_GPU or on_node > case.usable:
        return None
    return (
        "info",
        f"{case.key('num_workers')}={_per_node(case)}: every rank starts its own workers",
        f"if you meant {case.workers} workers for the whole node, set it to {max(1, case.workers // case.ranks)}; "
        f"{WORKERS_PER_GPU} workers per GPU are a good start",
    )


def _no_workers(case: SettingsHere) -> Diagnosis:
    if case.workers or case.get("num_workers") == "auto" or not case.settings.entries:
        return None
    how = ' with backend="thread"' if case.facts.platform == "win32" else ""
    state = "is 0" if case.get("num_workers") == 0 else "is not set"
    return (
        "info",
        f"{case.key('num_workers')} {state}: the training process loads every batch itself while the GPU waits",
        f"set {case.key('num_workers')} to {case.advised_workers}{how}",
    )


def _prefetch(case: SettingsHere) -> Diagnosis:
    prefetch = case.get("prefetch_factor")
    if not prefetch or not case.workers:
        return None
    per_rank = case.workers * prefetch
    on_node = per_rank * case.ranks
    if on_node <= MANY_BATCHES:
        return None
    batch = case.get("batch_size")
    of_size = f" of {batch} samples" if batch else ""
    each = case.facts.limits.memory_available_bytes / on_node
    return (
        "warning",
        f"{case.workers} workers x {case.key('prefetch_factor')} {prefetch} = {per_rank} batches{of_size} ahead per "
        f"rank, {on_node} per node: without a budget, batches of more than {format_bytes(each)} each "
        f"would fill the {format_bytes(case.facts.limits.memory_available_bytes)} available",
        f"set {case.key('prefetch_factor')} to {max(1, MANY_BATCHES // (case.workers * case.ranks))}, or set "
        "memory to a limit: the loader stays within it, however large the batches are",
    )


def _cache_over_half(case: SettingsHere) -> Diagnosis:
    size_bytes, limit = _fixed_bytes(case.get("cache")), case.facts.limits.memory_limit_bytes
    if size_bytes is None or size_bytes <= CACHE_FRACTION * limit:
        return None
    return (
        "hurts",
        f"{case.key('cache')} is {format_bytes(size_bytes)}: "
        f"that is more than half of this machine's {format_bytes(limit)}",
        f"set {case.key('cache')} to {_advised_cache(case)}",
    )


def _cache_over_available(case: SettingsHere) -> Diagnosis:
    size_bytes, limits = _fixed_bytes(case.get("cache")), case.facts.limits
    if (
        size_bytes is None
        or not limits.memory_available_bytes < size_bytes <= CACHE_FRACTION * limits.memory_limit_bytes
    ):
        return None
    return (
        "warning",
        f"{case.key('cache')} is {format_bytes(size_bytes)}, but only {format_bytes(limits.memory_available_bytes)} is "
        "available now: the cache cannot fill up",
        f"stop other programs, or set {case.key('cache')} to the memory that model and batches leave free",
    )


def _memory_over_available(case: SettingsHere) -> Diagnosis:
    size_bytes, limits = _fixed_bytes(case.get("memory")), case.facts.limits
    if size_bytes is None or size_bytes * case.ranks <= limits.memory_available_bytes:
        return None
    ranks = f" x {case.ranks} ranks" if case.ranks > 1 else ""
    return (
        "hurts",
        f"{case.key('memory')} is {format_bytes(size_bytes)}{ranks}, but only "
        f"{format_bytes(limits.memory_available_bytes)} is available",
        f"set {case.key('memory')} to auto, or to at most "
        f"{format_bytes(limits.memory_available_bytes / case.ranks / 2)}",
    )


def _device_missing(case: SettingsHere) -> Diagnosis:
    device = case.get("device")
    if case.facts.gpu.gpus or not str(device).startswith("cuda"):
        return None
    return (
        "hurts",
        f"{case.key('device')}={device}, but there is no GPU: {case.facts.gpu.reason}",
        f"remove {case.key('device')} on this machine, or pass device=None in the call",
    )


def _pin_without_gpu(case: SettingsHere) -> Diagnosis:
    if case.facts.gpu.gpus or not case.get("pin_memory"):
        return None
    return (
        "info",
        f"{case.key('pin_memory')} is on, but there is no GPU to copy to: {case.facts.gpu.reason}",
        "nothing to do if the training runs on another machine",
    )


def _keep_in_memory(case: SettingsHere) -> Diagnosis:
    if not case.settings.facts.get("keep_in_memory"):
        return None
    copies = f", and {case.workers * case.ranks} workers copy what they read of it" if case.workers else ""
    return (
        "warning",
        f"{case.key('keep_in_memory')} is on: every rank holds the whole dataset{copies}",
        'use penstock.data.ParquetDataset: it reads on demand, or keeps one copy for all workers with mode="memory"',
    )


def _not_persistent(case: SettingsHere) -> Diagnosis:
    if not case.workers or case.get("persistent_workers"):
        return None
    return (
        "info",
        f"{case.key('persistent_workers')} is off: {case.workers} workers start again every epoch",
        f"set {case.key('persistent_workers')} to true",
    )


def _per_node(case: SettingsHere) -> str:
    if case.ranks == 1:
        return f"{case.workers}"
    return f"{case.workers} per rank x {case.ranks} ranks = {case.workers * case.ranks} workers on this node"


def _fixed_bytes(size: Any) -> int | None:
    return None if size is None else parse_size(size).fixed_bytes


def _advised_cache(case: SettingsHere) -> str:
    advised = CACHE_ADVICE * case.facts.limits.memory_limit_bytes
    if case.key("cache").lower().endswith("_gb"):
        return f"{max(0.5, advised // (GIB / 2) / 2):g}"
    return f'"{max(1, int(advised / MIB)):,}MiB"'.replace(",", "")


CHECKS: dict[str, Callable[[SettingsHere], Diagnosis]] = {
    "no-loader-keys": _nothing,
    "batch-size-missing": _batch_missing,
    "workers-needed": _dropped,
    "workers-over-cpus": _workers_over_cpus,
    "workers-over-half": _workers_over_half,
    "workers-per-rank": _per_rank,
    "no-workers": _no_workers,
    "prefetch-many": _prefetch,
    "cache-over-half": _cache_over_half,
    "cache-over-available": _cache_over_available,
    "memory-over-available": _memory_over_available,
    "device-missing": _device_missing,
    "pin-without-gpu": _pin_without_gpu,
    "keep-in-memory": _keep_in_memory,
    "workers-not-kept": _not_persistent,
}
"""Id of a finding -> its check."""
