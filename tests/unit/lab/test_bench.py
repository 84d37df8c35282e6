"""What the bench counts, and which devices it refuses before it loads anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError
from penstock.lab.bench import Rounds, check_device, compare_loaders
from penstock.lab.dataset.sample_probe import NoDataError, weigh


@pytest.mark.parametrize(
    ("make", "size_bytes"),
    [
        pytest.param(lambda: torch.zeros(8, 3), 96, id="tensor"),
        pytest.param(lambda: [torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64)], 160, id="list of tensors"),
        pytest.param(lambda: {"x": np.zeros((5, 2)), "text": ["a"] * 5}, 85, id="dict"),
        pytest.param(lambda: ["a", "b"], 2, id="texts"),
        pytest.param(lambda: torch.tensor(3.0), 4, id="number"),
        pytest.param(list, 0, id="nothing"),
        pytest.param(lambda: torch.eye(3).to_sparse(), 3 * 4 + 2 * 3 * 8, id="sparse"),
        pytest.param(lambda: torch.eye(3).to_sparse_csr(), 3 * 4, id="sparse rows"),
        # Made by the test: torch imports 70 MB for it, which every process forked from this one would copy.
        pytest.param(
            lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged), 5 * 4, id="nested"
        ),
    ],
)
def test_the_bytes_of_a_batch_are_counted(make: Callable[[], Any], size_bytes: int) -> None:
    assert weigh(make()) == size_bytes


@pytest.mark.parametrize("device", ["no-such-device", "cuda:99"])
def test_a_device_that_is_not_here_is_refused_with_the_reason(device: str) -> None:
    with pytest.raises(ConfigError, match=f"batches cannot be delivered to '{device}'"):
        check_device(device)


def test_the_cpu_and_no_device_are_accepted() -> None:
    check_device(None)
    check_device("cpu")


def test_an_epoch_without_a_batch_ends_the_bench_with_an_error() -> None:
    rounds = Rounds(make={"torch": list, "penstock": list}, use=lambda batch, tally: None, rounds=1, round_s=1.0)
    with pytest.raises(NoDataError, match="an epoch has no batch"):
        compare_loaders(rounds, on_progress=lambda name, done: None)
