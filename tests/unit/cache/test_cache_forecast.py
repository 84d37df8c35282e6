"""A forecast says when every key is needed next."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.cache.policy.forecast import NEVER, Forecast
from support.caches import forecast_of, lows


@pytest.mark.parametrize("seed", range(5))
def test_a_forecast_agrees_with_a_search_of_the_epoch(seed: int) -> None:
    chance = random.Random(seed)
    batches = [[chance.randrange(60) for _ in range(chance.randrange(6))] for _ in range(50)]
    forecast = forecast_of(batches)
    asked = list(range(70))
    for now in (0, 1, 17, 49, 50):
        expected = [
            next((number - now for number, keys in enumerate(batches) if number >= now and key in keys), NEVER)
            for key in asked
        ]
        assert forecast.distances(lows(asked), now).tolist() == expected


@pytest.mark.parametrize(
    ("batches", "kind"), [(100, np.uint32), (1 << 28, np.uint32), (1 << 30, np.int64), (1 << 40, np.int64)]
)
def test_a_forecast_of_few_batches_takes_half_the_memory_and_gives_the_same_answers(batches: int, kind: type) -> None:
    """Of one key in the last batch, one in the first, and one that comes behind both in the table."""
    last, first = sorted(lows(["one", "another"]).tolist(), reverse=True)
    forecast = Forecast.of(np.array([last, first, last], np.uint64), np.array([batches - 1, 0, 3]), batches)
    assert forecast.uses.dtype == kind
    asked = np.array([first, last, (1 << 64) - 1], np.uint64)
    assert forecast.distances(asked, 0).tolist() == [0, 3, NEVER]
    assert forecast.distances(asked, 4).tolist() == [NEVER, batches - 5, NEVER]
    for over in (batches, batches + 7):
        assert forecast.distances(asked, over).tolist() == [NEVER] * 3


def test_a_forecast_of_an_empty_epoch_needs_no_key() -> None:
    assert forecast_of([]).distances(lows([1, 2]), 0).tolist() == [NEVER, NEVER]
    assert forecast_of([[], []]).distances(lows([1]), 1).tolist() == [NEVER]


def test_keys_used_once_do_not_repeat_and_windows_do() -> None:
    assert not forecast_of([[1, 2], [3, 4]]).repeats
    assert forecast_of([[1, 2], [2, 3]]).repeats


def test_a_key_needed_twice_in_a_batch_is_still_needed_after_its_first_use() -> None:
    forecast = forecast_of([[1, 1, 2], [3], [1]])
    assert forecast.repeats
    assert forecast.distances(lows([1, 2, 3]), 0, 0).tolist() == [0, NEVER, 1]
    assert forecast.distances(lows([1, 2, 3]), 1, 0).tolist() == [1, NEVER, 0], "and not once the batch is over"
