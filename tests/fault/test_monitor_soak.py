"""A long run with the monitor on, time compressed: its memory stays flat, its record small."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import psutil
import pytest
import torch

import penstock
from penstock.monitor.gauges import Gauges
from penstock.monitor.recorder import Recorder, WallClock
from penstock.monitor.runs.format import RunOutcome
from penstock.monitor.runs.reader import open_run
from penstock.monitor.watched_loader import WatchedLoader
from support.recorded_runs import begin_run

STEPS_PER_S = 20


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class CompressedClock:
    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


def train(home: Path, steps: int) -> tuple[int, int]:
    """Bytes the process has grown by after its first tenth, and of its record."""
    clock = CompressedClock()
    loader = penstock.DataLoader(Numbers(), 1, memory="64MB", name="train")
    watched = [WatchedLoader(loader, 0, is_only=True)]
    gauges = Gauges(watched, clock=clock)
    recorder = Recorder(watched, gauges, clock=WallClock(clock, clock), warn_at=None)
    recorder.record = begin_run(home, started_s=clock.now_s)
    record = recorder.record
    batches = iter(loader)
    warm_bytes = 0
    for step in range(steps):
        recorder.step += 1
        if step % STEPS_PER_S == 0:
            next(batches)
            clock.now_s += 1.0
            recorder.tick()
        if step % 1000 == 0:
            recorder.note("governor", "decision", "x" * 300)
        if step == steps // 10:
            gc.collect()
            warm_bytes = psutil.Process().memory_info().rss
    gc.collect()
    grown_bytes = psutil.Process().memory_info().rss - warm_bytes
    size_bytes = sum(path.stat().st_size for path in record.path.parent.iterdir())
    recorder.close(RunOutcome(state="finished", t_s=clock.now_s))
    with open_run(home, "last") as run:
        points = run.points(most=10**6)
        assert sum(point.span_s for point in points) == pytest.approx(steps // STEPS_PER_S - 1)
        assert len(points) < 600 + 1080 + 1440 + steps / STEPS_PER_S / 60
        assert run.totals["step"] == steps
    return grown_bytes, size_bytes


def test_half_an_hour_of_training_keeps_memory_flat_and_its_record_small(tmp_path: Path) -> None:
    grown_bytes, size_bytes = train(tmp_path, 36_000)
    assert grown_bytes < 8 << 20 and size_bytes < 12 << 20


@pytest.mark.soak
def test_a_million_steps_keep_memory_flat_and_the_record_below_50_mb(tmp_path: Path) -> None:
    grown_bytes, size_bytes = train(tmp_path, 1_000_000)
    logging.getLogger(__name__).info("grown by %d bytes, record of %d bytes", grown_bytes, size_bytes)
    assert grown_bytes < 8 << 20 and size_bytes < 50 << 20
