"""The demo's dataset is the same everywhere and survives a trip to a spawned worker."""

from __future__ import annotations

import pickle

import pytest
import torch

from penstock.lab.demo import BigSamples


def make(seed: int = 0) -> BigSamples:
    return BigSamples(length=300, sample_bytes=64, wait_s=0.0, seed=seed)


def test_samples_are_the_same_every_time_and_differ_from_each_other() -> None:
    first, again = make(), make()
    assert torch.equal(first[7]["pixels"], again[7]["pixels"])
    assert not torch.equal(first[7]["pixels"], first[8]["pixels"])
    assert not torch.equal(first[7]["pixels"], make(seed=1)[7]["pixels"])
    assert first[7]["pixels"].dtype is torch.uint8
    assert first[299]["index"] == 299


def test_it_has_a_length_and_an_end() -> None:
    assert len(make()) == 300
    for outside in (-1, 300):
        with pytest.raises(IndexError, match=str(outside)):
            make()[outside]


def test_it_can_be_pickled() -> None:
    copied = pickle.loads(pickle.dumps(make()))
    assert torch.equal(copied[5]["pixels"], make()[5]["pixels"])
