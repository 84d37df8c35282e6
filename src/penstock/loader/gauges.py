"""Gauges of a loader in addition to its stats: workers, waiting time, latest crashes, settings.

In:  a loader that may be iterating in another thread.
Out: values at this moment, for monitors and measurements.
Runs in: trainer, any thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.loader.dataloader import DataLoader
    from penstock.loader.engine.worker_set import WorkerNow


def workers_now(loader: DataLoader[Any]) -> list[WorkerNow]:
    """The workers of all running iterations. Values that change during the call may be a moment old."""
    found = [worker for iterator in loader._live() for worker in iterator.workers_now()]
    return sorted(found, key=lambda worker: worker.worker_id)


def waited_s(loader: DataLoader[Any]) -> float:
    """The seconds that the training loop has waited so far, including the current wait."""
    counters = loader._counters
    since_s = counters.waits_since_s
    now_s = 0.0 if since_s is None else max(0.0, time.perf_counter() - since_s)
    return counters.wait_s + now_s


def is_iterating(loader: DataLoader[Any]) -> bool:
    """Whether an iteration has begun but not ended."""
    return loader._counters.began_s is not None and loader._counters.ended_s is None


def recent_crashes(loader: DataLoader[Any], count: int) -> list[str]:
    """How the last ``count`` replaced workers had crashed, as far as the crashes are remembered."""
    return list(loader._counters.crashes)[-count:] if count else []


def depth_as_set(loader: DataLoader[Any]) -> int | None:
    """The depth that was last passed to ``resize``; None if the engine decides."""
    return loader._depth


def depth_ceiling(loader: DataLoader[Any]) -> int | None:
    """The most batches that ``prefetch_factor`` allows ahead; None if it is not set."""
    return loader._depth_ceiling


def awaits_next_epoch(loader: DataLoader[Any]) -> bool:
    """Whether the number of workers changes only when the next epoch begins."""
    return any(iterator.is_outgrown(loader.num_workers) for iterator in loader._live())


def cache_name(loader: DataLoader[Any]) -> str | None:
    """The name of the cache whose figures the loader's stats show."""
    cache = loader.cache or loader._cache_inside
    return None if cache is None else str(cache.name)


def settings_keys(loader: DataLoader[Any]) -> Mapping[str, str]:
    """The name of each argument in the settings from which it came."""
    return loader._settings_keys


def plan_of(loader: DataLoader[Any]) -> Any:
    """The plan of ``num_workers="auto"``; None without a plan."""
    return None if loader._first_workers is None else loader._first_workers.plan
