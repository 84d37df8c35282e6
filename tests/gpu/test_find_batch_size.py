"""The largest batch under a limit on a real GPU: what is found trains, and 15% more does not, or eats the margin."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from penstock import gpu
from penstock.errors import ConfigError
from penstock.gpu import real_steps
from penstock.gpu.examples import EXAMPLES
from penstock.units import GIB, MIB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def _a_fresh_allocator() -> Iterator[None]:
    real_steps.release_unused()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    real_steps.release_unused()


def limit(reserved_bytes: int) -> None:
    """torch reserves no more than this, as on a smaller card."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(reserved_bytes / total)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def vectors(n: int) -> torch.Tensor:
    return torch.rand(n, 256, 512)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], dict[str, Any], int]] = {
    **{
        name: (example.make_model, example.make_batch, {"precision": "bf16"}, 10 * GIB)
        for name, example in EXAMPLES.items()
    },
    "encoder": (Encoder, vectors, {"precision": "fp32", "optimizer": "sgd-momentum"}, 6 * GIB),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_batch_found_trains_and_15_percent_more_fails_or_eats_the_margin(name: str) -> None:
    make_model, make_batch, how, limit_bytes = MODELS[name]
    limit(limit_bytes)
    found = gpu.find_batch_size(make_model, make_batch, **how)
    assert found.is_verified and 1 <= len(found.trials) <= 3, found.reason
    training = gpu.TrainingSetup(make_model=make_model, make_batch=make_batch, **how)
    line = found.memory_bytes * (1 - found.margin) - gpu.Card().context_bytes
    ran = real_steps.measure(training, found.batch_size)
    assert ran.fits and ran.reserved_bytes <= line * 1.01, found.reason
    more = real_steps.measure(training, -(-found.batch_size * 115 // 100))
    assert not more.fits or more.reserved_bytes > line, f"{found.reason}; {more}"


def test_trials_give_everything_back_and_put_the_limit_back() -> None:
    limit(4 * GIB)
    kept = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    share = torch.cuda.get_per_process_memory_fraction()
    found = gpu.find_batch_size(Encoder, vectors, memory="3GB", precision="bf16")
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    # torch keeps bytes and says a share of the device.
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(share, rel=1e-6)
    assert kept.device.type == "cuda"
    assert found.memory_bytes == 3 * 10**9


def test_running_out_of_memory_is_caught_and_its_memory_comes_back() -> None:
    training = gpu.TrainingSetup(make_model=Encoder, make_batch=vectors)
    before = torch.cuda.memory_reserved()
    full = real_steps.measure(training, 512, 2 * GIB)
    assert not full.fits and full.reserved_bytes <= 2 * GIB and full.step_s is None
    assert torch.cuda.memory_reserved() == before
    assert real_steps.measure(training, 4, 2 * GIB).fits


def test_a_model_that_fails_on_the_gpu_is_one_clear_error() -> None:
    class Fails(Encoder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.device.type == "cuda":
                raise KeyError("no such layer")
            return super().forward(x)

    training = gpu.TrainingSetup(make_model=Fails, make_batch=vectors)
    with pytest.raises(ConfigError, match="real steps at batch size 2 failed: KeyError"):
        real_steps.measure(training, 2)


@pytest.mark.parametrize("name", MODELS)
def test_calibrated_estimates_are_near_what_is_measured(name: str) -> None:
    make_model, make_batch, how, _ = MODELS[name]
    found = gpu.estimate(make_model, make_batch, [32], calibrate=True, **how)[0]
    assert found.correction is not None and len(found.correction.trials) == 2
    real = real_steps.measure(gpu.TrainingSetup(make_model=make_model, make_batch=make_batch, **how), 32)
    assert found.allocated_bytes == pytest.approx(real.allocated_bytes, rel=0.03)
    assert found.reserved_bytes == pytest.approx(real.reserved_bytes, rel=0.08)


@pytest.mark.parametrize("more", [{"precision": "fp16"}, {"checkpointing": True}, {"accumulation": 2}])
def test_real_steps_take_what_an_estimate_says(more: dict[str, Any]) -> None:
    said = gpu.estimate(Encoder, vectors, [32], **more)[0]
    real = real_steps.measure(gpu.TrainingSetup(make_model=Encoder, make_batch=vectors, **more), 32)
    assert said.allocated_bytes == pytest.approx(real.allocated_bytes, rel=0.03)
