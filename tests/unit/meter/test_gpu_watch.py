"""The use of a process's own GPUs, out of many readings."""

from __future__ import annotations

import pytest

from penstock.meter.gpu import Gpu
from penstock.meter.gpu_watch import GpuWatch


def gpu(use: int | None, *, is_mine: bool = True) -> Gpu:
    return Gpu(
        index=0, name="a GPU", uuid="GPU-1", memory_total_bytes=1, memory_used_bytes=1, utilisation_percent=use,
        torch_reserved_bytes=1 if is_mine else None,
    )  # fmt: skip


def seen(*readings: tuple[Gpu, ...]) -> float | None:
    left = list(readings)
    watch = GpuWatch(read=lambda: left.pop(0))
    for _ in readings:
        watch.look()
    return watch.use


def test_the_use_is_the_mean_over_readings_and_the_gpus_of_this_process() -> None:
    others = gpu(100, is_mine=False)
    assert seen((gpu(80), others), (gpu(40), others)) == pytest.approx(0.6)
    assert seen((gpu(100), gpu(0))) == pytest.approx(0.5)


@pytest.mark.parametrize("reading", [(), (gpu(90, is_mine=False),), (gpu(None),)])
def test_without_a_gpu_of_its_own_nothing_is_known(reading: tuple[Gpu, ...]) -> None:
    assert seen(reading, reading) is None
