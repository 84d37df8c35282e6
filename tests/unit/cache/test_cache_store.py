"""The cache's memory: values come back as they were, never more bytes than the limit, the right ones go."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from penstock.cache.keys import digest
from penstock.cache.policy.forecast import NEVER
from penstock.cache.policy.policies import LRU, STATIC, Lru, NextUse, Policy, Static
from penstock.cache.policy.shared_forecasts import SharedForecasts, position_of
from penstock.cache.store import memory
from penstock.cache.store.region import (
    H_CHANGING,
    H_ITEMS,
    H_LIMIT,
    H_POLICY,
    H_TAGS,
    H_VALUE_BYTES,
    MOST_FORECASTS,
    R_READING,
    R_WRITING,
    Extent,
    Region,
)
from penstock.cache.store.store import Store
from penstock.cache.store.values import PackedValue, least_bytes, unpack
from penstock.workers import forecast_position
from support.caches import MIB, forecast_of, lows, same


def open_store(region: Region, policy: Policy | None = None) -> Store:
    return Store(region, {LRU: policy or Lru()}, headroom_bytes=lambda: 1 << 50, position=forecast_position.current)


def value_of(number: int, values: int = 40_000) -> torch.Tensor:
    return torch.full((values,), number, dtype=torch.int32)


def put(store: Store, number: int, values: int = 40_000) -> bool:
    return store.put(digest(number), PackedValue(value_of(number, values)))


def got(store: Store, number: int) -> Any:
    found = store.get(digest(number))
    return None if found is None else unpack(found)


def resident_bytes(region: Region) -> int:
    return os.fstat(region.data_fd).st_blocks * 512 + os.fstat(region.meta_fd).st_blocks * 512


VALUES: list[Any] = [
    {"a": b"long" * 50_000, "x": torch.arange(9), "b": [b"bytes" * 40_000, "é" * 90_000]},
    None, 3, "text", b"bytes" * 1000, torch.arange(10), torch.zeros(0), np.arange(6.0).reshape(2, 3),
    {"x": torch.rand(3, 4).t(), "y": [1, (2, "z")]}, torch.rand(1 << 18), "long " * 20_000,
    torch.eye(3).to_sparse(), torch.ones(4, dtype=torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_read_as_they_were_written_and_as_private_copies(region: Region, value: Any) -> None:
    store = open_store(region)
    assert store.put(digest("key"), PackedValue(value))
    for _ in range(2):
        back = store.get(digest("key"))
        assert back is not None
        found = unpack(back)
        same(found, value)
        if isinstance(found, torch.Tensor) and found.layout is torch.strided and found.numel():
            found += 1
        if isinstance(found, np.ndarray):
            found += 1


@pytest.mark.parametrize("policy", [Static(), Lru()], ids=["static", "lru"])
def test_the_limit_holds_for_values_of_any_size_and_includes_the_index(region: Region, policy: Policy) -> None:
    store, chance = open_store(region, policy), random.Random(1)
    for number in range(400):
        put(store, number, chance.choice([10, 1000, 20_000, 200_000, 2_000_000]))
        now = store.region.counts()
        assert now["bytes"] <= now["limit_bytes"]
        assert resident_bytes(region) <= now["limit_bytes"] + (64 << 10)
    assert store.region.counts()["items"] > 0
    assert store.region.counts()["passed"] > 0


def test_static_keeps_the_first_values_and_lru_the_latest(region: Region) -> None:
    store = open_store(region, Static())
    kept = [number for number in range(40) if put(store, number)]
    assert kept == list(range(len(kept))) and store.region.counts()["evictions"] == 0
    store = open_store(region, Lru())
    for number in range(40, 80):
        assert put(store, number)
    here = [number for number in range(80) if got(store, number) is not None]
    assert here == list(range(80 - len(here), 80))


def test_a_value_is_copied_into_reused_memory_and_written_by_a_call_into_new_memory(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    write = memory.write_pieces

    def counted(fd: int, pieces: list[Any], offset: int) -> None:
        calls.append(offset)
        write(fd, pieces, offset)

    monkeypatch.setattr(memory, "write_pieces", counted)
    store = open_store(region)
    number = 0
    while not region.counts()["evictions"]:
        assert put(store, number)
        number += 1
    assert len(calls) == number - 1, "the last one lies where the first one did"
    assert put(store, number - 1) and len(calls) == number - 1, "a value put again"
    resident = resident_bytes(region)
    for each in range(number, 3 * number):
        assert put(store, each)
        assert torch.equal(got(store, each), value_of(each))
    assert len(calls) == number - 1 and resident_bytes(region) == resident


def test_the_value_that_was_read_last_stays(region: Region) -> None:
    store = open_store(region)
    for number in range(10):
        put(store, number)
    for number in range(10, 60):
        assert got(store, 3) is not None
        put(store, number)
    assert torch.equal(got(store, 3), value_of(3))


class ByNumber:
    """Key n is needed n batches from now."""

    def __init__(self, numbers: range) -> None:
        self._uses = {digest(number)[8:]: number for number in numbers}

    def is_known(self) -> bool:
        return bool(self._uses)

    def remove_crashed(self) -> None:
        """This oracle has no loaders that could crash."""

    def next_uses(self, low: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return np.array([self._uses[key.tobytes()] for key in low], dtype=np.int64)


def test_next_use_keeps_values_needed_soonest_and_refuses_values_needed_last(region: Region) -> None:
    numbers = list(range(60))
    random.Random(2).shuffle(numbers)
    store = open_store(region, NextUse(ByNumber(range(60)), forecast_position.current))
    for number in numbers:
        put(store, number)
    here = [number for number in range(60) if store.has(digest(number))]
    assert here == list(range(len(here))) and 10 < len(here) < 60


def test_next_use_without_a_forecast_behaves_like_lru(region: Region) -> None:
    store = open_store(region, NextUse(ByNumber(range(0)), forecast_position.current))
    for number in range(60):
        assert put(store, number)
    here = [number for number in range(60) if store.has(digest(number))]
    assert here == list(range(60 - len(here), 60))


def test_one_large_value_evicts_as_many_small_ones_as_necessary(region: Region) -> None:
    store = open_store(region)
    for number in range(900):
        assert put(store, number, 100)
    assert region.counts()["items"] > 800
    assert put(store, 1000, 900_000)
    assert torch.equal(got(store, 1000), value_of(1000, 900_000))


def test_a_value_stored_again_replaces_the_first(region: Region) -> None:
    store = open_store(region)
    for number in range(50):
        assert store.put(digest("key"), PackedValue(value_of(number)))
    assert store.region.counts()["items"] == 1
    assert torch.equal(unpack(store.get(digest("key"))), value_of(49))  # type: ignore[arg-type]


def test_a_value_larger_than_the_limit_is_refused_and_evicts_nothing(region: Region) -> None:
    store = open_store(region)
    put(store, 0)
    assert not put(store, 1, 2_000_000)
    assert got(store, 0) is not None and store.region.counts()["passed"] == 1


def test_shrinking_releases_memory_at_once_and_growing_takes_more(region: Region) -> None:
    store = open_store(region)
    for number in range(20):
        put(store, number)
    store.resize(1 * MIB)
    assert resident_bytes(region) <= 1 * MIB + (64 << 10)
    assert store.region.counts()["items"] >= 1
    store.resize(8 * MIB)
    for number in range(100):
        put(store, number)
    assert 7 * MIB < store.region.counts()["bytes"] <= 8 * MIB


def test_clear_removes_every_value_and_releases_the_memory(region: Region) -> None:
    store = open_store(region)
    for number in range(20):
        put(store, number)
    store.clear()
    assert store.region.counts()["items"] == 0 and os.fstat(region.data_fd).st_blocks == 0
    assert got(store, 3) is None and put(store, 3) and got(store, 3) is not None


def test_a_machine_short_of_memory_only_stops_growth(region: Region) -> None:
    store = Store(region, {LRU: Lru()}, headroom_bytes=lambda: 400_000 - int(region.header[H_VALUE_BYTES]))
    for number in range(20):
        assert put(store, number) or number < 2
    assert store.is_short
    assert 1 <= store.region.counts()["items"] <= 3


def test_a_value_that_is_being_read_is_not_evicted(region: Region) -> None:
    store = open_store(region)
    put(store, 0)
    found = store._table.find(digest(0))
    assert found is not None
    row = store._readers.row()
    row[R_READING] = found[1].offset + 1
    for number in range(1, 60):
        put(store, number)
    assert store.has(digest(0))
    row[R_READING] = 0
    for number in range(60, 120):
        put(store, number)
    assert not store.has(digest(0))


def test_an_unfinished_change_of_a_crashed_process_is_repaired(region: Region) -> None:
    store = open_store(region)
    for number in range(10):
        put(store, number)
    before = store.region.counts()
    region.header[H_CHANGING] = 1
    region.header[H_ITEMS], region.header[H_VALUE_BYTES] = 99, 1 << 40
    # Pages of an entry that was removed and not given back.
    region.values[60 * MIB : 61 * MIB] = 1
    assert put(store, 10)
    assert store.region.counts()["items"] == before["items"] + 1
    assert resident_bytes(region) <= int(region.header[H_LIMIT])
    for number in range(11):
        assert torch.equal(got(store, number), value_of(number))


def test_the_limit_holds_after_a_process_crashed_while_it_lowered_it(region: Region) -> None:
    store = open_store(region)
    for number in range(20):
        put(store, number)
    region.header[H_CHANGING], region.header[H_LIMIT] = 1, 1 * MIB
    assert put(store, 20)
    assert store.region.counts()["bytes"] <= 1 * MIB
    assert resident_bytes(region) <= 1 * MIB + (64 << 10)


def test_a_limit_lowered_while_a_value_is_written_holds_once_it_is_written(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, write = open_store(region), region.write

    def write_slowly(key: bytes, place: Extent, packed: Any) -> None:
        write(key, place, packed)
        store.resize(512 << 10)

    monkeypatch.setattr(region, "write", write_slowly)
    put(store, 0, 200_000)
    assert store.region.counts()["bytes"] <= 512 << 10
    assert resident_bytes(region) <= 576 << 10


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_the_least_size_of_a_value_is_not_above_its_size(value: Any) -> None:
    assert least_bytes(value) <= PackedValue(value).total_bytes
    assert least_bytes([value, value]) <= PackedValue([value, value]).total_bytes


def test_a_full_static_cache_refuses_values_without_taking_the_lock(region: Region) -> None:
    region.header[H_POLICY] = STATIC
    store = Store(region, {STATIC: Static()}, headroom_bytes=lambda: 1 << 50)
    number = 0
    while not store.refuses(digest(number), least_bytes(value_of(number))):
        assert put(store, number)
        number += 1
    assert not put(store, number), "and it does"
    assert not store.refuses(digest(0), least_bytes(value_of(0))), "what is there is replaced"
    assert not store.refuses(digest(number), 1), "a smaller one still fits"
    assert region.counts()["passed"] == 2
    # Somebody dies while writing: the row says so first, then the entry takes a tag.
    region.rows[7, R_WRITING] = 1
    region.header[H_TAGS] += np.uint64(1)
    assert not store.refuses(digest(number), least_bytes(value_of(number))), "room may come free after the dead"


def test_a_pinned_value_stays_however_many_others_are_stored(region: Region) -> None:
    store = open_store(region)
    assert store.put(digest("pinned"), PackedValue(value_of(-1)), pinned=True)
    for number in range(100):
        put(store, number)
    store.resize(2 * MIB)
    found = store.view(digest("pinned"))
    assert found is not None and torch.equal(unpack(found[1]), value_of(-1))
    store.put(digest("pinned"), PackedValue(value_of(-2)), pinned=True)
    again = store.view(digest("pinned"))
    assert again is not None and again[0] != found[0] and torch.equal(unpack(again[1]), value_of(-2))


def windows(chance: random.Random, frames: int, length: int) -> list[list[int]]:
    """An epoch of windows of frames, shuffled."""
    starts = list(range(frames - length + 1))
    chance.shuffle(starts)
    return [list(range(start, start + length)) for start in starts]


def hit_rate(store: Store, epochs: list[list[list[int]]], forecasts: SharedForecasts | None) -> float:
    hits = asked = 0
    claim = 0
    for number, epoch in enumerate(epochs):
        if forecasts is not None:
            claim = forecasts.claim()
            forecasts.publish(claim, forecast_of(epoch), 0)
        for place, frames in enumerate(epoch):
            if forecasts is not None:
                forecasts.advance(claim, place)
                forecast_position.begin(position_of(claim, place))
            for frame in frames:
                found = store.get(digest(frame))
                if found is None:
                    store.put(digest(frame), PackedValue(torch.full((900,), frame)))
                else:
                    assert int(unpack(found)[0]) == frame
                if number:
                    asked, hits = asked + 1, hits + (found is not None)
        if forecasts is not None:
            forecasts.withdraw(claim)
    forecast_position.begin(0)
    return hits / asked


def test_windows_under_next_use_reach_the_hits_of_the_theory_and_more_than_lru(region: Region) -> None:
    """Frames of two pages each; room for half of them beside index and forecast."""
    frames, length = 400, 8
    chance = random.Random(5)
    epochs = [windows(chance, frames, length) for _ in range(3)]
    forecast_bytes = 8192 + 8 * (frames + frames * length)
    limit_bytes = region.index_bytes + forecast_bytes + frames // 2 * 8192
    store = open_store(region, Static())
    store.resize(limit_bytes)
    forecasts = SharedForecasts(region, store)
    store.policies = {LRU: NextUse(forecasts, forecast_position.current)}
    by_forecast = hit_rate(store, epochs, forecasts)
    store.clear()
    store.policies = {LRU: Lru()}
    by_age = hit_rate(store, epochs, None)
    assert 0.72 < by_forecast < 0.84
    assert by_age < by_forecast - 0.2


def test_the_loader_that_needs_a_key_soonest_decides_among_several(region: Region) -> None:
    store = open_store(region)
    forecasts = SharedForecasts(region, store)
    one, other = forecasts.claim(), forecasts.claim()
    assert not forecasts.is_known()
    forecasts.publish(one, forecast_of([["a"], ["b"], ["c"]]), 0)
    forecasts.publish(other, forecast_of([["c"], ["x"], ["a"], ["d"]]), 0)
    low, untouched = lows("abcdz"), np.zeros(5, np.uint64)
    assert forecasts.next_uses(low, untouched).tolist() == [0, 1, 0, 3, NEVER]
    forecasts.advance(one, 2)
    forecasts.advance(other, 1)
    assert forecasts.next_uses(low, untouched).tolist() == [1, NEVER, 0, 2, NEVER]
    used = np.full(5, position_of(one, 2), np.uint64)
    assert forecasts.next_uses(low, used).tolist() == [1, NEVER, NEVER, 2, NEVER], (
        "a worker has used it, ahead of its loader"
    )
    forecasts.withdraw(one)
    assert forecasts.next_uses(low, untouched).tolist() == [1, NEVER, NEVER, 2, NEVER]
    forecasts.remove_crashed()
    assert forecasts.is_known(), "the forecast of a living loader was removed"


def test_the_forecast_of_a_crashed_loader_is_removed(region: Region) -> None:
    store = open_store(region)
    forecasts = SharedForecasts(region, store)
    pid = os.fork()
    if pid == 0:
        forecasts.publish(forecasts.claim(), forecast_of([["a"]]), 0)
        os._exit(0)
    os.waitpid(pid, 0)
    assert forecasts.is_known()
    forecasts.remove_crashed()
    assert not forecasts.is_known()


def test_threads_that_claim_at_once_get_different_numbers(region: Region) -> None:
    forecasts = SharedForecasts(region, open_store(region))
    for _ in range(20):
        with ThreadPoolExecutor(8) as threads:
            claims = list(threads.map(lambda _: forecasts.claim(), range(8)))
        assert len({claim % MOST_FORECASTS for claim in claims}) == 8
        for claim in claims:
            forecasts.withdraw(claim)


def test_a_withdrawn_forecast_is_removed_with_the_next_claim(region: Region) -> None:
    store = open_store(region)
    forecasts = SharedForecasts(region, store)
    claim = forecasts.claim()
    forecasts.publish(claim, forecast_of([["a"], ["b"]]), 0)
    forecasts.withdraw(claim)
    forecasts.withdraw(claim)
    assert not forecasts.is_known()
    forecasts.claim()
    assert region.counts()["items"] == 0
