"""What a loader does at this moment: its workers, its waiting, its latest crashes.

In:  a loader that may be iterating in another thread.
Out: one ``WorkerNow`` per worker; since when the training loop waits.
Runs in: trainer, any thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.loader.dataloader import DataLoader
    from penstock.loader.engine.worker_set import WorkerNow


def workers_now(loader: DataLoader[Any]) -> list[WorkerNow]:
    """The workers of all iterations under way. What changes during the call may be a moment old."""
    found = [worker for iterator in loader._live() for worker in iterator.engine.workers_now()]
    return sorted(found, key=lambda worker: worker.worker_id)


def waited_s(loader: DataLoader[Any]) -> float:
    """Time the training loop has waited so far, including a wait under way. Without workers, fetching is waiting."""
    counters = loader._counters
    since_s = counters.waits_since_s
    now_s = 0.0 if since_s is None else max(0.0, time.perf_counter() - since_s)
    return counters.wait_s + now_s + (0.0 if loader.num_workers else counters.deliver_s)


def is_iterating(loader: DataLoader[Any]) -> bool:
    """Whether an iteration has begun and not ended."""
    return loader._counters.began_s is not None and loader._counters.ended_s is None


def recent_crashes(loader: DataLoader[Any], count: int) -> list[str]:
    """How the last ``count`` workers that were replaced had crashed, as far as that is remembered."""
    return list(loader._counters.crashes)[-count:] if count else []
