"""Randomness depends on seed, rank, epoch, batch and row alone."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from penstock.workers.rng import batch_seed, mix, seed_collate, seed_stretch
from penstock.workers.stretches import STRETCHES_PER_BATCH, stretch_rows


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize(
    ("rows", "stretch"), [(0, 1), (1, 1), (8, 1), (9, 2), (16, 2), (17, 3), (64, 8), (65, 9), (1000, 125)]
)
def test_stretches_depend_on_the_length_of_the_batch_alone(rows: int, stretch: int) -> None:
    assert stretch_rows(rows) == stretch
    assert -(-rows // stretch) <= STRETCHES_PER_BATCH


def test_the_same_stretch_of_the_same_batch_draws_the_same() -> None:
    seed_stretch(12345, 3)
    first = draws()
    draws()
    seed_stretch(12345, 3)
    assert draws() == first


def test_every_rank_epoch_batch_stretch_and_collate_draws_its_own() -> None:
    seen: set[tuple[float, float, float]] = set()
    places = 0
    for rank, epoch, batch in itertools.product(range(3), range(3), range(5)):
        seed = batch_seed(99, rank=rank, epoch=epoch, batch=batch)
        assert 0 <= seed < 1 << 64
        for stretch in range(3):
            seed_stretch(seed, stretch)
            seen.add(draws())
            places += 1
        seed_collate(seed)
        seen.add(draws())
        places += 1
    assert len(seen) == places
    assert len({one for one, _, _ in seen}) == len({two for _, two, _ in seen}) == places


def test_swapped_places_do_not_share_a_seed() -> None:
    assert batch_seed(0, rank=1, epoch=0, batch=0) != batch_seed(0, rank=0, epoch=1, batch=0)
    assert batch_seed(0, rank=0, epoch=1, batch=0) != batch_seed(0, rank=0, epoch=0, batch=1)
    assert batch_seed(1, rank=0, epoch=0, batch=0) != batch_seed(0, rank=1, epoch=0, batch=0)


def test_negative_and_huge_seeds_are_taken() -> None:
    for seed in (-1, 1 << 200, (1 << 63) - 1):
        assert 0 <= mix(seed) < 1 << 64
        seed_stretch(batch_seed(seed, rank=0, epoch=0, batch=0), 0)
