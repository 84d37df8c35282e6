"""The watcher: peaks, growth and means of the samples of a gauge."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from penstock.meter import Gpu, Watcher, gpu_use


@dataclass(frozen=True)
class Level:
    """A sample of two measures."""

    high: int | None
    low: int = 0


def watcher(*samples: Level | None) -> Watcher[Level | None]:
    """A watcher that has taken all samples."""
    left = list(samples)
    watch = Watcher(lambda: left.pop(0), measures=["high", "low"], every_s=1.0)
    while left:
        watch.take()
    return watch


def test_each_measure_has_its_own_peak_and_its_sample_is_whole() -> None:
    watch = watcher(Level(1, 9), Level(7, 2), Level(3, 4))
    assert watch.peak("high") == Level(7, 2)
    assert watch.peak("low") == Level(1, 9)
    assert (watch.start, watch.latest) == (Level(1, 9), Level(3, 4))


def test_growth_is_relative_to_the_first_sample() -> None:
    watch = watcher(Level(5, 5), Level(9, 4), Level(3, 2))
    assert (watch.growth("high"), watch.peak_growth("high")) == (-2, 4)
    assert (watch.growth("low"), watch.peak_growth("low")) == (-3, 0)


def test_forgotten_peaks_begin_at_a_fresh_sample() -> None:
    left = [Level(1), Level(8), Level(4), Level(5)]
    watch = Watcher(lambda: left.pop(0), measures=["high"], every_s=1.0)
    watch.take()
    watch.forget_peaks()
    assert watch.peak("high") == Level(4)
    watch.take()
    assert watch.peak_growth("high") == 4


@pytest.mark.parametrize("unknown", [None, Level(None)])
def test_where_a_figure_is_not_provided_growth_and_mean_are_unknown(unknown: Level | None) -> None:
    watch = watcher(unknown, unknown)
    assert (watch.growth("high"), watch.peak_growth("high"), watch.mean("high")) == (None, None, None)


def test_the_mean_leaves_out_the_first_sample_and_unknown_ones() -> None:
    assert watcher(Level(100), Level(2), Level(None), None, Level(4)).mean("high") == 3


def test_samples_are_taken_from_a_thread_until_the_context_ends() -> None:
    enough = threading.Event()
    taken: list[int] = []

    def sample() -> Level:
        taken.append(threading.get_ident())
        if len(taken) > 3:
            enough.set()
        return Level(len(taken))

    with Watcher(sample, measures=["high"], every_s=0.0) as watch:
        assert enough.wait(60)
    count = len(taken)
    assert taken[0] == threading.get_ident() and len(set(taken[1:])) == 1
    assert watch.peak("high") == watch.latest == Level(count)


def gpu(use: int | None, *, is_mine: bool = True) -> Gpu:
    return Gpu(
        index=0, name="a GPU", uuid="GPU-1", memory_total_bytes=1, memory_used_bytes=1, utilisation_percent=use,
        torch_reserved_bytes=1 if is_mine else None,
    )  # fmt: skip


def mean_use(samples: Iterable[tuple[Gpu, ...]]) -> float | None:
    left = [(), *samples]
    watch = Watcher(lambda: gpu_use(read=lambda: left.pop(0)), measures=["fraction"], every_s=1.0)
    while left:
        watch.take()
    return watch.mean("fraction")


def test_the_use_is_the_mean_over_samples_and_the_gpus_of_this_process() -> None:
    others = gpu(100, is_mine=False)
    assert mean_use([(gpu(80), others), (gpu(40), others)]) == pytest.approx(0.6)
    assert mean_use([(gpu(100), gpu(0))]) == pytest.approx(0.5)


@pytest.mark.parametrize("sample", [(), (gpu(90, is_mine=False),), (gpu(None),)])
def test_the_use_is_unknown_without_a_gpu_of_this_process(sample: tuple[Gpu, ...]) -> None:
    assert mean_use([sample, sample]) is None
