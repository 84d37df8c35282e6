"""Fetches batches without a worker: in the training thread, with a worker's randomness.

In:  indices and the batch's seed.
Out: the collated batch; the caller's generators in their earlier states.
Runs in: trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.workers import forecast_position
from penstock.workers.kept_generators import GeneratorWatch, KeptGenerators, WatchedGenerator, the_watch
from penstock.workers.rng import collate_seed, seed_numpy, seed_python, seed_torch, stretch_seed
from penstock.workers.setup import fetches_whole_lists
from penstock.workers.stretches import stretch_rows

Seeders = Sequence[Callable[[int], None]]

_ALL: Seeders = (seed_python, seed_numpy, seed_torch)
_LEARNING_BATCHES = 3


class UsedGenerators:
    """The global generators that a dataset and its collate function were seen to use.

    The first batches are fetched with all generators seeded. Later batches seed only the generators that were used by
    then. A batch that uses another generator is a surprise and is fetched again, which can happen once per generator.
    """

    __slots__ = ("is_surprised", "known", "learning_left", "seeders")

    def __init__(self) -> None:
        self.learning_left = _LEARNING_BATCHES
        """How many batches are still fetched with all generators seeded."""
        self.known: Sequence[WatchedGenerator] = ()
        self.seeders: Seeders = ()
        """The functions to call before each stretch of rows, and before collation."""
        self.is_surprised = False
        """Whether the latest batch used a generator that was not seeded for this batch."""

    def learn_from(self, watch: GeneratorWatch) -> Seeders:
        """Note the beginning of a batch from which the use of generators is learnt. Returns the functions to call
        before each stretch and before collation."""
        self.learning_left -= 1
        return (lambda _: self.note(watch.used(), surprises=False), *_ALL, lambda _: watch.forget())

    def note(self, used: list[WatchedGenerator], *, surprises: bool) -> None:
        new = [generator for generator in used if generator not in self.known]
        if new:
            self.known = (*self.known, *new)
            self.seeders = tuple(generator.seed for generator in self.known)
        self.is_surprised = surprises and bool(new)


class InlineFetcher:
    """Fetches the same batches as a worker would."""

    __slots__ = ("_auto_collation", "_by_list", "_collate_fn", "_dataset", "_fetches_whole", "_used", "_watch")

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], *, auto_collation: bool) -> None:
        self._dataset, self._collate_fn, self._auto_collation = dataset, collate_fn, auto_collation
        self._by_list: Any = getattr(dataset, "__getitems__", None)
        self._fetches_whole = not auto_collation or fetches_whole_lists(dataset)
        self._used = UsedGenerators()
        self._watch = the_watch()

    def serves(self, dataset: Any, collate_fn: Callable[[Any], Any]) -> bool:
        return self._dataset is dataset and self._collate_fn is collate_fn

    @property
    def lists_indices(self) -> bool:
        """Whether the indices of a batch must be a list, so that they can be divided."""
        return not self._fetches_whole

    def fetch(self, indices: Any, seed_of: Callable[[int], int] | None, number: int, position: int) -> Any:
        """``seed_of`` returns the seed of the batch with this ``number``; None if generators are not seeded.
        ``position`` is the batch's position in the loader's forecast."""
        # This thread may be fetching a batch of another loader, whose dataset contains this loader.
        before = forecast_position.current()
        if position == before:
            return self._fetch(indices, seed_of, number)
        forecast_position.begin(position)
        try:
            return self._fetch(indices, seed_of, number)
        finally:
            forecast_position.begin(before)

    def _fetch(self, indices: Any, seed_of: Callable[[int], int] | None, number: int) -> Any:
        if seed_of is None:
            return self._collated(indices, 0, ())
        if not self._watch.is_free():
            with KeptGenerators():
                return self._collated(indices, seed_of(number), _ALL)
        used = self._used
        while True:
            try:
                batch = self._watched(indices, seed_of, number)
            except Exception:
                if not used.is_surprised:
                    raise
            else:
                if not used.is_surprised:
                    return batch

    def _watched(self, indices: Any, seed_of: Callable[[int], int], number: int) -> Any:
        watch, used = self._watch, self._used
        is_learning = used.learning_left > 0
        try:
            watch.begin(watch.generators if is_learning else used.known)
            seeders = used.learn_from(watch) if is_learning else used.seeders
            return self._collated(indices, seed_of(number) if seeders else 0, seeders)
        finally:
            found = watch.end()
            if found or used.is_surprised:
                used.note(found, surprises=not is_learning)

    def _collated(self, indices: Any, seed: int, seeders: Seeders) -> Any:
        if seeders:
            found = self._seeded(indices, seed, seeders)
        elif self._fetches_whole:
            found = self._by_list(indices) if self._auto_collation else self._dataset[indices]
        elif self._by_list:
            found = self._in_stretches(indices, seed, seeders)
        else:
            dataset = self._dataset
            found = [dataset[index] for index in indices]
        return self._collate_fn(found)

    def _seeded(self, indices: Any, seed: int, seeders: Seeders) -> Any:
        if not self._fetches_whole:
            found = self._in_stretches(indices, seed, seeders)
        else:
            _call(seeders, stretch_seed(seed, 0))
            found = self._by_list(indices) if self._auto_collation else self._dataset[indices]
        if self._auto_collation:
            _call(seeders, collate_seed(seed))
        return found

    def _in_stretches(self, indices: list[Any], seed: int, seeders: Seeders) -> list[Any]:
        dataset, by_list = self._dataset, self._by_list
        samples: list[Any] = []
        step = stretch_rows(len(indices))
        for stretch, start in enumerate(range(0, len(indices), step)):
            if seeders:
                _call(seeders, stretch_seed(seed, stretch))
            some = indices[start : start + step]
            samples += by_list(some) if by_list else [dataset[index] for index in some]
        return samples


def _call(seeders: Seeders, seed: int) -> None:
    for seeder in seeders:
        seeder(seed)
