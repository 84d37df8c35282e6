"""Recorded runs to read, without a training: any length, written through the same door as real ones."""

from __future__ import annotations

import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from penstock.monitor.runs.format import Alert, Note, Point, TriedSettings
from penstock.monitor.runs.liveness import boot_id
from penstock.monitor.runs.writer import RunRecord

GIB = 1 << 30


def begin_run(home: Path, name: str = "train.py", *, started_s: float | None = None, **facts: Any) -> RunRecord:
    """A run that is being recorded; call ``write``, then ``finish`` or ``abandon`` (which looks like a kill)."""
    began_s = time.time() if started_s is None else started_s
    loader = {"name": "train", "kind": "penstock", "arguments": {"num_workers": 4, "batch_size": 32, "memory": "4GB"}}
    all_facts = {
        "name": name,
        "started_s": began_s,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot_id": boot_id(),
        "command": ["python", "train.py"],
        "loaders": [loader],
        "machine": {"memory_limit_bytes": 16 * GIB, "memory_limit_source": "host", "cpu_usable": 8.0},
        "gpus": [{"name": "NVIDIA H200", "uuid": "GPU-0", "memory_total_bytes": 141 * GIB}],
        "tree_measure": "pss",
        "socket": None,
        **facts,
    }
    return RunRecord(home, all_facts)


def point_at(t_s: float, number: int, *, span_s: float = 1.0) -> Point:
    """Every figure a run has, moving a little."""
    wave = math.sin(number / 40)
    figures = {
        "step": 20.0 * number, "steps_per_s": 20.0, "samples": 640.0 * number, "samples_per_s": 640 + 40 * wave,
        "wait_fraction": 0.1 + 0.08 * wave, "tree_bytes": (6 + wave) * GIB, "tree_is_exact": 0.0, "processes": 5.0,
        "trainer_bytes": 2.5 * GIB, "workers_bytes": 1.0 * GIB, "arena_bytes": (1 + wave / 2) * GIB,
        "cache_bytes": 0.5 * GIB, "other_bytes": 0.5 * GIB, "limit_bytes": 16.0 * GIB, "used_bytes": (9 + wave) * GIB,
        "available_bytes": (7 - wave) * GIB, "swap_used_bytes": 0.0, "budget_bytes": 4.0 * GIB, "workers": 4.0,
        "depth": 3.0, "worker_restarts": float(number // 1000), "cache_hits": 80.0 * number,
        "cache_misses": 20.0 * number, "cache_hit_rate": 0.8, "gpu_allocated_bytes": 20.0 * GIB,
        "gpu_reserved_bytes": 24.0 * GIB, "gpu.0.used_bytes": 25.0 * GIB, "gpu.0.total_bytes": 141.0 * GIB,
        "gpu.0.busy_fraction": 0.9, "gpu.0.allocated_bytes": 20.0 * GIB, "gpu.0.reserved_bytes": 24.0 * GIB,
        "loader.0.samples": 640.0 * number, "loader.0.batches": 20.0 * number,
        "loader.0.samples_per_s": 640 + 40 * wave, "loader.0.wait_fraction": 0.1 + 0.08 * wave,
        "loader.0.workers": 4.0, "loader.0.depth": 3.0, "loader.0.in_flight_bytes": (1 + wave / 2) * GIB,
        "loader.0.lent_bytes": 0.3 * GIB, "loader.0.workers_private_bytes": 1.0 * GIB,
        "loader.0.budget_bytes": 4.0 * GIB, "loader.0.worker_restarts": float(number // 1000),
        "loader.0.wait_s": 0.1 * number, "loader.0.fetch_s": 3.0 * number, "loader.0.collate_s": 0.2 * number,
    }  # fmt: skip
    return Point(t_s, span_s, figures)


def fill(record: RunRecord, seconds: int, *, ended_s: float) -> None:
    """So many seconds of points up to ``ended_s``, with a journal, an alert and totals."""
    chunk = 600
    for start in range(0, seconds, chunk):
        numbers = range(start, min(seconds, start + chunk))
        record.write([point_at(ended_s - seconds + 1 + number, number) for number in numbers])
    began_s = ended_s - seconds
    configuration = {"workers": 4, "depth": None, "prefetch_factor": 2, "memory": "4GB", "batch_size": 32}
    record.write(
        notes=[
            Note(t_s=began_s + 1, who="training", kind="moment", what="After dataset creation"),
            Note(t_s=began_s + seconds / 2, who="terminal", kind="resize", what="train: workers 2 -> 4"),
        ],
        alerts=[Alert(t_s=began_s + seconds / 2, rule="memory", state="raised", what="memory above 90%")],
        totals={
            "t_s": ended_s, "step": 20.0 * seconds, "samples": 640.0 * seconds, "active_s": float(seconds),
            "wait_s": 0.1 * seconds, "peak_tree_bytes": 7.0 * GIB, "peak_used_bytes": 10.0 * GIB,
        },
        tried={
            "0:a": TriedSettings(
                loader=0, configuration=configuration, began_s=began_s, ended_s=ended_s, active_s=float(seconds),
                samples=640.0 * seconds, wait_s=0.1 * seconds, peak_bytes=7.0 * GIB,
            )
        },
    )  # fmt: skip
