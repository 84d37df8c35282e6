"""What each worker of a loader is doing at this moment.

In:  a loader that may be iterating in another thread.
Out: one ``WorkerNow`` per worker; since when the training loop waits.
Runs in: trainer, any thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from penstock.loader.dataloader import DataLoader
    from penstock.loader.engine.engine import Engine
    from penstock.loader.engine.seat import Seat

_WITHIN_S = 0.1

Doing = Literal["starting", "idle", "fetching", "collating", "waiting for memory"]


@dataclass(frozen=True, kw_only=True)
class WorkerNow:
    """One worker."""

    worker_id: int
    pid: int | None
    """None: it is a thread."""
    doing: Doing
    batch: int | None
    """Number of the batch in its hands, counted in its epoch."""
    index: str | None
    """What it fetches of that batch, as the sampler said, where that is known."""
    since_s: float | None
    """How long it has had that."""
    samples: int
    """Samples it has fetched since it was started."""
    restarts: int
    """How often a worker of this number died and was replaced."""
    private_bytes: int
    leaving: bool
    """Whether it goes once its work is done."""


def workers_now(loader: DataLoader[Any]) -> list[WorkerNow]:
    """Workers of all iterations under way. What changes while it is looked at may be a moment old."""
    restarts = loader._counters.restarts_by_worker
    found: list[WorkerNow] = []
    for iterator in list(loader._live):
        engine = iterator._engine
        is_locked = engine._lock.acquire(timeout=_WITHIN_S)
        try:
            if not engine.is_closed:
                found += [_now(engine, seat, restarts) for seat in list(engine.dispatcher.roster.seats)]
        finally:
            if is_locked:
                engine._lock.release()
    return sorted(found, key=lambda worker: worker.worker_id)


def waited_s(loader: DataLoader[Any]) -> float:
    """Time the training loop has waited so far, a wait that goes on included. Without workers, fetching is waiting."""
    counters = loader._counters
    since_s = counters.waits_since_s
    now_s = 0.0 if since_s is None else max(0.0, time.perf_counter() - since_s)
    return counters.wait_s + now_s + (0.0 if loader.num_workers else counters.deliver_s)


def is_iterating(loader: DataLoader[Any]) -> bool:
    """Whether an iteration was begun and has not come to its end."""
    return loader._counters.began_s is not None and loader._counters.ended_s is None


def recent_endings(loader: DataLoader[Any], count: int) -> list[str]:
    """How the last ``count`` workers died that were replaced, as far as that is remembered."""
    return list(loader._counters.endings)[-count:] if count else []


def _now(engine: Engine, seat: Seat, restarts: dict[int, int]) -> WorkerNow:
    number, row = engine._crew.in_hand(seat)
    task = seat.tasks.get(number) or next(iter(seat.tasks.values()), None)
    doing: Doing = "idle"
    index = None
    if not seat.handle.started:
        doing = "starting"
    elif task is not None and task.need is not None:
        doing = "waiting for memory"
    elif task is not None:
        doing = "collating" if task.rows is None else "fetching"
        indices = task.batch.indices
        if task.number == number and isinstance(indices, list) and 0 <= row < len(indices):
            index = str(indices[row])[:80]
    return WorkerNow(
        worker_id=seat.handle.worker_id,
        pid=seat.handle.pid,
        doing=doing,
        batch=None if task is None else task.batch.number,
        index=index,
        since_s=None if task is None else max(0.0, time.monotonic() - task.handed_s),
        samples=seat.rows_done,
        restarts=restarts.get(seat.handle.worker_id, 0),
        private_bytes=seat.handle.private_bytes,
        leaving=seat.leaving,
    )
