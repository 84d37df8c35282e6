"""What other choices would save, and a prediction beside what was measured."""

from __future__ import annotations

import pytest
import torch

from penstock import gpu
from penstock.errors import ConfigError
from support.models import MIB, Chain, vectors


def test_every_other_choice_is_tried_and_the_largest_saving_comes_first() -> None:
    found = gpu.what_if(Chain, vectors, 4096, environment={})
    names = [one.name for one in found]
    assert {"checkpointing", "precision=bf16", "optimizer=sgd", "accumulation=2 of 2048"} <= set(names)
    assert "precision=fp32" not in names and "optimizer=adamw" not in names
    assert [one.saved_bytes for one in found] == sorted((one.saved_bytes for one in found), reverse=True)
    by_name = {one.name: one for one in found}
    now = gpu.estimate(Chain, vectors, [4096], environment={})[0]
    sgd = by_name["optimizer=sgd"]
    assert sgd.saved_bytes == now.reserved_bytes - sgd.estimate.reserved_bytes >= 32 * MIB
    assert by_name["accumulation=2 of 2048"].estimate.batch_size == 2048
    assert all(one.time_cost for one in found)


def test_what_a_model_does_not_allow_is_left_out() -> None:
    found = gpu.what_if(lambda: torch.nn.Linear(1024, 1024), vectors, 64, environment={})
    assert "checkpointing" not in [one.name for one in found]


def stats(estimate: gpu.Estimate, *, allocated: float, reserved: float) -> dict[str, int]:
    return {
        "allocated_bytes.all.peak": int(estimate.allocated_bytes * allocated),
        "reserved_bytes.all.peak": int(estimate.reserved_bytes * reserved),
        "num_alloc_retries": 3,
    }


def test_a_prediction_is_compared_with_torchs_statistics() -> None:
    estimate = gpu.estimate(Chain, vectors, [4096], environment={})[0]
    near = gpu.compare(estimate, stats(estimate, allocated=1.01, reserved=0.98))
    assert near.allocated_error == pytest.approx(-0.0099, abs=1e-3)
    assert near.reserved_error == pytest.approx(0.0204, abs=1e-3)
    assert (near.is_within_range, near.retries) == (True, 3)
    assert "predicted" in str(near) and "-1.0%" in str(near)
    far = gpu.compare(estimate, stats(estimate, allocated=2, reserved=2))
    assert not far.is_within_range


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "have no 'allocated_bytes.all.peak'"),
        ({"allocated_bytes.all.peak": 0, "reserved_bytes.all.peak": 0}, "nothing has been allocated"),
    ],
)
def test_statistics_without_peaks_are_refused(given: dict[str, int], said: str) -> None:
    estimate = gpu.estimate(Chain, vectors, [64], environment={})[0]
    with pytest.raises(ConfigError, match=said):
        gpu.compare(estimate, given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_comparison_needs_statistics() -> None:
    estimate = gpu.estimate(Chain, vectors, [64], environment={})[0]
    with pytest.raises(ConfigError, match="no GPU here"):
        gpu.compare(estimate)
