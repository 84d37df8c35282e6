"""Fetching without a worker: in the training thread, with a worker's randomness.

In:  indices and the batch's seed.
Out: the batch, collated; the caller's generators as they were.
Runs in: trainer.
"""

from __future__ import annotations

from typing import Any

from penstock.workers import forecast_position
from penstock.workers.rng import KeptGenerators, seed_collate, seed_stretch
from penstock.workers.setup import Setup
from penstock.workers.stretches import stretch_rows


class InlineFetcher:
    """Returns the same batches as a worker."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def fetch(self, indices: Any, seed: int | None, position: int) -> Any:
        """``position`` is the batch's position in the loader's forecast."""
        # This thread may be fetching a batch of another loader, whose dataset contains this loader.
        before = forecast_position.current()
        forecast_position.begin(position)
        try:
            if seed is None:
                return self._fetch(indices, None)
            with KeptGenerators():
                return self._fetch(indices, seed)
        finally:
            forecast_position.begin(before)

    def _fetch(self, indices: Any, seed: int | None) -> Any:
        setup = self._setup
        if not setup.auto_collation or setup.fetches_whole_lists:
            if seed is not None:
                seed_stretch(seed, 0)
            found = setup.dataset.__getitems__(indices) if setup.auto_collation else setup.dataset[indices]
        else:
            found = self._samples(indices, seed)
        if seed is not None and setup.auto_collation:
            seed_collate(seed)
        return setup.collate_fn(found)

    def _samples(self, indices: list[Any], seed: int | None) -> list[Any]:
        dataset = self._setup.dataset
        by_list = getattr(dataset, "__getitems__", None)
        samples: list[Any] = []
        step = stretch_rows(len(indices))
        for stretch, start in enumerate(range(0, len(indices), step)):
            if seed is not None:
                seed_stretch(seed, stretch)
            some = indices[start : start + step]
            samples += by_list(some) if by_list else [dataset[index] for index in some]
        return samples
