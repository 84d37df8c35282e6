"""Starting points by machine, as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import settings
from penstock.planner.starting_points import StartingMachine, starting_point

GB, GIB = 10**9, 1 << 30


def machine(**more: Any) -> StartingMachine:
    return StartingMachine(
        **{"platform": "linux", "cores": 64, "ram_bytes": 64 * GB, "gpu_bytes": None, "ranks": 1, **more}
    )


@pytest.mark.parametrize(
    ("gpu_bytes", "batch", "high", "workers", "prefetch"),
    [
        (None, 8, 8, 8, 4),
        (8 * GB, 4, 8, 8, 2),
        (8 * GIB, 4, 8, 8, 2),
        (16 * GIB, 8, 16, 8, 4),
        (24 * GB, 16, 32, 16, 8),
        (141 * GB, 16, 32, 16, 8),
    ],
)
def test_batch_workers_and_prefetch_follow_the_gpu_s_memory(
    gpu_bytes: int | None, batch: int, high: int, workers: int, prefetch: int
) -> None:
    point = starting_point(machine(gpu_bytes=gpu_bytes))
    assert (point.batch_size, point.batch_high, point.workers, point.prefetch_factor) == (
        batch,
        high,
        workers,
        prefetch,
    )
    assert point.pin_memory == (gpu_bytes is not None)


@pytest.mark.parametrize(
    ("cores", "ranks", "per_rank"), [(64, 1, 16), (12, 1, 6), (2, 1, 1), (0.5, 1, 1), (64, 3, 4), (12, 3, 2), (4, 8, 1)]
)
def test_workers_are_at_most_half_the_cores_and_four_for_each_of_several_gpus(
    cores: float, ranks: int, per_rank: int
) -> None:
    point = starting_point(machine(cores=cores, ranks=ranks, gpu_bytes=48 * GB))
    assert (point.workers, point.workers_on_node) == (per_rank, per_rank * ranks)
    assert any(f"{per_rank} per rank, {per_rank * ranks} on this node" in why for why in point.why)


def test_on_windows_penstock_uses_threads_and_torch_no_worker_processes() -> None:
    point = starting_point(machine(platform="win32"))
    assert (point.workers, point.torch_workers) == (8, 0)
    assert any("Windows" in why and "threads" in why for why in point.why)
    assert starting_point(machine(platform="darwin")).torch_workers == 8


@pytest.mark.parametrize(
    ("ram_gb", "low_gb", "high_gb"), [(64, 10, 20), (128, 20, 40), (256, 50, 80), (16, 2.5, 5), (1024, 200, 320)]
)
def test_caches_are_as_the_teams_had_them_and_never_over_half(ram_gb: int, low_gb: float, high_gb: float) -> None:
    point = starting_point(machine(ram_bytes=ram_gb * GB))
    assert (point.cache_low_bytes, point.cache_high_bytes) == (low_gb * GB, high_gb * GB)
    assert point.cache_high_bytes <= ram_gb * GB / 2


def test_the_yaml_is_read_back_as_the_same_arguments(tmp_path: Path) -> None:
    point = starting_point(machine(gpu_bytes=16 * GB))
    path = tmp_path / "start.yaml"
    path.write_text(point.to_yaml())
    assert settings.load(path).arguments == point.arguments()
