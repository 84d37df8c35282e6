"""Windows that share frames, through the real loader: the cache knows which frame is needed next."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Sampler

import penstock

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfd"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

WINDOW = 8
FRAME_BYTES = 16 << 10
INDEX_BYTES = 128
"""What table and plan take of the limit for a frame, about: the fraction is one of the frames."""


class Windows(Dataset):
    """Eight frames in a row, each kept by its number."""

    def __init__(self, frames: int, cache: penstock.Cache) -> None:
        self.frames, self.cache = frames, cache

    def __len__(self) -> int:
        return self.frames - WINDOW + 1

    def keys(self, index: int) -> range:
        return range(index, index + WINDOW)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([self.cache.get_or_load(key, lambda key=key: frame(key)) for key in self.keys(index)])


def frame(number: int) -> torch.Tensor:
    return torch.full((FRAME_BYTES // 4 - 64,), number, dtype=torch.int32)


class Blocks(Sampler[int]):
    """Blocks of 256 neighbours in any order, and any order inside each."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._chance = random.Random(3)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        starts = list(range(0, self.length, 256))
        self._chance.shuffle(starts)
        for start in starts:
            block = list(range(start, min(start + 256, self.length)))
            self._chance.shuffle(block)
            yield from block


def hit_rate(policy: str, fraction: float, *, frames: int, blocks: bool, epochs: int = 3, workers: int = 2) -> float:
    """In the epochs after the first."""
    limit = int(fraction * frames * FRAME_BYTES) + frames * INDEX_BYTES
    with penstock.Cache(limit, policy) as cache:
        dataset = Windows(frames, cache)
        order: dict[str, Any] = {"sampler": Blocks(len(dataset))} if blocks else {"shuffle": True}
        loader = penstock.DataLoader(
            dataset, batch_size=8, num_workers=workers, cache=cache, persistent_workers=True, **order
        )
        for batch in loader:
            assert torch.equal(batch[:, :, 0], batch[:, :1, 0] + torch.arange(WINDOW))
        before = cache.stats()
        for _ in range(epochs - 1):
            for _ in loader:
                pass
        after = cache.stats()
        loader.close()
        assert after.bytes <= limit and after.items <= 1.005 * fraction * frames + 2
        hits, misses = after.hits - before.hits, after.misses - before.misses
        return hits / (hits + misses)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("blocks", "fraction", "least"),
    [
        (False, 0.2, 0.52), (False, 0.5, 0.77), (False, 0.8, 0.93),
        (True, 0.2, 0.89), (True, 0.5, 0.93), (True, 0.8, 0.97),
    ],
)  # fmt: skip
def test_next_use_reaches_the_hits_of_the_theory(blocks: bool, fraction: float, least: float) -> None:
    rate = hit_rate("auto", fraction, frames=20_000, blocks=blocks)
    print(f"{'block' if blocks else 'full'} shuffle, cache of {fraction}: {rate:.4f} hits")
    assert rate >= least


def test_next_use_has_more_hits_than_lru_through_the_loader() -> None:
    known, unknown = (hit_rate(policy, 0.3, frames=600, blocks=False) for policy in ("auto", "lru"))
    assert known > unknown + 0.1


def test_windows_in_order_are_kept_as_well_as_lru_keeps_them() -> None:
    """A frame's uses are all in one or two batches, one window after another."""

    def loads(policy: str) -> int:
        with penstock.Cache(80 * FRAME_BYTES, policy) as cache:
            dataset = Windows(600, cache)
            loader = penstock.DataLoader(dataset, batch_size=8, num_workers=0, cache=cache)
            for _ in range(2):
                for _ in loader:
                    pass
            loader.close()
            return cache.stats().misses

    assert loads("auto") <= 1.02 * loads("lru")
