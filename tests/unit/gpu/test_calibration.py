"""Estimates corrected by what was measured, and the steps that are run for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import gpu
from penstock.errors import ConfigError
from penstock.gpu.allocator.alloc_conf import AllocatorSettings
from penstock.gpu.calibration import BatchTrial, calibrate, correct, small_batches
from penstock.gpu.real_steps import RealSteps, is_out_of_memory, train
from support.models import MIB, Chain, vectors

CARD, SETTINGS = gpu.Card(), AllocatorSettings()


def profile(*sizes: int) -> gpu.Estimator:
    return gpu.Estimator(
        gpu.TrainingSetup(make_model=Chain, make_batch=vectors), CARD, SETTINGS, batch_sizes=list(sizes)
    )


def trial(n: int, *, off_allocated: int, off_kept: int = 0) -> BatchTrial:
    return BatchTrial(
        batch_size=n,
        fits=True,
        allocated_bytes=1000 + off_allocated,
        reserved_bytes=1200 + off_allocated + off_kept,
        estimated_allocated_bytes=1000,
        estimated_reserved_bytes=1200,
    )


def test_a_line_through_two_differences_is_followed_to_other_batch_sizes() -> None:
    found = correct([trial(2, off_allocated=30), trial(4, off_allocated=50)])
    assert (found.fixed_bytes, found.per_sample_bytes) == (10, 10)
    assert found.allocated(10, 5000) == 5110
    assert found.reserved(10, 5000, 6000) == 6110


def test_what_the_allocator_keeps_is_corrected_by_a_share() -> None:
    found = correct([trial(2, off_allocated=0, off_kept=100), trial(4, off_allocated=0, off_kept=100)])
    assert found.overhead_share == pytest.approx(0.1)
    assert found.reserved(10, 5000, 6000) == 6500


def test_of_one_difference_what_is_missing_grows_and_what_is_too_much_does_not() -> None:
    missing, too_much = correct([trial(2, off_allocated=40)]), correct([trial(2, off_allocated=-40)])
    assert (missing.fixed_bytes, missing.per_sample_bytes) == (0, 20)
    assert (too_much.fixed_bytes, too_much.per_sample_bytes) == (-40, 0)
    assert correct([]).allocated(3, 77) == 77


def test_calibration_finds_what_tracing_missed_and_keeps_both() -> None:
    """A GPU that takes 50 MiB and 2 KiB a sample more than is traced."""

    def measure(training: gpu.TrainingSetup, n: int, limit_bytes: int | None) -> RealSteps:
        said = profile(n).at(n)
        more = 50 * MIB + 2048 * n
        return RealSteps(
            batch_size=n,
            fits=True,
            allocated_bytes=said.allocated_bytes + more,
            reserved_bytes=said.reserved_bytes + more,
        )

    traced, here = profile(4096, 32768).at(32768), profile(4096, 32768)
    here.correction = calibrate(here, 32768, measure)
    found = here.at(32768, device_memory_bytes=4 << 30)
    more = 50 * MIB + 2048 * 32768
    assert found.allocated_bytes == pytest.approx(traced.allocated_bytes + more, rel=1e-6)
    assert found.reserved_bytes == pytest.approx(traced.reserved_bytes + more, rel=1e-3)
    assert found.uncalibrated is not None and found.uncalibrated.reserved_bytes == traced.reserved_bytes
    assert found.components["workspaces"] - traced.components["workspaces"] == pytest.approx(50 * MIB, rel=1e-3)
    assert found.components["activations"] - traced.components["activations"] == pytest.approx(2048 * 32768, rel=1e-3)
    assert sum(found.components.values()) == found.device_bytes
    slopes = [each.growth["activations"].per_sample_bytes for each in (traced, found)]
    assert slopes[1] - slopes[0] == pytest.approx(2048, rel=1e-3)
    assert [one.batch_size for one in found.correction.trials] == [4096, 8192]  # type: ignore[union-attr]
    low, high = found.reserved_range
    assert low < found.reserved_bytes < high
    # What fitted by tracing alone no longer does.
    tight = traced.device_bytes + 10 * MIB
    assert found.fits and traced.fits is None and here.at(32768, device_memory_bytes=tight).fits is False


def test_small_batches_have_their_peak_where_the_large_one_has_it() -> None:
    here = profile(64, 4096)
    assert here.at(512).peak_phase == "optimizer" and here.at(4096).peak_phase == "backward"
    sizes = small_batches(here, 4096)
    assert here.at(sizes[0]).peak_phase == "backward" and sizes[-1] <= 4096
    assert small_batches(here, 1) == [1, 2]


def test_a_gpu_that_cannot_run_the_smallest_batch_calibrates_nothing() -> None:
    def full(training: gpu.TrainingSetup, n: int, limit_bytes: int | None) -> RealSteps:
        return RealSteps(batch_size=n, fits=False, allocated_bytes=0, reserved_bytes=0)

    with pytest.raises(ConfigError, match="not even batch size 8 fits"):
        calibrate(profile(64), 64, full)


# -- the steps themselves, on the CPU: what they compute is the same there -----------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"precision": "bf16"},
        {"precision": "bf16-true"},
        {"checkpointing": True},
        {"accumulation": 3},
        {"optimizer": "sgd-momentum"},
    ],
)
def test_real_steps_train(more: dict[str, Any]) -> None:
    models: list[torch.nn.Module] = []

    def make_model() -> torch.nn.Module:
        models.append(Chain(width=16, layers=2))
        return models[-1]

    def make_batch(n: int) -> torch.Tensor:
        assert n == 4
        return torch.ones(n, 16)

    torch.manual_seed(0)
    before = [parameter.clone() for parameter in Chain(width=16, layers=2).parameters()]
    torch.manual_seed(0)
    training = gpu.TrainingSetup(make_model=make_model, make_batch=make_batch, **more)
    assert train(training, 4, "cpu", steps=2) > 0
    after = list(models[0].parameters())
    assert all(not torch.equal(one.to(two.dtype), two) for one, two in zip(before, after, strict=True))
    assert after[0].dtype == (torch.bfloat16 if more.get("precision") == "bf16-true" else torch.float32)


def test_a_step_of_ones_own_is_what_runs() -> None:
    seen = []

    def step(model: torch.nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        seen.append(batch.shape)

    training = gpu.TrainingSetup(make_model=lambda: Chain(16, 2), make_batch=lambda n: torch.ones(n, 16), step=step)
    train(training, 5, "cpu", steps=3)
    assert seen == [(5, 16)] * 3


def test_running_out_of_memory_is_distinguished_from_other_failures() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))
