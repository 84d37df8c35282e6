"""The largest batch that fits, from estimates alone and with real steps that a stand-in pretends to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock import gpu
from penstock.errors import ConfigError
from penstock.gpu.allocator.alloc_conf import AllocatorSettings
from penstock.gpu.batch_size import BatchSizeFinder, LargestSearch
from penstock.gpu.real_steps import RealSteps
from support.models import MIB, Chain, vectors

CARD = gpu.Card()
SETTINGS = AllocatorSettings()
MEMORY = 2000 * MIB
TRAINING = gpu.TrainingSetup(make_model=Chain, make_batch=vectors)


def find(**more: Any) -> gpu.BatchSize:
    return gpu.find_batch_size(Chain, vectors, environment={}, verify=False, **more)


def device_bytes(n: int, **more: Any) -> int:
    return gpu.estimate(Chain, vectors, [n], environment={}, **more)[0].device_bytes


def test_the_batch_found_leaves_the_margin_and_a_larger_one_does_not() -> None:
    found = find(memory=MEMORY, margin=0.15)
    assert found.estimate.device_bytes == device_bytes(found.batch_size) <= 0.85 * MEMORY
    assert device_bytes(int(found.batch_size * 1.15)) > 0.85 * MEMORY
    assert (found.margin, found.memory_bytes, found.accumulation_steps) == (0.15, MEMORY, 1)
    assert not found.is_verified and not found.trials
    assert "15% must stay free" in found.reason and "not run" in found.reason


def test_more_memory_is_more_batch_and_a_wider_margin_less() -> None:
    usual = find(memory=MEMORY).batch_size
    assert find(memory=2 * MEMORY).batch_size > usual > find(memory=MEMORY, margin=0.2).batch_size


def test_no_batch_larger_than_asked_for_is_looked_for() -> None:
    found = find(memory=MEMORY, most=100)
    assert found.batch_size == 100 and "no larger batch was requested" in found.reason


@pytest.mark.parametrize("effective", [100_000, 99_991, 40_000])
def test_pieces_make_the_effective_batch_and_fit_with_gradients_that_stay(effective: int) -> None:
    found = find(memory=MEMORY, effective_batch=effective)
    assert found.batch_size <= found.largest_batch_size
    if effective % found.accumulation_steps == 0:
        assert found.batch_size * found.accumulation_steps == effective
    else:
        assert -(-effective // found.accumulation_steps) == found.batch_size and "tensor_split" in found.reason
    assert device_bytes(found.batch_size, accumulation=2) <= 0.9 * MEMORY
    assert found.accumulation_steps > 1


def test_an_effective_batch_that_fits_stays_whole() -> None:
    found = find(memory=MEMORY, effective_batch=512)
    assert (found.batch_size, found.accumulation_steps) == (512, 1)


def test_if_not_even_one_sample_fits_that_is_said_with_what_would_help() -> None:
    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).sum()

    found = gpu.find_batch_size(Wide, lambda n: torch.zeros(n, 4096), "2GB", environment={}, verify=False)
    assert found.batch_size == 0
    assert "optimizer=sgd" in [choice.name for choice in found.would_fit]
    assert "not even one sample fits" in found.reason and "it would fit with" in found.reason
    assert all(choice.estimate.device_bytes <= 0.9 * found.memory_bytes for choice in found.would_fit)


def test_sizes_that_fit_need_not_be_an_unbroken_row() -> None:
    class Jagged:
        """Every tenth batch size takes more than the next ones."""

        def at(self, n: int) -> Any:
            return type("E", (), {"reserved_bytes": n * 10 + (60 if n % 10 == 0 else 0)})

    # 103 takes 1030 and so do those below it, but for 100, which takes 1060.
    assert LargestSearch(Jagged(), 1035, 1000).find() == 99  # type: ignore[arg-type]
    assert LargestSearch(Jagged(), 1075, 1000).find() == 107  # type: ignore[arg-type]


# -- with real steps, pretended ------------------------------------------------------------------------------------


class Gpu:
    """A GPU on which a training takes so many times what is estimated."""

    def __init__(self, factor: float, limit_bytes: int = MEMORY - CARD.context_bytes) -> None:
        self._factor, self._limit_bytes = factor, limit_bytes
        self.ran: list[int] = []

    def measure(self, training: gpu.TrainingSetup, n: int, limit_bytes: int | None) -> RealSteps:
        self.ran.append(n)
        said = gpu.Estimator(training, CARD, SETTINGS, batch_sizes=[n]).at(n)
        reserved, limit = int(said.reserved_bytes * self._factor), limit_bytes or self._limit_bytes
        fits = reserved <= limit
        return RealSteps(
            batch_size=n,
            fits=fits,
            allocated_bytes=int(said.allocated_bytes * self._factor) if fits else limit,
            reserved_bytes=reserved if fits else limit,
        )


def finder(measure: Callable[..., RealSteps]) -> BatchSizeFinder:
    return BatchSizeFinder(TRAINING, CARD, SETTINGS, memory_bytes=MEMORY, margin=0.1, measure=measure)


@pytest.mark.parametrize("factor", [0.8, 0.97, 1.0, 1.04, 1.3])
def test_trials_correct_the_estimate_and_are_three_at_the_most(factor: float) -> None:
    device = Gpu(factor)
    found = finder(device.measure).find()
    line = 0.9 * MEMORY - CARD.context_bytes
    assert found.is_verified and found.batch_size in device.ran
    assert [trial.batch_size for trial in found.trials] == device.ran and len(device.ran) <= 3
    assert device.measure(TRAINING, found.batch_size, None).reserved_bytes <= line
    assert device.measure(TRAINING, int(found.batch_size * 1.15), None).reserved_bytes > line
    assert "trials: " in found.reason
    if factor == 1.0:
        assert len(found.trials) == 1


def test_running_out_of_memory_is_a_trial_and_not_the_end() -> None:
    device = Gpu(1.5)
    found = finder(device.measure).find()
    assert not found.trials[0].fits and found.trials[-1].fits
    assert f"{found.trials[0].batch_size} ran out of memory" in found.reason


def test_an_estimate_that_is_far_too_low_still_ends_with_a_batch_that_ran() -> None:
    device = Gpu(2.0)
    found = finder(device.measure).find()
    assert found.is_verified and found.batch_size > 1 and len(device.ran) <= 3


def test_that_not_even_one_fits_is_said_once_one_was_run() -> None:
    def always_full(training: gpu.TrainingSetup, n: int, limit_bytes: int | None) -> RealSteps:
        return RealSteps(batch_size=n, fits=False, allocated_bytes=1, reserved_bytes=1)

    found = BatchSizeFinder(
        TRAINING, CARD, SETTINGS, memory_bytes=MEMORY, margin=0.1, most=2, measure=always_full
    ).find()
    assert [trial.batch_size for trial in found.trials] == [2, 1]
    assert found.batch_size == 0 and found.is_verified and "1 ran out of memory" in found.reason


def test_nothing_is_called_verified_that_did_not_run() -> None:
    def always_full(training: gpu.TrainingSetup, n: int, limit_bytes: int | None) -> RealSteps:
        return RealSteps(batch_size=n, fits=False, allocated_bytes=1, reserved_bytes=1)

    found = finder(always_full).find()
    assert len(found.trials) == 3 and not any(trial.fits for trial in found.trials)
    assert 0 < found.batch_size < found.trials[-1].batch_size
    assert not found.is_verified and "the chosen size itself was not run" in found.reason


def test_pieces_are_run_as_pieces_and_all_trials_together_are_three_at_the_most() -> None:
    trainings: list[int] = []
    device = Gpu(1.2)

    def measure(training: gpu.TrainingSetup, n: int, limit_bytes: int | None) -> RealSteps:
        trainings.append(training.accumulation)
        return device.measure(training, n, limit_bytes)

    found = finder(measure).find(100_000)
    assert found.batch_size * found.accumulation_steps == 100_000
    assert set(trainings) == {2} and len(trainings) <= 3 and found.is_verified
    # What seemed to fit whole, and does not: its trials count.
    whole = gpu.find_batch_size(Chain, vectors, MEMORY, environment={}, verify=False).batch_size
    trainings.clear()
    found = finder(measure).find(whole)
    assert found.accumulation_steps > 1
    assert trainings[0] == 1 and len(trainings) <= 3 and len(found.trials) == len(trainings)


# -- what cannot be meant ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"margin": 1.0}, "margin=1.0 is not a share"),
        ({"margin": -0.1}, "margin=-0.1 is not a share"),
        ({"effective_batch": 0}, "effective_batch=0 is not a whole number"),
        ({"most": 0}, "most=0 is not a whole number"),
        ({"memory": "big"}, "memory='big'"),
        ({"optimizer": "adamw2"}, "optimizer='adamw2' is not known"),
        ({"effective_batch": 8, "step": lambda *_: None}, "has to accumulate gradients itself"),
    ],
)
def test_arguments_that_cannot_work_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find(**{"memory": "8GB", **given})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_limit_is_needed_and_no_steps_can_run() -> None:
    with pytest.raises(ConfigError, match='such as memory="20GB"'):
        gpu.find_batch_size(Chain, vectors, environment={})
    with pytest.raises(ConfigError, match="finds no GPU here"):
        gpu.find_batch_size(Chain, vectors, "8GB", verify=True, environment={})
    with pytest.raises(ConfigError, match="calibrate=True runs real steps"):
        gpu.estimate(Chain, vectors, [8], calibrate=True, environment={})
