"""Rules about a run: what its measurements show to be wrong, and what to change in the user's own settings.

In:  ``Evidence``.
Out: ``Finding``s, worst first.
Runs in: anywhere; pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.findings import Diagnosis, Finding, run_checks
from penstock.formatting import counted
from penstock.planner.feeding import FED, STARVED
from penstock.units import MIB, format_bytes

CALM, DANGER = 0.65, 0.76
"""Shares of the memory limit in use: up to the first share there is room, from the second share on a setting must be
lowered."""
GPU_IDLE, GPU_FULL = 0.80, 0.95
"""Shares of the time in which the GPU is busy: below the first share the GPU could do more, above the second it is
fully used."""
LOW_HITS = 0.5
"""Hit rate below which the cache misses more often than it hits."""
_FEW_LOOKUPS = 200
_SWAP_BYTES = 16 * MIB
_CONTAINERS_BYTES = 64 * MIB
_WHOLE_BYTES = 64 * MIB
_COMPUTES = 0.6
"""If a sample computes for more than this share of its time, more workers than cores make nothing faster."""
_SHORT_BATCH_S = 1e-3
"""A batch that takes less time than this to fetch is not worth passing between processes."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Measurements of a run. None: not measured."""

    batch_size: int
    workers: int
    depth: int
    cores: float
    limit_bytes: int
    """Memory of the machine or container."""
    used_bytes: int
    """Memory that all programs use at the peak of the run."""
    budget_bytes: int
    """The loader's own memory limit."""
    batch_bytes: int
    shared_batches: bool
    """Whether rows of one batch come from several workers."""
    samples_per_s: float
    wait_fraction: float | None = None
    """Share of the training loop's time spent waiting for data."""
    cpu_fraction: float | None = None
    """Share of a sample's time in the worker that is spent computing."""
    fetch_s: float | None = None
    """Time spent in the dataset for one batch, summed over its samples."""
    torch_used_bytes: int | None = None
    """Like ``used_bytes``, but with torch's DataLoader and the same settings."""
    gpu_busy: float | None = None
    """Share of the time in which the GPU was busy."""
    has_gpu: bool = False
    pins: bool = False
    """Whether the user set pin_memory."""
    cache_hit_rate: float | None = None
    cache_lookups: int = 0
    cache_bytes: int = 0
    cache_limit_bytes: int = 0
    swap_growth_bytes: int | None = None
    kills: int | None = None
    """Processes that the kernel killed during the run because memory ran out."""
    containers_bytes: int = 0
    """Python objects in the dataset that each worker eventually copies."""
    containers: str = ""
    """The largest of these objects, by name."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Argument -> its name in the user's own settings."""

    def key(self, argument: str) -> str:
        return self.keys.get(argument, argument)


def find_in_run(seen: Evidence) -> tuple[Finding, ...]:
    """All findings about the run, worst first."""
    return run_checks(CHECKS, seen)


def _out_of_memory(seen: Evidence) -> Diagnosis:
    share = seen.used_bytes / max(1, seen.limit_bytes)
    if not seen.kills and share < CALM:
        return None
    killed = (
        f"the kernel killed {counted(seen.kills, 'process', 'processes')} because memory ran out; "
        if seen.kills
        else ""
    )
    moves = [f"lower {seen.key('batch_size')} from {seen.batch_size} to {max(1, seen.batch_size // 2)}"]
    if seen.workers > 1:
        moves.append(f"{seen.key('num_workers')} from {seen.workers} to {max(1, seen.workers // 2)}")
    if seen.cache_limit_bytes:
        moves.insert(0, f"lower {seen.key('cache')} to {format_bytes(0.6 * seen.cache_limit_bytes)}")
    moves.append(f"or limit the loader: set {seen.key('memory')} to {format_bytes(seen.budget_bytes / 2)}, for example")
    return (
        "hurts" if seen.kills or share >= DANGER else "warning",
        f"{killed}{format_bytes(seen.used_bytes)} of {format_bytes(seen.limit_bytes)} in use at the peak "
        f"({share:.0%}; up to {CALM:.0%} is safe, {DANGER:.0%} and more is too much)",
        ", ".join(moves),
    )


def _swap(seen: Evidence) -> Diagnosis:
    if seen.swap_growth_bytes is None or seen.swap_growth_bytes < _SWAP_BYTES:
        return None
    return (
        "hurts",
        f"swap grew by {format_bytes(seen.swap_growth_bytes)} during the run: the kernel moves memory to disk and back",
        f"lower {seen.key('memory')} or {seen.key('batch_size')} until swap stops growing; stop other programs",
    )


def _torch_out_of_memory(seen: Evidence) -> Diagnosis:
    used = seen.torch_used_bytes
    if used is None or used / max(1, seen.limit_bytes) < DANGER or used <= seen.used_bytes:
        return None
    return (
        "info",
        f"with torch's DataLoader and the same settings, {format_bytes(used)} of {format_bytes(seen.limit_bytes)} are "
        f"in use; with penstock's DataLoader, {format_bytes(seen.used_bytes)}",
        f"stay with penstock.DataLoader, or lower {seen.key('prefetch_factor')} and {seen.key('num_workers')} before "
        "going back to torch's",
    )


def _starved(seen: Evidence) -> Diagnosis:
    waited = seen.wait_fraction
    if waited is None or waited < FED or (not seen.workers and waited >= STARVED):
        return None
    computes = seen.cpu_fraction is not None and seen.cpu_fraction > _COMPUTES
    key, workers = seen.key("num_workers"), seen.workers
    if workers < int(seen.cores) or (not computes and workers < 4 * seen.cores):
        most = int(seen.cores) if computes else int(4 * seen.cores)
        fix = f"raise {key} from {workers} to {max(1, min(most, 2 * workers))}"
    elif seen.cache_hit_rate is None:
        fix = (
            f"{workers} workers keep {seen.cores:g} cores busy: cache samples with cache=, prepare them beforehand "
            "(penstock.precompute), or make __getitem__ cheaper"
        )
    else:
        fix = (
            f"raise {seen.key('cache')}, or make __getitem__ cheaper: {workers} workers keep {seen.cores:g} cores busy"
        )
    return (
        "warning" if waited >= STARVED else "info",
        f"the training loop waits for data {waited:.0%} of its time, at {seen.samples_per_s:.3g} samples/s",
        fix,
    )


def _gpu(seen: Evidence) -> Diagnosis:
    busy = seen.gpu_busy
    if busy is None or GPU_IDLE <= busy <= GPU_FULL:
        return None
    if busy > GPU_FULL:
        return "info", f"the GPU is busy {busy:.0%} of the time: loading is fast enough", "nothing to do"
    if seen.wait_fraction is not None and seen.wait_fraction < FED:
        return (
            "info",
            f"the GPU is busy {busy:.0%} of the time, but the training loop waits for data only "
            f"{seen.wait_fraction:.0%} of the time",
            f"loading is not the cause: raise {seen.key('batch_size')}, or profile the training step",
        )
    return (
        "warning",
        f"the GPU is busy only {busy:.0%} of the time",
        f"raise {seen.key('num_workers')} from {seen.workers}, then {seen.key('prefetch_factor')}",
    )


def _hit_rate(seen: Evidence) -> Diagnosis:
    rate = seen.cache_hit_rate
    if rate is None or rate >= LOW_HITS or seen.cache_lookups < _FEW_LOOKUPS:
        return None
    is_full = seen.cache_bytes >= 0.9 * seen.cache_limit_bytes
    more = f"raise {seen.key('cache')} from {format_bytes(seen.cache_limit_bytes)}; " if is_full else ""
    return (
        "warning" if is_full else "info",
        f"the cache hits on {rate:.2%} of {seen.cache_lookups:,} lookups, with {format_bytes(seen.cache_bytes)} of "
        f"{format_bytes(seen.cache_limit_bytes)} in use",
        f"{more}shuffle within blocks (penstock.data.BlockShuffleSampler) or by sequence "
        f"(penstock.data.SequenceSampler)"
        if is_full
        else "the cache is not full yet: check again after an epoch",
    )


def _many_workers(seen: Evidence) -> Diagnosis:
    over = seen.workers > seen.cores
    computes = seen.cpu_fraction is None or seen.cpu_fraction > _COMPUTES
    if not over or (not computes and seen.workers <= 4 * seen.cores):
        return None
    share = "" if seen.cpu_fraction is None else f", and a sample spends {seen.cpu_fraction:.0%} of its time computing"
    return (
        "warning",
        f"{seen.workers} workers on {seen.cores:g} usable cores{share}: the workers take turns",
        f"lower {seen.key('num_workers')} to {max(1, int(seen.cores if computes else 4 * seen.cores))}",
    )


def _no_workers(seen: Evidence) -> Diagnosis:
    if seen.workers or seen.wait_fraction is None or seen.wait_fraction < STARVED:
        return None
    return (
        "warning",
        f"there are no workers: the training process spends {seen.wait_fraction:.0%} of its time loading "
        f"batches itself",
        f"set {seen.key('num_workers')} to {max(1, int(seen.cores))}",
    )


def _containers(seen: Evidence) -> Diagnosis:
    all_bytes = seen.containers_bytes * seen.workers
    if all_bytes < _CONTAINERS_BYTES:
        return None
    return (
        "hurts" if all_bytes > 0.25 * (seen.limit_bytes - seen.used_bytes) else "warning",
        f"each worker copies what it reads of {seen.containers}: {format_bytes(seen.containers_bytes)} per worker, "
        f"{format_bytes(all_bytes)} for all {seen.workers} workers, by the end of an epoch",
        "keep one copy for all workers: penstock.data.SharedList(...), an array, or Parquet",
    )


def _whole_batches(seen: Evidence) -> Diagnosis:
    if seen.shared_batches or seen.workers < 2:
        return None
    more_bytes = (seen.workers - 1) * seen.batch_bytes
    short = seen.fetch_s is not None and seen.fetch_s < 5 * _SHORT_BATCH_S
    if short and more_bytes < _WHOLE_BYTES:
        return None
    return (
        "warning" if more_bytes >= _WHOLE_BYTES else "info",
        f"each worker builds whole batches, so {seen.workers} batches of {format_bytes(seen.batch_bytes)} are in "
        "memory at the same time",
        "use a map-style dataset without __getitems__ whose samples are tensors, arrays, numbers or strings: its "
        f"workers share a batch; or lower {seen.key('num_workers')}",
    )


def _tiny(seen: Evidence) -> Diagnosis:
    if not seen.workers or seen.fetch_s is None or seen.fetch_s >= _SHORT_BATCH_S:
        return None
    return (
        "info",
        f"a batch of {seen.batch_size} samples takes {1e6 * seen.fetch_s:.0f} µs to fetch and "
        f"is {format_bytes(seen.batch_bytes)} large: passing it between processes takes about as long as fetching it",
        f"raise {seen.key('batch_size')}, give the dataset __getitems__, or try {seen.key('num_workers')}=0",
    )


def _pinning(seen: Evidence) -> Diagnosis:
    if not seen.pins or seen.has_gpu:
        return None
    return (
        "info",
        "pin_memory is set, but there is no GPU here: no batch was page-locked, and the cost of page-locking was not "
        "measured",
        f"measure {seen.key('pin_memory')} on the machine that trains",
    )


CHECKS: dict[str, Callable[[Evidence], Diagnosis]] = {
    "out-of-memory": _out_of_memory,
    "swap-growth": _swap,
    "torch-out-of-memory": _torch_out_of_memory,
    "data-starved": _starved,
    "gpu-use": _gpu,
    "cache-hit-rate": _hit_rate,
    "workers-over-cores": _many_workers,
    "no-workers": _no_workers,
    "python-containers": _containers,
    "whole-batches": _whole_batches,
    "tiny-batches": _tiny,
    "pin-without-gpu": _pinning,
}
"""Id of a finding -> its check."""
