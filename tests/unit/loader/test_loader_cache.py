"""A loader with a cache: the same batches as without, and the cache knows what they will need."""

from __future__ import annotations

import gc
import os
import pickle
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
)

import penstock
from penstock.cache.cached_dataset import CachedDataset
from penstock.cache.keys import keys_of
from penstock.cache.store.locks import RangeLock, TooLong
from penstock.data.samplers import BlockShuffleSampler
from penstock.errors import ConfigError
from penstock.loader.epochs import next_epoch_of

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

FRAMES, WINDOW = 120, 4


class Plain(Dataset):
    def __init__(self, length: int = 40) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((50,), index)


class Frames(Dataset):
    """Windows over frames that a cache keeps, with something random after it."""

    def __init__(self, cache: penstock.Cache | None = None, *, frames: int = FRAMES) -> None:
        self.cache, self.frames = cache, frames

    def __len__(self) -> int:
        return self.frames - WINDOW + 1

    def keys(self, index: int) -> list[tuple[str, int]]:
        return [("frame", number) for number in range(index, index + WINDOW)]

    def _frame(self, key: tuple[str, int]) -> torch.Tensor:
        return torch.full((700,), key[1]) + torch.rand(())

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.cache is None:
            return torch.zeros(())
        frames = [self.cache.get_or_load(key, lambda key=key: self._frame(key)) for key in self.keys(index)]
        return torch.stack(frames) + random.random()


class Stateful(Sampler[int]):
    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        while self.at < self.length:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.fixture
def cache() -> Iterator[penstock.Cache]:
    with penstock.Cache("2MB") as made:
        yield made


def has_forecast(cache: penstock.Cache) -> bool:
    return cache._forecasts.is_known()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("given", ["1MB", "cache"])
def test_whole_samples_are_kept_by_index(workers: int, given: str) -> None:
    with penstock.Cache("1MB") as own:
        loader = penstock.DataLoader(
            Plain(), batch_size=8, num_workers=workers, cache=own if given == "cache" else given, shuffle=True
        )
        for _ in range(2):
            assert sorted(torch.cat(list(loader))[:, 0].tolist()) == list(range(40))
        stats = loader.stats().cache
        assert stats is not None and loader.cache is not None
        assert (stats.items, stats.hits, stats.misses) == (40, 40, 40)
        assert loader.cache is own or given != "cache"
        loader.cache.close()


def batches_of(workers: int, limit: str | None, **more: Any) -> list[torch.Tensor]:
    torch.manual_seed(5)
    random.seed(5)
    with (
        penstock.Cache(limit or "8MB") as cache,
        penstock.DataLoader(
            Frames(cache), batch_size=8, num_workers=workers, cache=cache if limit else None, shuffle=True, **more
        ) as loader,
    ):
        return [batch for _ in range(2) for batch in loader]


@pytest.mark.parametrize("seeding", ["batch", "worker"])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_do_not_depend_on_the_cache(workers: int, seeding: str) -> None:
    expected = batches_of(workers, None, seeding=seeding)
    for limit in ("1MB", "8MB"):
        found = batches_of(workers, limit, seeding=seeding)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_spawned_workers_share_the_cache(cache: penstock.Cache) -> None:
    loader = penstock.DataLoader(
        Frames(cache), batch_size=20, num_workers=2, cache=cache, multiprocessing_context="spawn"
    )
    assert sum(len(batch) for batch in loader) == len(Frames())
    stats = cache.stats()
    assert stats.hits + stats.misses == WINDOW * len(Frames()) and stats.hits > stats.misses


@pytest.mark.parametrize("part", [False, True])
def test_a_dataset_whose_cache_is_none_gets_the_cache_of_the_loader(part: bool) -> None:
    dataset = Frames()
    given = ConcatDataset([Subset(dataset, range(len(dataset)))]) if part else dataset
    with penstock.DataLoader(given, batch_size=4, cache="2MB") as loader:
        assert dataset.cache is loader.cache
        list(loader)
        assert loader.cache is not None and loader.cache.stats().hits > loader.cache.stats().misses
        again = penstock.DataLoader(given, batch_size=4, cache="1MB")
        assert again.cache is loader.cache, "the next loader over it uses the same"
        assert loader.cache.limit_bytes == 1_000_000, "and says how large it is"
        loader.cache.close()
        assert loader.stats().cache is None


def test_stats_show_the_cache_of_a_wrapped_dataset(cache: penstock.Cache) -> None:
    wrapped = cache.wrap(Plain())
    for dataset in (wrapped, Subset(wrapped, [0, 1])):
        with penstock.DataLoader(dataset, batch_size=2) as loader:
            list(loader)
            assert loader.cache is None, "the argument as it was given"
            assert loader.stats().cache == cache.stats()


def test_the_error_for_a_dataset_that_cannot_be_cached_says_what_to_do(cache: penstock.Cache) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(ConfigError, match="get_or_load"):
        penstock.DataLoader(Stream(), cache=cache)
    with pytest.raises(ConfigError, match="pass the same cache to the loader"):
        penstock.DataLoader(Frames(cache), cache="2MB")
    with penstock.Cache("2MB") as other:
        for dataset in (Frames(cache), Subset(Frames(cache), [1, 2]), cache.wrap(Plain())):
            with pytest.raises(ConfigError, match="cache= of the loader is"):
                penstock.DataLoader(dataset, cache=other)
    with pytest.raises(ValueError, match="plenty"):
        penstock.DataLoader(Plain(), cache="plenty")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_forecast_lasts_as_long_as_its_epoch(cache: penstock.Cache, workers: int) -> None:
    loader = penstock.DataLoader(Frames(cache), batch_size=8, num_workers=workers, cache=cache, shuffle=True)
    assert not has_forecast(cache)
    iterator = iter(loader)
    next(iterator)
    assert has_forecast(cache)
    del iterator
    gc.collect()
    assert not has_forecast(cache), "the loop was left"
    for _ in loader:
        assert has_forecast(cache)
    assert not has_forecast(cache)
    assert not cache._forecasts._own, "a number is still taken"
    list(loader)


def test_two_loaders_over_one_cache_each_have_a_forecast(cache: penstock.Cache) -> None:
    one, other = (
        iter(penstock.DataLoader(Frames(cache), batch_size=8, num_workers=1, cache=cache, shuffle=True))
        for _ in range(2)
    )
    next(one)
    next(other)
    assert len(cache._forecasts._own) == 2
    assert len(list(one)) == len(list(other)) == 14
    assert not cache._forecasts._own


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_resumes_at_the_next_batch(cache: penstock.Cache, workers: int) -> None:
    def made() -> penstock.DataLoader[Any]:
        return penstock.DataLoader(
            Frames(cache), batch_size=8, num_workers=workers, cache=cache, shuffle=True,
            generator=torch.Generator().manual_seed(3),
        )  # fmt: skip

    expected = list(made())
    loader = made()
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    resumed = made()
    resumed.load_state_dict(state)
    assert all(map(torch.equal, resumed, expected[5:]))


def test_a_sampler_with_a_state_is_not_read_ahead(cache: penstock.Cache) -> None:
    sampler = Stateful(100)
    loader = penstock.DataLoader(Frames(cache), batch_size=5, sampler=sampler, cache=cache)
    next(iter(loader))
    assert sampler.at < 20 and not has_forecast(cache)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_counts_epochs_is_read_ahead_and_resumes_exactly(cache: penstock.Cache, workers: int) -> None:
    def made() -> penstock.DataLoader[Any]:
        sampler = BlockShuffleSampler([30, 40, 47], window=60, seed=5)
        return penstock.DataLoader(Frames(cache), batch_size=8, num_workers=workers, cache=cache, sampler=sampler)

    loader = made()
    torch.manual_seed(1)
    expected = [list(loader), list(loader)]
    torch.manual_seed(1)
    loader = made()
    list(loader)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    assert has_forecast(cache)
    state = loader.state_dict()
    resumed = made()
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert len(rest) == len(expected[1]) - 5 and all(map(torch.equal, rest, expected[1][5:]))
    del iterator


def test_a_sampler_that_counts_epochs_gives_the_order_of_the_next_one() -> None:
    sampler = BlockShuffleSampler([3, 4, 5], window=4)
    foretold = list(next_epoch_of(BatchSampler(sampler, 5, False), 0))
    list(sampler)
    assert foretold == list(BatchSampler(sampler, 5, False))


def test_samplers_that_reuse_a_list_or_restart_give_the_same_batches_as_without_a_cache(cache: penstock.Cache) -> None:
    class Odd(Sampler[list[int]]):
        def __init__(self) -> None:
            self.given: list[int] = []
            self.turn = 0

        def __iter__(self) -> Odd:
            return self

        def __next__(self) -> list[int]:
            self.turn += 1
            if self.turn % 6 == 0:
                raise StopIteration
            self.given[:] = [2 * self.turn, 2 * self.turn + 1]
            return self.given

    class Numbers(Frames):
        def __getitem__(self, index: int) -> int:  # type: ignore[override]
            return index

    loader = penstock.DataLoader(Numbers(cache), batch_sampler=Odd(), cache=cache)
    assert torch.cat(list(loader)).tolist() == list(range(2, 12))


def test_a_sampler_that_never_ends_is_read_in_parts(cache: penstock.Cache) -> None:
    class Endless(Sampler[list[int]]):
        def __iter__(self) -> Iterator[Any]:
            chance = random.Random(1)
            while True:
                # Any iterable is a batch, also one that can be read once.
                yield (chance.randrange(100) for _ in range(4))

    loader = penstock.DataLoader(Frames(cache), batch_sampler=Endless(), cache=cache)
    iterator = iter(loader)
    assert all(next(iterator).shape == (4, WINDOW, 700) for _ in range(100))


def test_an_exception_of_the_sampler_is_raised_in_its_turn(cache: penstock.Cache) -> None:
    class Broken(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(10)
            raise KeyError("no more")

    loader = penstock.DataLoader(Frames(cache), batch_size=5, sampler=Broken(), cache=cache)
    iterator = iter(loader)
    assert len([next(iterator), next(iterator)]) == 2
    with pytest.raises(KeyError, match="no more"):
        next(iterator)


def test_the_forecast_of_a_long_epoch_is_published_in_parts(
    cache: penstock.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = 0

    def publish(*arguments: Any) -> int | None:
        nonlocal published
        published += 1
        return penstock.Cache.publish(cache, *arguments)

    monkeypatch.setattr(cache, "publish", publish)
    order = random.Random(2)
    sampler = [order.randrange(len(Frames())) for _ in range(20_000)]
    loader = penstock.DataLoader(Frames(cache), batch_size=10, sampler=sampler, cache=cache)
    assert sum(1 for _ in loader) == 2000
    # 80,000 uses, of which the cache has room to note some 4000.
    assert 20 <= published <= 80


def test_an_error_in_keys_is_a_warning_and_training_continues(cache: penstock.Cache) -> None:
    class Failing(Frames):
        def keys(self, index: int) -> list[tuple[str, int]]:
            if index == 50:
                raise LookupError("not that one")
            return super().keys(index)

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((3,), index)

    loader = penstock.DataLoader(Failing(cache), batch_size=5, cache=cache)
    with pytest.warns(RuntimeWarning, match="not that one"):
        for batch in loader:
            assert not has_forecast(cache) and len(batch)
    assert not cache._forecasts._own


def test_a_cache_closed_under_a_loader_is_an_error_and_not_a_hang(cache: penstock.Cache) -> None:
    loader = penstock.DataLoader(Frames(cache), batch_size=5, cache=cache)
    iterator = iter(loader)
    next(iterator)
    cache.close()
    with pytest.raises(penstock.CacheError, match="closed"):
        for _ in range(100):
            next(iterator)
    del iterator
    gc.collect()


def test_subsets_and_concatenated_datasets_use_the_keys_of_their_parts(cache: penstock.Cache) -> None:
    keys = keys_of(Subset(ConcatDataset([Frames(cache), Frames(cache, frames=10)]), [0, 117, 123, 5]))
    assert keys is not None
    assert [keys(index)[0][1] for index in range(4)] == [0, 0, 6, 5]
    assert keys_of(ConcatDataset([Frames(cache), Plain()])) is None
    assert keys_of({"a": 1}) is None and keys_of(cache.wrap(Frames(cache))) is None


def test_the_order_of_the_next_epoch_is_forecast_where_it_is_known() -> None:
    data = Plain(10)
    assert list(next_epoch_of(BatchSampler(SequentialSampler(data), 4, False))) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    ranks = DistributedSampler(data, num_replicas=2, rank=1, seed=4)
    foretold = list(next_epoch_of(BatchSampler(ranks, 2, False)))
    ranks.set_epoch(1)
    assert foretold == list(BatchSampler(ranks, 2, False))
    assert list(next_epoch_of(BatchSampler(torch.utils.data.RandomSampler(data), 2, False))) == []


def test_a_policy_chosen_by_the_user_stays(cache: penstock.Cache) -> None:
    with penstock.Cache("1MB", "lru") as own:
        loader = penstock.DataLoader(Frames(own), batch_size=8, cache=own)
        next(iter(loader))
        assert not has_forecast(own)


def test_without_a_cache_the_loader_and_its_stats_have_none() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = penstock.DataLoader(Plain(), batch_size=8)
        list(loader)
    assert loader.cache is None and loader.stats().cache is None


def test_a_wrapped_dataset_is_pickled_with_its_cache(cache: penstock.Cache) -> None:
    wrapped = cache.wrap(Plain())
    again = pickle.loads(pickle.dumps(wrapped))
    assert torch.equal(again[3], wrapped[3]) and cache.stats().hits == 1
    again.cache.close()


def test_a_lock_held_too_long_costs_the_forecast_and_nothing_else(
    cache: penstock.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> int:
        raise TooLong

    monkeypatch.setattr(cache._forecasts, "claim", never)
    loader = penstock.DataLoader(Frames(cache), batch_size=8, cache=cache)
    assert len(list(loader)) == 15
    monkeypatch.undo()
    iterator = iter(loader)
    next(iterator)
    monkeypatch.setattr(cache._forecasts, "advance", never)
    assert len(list(iterator)) == 14 and not cache._forecasts._own


def test_an_iterator_may_be_garbage_collected_while_the_cache_is_being_changed(
    cache: penstock.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = penstock.DataLoader(Frames(cache), batch_size=8, cache=cache)
    iterator = iter(loader)
    next(iterator)
    requested: list[RangeLock] = []

    def held(lock: RangeLock, within_s: float) -> NoReturn:
        requested.append(lock)
        raise TooLong

    with cache._memory.region.changing():
        monkeypatch.setattr(RangeLock, "held", held)
        del iterator
        gc.collect()
        monkeypatch.undo()
        assert not requested and not cache._forecasts._own
    assert len(list(loader)) == 15


def test_a_forked_child_that_drops_its_copy_keeps_the_forecast(cache: penstock.Cache) -> None:
    iterator = iter(penstock.DataLoader(Frames(cache), batch_size=8, cache=cache))
    next(iterator)
    pid = os.fork()
    if pid == 0:
        del iterator
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    assert has_forecast(cache)
    assert len(list(iterator)) == 14


def test_a_cache_closed_while_another_of_its_name_is_open_leaves_no_forecast() -> None:
    with penstock.Cache("2MB", name="twice") as stays, penstock.Cache("2MB", name="twice") as goes:
        iterator = iter(penstock.DataLoader(Frames(goes), batch_size=8, cache=goes))
        next(iterator)
        assert has_forecast(stays)
        goes.close()
        assert not has_forecast(stays) and not stays._forecasts._own


def test_values_outside_forecasts_are_kept_together_with_those_in_them(cache: penstock.Cache) -> None:
    iterator = iter(penstock.DataLoader(Frames(cache), batch_size=8, cache=cache, shuffle=True))
    next(iterator)
    assert has_forecast(cache)
    for number in range(600):
        cache.put(("filling", number), torch.zeros(700))
    before = cache.stats()
    for _ in range(20):
        for number in range(10):
            cache.get_or_load(("validation", number), lambda: torch.zeros(700))
    assert cache.stats().hits - before.hits == 190


def test_a_cache_that_is_emptied_or_shrunk_continues_with_or_without_the_forecast(cache: penstock.Cache) -> None:
    iterator = iter(penstock.DataLoader(Frames(cache, frames=3000), batch_size=8, cache=cache, shuffle=True))
    next(iterator)
    cache.clear()
    assert has_forecast(cache)
    cache.resize("1MB")
    assert cache.stats().bytes <= 1_000_000
    assert len(list(iterator)) == 374


def test_a_loader_without_a_cache_needs_no_file_locks() -> None:
    code = "import sys; sys.modules['fcntl'] = None; import penstock; penstock.DataLoader([1, 2, 3]); print('fine')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "fine\n"


class Noise(Dataset):
    """Samples that begin with random numbers of all three generators."""

    def __init__(self, *, too_large: bool = False) -> None:
        self.rest = torch.zeros(300_000 if too_large else 0)

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.rand(2), torch.tensor([random.random(), np.random.rand()]), self.rest]).float()


def with_noise(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """A batch and what a collate function draws after its samples."""
    return torch.stack([sample[:4] for sample in samples]), torch.rand(3), random.random(), float(np.random.rand())


class Doubled(CachedDataset):
    def __getitem__(self, index: int) -> torch.Tensor:
        return 2 * super().__getitem__(index)


@pytest.mark.filterwarnings("ignore:Noise draws random numbers")
def test_a_cache_hit_leaves_the_generators_where_a_miss_leaves_them() -> None:
    def batches(workers: int, *, too_large: bool) -> list[Any]:
        with penstock.Cache("1MB", "static") as cache:
            dataset = cache.wrap(Noise(too_large=too_large), fingerprint="noise")
            loader = penstock.DataLoader(
                dataset, batch_size=8, num_workers=workers, collate_fn=with_noise, shuffle=True,
                generator=torch.Generator().manual_seed(5),
            )  # fmt: skip
            came = [batch for _ in range(2) for batch in loader]
            assert (cache.stats().hits > 0) is not too_large
            return came

    expected = batches(0, too_large=False)
    assert not torch.equal(expected[0][1], expected[1][1])
    for workers, too_large in ((0, True), (2, False), (2, True)):
        for batch, other in zip(batches(workers, too_large=too_large), expected, strict=True):
            assert torch.equal(batch[0], other[0]) and torch.equal(batch[1], other[1]) and batch[2:] == other[2:]


@pytest.mark.filterwarnings("ignore:Noise draws random numbers")
def test_generators_of_a_worker_continue_alike_with_and_without_cache_hits() -> None:
    def drawn(*, too_large: bool) -> list[torch.Tensor]:
        with penstock.Cache("1MB", "static") as cache:
            dataset = cache.wrap(Noise(too_large=too_large), fingerprint="noise")
            loader = penstock.DataLoader(
                dataset, batch_size=8, num_workers=2, collate_fn=with_noise, seeding="worker",
                generator=torch.Generator().manual_seed(5), persistent_workers=True,
            )  # fmt: skip
            came = [batch[1] for _ in range(2) for batch in loader]
            assert (cache.stats().hits > 0) is not too_large
            return came

    for one, other in zip(drawn(too_large=False), drawn(too_large=True), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:Noise draws random numbers")
def test_a_subclass_of_a_cached_dataset_keeps_its_own_getitem(cache: penstock.Cache) -> None:
    plain = cache.wrap(Noise())
    derived = Doubled(plain.dataset, cache, plain.fingerprint)
    for workers in (0, 2):
        loader = penstock.DataLoader(derived, batch_size=8, num_workers=workers)
        assert torch.equal(torch.cat(list(loader)), torch.stack([2 * plain[index] for index in range(48)]))
