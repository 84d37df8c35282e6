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
from penstock.cache.policy.shared_forecasts import Plans, position_of
from penstock.cache.store import memory
from penstock.cache.store.counts import counts
from penstock.cache.store.region import (
    H_CHANGING,
    H_ITEMS,
    H_LIMIT,
    H_POLICY,
    H_TAGS,
    H_VALUE_BYTES,
    MOST_PLANS,
    R_READING,
    R_WRITING,
    Place,
    Region,
)
from penstock.cache.store.store import Tier
from penstock.cache.store.values import Packed, least_bytes, unpack
from penstock.workers import forecast_position
from support.caches import MIB, lows, plan_of, same


def tier(region: Region, policy: Policy | None = None) -> Tier:
    return Tier(region, {LRU: policy or Lru()}, headroom_bytes=lambda: 1 << 50, position=forecast_position.current)


def value_of(number: int, values: int = 40_000) -> torch.Tensor:
    return torch.full((values,), number, dtype=torch.int32)


def put(ram: Tier, number: int, values: int = 40_000) -> bool:
    return ram.put(digest(number), Packed(value_of(number, values)))


def got(ram: Tier, number: int) -> Any:
    found = ram.get(digest(number))
    return None if found is None else unpack(found)


def resident_bytes(region: Region) -> int:
    return os.fstat(region.data_fd).st_blocks * 512 + os.fstat(region.meta_fd).st_blocks * 512


VALUES: list[Any] = [
    None, 3, "text", b"bytes" * 1000, torch.arange(10), torch.zeros(0), np.arange(6.0).reshape(2, 3),
    {"x": torch.rand(3, 4).t(), "y": [1, (2, "z")]}, torch.rand(1 << 18), "long " * 20_000,
    torch.eye(3).to_sparse(), torch.ones(4, dtype=torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_as_they_were_and_as_the_callers_own(region: Region, value: Any) -> None:
    ram = tier(region)
    assert ram.put(digest("key"), Packed(value))
    for _ in range(2):
        back = ram.get(digest("key"))
        assert back is not None
        found = unpack(back)
        same(found, value)
        if isinstance(found, torch.Tensor) and found.layout is torch.strided and found.numel():
            found += 1
        if isinstance(found, np.ndarray):
            found += 1


@pytest.mark.parametrize("policy", [Static(), Lru()], ids=["static", "lru"])
def test_the_limit_holds_whatever_the_sizes_index_included(region: Region, policy: Policy) -> None:
    ram, chance = tier(region, policy), random.Random(1)
    for number in range(400):
        put(ram, number, chance.choice([10, 1000, 20_000, 200_000, 2_000_000]))
        now = counts(ram.region)
        assert now["bytes"] <= now["limit_bytes"]
        assert resident_bytes(region) <= now["limit_bytes"] + (64 << 10)
    assert counts(ram.region)["items"] > 0
    assert counts(ram.region)["passed"] > 0


def test_static_keeps_the_first_and_lru_the_latest(region: Region) -> None:
    ram = tier(region, Static())
    kept = [number for number in range(40) if put(ram, number)]
    assert kept == list(range(len(kept))) and counts(ram.region)["evictions"] == 0
    ram = tier(region, Lru())
    for number in range(40, 80):
        assert put(ram, number)
    here = [number for number in range(80) if got(ram, number) is not None]
    assert here == list(range(80 - len(here), 80))


def test_a_value_goes_into_memory_that_another_one_left_by_copying_and_into_new_memory_by_a_call(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    write = memory.write_pieces

    def counted(fd: int, pieces: list[Any], offset: int) -> None:
        calls.append(offset)
        write(fd, pieces, offset)

    monkeypatch.setattr(memory, "write_pieces", counted)
    ram = tier(region)
    number = 0
    while not counts(region)["evictions"]:
        assert put(ram, number)
        number += 1
    assert len(calls) == number - 1, "the last one lies where the first one did"
    assert put(ram, number - 1) and len(calls) == number - 1, "a value put again"
    resident = resident_bytes(region)
    for each in range(number, 3 * number):
        assert put(ram, each)
        assert torch.equal(got(ram, each), value_of(each))
    assert len(calls) == number - 1 and resident_bytes(region) == resident


def test_what_was_read_last_stays(region: Region) -> None:
    ram = tier(region)
    for number in range(10):
        put(ram, number)
    for number in range(10, 60):
        assert got(ram, 3) is not None
        put(ram, number)
    assert torch.equal(got(ram, 3), value_of(3))


class ByNumber:
    """Key n is needed n batches from now."""

    def __init__(self, numbers: range) -> None:
        self._uses = {digest(number)[8:]: number for number in numbers}

    def is_known(self) -> bool:
        return bool(self._uses)

    def bury(self) -> None:
        """Nobody dies here."""

    def next_uses(self, low: np.ndarray, turns: np.ndarray) -> np.ndarray:
        return np.array([self._uses[key.tobytes()] for key in low], dtype=np.int64)


def test_next_use_keeps_what_is_needed_soonest_and_passes_what_is_needed_latest(region: Region) -> None:
    numbers = list(range(60))
    random.Random(2).shuffle(numbers)
    ram = tier(region, NextUse(ByNumber(range(60)), forecast_position.current))
    for number in numbers:
        put(ram, number)
    here = [number for number in range(60) if ram.has(digest(number))]
    assert here == list(range(len(here))) and 10 < len(here) < 60


def test_next_use_without_anything_known_is_lru(region: Region) -> None:
    ram = tier(region, NextUse(ByNumber(range(0)), forecast_position.current))
    for number in range(60):
        assert put(ram, number)
    here = [number for number in range(60) if ram.has(digest(number))]
    assert here == list(range(60 - len(here), 60))


def test_one_large_value_makes_any_number_of_small_ones_go(region: Region) -> None:
    ram = tier(region)
    for number in range(900):
        assert put(ram, number, 100)
    assert counts(region)["items"] > 800
    assert put(ram, 1000, 900_000)
    assert torch.equal(got(ram, 1000), value_of(1000, 900_000))


def test_a_value_put_again_replaces_the_first(region: Region) -> None:
    ram = tier(region)
    for number in range(50):
        assert ram.put(digest("key"), Packed(value_of(number)))
    assert counts(ram.region)["items"] == 1
    assert torch.equal(unpack(ram.get(digest("key"))), value_of(49))  # type: ignore[arg-type]


def test_a_value_larger_than_the_limit_is_passed_through_and_costs_nobody(region: Region) -> None:
    ram = tier(region)
    put(ram, 0)
    assert not put(ram, 1, 2_000_000)
    assert got(ram, 0) is not None and counts(ram.region)["passed"] == 1


def test_shrinking_gives_memory_back_at_once_and_growing_takes_more(region: Region) -> None:
    ram = tier(region)
    for number in range(20):
        put(ram, number)
    ram.resize(1 * MIB)
    assert resident_bytes(region) <= 1 * MIB + (64 << 10)
    assert counts(ram.region)["items"] >= 1
    ram.resize(8 * MIB)
    for number in range(100):
        put(ram, number)
    assert 7 * MIB < counts(ram.region)["bytes"] <= 8 * MIB


def test_clear_forgets_everything_and_gives_it_back(region: Region) -> None:
    ram = tier(region)
    for number in range(20):
        put(ram, number)
    ram.clear()
    assert counts(ram.region)["items"] == 0 and os.fstat(region.data_fd).st_blocks == 0
    assert got(ram, 3) is None and put(ram, 3) and got(ram, 3) is not None


def test_a_machine_without_memory_stops_growth_and_nothing_else(region: Region) -> None:
    ram = Tier(region, {LRU: Lru()}, headroom_bytes=lambda: 400_000 - int(region.header[H_VALUE_BYTES]))
    for number in range(20):
        assert put(ram, number) or number < 2
    assert ram.is_short
    assert 1 <= counts(ram.region)["items"] <= 3


def test_a_value_somebody_reads_is_not_given_away(region: Region) -> None:
    ram = tier(region)
    put(ram, 0)
    found = ram._table.find(digest(0))
    assert found is not None
    row = ram._readers.row()
    row[R_READING] = found[1].offset + 1
    for number in range(1, 60):
        put(ram, number)
    assert ram.has(digest(0))
    row[R_READING] = 0
    for number in range(60, 120):
        put(ram, number)
    assert not ram.has(digest(0))


def test_what_a_dead_process_left_half_done_is_put_right(region: Region) -> None:
    ram = tier(region)
    for number in range(10):
        put(ram, number)
    before = counts(ram.region)
    region.header[H_CHANGING] = 1
    region.header[H_ITEMS], region.header[H_VALUE_BYTES] = 99, 1 << 40
    # Pages of an entry that was removed and not given back.
    region.values[60 * MIB : 61 * MIB] = 1
    assert put(ram, 10)
    assert counts(ram.region)["items"] == before["items"] + 1
    assert resident_bytes(region) <= int(region.header[H_LIMIT])
    for number in range(11):
        assert torch.equal(got(ram, number), value_of(number))


def test_a_process_that_died_while_it_lowered_the_limit_leaves_nothing_over_it(region: Region) -> None:
    ram = tier(region)
    for number in range(20):
        put(ram, number)
    region.header[H_CHANGING], region.header[H_LIMIT] = 1, 1 * MIB
    assert put(ram, 20)
    assert counts(ram.region)["bytes"] <= 1 * MIB
    assert resident_bytes(region) <= 1 * MIB + (64 << 10)


def test_a_limit_lowered_while_a_value_is_written_holds_once_it_is_there(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    ram, write = tier(region), region.write

    def write_slowly(key: bytes, place: Place, packed: Any) -> None:
        write(key, place, packed)
        ram.resize(512 << 10)

    monkeypatch.setattr(region, "write", write_slowly)
    put(ram, 0, 200_000)
    assert counts(ram.region)["bytes"] <= 512 << 10
    assert resident_bytes(region) <= 576 << 10


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_a_value_takes_at_least_is_not_more_than_it_takes(value: Any) -> None:
    assert least_bytes(value) <= Packed(value).total_bytes
    assert least_bytes([value, value]) <= Packed([value, value]).total_bytes


def test_of_a_full_static_cache_is_said_without_the_lock_what_it_would_refuse(region: Region) -> None:
    region.header[H_POLICY] = STATIC
    ram = Tier(region, {STATIC: Static()}, headroom_bytes=lambda: 1 << 50)
    number = 0
    while not ram.refuses(digest(number), least_bytes(value_of(number))):
        assert put(ram, number)
        number += 1
    assert not put(ram, number), "and it does"
    assert not ram.refuses(digest(0), least_bytes(value_of(0))), "what is there is replaced"
    assert not ram.refuses(digest(number), 1), "a smaller one still fits"
    assert counts(region)["passed"] == 2
    # Somebody dies while writing: the row says so first, then the entry takes a tag.
    region.rows[7, R_WRITING] = 1
    region.header[H_TAGS] += np.uint64(1)
    assert not ram.refuses(digest(number), least_bytes(value_of(number))), "room may come free after the dead"


def test_a_pinned_value_outlives_any_number_of_others(region: Region) -> None:
    ram = tier(region)
    assert ram.put(digest("pinned"), Packed(value_of(-1)), pinned=True)
    for number in range(100):
        put(ram, number)
    ram.resize(2 * MIB)
    found = ram.view(digest("pinned"))
    assert found is not None and torch.equal(unpack(found[1]), value_of(-1))
    ram.put(digest("pinned"), Packed(value_of(-2)), pinned=True)
    again = ram.view(digest("pinned"))
    assert again is not None and again[0] != found[0] and torch.equal(unpack(again[1]), value_of(-2))


def windows(chance: random.Random, frames: int, length: int) -> list[list[int]]:
    """An epoch of windows of frames, shuffled."""
    starts = list(range(frames - length + 1))
    chance.shuffle(starts)
    return [list(range(start, start + length)) for start in starts]


def hit_rate(ram: Tier, epochs: list[list[list[int]]], plans: Plans | None) -> float:
    hits = asked = 0
    claim = 0
    for number, epoch in enumerate(epochs):
        if plans is not None:
            claim = plans.claim()
            plans.publish(claim, plan_of(epoch), 0)
        for place, frames in enumerate(epoch):
            if plans is not None:
                plans.advance(claim, place)
                forecast_position.begin(position_of(claim, place))
            for frame in frames:
                found = ram.get(digest(frame))
                if found is None:
                    ram.put(digest(frame), Packed(torch.full((900,), frame)))
                else:
                    assert int(unpack(found)[0]) == frame
                if number:
                    asked, hits = asked + 1, hits + (found is not None)
        if plans is not None:
            plans.withdraw(claim)
    forecast_position.begin(0)
    return hits / asked


def test_windows_under_next_use_have_the_hits_the_theory_gives_and_more_than_lru(region: Region) -> None:
    """Frames of two pages each; room for half of them besides index and plan."""
    frames, length = 400, 8
    chance = random.Random(5)
    epochs = [windows(chance, frames, length) for _ in range(3)]
    plan_bytes = 8192 + 8 * (frames + frames * length)
    limit_bytes = region.index_bytes + plan_bytes + frames // 2 * 8192
    ram = tier(region, Static())
    ram.resize(limit_bytes)
    plans = Plans(region, ram)
    ram.policies = {LRU: NextUse(plans, forecast_position.current)}
    by_plan = hit_rate(ram, epochs, plans)
    ram.clear()
    ram.policies = {LRU: Lru()}
    by_age = hit_rate(ram, epochs, None)
    assert 0.72 < by_plan < 0.84
    assert by_age < by_plan - 0.2


def test_of_several_loaders_the_one_that_needs_a_key_soonest_counts(region: Region) -> None:
    ram = tier(region)
    plans = Plans(region, ram)
    one, other = plans.claim(), plans.claim()
    assert not plans.is_known()
    plans.publish(one, plan_of([["a"], ["b"], ["c"]]), 0)
    plans.publish(other, plan_of([["c"], ["x"], ["a"], ["d"]]), 0)
    low, untouched = lows("abcdz"), np.zeros(5, np.uint64)
    assert plans.next_uses(low, untouched).tolist() == [0, 1, 0, 3, NEVER]
    plans.advance(one, 2)
    plans.advance(other, 1)
    assert plans.next_uses(low, untouched).tolist() == [1, NEVER, 0, 2, NEVER]
    used = np.full(5, position_of(one, 2), np.uint64)
    assert plans.next_uses(low, used).tolist() == [1, NEVER, NEVER, 2, NEVER], (
        "a worker has used it, ahead of its loader"
    )
    plans.withdraw(one)
    assert plans.next_uses(low, untouched).tolist() == [1, NEVER, NEVER, 2, NEVER]
    plans.bury()
    assert plans.is_known(), "a plan of the living was buried"


def test_the_plans_of_a_loader_that_died_are_buried(region: Region) -> None:
    ram = tier(region)
    plans = Plans(region, ram)
    pid = os.fork()
    if pid == 0:
        plans.publish(plans.claim(), plan_of([["a"]]), 0)
        os._exit(0)
    os.waitpid(pid, 0)
    assert plans.is_known()
    plans.bury()
    assert not plans.is_known()


def test_threads_that_claim_at_once_get_numbers_of_their_own(region: Region) -> None:
    plans = Plans(region, tier(region))
    for _ in range(20):
        with ThreadPoolExecutor(8) as threads:
            claims = list(threads.map(lambda _: plans.claim(), range(8)))
        assert len({claim % MOST_PLANS for claim in claims}) == 8
        for claim in claims:
            plans.withdraw(claim)


def test_what_lies_in_the_cache_of_a_plan_that_is_over_goes_with_the_next(region: Region) -> None:
    ram = tier(region)
    plans = Plans(region, ram)
    claim = plans.claim()
    plans.publish(claim, plan_of([["a"], ["b"]]), 0)
    plans.withdraw(claim)
    plans.withdraw(claim)
    assert not plans.is_known()
    plans.claim()
    assert counts(region)["items"] == 0
