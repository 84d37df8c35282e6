"""Accounts of runs on paper: a machine of 16 GiB, a loader called train, a point every second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.monitor.runs.format import Alert, Note, Point, TriedSettings
from penstock.monitor.runs.reader import RunSummary
from penstock.report.account import Account

GIB, MIB = 1 << 30, 1 << 20
BEGAN_S = 1_700_000_000.0
SETTINGS = {"workers": 4, "depth": None, "prefetch_factor": 2, "memory": "4GB", "batch_size": 32}


def tried(
    wait: float = 0.0, *, speed: float = 640.0, active_s: float = 100.0, ended_s: float = 100.0, **now: Any
) -> TriedSettings:
    return TriedSettings(
        loader=0, configuration={**SETTINGS, **now}, began_s=BEGAN_S + ended_s - active_s, ended_s=BEGAN_S + ended_s,
        active_s=active_s, samples=speed * active_s, wait_s=wait * active_s, peak_bytes=2.0 * GIB,
    )  # fmt: skip


def account_of(
    *,
    wait: float | None = 0.01,
    seconds: int = 100,
    used: float = 4.0,
    busy: float | None = None,
    figures: Callable[[int], Mapping[str, float]] = lambda second: {},
    all_tried: Sequence[TriedSettings] | None = None,
    journal: Sequence[Note] = (),
    alerts: Sequence[Alert] = (),
    loader: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    **summary: Any,
) -> Account:
    """``wait``: None for a loader that does not say. ``used``: GiB in use of 16, by everybody."""
    waits = {} if wait is None else {"wait_fraction": wait, "loader.0.wait_s": 0.0}
    gpu = {} if busy is None else {"gpu.0.busy_fraction": busy, "gpu.0.used_bytes": 9.0 * GIB}
    points = [
        Point(
            BEGAN_S + second + 1,
            1.0,
            {
                "tree_bytes": 2.0 * GIB, "used_bytes": used * GIB, "limit_bytes": 16.0 * GIB, "budget_bytes": 4.0 * GIB,
                "trainer_bytes": 1.0 * GIB, "workers_bytes": 0.4 * GIB, "arena_bytes": 0.3 * GIB, "cache_bytes": 0.0,
                "other_bytes": 0.3 * GIB, "samples_per_s": 640.0, "loader.0.samples": 640.0 * (second + 1),
                "loader.0.batches": 20.0 * (second + 1), "loader.0.fetch_s": 3.0 * second, "loader.0.workers": 4.0,
                "loader.0.depth": 2.0, "loader.0.in_flight_bytes": 300.0 * MIB,
                "loader.0.workers_private_bytes": 400.0 * MIB, "loader.0.budget_bytes": 1.0 * GIB, **waits, **gpu,
                **figures(second),
            },
        )
        for second in range(seconds)
    ]  # fmt: skip
    arguments = {"num_workers": 4, "batch_size": 32, "memory": "1GB"}
    entry = {
        "name": "train",
        "kind": "penstock",
        "dataset": "Frames",
        "arguments": arguments,
        "keys": {},
        **(loader or {}),
    }
    values: dict[str, Any] = {
        "id": "231114-221320-aaaa", "name": "train.py", "state": "finished", "what": None, "started_s": BEGAN_S,
        "ended_s": BEGAN_S + seconds, "heard_s": BEGAN_S + seconds, "pid": 5, "host": "here", "rank": None,
        "step": 20 * seconds, "samples": 640 * seconds, "samples_per_s": None if wait is None else 640.0,
        "wait_fraction": wait, "peak_bytes": 2 * GIB, "limit_bytes": 16 * GIB, "worker_restarts": 0,
        "loaders": [entry], "tried": [tried(wait or 0.0)] if all_tried is None else list(all_tried), **summary,
    }  # fmt: skip
    return Account(
        summary=RunSummary(**values),
        facts={"machine": {"cpu_usable": 8.0, "memory_limit_bytes": 16 * GIB}, **(facts or {})},
        totals={"active_s": float(seconds), "peak_used_bytes": used * GIB},
        points=points,
        journal=journal,
        alerts=alerts,
    )
