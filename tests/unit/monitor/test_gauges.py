"""What the gauges say of this very process, its workers and its GPUs."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock
from penstock.meter import MemoryReport
from penstock.monitor import gauges as gauges_room
from penstock.monitor.gauges import Gauges
from penstock.monitor.watched_loader import WatchedLoader

GIB = 1 << 30
PARTS = ("trainer_bytes", "workers_bytes", "arena_bytes", "cache_bytes", "other_bytes")


class PaperNvml:
    """Two GPUs, of which one may fall off the bus."""

    NVMLError = OSError

    def __init__(self) -> None:
        self.gone: set[int] = set()

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.gone:
            raise OSError("GPU is lost")
        return index

    def nvmlDeviceGetName(self, device: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetUUID(self, device: int) -> str:
        return f"GPU-{device}"

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:
        return SimpleNamespace(total=141 * GIB, used=(device + 1) * GIB)

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:
        return SimpleNamespace(gpu=40 + device)

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> list[Any]:
        return []

    nvmlDeviceGetGraphicsRunningProcesses = nvmlDeviceGetComputeRunningProcesses


class Frames(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, count: int = 4096) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(64, 1024)


def processes_now() -> int:
    """This process, and those that Python started for earlier tests: a resource tracker, a fork server."""
    return len(penstock.memory(exact=False).processes)


def files_bytes(report: MemoryReport) -> int:
    """PSS of programs and libraries: it changes whenever a process of another tree that maps them starts or ends."""
    assert report.pss_bytes is not None and report.pss_shared_bytes is not None and report.pss_anon_bytes is not None
    return report.pss_bytes - report.pss_shared_bytes - report.pss_anon_bytes


@pytest.mark.parametrize("is_read", [False, True], ids=["only workers touch the batches", "the trainer reads them"])
def test_memory_of_forked_workers_agrees_with_proc_as_soon_as_they_are_there(is_read: bool) -> None:
    before = processes_now()
    loader = penstock.DataLoader(Frames(128), 32, num_workers=3, memory="128MB")
    watched = [WatchedLoader(loader, 0, is_only=True)]
    with loader:
        gauges = Gauges(watched, clock=time.monotonic)
        first = penstock.memory()
        alone = gauges.read(0).levels
        batches = iter(loader)
        # All four, so that no worker fills another one while memory is sampled.
        held = [next(batches) for _ in range(4)]
        if is_read:
            assert sum(float(batch.sum()) for batch in held) == 0
        levels = gauges.read(1).levels
        now = penstock.memory()
    assert now.pss_bytes is not None
    truth_bytes = now.pss_bytes - files_bytes(now) + files_bytes(first)
    assert alone["processes"] == before and levels["processes"] == before + 3 and not levels["tree_is_exact"]
    assert levels["tree_bytes"] == pytest.approx(truth_bytes, rel=0.05)
    assert sum(levels[name] for name in PARTS) == pytest.approx(levels["tree_bytes"], rel=0.05)
    assert levels["arena_bytes"] >= 4 * 32 * 64 * 1024 * 4 and levels["workers_bytes"] > 0
    assert gauges.tree_measure == "pss"


def test_a_huge_tree_gets_a_size_without_pss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges_room, "_EXACT_UP_TO_BYTES", 1)
    gauges = Gauges((), clock=time.monotonic)
    levels = gauges.read(0).levels
    # Other descendants have no other figure.
    assert not levels["tree_is_exact"] and gauges.tree_measure == ("sum of parts" if processes_now() == 1 else "rss")
    assert levels["tree_bytes"] == pytest.approx(penstock.memory().rss_bytes, rel=0.15)


def test_in_haste_the_last_sample_of_the_processes_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gauges = Gauges((), clock=time.monotonic)
    before = gauges.read(0).levels
    monkeypatch.setattr(gauges, "_tree", lambda *_: pytest.fail("the training thread waits for /proc"))
    assert gauges.read(1, in_haste=True).levels["tree_bytes"] == before["tree_bytes"]


def test_figures_of_a_gpu_keep_its_number_when_another_is_lost() -> None:
    nvml = PaperNvml()
    gauges = Gauges((), clock=time.monotonic, nvml=nvml)
    assert [gpu["uuid"] for gpu in gauges.gpus] == ["GPU-0", "GPU-1"]
    levels = gauges.read(0).levels
    assert (levels["gpu.0.used_bytes"], levels["gpu.1.used_bytes"]) == (GIB, 2 * GIB)
    assert levels["gpu.1.busy_fraction"] == 0.41
    nvml.gone = {0}
    levels = gauges.read(0).levels
    assert levels["gpu.1.used_bytes"] == 2 * GIB and "gpu.0.used_bytes" not in levels


def test_one_cache_of_two_loaders_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with penstock.Cache("16MiB", name="frames") as cache:
        cache.put("a", torch.zeros(100_000))
        cache.get("a")
        cache.get("b")
        loaders = [penstock.DataLoader(Frames(), 4, memory="64MB", cache=cache) for _ in range(2)]
        watched = [WatchedLoader(each, number, is_only=False) for number, each in enumerate(loaders)]
        reading = Gauges(watched, clock=time.monotonic).read(0)
    assert reading.levels["cache_bytes"] == reading.loaders[0].figures["cache_bytes"] > 400_000
    assert (reading.levels["cache_hits"], reading.levels["cache_misses"]) == (1, 1)
