"""Simulated loaders: their memory and their speed follow from what is slowest."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from penstock.loader.rules import LoaderRules
from penstock.planner.profile import LoaderCost, Profile, SeenSample
from penstock.planner.simulate import penstock_pipeline as own_pipeline
from penstock.planner.simulate.arena import SimulatedArena
from penstock.planner.simulate.penstock_pipeline import batches_within, simulate_penstock, slots_within
from penstock.planner.simulate.pipeline import Load
from penstock.planner.simulate.torch_pipeline import simulate_torch

MB = 1_000_000
FREE = LoaderCost(worker_bytes=10 * MB, sample_s=0.0, batch_s=0.0, trainer_s=0.0, start_s=0.0, creep_batches=0)


def load(
    *, size: int = MB, wait_s: float = 0.0, cpu_s: float = 0.0, cost: LoaderCost = FREE, cores: float = 4, **given: Any
) -> Load:
    sample = SeenSample(size_bytes=size, wait_s=wait_s, cpu_s=cpu_s)
    profile = Profile(name="it", length=None, samples=(sample,), torchs=cost, ours=cost)
    return Load(profile=profile, rules=LoaderRules(), cores=cores, **{"batch_size": 8, "workers": 4, **given})


@pytest.mark.parametrize("play", [simulate_torch, simulate_penstock])
@pytest.mark.parametrize(
    ("given", "samples_per_s"),
    [
        ({"wait_s": 0.02, "workers": 4}, 200.0),
        ({"wait_s": 0.02, "workers": 8}, 400.0),
        ({"cpu_s": 0.01, "workers": 2, "cores": 2}, 200.0),
        ({"cpu_s": 0.01, "workers": 1, "cores": 2}, 100.0),
        ({"wait_s": 0.02, "workers": 8, "step_s": 0.1}, 80.0),
    ],
)
def test_the_slowest_of_waiting_computing_and_training_decides(
    play: Any, given: dict[str, Any], samples_per_s: float
) -> None:
    assert play(load(**given)).samples_per_s == pytest.approx(samples_per_s, rel=0.05)


def test_torchs_workers_slow_each_other_down_once_they_outnumber_the_cores() -> None:
    two, eight = (simulate_torch(load(cpu_s=0.01, workers=workers, cores=2)).samples_per_s for workers in (2, 8))
    assert two == pytest.approx(200.0, rel=0.02) and eight == pytest.approx(200.0 / 1.15, rel=0.02)


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (2, 2), (4, 3), (8, 2)])
def test_with_a_slow_training_loop_torch_holds_all_its_prefetched_batches(workers: int, prefetch: int) -> None:
    cost = replace(FREE, batch_s=0.001)
    outcome = simulate_torch(load(wait_s=0.001, workers=workers, step_s=0.5, cost=cost, cores=16), prefetch)
    # What was asked for is there, and the batch the loop holds besides.
    assert outcome.most_batches_bytes == (workers * prefetch + 1) * 8 * MB
    assert outcome.most_workers_bytes == workers * (10 + 8) * MB


def test_with_a_fast_training_loop_torch_holds_only_the_batches_being_built() -> None:
    outcome = simulate_torch(load(wait_s=0.02, workers=4), 4)
    assert outcome.most_batches_bytes <= 6 * 8 * MB


@pytest.mark.parametrize(("workers", "depth"), [(1, 2), (4, 2), (8, 4), (16, 2)])
def test_penstock_holds_as_many_batches_as_its_depth_with_any_number_of_workers(workers: int, depth: int) -> None:
    outcome = simulate_penstock(load(wait_s=0.02, workers=workers, step_s=0.5), depth)
    assert outcome.most_batches_bytes == (depth + 1) * 8 * MB
    assert outcome.most_workers_bytes <= workers * 11 * MB


def test_a_free_segment_is_reused_if_it_fits_and_closed_if_more_is_free_than_was_in_use() -> None:
    pages: list[int] = []
    here = SimulatedArena(LoaderRules(), pages.append)
    large = here.take(8 * MB)
    assert large.new_bytes == 8 * MB
    here.release([large])
    assert here.take(5 * MB) is large and sum(pages) == 8 * MB and not large.new_bytes
    here.release([large])
    small = here.take(3 * MB)
    assert small is not large and sum(pages) == 3 * MB, "a free one of 8 beside 3 is more than was ever in use"
    here.release([small])
    assert here.take(2 * MB, room_bytes=3 * MB) is small and sum(pages) == 3 * MB
    roomy = here.take(4 * MB, room_bytes=6 * MB)
    here.release([roomy])
    assert here.take(6 * MB) is roomy and roomy.new_bytes == 2 * MB


def test_at_depth_one_penstock_has_three_batches_while_one_is_delivered() -> None:
    batches_bytes = [simulate_penstock(load(wait_s=0.02, workers=2), depth).most_batches_bytes for depth in (1, 2)]
    assert batches_bytes == [3 * 8 * MB, 3 * 8 * MB]
    assert simulate_penstock(load(wait_s=0.02, workers=2), 1, room=2).most_batches_bytes == 2 * 8 * MB


def test_with_a_custom_collate_function_one_batch_exists_twice() -> None:
    slow = load(wait_s=0.02, step_s=0.5)
    made = replace(slow, profile=replace(slow.profile, has_collate=True))
    assert simulate_penstock(made, 2).most_batches_bytes == (1 + 1 + 2) * 8 * MB


def test_while_pages_are_new_more_batches_are_built_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = load(size=4 * MB, wait_s=0.015, cpu_s=0.001, workers=8, cores=2, cost=replace(FREE, batch_s=0.004))
    made = replace(fast, profile=replace(fast.profile, has_collate=True))
    slow = simulate_penstock(made, 3)
    monkeypatch.setattr(own_pipeline, "_NEW_BYTES_PER_S", 1e12)
    at_once = simulate_penstock(made, 3)
    assert slow.most_batches_bytes > at_once.most_batches_bytes
    assert slow.first_batch_s > at_once.first_batch_s
    assert slow.samples_per_s == pytest.approx(at_once.samples_per_s, rel=0.1), "once they are there, no slower"


def test_uneven_samples_take_more_than_their_sum() -> None:
    slow = load(wait_s=0.02, step_s=0.5)
    samples = tuple(SeenSample(size_bytes=size * MB // 10, wait_s=0.02, cpu_s=0.0) for size in range(2, 19))
    made = replace(slow, profile=replace(slow.profile, has_collate=True, samples=samples))
    assert 1.1 * 32 * MB < simulate_penstock(made, 2).most_batches_bytes < 2 * 32 * MB


def test_a_budget_leaves_fewer_slots() -> None:
    tight = 4 * 11 * MB + 2 * 8 * MB + LoaderRules().most_own_bytes
    room = batches_within(load(wait_s=0.02), tight)
    assert slots_within(load(wait_s=0.02), 4, room) == 2
    assert simulate_penstock(load(wait_s=0.02, step_s=0.5), 4, room).growth_bytes <= tight


def test_the_first_batch_comes_as_many_times_sooner_as_there_are_workers() -> None:
    theirs, ours = simulate_torch(load(wait_s=0.02)), simulate_penstock(load(wait_s=0.02))
    assert theirs.first_batch_s == pytest.approx(0.16) and ours.first_batch_s == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("size_bytes", "grows"), [(100_000, False), (200_000, True), (MB, True), (30 * MB, True), (40 * MB, False)]
)
def test_heaps_of_torchs_workers_grow_with_every_batch_until_old_ones_are_forgotten(
    size_bytes: int, grows: bool
) -> None:
    cost = replace(FREE, worker_bytes=0, creep_batches=64)
    still, some, long = (
        simulate_torch(load(size=size_bytes, wait_s=0.01, cost=cost), batches=batches).workers_bytes
        for batches in (0, 40, None)
    )
    # The first two of each worker are built ahead, before any is taken.
    assert some - still == pytest.approx(grows * 0.7 * 40 * size_bytes, abs=2)
    assert long - still == pytest.approx(grows * 0.7 * 4 * (64 - 2) * size_bytes, abs=2)


@pytest.mark.parametrize("cores", [0.5, 2, 4])
def test_workers_wait_for_a_core_only_while_they_outnumber_the_cores_and_keep_them_busy(cores: float) -> None:
    def rate(workers: int, *, wait_s: float, cpu_s: float) -> float:
        here = load(workers=workers, cores=cores, batch_size=32, wait_s=wait_s, cpu_s=cpu_s)
        return simulate_penstock(here).samples_per_s

    many = 2 * max(1, int(cores))
    # Samples that hardly compute: as many workers as there are times faster.
    assert rate(many, wait_s=0.02, cpu_s=0.0) == pytest.approx(many * rate(1, wait_s=0.02, cpu_s=0.0), rel=0.1)
    if cores >= 2:
        half = rate(int(cores), wait_s=0.01, cpu_s=0.01)
        # With a core for each, none waits; with twice as many that keep all cores busy, each does.
        assert half == pytest.approx(int(cores) / 0.02, rel=0.1)
        assert rate(many, wait_s=0.01, cpu_s=0.01) < 2 * half


def test_the_shuffled_order_of_a_long_dataset_counts_for_the_training_process() -> None:
    short, long = (load(wait_s=0.01), load(wait_s=0.01))
    long = replace(long, profile=replace(long.profile, length=10_000_000))
    assert simulate_penstock(long).growth_bytes - simulate_penstock(short).growth_bytes == pytest.approx(
        450 * MB, rel=0.01
    )


@pytest.mark.parametrize("copies", [1.0, 1.09, 1.3])
@pytest.mark.parametrize("slots", [1, 2, 7])
def test_a_budget_has_room_for_as_many_batches_as_are_left_by_workers_and_the_loaders_own_objects(
    copies: float, slots: int
) -> None:
    here = load(wait_s=0.01)
    here = replace(here, profile=replace(here.profile, ours=replace(here.profile.ours, copies=copies)))
    # Above 100 MB the loader sets aside all it ever does.
    batch_bytes = 16 * round(copies * 8 * MB)
    here = replace(here, batch_size=128)
    budget_bytes = 4 * 11 * MB + LoaderRules().most_own_bytes + slots * batch_bytes
    assert batches_within(here, budget_bytes) == slots
    assert batches_within(here, budget_bytes - 1) == slots - 1


def test_without_workers_the_training_loop_loads_for_itself() -> None:
    outcome = simulate_torch(load(wait_s=0.01, workers=0, step_s=0.02))
    assert outcome.samples_per_s == pytest.approx(80.0, rel=0.05)
    assert outcome.growth_bytes == 3 * 8 * MB


class OneRowTasks(LoaderRules):
    def rows_per_task(self, row_s: float | None, batch_rows: int, **more: int) -> int:
        return 1


def test_the_simulation_follows_the_rules_it_is_given() -> None:
    usual = load(wait_s=0.0001, workers=2, batch_size=8)
    assert usual.rows_per_task == LoaderRules().rows_per_task(usual.row_s, 8) == 8
    other = replace(usual, rules=OneRowTasks())
    assert other.rows_per_task == 1
    assert simulate_penstock(other).first_batch_s < simulate_penstock(usual).first_batch_s
    assert replace(other, profile=replace(other.profile, is_splittable=False)).rows_per_task == 8


def test_a_heap_keeps_the_memory_of_samples_unless_each_has_a_mapping_of_its_own() -> None:
    small = simulate_torch(load(wait_s=0.001, step_s=0.5, workers=4), 1, batches=0)
    assert small.most_workers_bytes == 4 * (10 + 8) * MB
    profile = replace(load(wait_s=0.001).profile, samples=(SeenSample(size_bytes=50 * MB, wait_s=0.02, cpu_s=0.0),))
    huge = simulate_torch(replace(load(wait_s=0.001, step_s=5.0, workers=4), profile=profile, cores=1), 1, batches=0)
    assert huge.growth_bytes < huge.most_batches_bytes + 4 * (10 + 8 * 50) * MB


def test_samples_that_stay_apart_are_sent_while_the_next_batch_is_built() -> None:
    cost = replace(FREE, batch_s=0.07)
    kept_apart = replace(load(wait_s=0.01, workers=2, cost=cost).profile, is_collated=False)
    one, two = (
        simulate_torch(replace(load(wait_s=0.01, workers=2, cost=cost), profile=profile))
        for profile in (replace(kept_apart, is_collated=True), kept_apart)
    )
    assert two.samples_per_s > 1.5 * one.samples_per_s
    assert one.most_workers_bytes == 2 * (10 + 8) * MB < two.most_workers_bytes <= 2 * (10 + 16) * MB


def test_during_a_collate_function_samples_exist_beside_their_batch() -> None:
    profile = replace(load(wait_s=0.02).profile, has_collate=True)
    plain = simulate_penstock(load(wait_s=0.02, step_s=0.5), 2)
    collated = simulate_penstock(replace(load(wait_s=0.02, step_s=0.5), profile=profile), 2)
    assert plain.most_batches_bytes == 3 * 8 * MB
    assert plain.most_batches_bytes < collated.most_batches_bytes <= 5 * 8 * MB


@pytest.mark.parametrize("play", [simulate_torch, simulate_penstock])
def test_a_huge_batch_is_simulated_as_fast_as_a_small_one(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = 0
    draw = random.Random.randrange

    def counted(self: random.Random, *given: int) -> int:
        nonlocal drawn
        drawn += 1
        return draw(self, *given)

    monkeypatch.setattr(random.Random, "randrange", counted)
    samples = tuple(SeenSample(size_bytes=size, wait_s=0.0, cpu_s=size / 1e12) for size in (1000, 3000, 20_000))
    profile = Profile(name="it", length=None, samples=samples, torchs=FREE, ours=FREE)
    outcome = play(Load(profile=profile, rules=LoaderRules(), cores=4, batch_size=100_000, workers=4))
    assert drawn < 200_000
    # As many of each kind come as if they had been drawn one by one.
    assert outcome.samples_per_s == pytest.approx(4 / profile.cpu_s, rel=0.05)
    batch_bytes = 100_000 * profile.sample_bytes
    assert outcome.most_batches_bytes / batch_bytes == pytest.approx(
        round(outcome.most_batches_bytes / batch_bytes), rel=0.01
    )


def test_penstocks_depth_grows_beyond_slow_samples_where_memory_is_cheap_and_nowhere_else() -> None:
    usual = load(wait_s=0.01, workers=8, cores=16)
    quick, slow = usual.profile.samples[0], replace(usual.profile.samples[0], wait_s=0.2)
    uneven = replace(usual, profile=replace(usual.profile, samples=(quick,) * 24 + (slow,)))
    ideal = 8 / uneven.row_s
    roomy, tight = simulate_penstock(uneven, room=400), simulate_penstock(uneven, room=16)
    assert roomy.samples_per_s > 0.9 * ideal
    assert tight.samples_per_s < 0.7 * ideal
    assert tight.most_batches_bytes <= (uneven.usual_depth + 1) * 8 * MB
    even = simulate_penstock(usual, room=400)
    assert even.most_batches_bytes <= (usual.usual_depth + 1) * 8 * MB
