"""Loaders played through: what they hold and how fast they are follows from who is slower."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from penstock.loader.engine.rules import LoaderRules
from penstock.planner.profile import LoaderCost, Profile, Sample
from penstock.planner.simulate import arena
from penstock.planner.simulate import penstock_pipeline as own_pipeline
from penstock.planner.simulate.penstock_pipeline import bytes_for, play_ours, rows_a_task, slots_within, usual_depth
from penstock.planner.simulate.pipeline import Load
from penstock.planner.simulate.torch_pipeline import play_torch

MB = 1_000_000
FREE = LoaderCost(worker_bytes=10 * MB, sample_s=0.0, batch_s=0.0, trainer_s=0.0, start_s=0.0)


def load(
    *, size: int = MB, wait_s: float = 0.0, cpu_s: float = 0.0, cost: LoaderCost = FREE, cores: float = 4, **given: Any
) -> Load:
    sample = Sample(size_bytes=size, wait_s=wait_s, cpu_s=cpu_s)
    profile = Profile(name="it", length=None, samples=(sample,), torchs=cost, ours=cost)
    return Load(profile=profile, cores=cores, **{"batch_size": 8, "workers": 4, **given})


@pytest.mark.parametrize("play", [play_torch, play_ours])
@pytest.mark.parametrize(
    ("given", "samples_per_s"),
    [
        ({"wait_s": 0.02, "workers": 4}, 200.0),
        ({"wait_s": 0.02, "workers": 8}, 400.0),
        ({"cpu_s": 0.01, "workers": 8, "cores": 2}, 200.0),
        ({"cpu_s": 0.01, "workers": 1, "cores": 2}, 100.0),
        ({"wait_s": 0.02, "workers": 8, "step_s": 0.1}, 80.0),
    ],
)
def test_the_slowest_of_waiting_computing_and_training_decides(
    play: Any, given: dict[str, Any], samples_per_s: float
) -> None:
    assert play(load(**given)).samples_per_s == pytest.approx(samples_per_s, rel=0.05)


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (2, 2), (4, 3), (8, 2)])
def test_behind_a_slow_training_loop_torch_holds_everything_it_may(workers: int, prefetch: int) -> None:
    cost = replace(FREE, batch_s=0.001)
    outcome = play_torch(load(wait_s=0.001, workers=workers, step_s=0.5, cost=cost, cores=16), prefetch)
    # What was asked for is there, and the batch the loop holds besides.
    assert outcome.most_batches_bytes == (workers * prefetch + 1) * 8 * MB
    assert outcome.most_workers_bytes == workers * (10 + 8) * MB


def test_behind_a_fast_one_it_holds_what_is_being_built() -> None:
    outcome = play_torch(load(wait_s=0.02, workers=4), 4)
    assert outcome.most_batches_bytes <= 6 * 8 * MB


@pytest.mark.parametrize(("workers", "depth"), [(1, 2), (4, 2), (8, 4), (16, 2)])
def test_ours_holds_as_many_batches_as_it_is_deep_whatever_the_workers(workers: int, depth: int) -> None:
    outcome = play_ours(load(wait_s=0.02, workers=workers, step_s=0.5), depth)
    assert outcome.most_batches_bytes == (depth + 1) * 8 * MB
    assert outcome.most_workers_bytes <= workers * 11 * MB


def test_segments_and_their_room_are_as_in_the_loader() -> None:
    rules = LoaderRules()
    assert rules.recent_batches == own_pipeline.RECENT
    assert (rules.reuse_up_to, rules.recent_needs) == (arena.REUSE_UP_TO, arena.RECENT_NEEDS)


def test_a_segment_is_used_again_for_what_fits_well_and_closed_where_more_lies_free_than_was_in_use() -> None:
    pages: list[int] = []
    here = arena.Arena(pages.append)
    large = here.take(8 * MB)
    assert large.new_bytes == 8 * MB
    here.give_back([large])
    assert here.take(5 * MB) is large and sum(pages) == 8 * MB and not large.new_bytes
    here.give_back([large])
    small = here.take(3 * MB)
    assert small is not large and sum(pages) == 3 * MB, "a free one of 8 beside 3 is more than was ever in use"
    here.give_back([small])
    assert here.take(2 * MB, room_bytes=3 * MB) is small and sum(pages) == 3 * MB
    roomy = here.take(4 * MB, room_bytes=6 * MB)
    here.give_back([roomy])
    assert here.take(6 * MB) is roomy and roomy.new_bytes == 2 * MB


def test_one_deep_ours_has_three_batches_while_one_is_handed_over() -> None:
    batches_bytes = [play_ours(load(wait_s=0.02, workers=2), depth).most_batches_bytes for depth in (1, 2)]
    assert batches_bytes == [3 * 8 * MB, 3 * 8 * MB]
    room_for_two = 2 * 11 * MB + 2 * 8 * MB
    assert play_ours(load(wait_s=0.02, workers=2), 1, room_for_two).most_batches_bytes == 2 * 8 * MB


def test_a_function_of_the_users_has_one_batch_twice() -> None:
    slow = load(wait_s=0.02, step_s=0.5)
    made = replace(slow, profile=replace(slow.profile, has_collate=True))
    assert play_ours(made, 2).most_batches_bytes == (1 + 1 + 2) * 8 * MB


def test_while_pages_are_made_more_batches_are_being_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = load(size=4 * MB, wait_s=0.015, cpu_s=0.001, workers=8, cores=2, cost=replace(FREE, batch_s=0.004))
    made = replace(fast, profile=replace(fast.profile, has_collate=True))
    slow = play_ours(made, 3)
    monkeypatch.setattr(own_pipeline, "_NEW_BYTES_PER_S", 1e12)
    at_once = play_ours(made, 3)
    assert slow.most_batches_bytes > at_once.most_batches_bytes
    assert slow.first_batch_s > at_once.first_batch_s
    assert slow.samples_per_s == pytest.approx(at_once.samples_per_s, rel=0.1), "once they are there, no slower"


def test_uneven_samples_take_more_than_their_sum() -> None:
    slow = load(wait_s=0.02, step_s=0.5)
    samples = tuple(Sample(size_bytes=size * MB // 10, wait_s=0.02, cpu_s=0.0) for size in range(2, 19))
    made = replace(slow, profile=replace(slow.profile, has_collate=True, samples=samples))
    assert 1.1 * 32 * MB < play_ours(made, 2).most_batches_bytes < 2 * 32 * MB


def test_a_budget_takes_slots_away() -> None:
    tight = 4 * 11 * MB + 2 * 8 * MB
    assert slots_within(load(wait_s=0.02), 4, tight) == 2
    assert play_ours(load(wait_s=0.02, step_s=0.5), 4, tight).growth_bytes <= tight


def test_the_first_batch_comes_as_many_times_sooner_as_there_are_workers() -> None:
    theirs, ours = play_torch(load(wait_s=0.02)), play_ours(load(wait_s=0.02))
    assert theirs.first_batch_s == pytest.approx(0.16) and ours.first_batch_s == pytest.approx(0.04)


def test_heaps_that_creep_do_so_until_old_batches_are_forgotten() -> None:
    cost = LoaderCost(worker_bytes=0, sample_s=0.0, batch_s=0.0, trainer_s=0.0, start_s=0.0, creep_bytes=MB)
    still, some, long = (
        play_torch(load(wait_s=0.01, cost=cost), batches=batches).growth_bytes for batches in (0, 40, None)
    )
    # The first ones are built ahead, before any is taken.
    assert some - still == 40 * MB and long - still == 4 * (128 - 2) * MB


def test_the_shuffled_order_of_a_long_dataset_is_the_training_processs() -> None:
    short, long = (load(wait_s=0.01), load(wait_s=0.01))
    long = replace(long, profile=replace(long.profile, length=10_000_000))
    assert play_ours(long).growth_bytes - play_ours(short).growth_bytes == pytest.approx(450 * MB, rel=0.01)


@pytest.mark.parametrize("copies", [1.0, 1.09, 1.3])
@pytest.mark.parametrize("has_collate", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 7])
def test_a_budget_for_so_many_batches_has_room_for_them(copies: float, has_collate: bool, slots: int) -> None:
    here = load(wait_s=0.01)
    here = replace(
        here, profile=replace(here.profile, has_collate=has_collate, ours=replace(here.profile.ours, copies=copies))
    )
    assert slots_within(here, 10, bytes_for(here, slots)) == slots
    assert slots_within(here, 10, bytes_for(here, slots) - 1) == max(1, slots - 1)


def test_a_cache_is_worth_the_samples_it_has() -> None:
    cold, warm = (play_ours(load(wait_s=0.02, hit_rate=rate)).samples_per_s for rate in (0.0, 0.5))
    assert warm == pytest.approx(2 * cold, rel=0.1)


def test_without_workers_the_training_loop_loads_for_itself() -> None:
    outcome = play_torch(load(wait_s=0.01, workers=0, step_s=0.02))
    assert outcome.samples_per_s == pytest.approx(80.0, rel=0.05)
    assert outcome.growth_bytes == 3 * 8 * MB


@pytest.mark.parametrize("row_s", [0.00001, 0.0004, 0.002, 0.006, 0.019, 0.05, 1.0])
@pytest.mark.parametrize("batch_size", [1, 8, 20, 256])
@pytest.mark.parametrize("workers", [1, 4, 16])
def test_depth_and_tasks_are_those_of_the_loader(row_s: float, batch_size: int, workers: int) -> None:
    profile = load(wait_s=row_s, cost=FREE).profile
    rules = LoaderRules()
    rows = rules.rows_per_task(row_s, batch_size)
    assert rows_a_task(profile, batch_size) == rows
    assert usual_depth(profile, batch_size, workers) == rules.depth(row_s, batch_size, workers, rows=rows)


def test_a_heap_keeps_what_samples_took_unless_they_are_mapped_on_their_own() -> None:
    small = play_torch(load(wait_s=0.001, step_s=0.5, workers=4), 1, batches=0)
    assert small.most_workers_bytes == 4 * (10 + 8) * MB
    profile = replace(load(wait_s=0.001).profile, samples=(Sample(size_bytes=50 * MB, wait_s=0.02, cpu_s=0.0),))
    huge = play_torch(replace(load(wait_s=0.001, step_s=5.0, workers=4), profile=profile, cores=1), 1, batches=0)
    assert huge.growth_bytes < huge.most_batches_bytes + 4 * (10 + 8 * 50) * MB


def test_samples_kept_apart_are_sent_beside_the_next_batch() -> None:
    cost = replace(FREE, batch_s=0.07)
    kept_apart = replace(load(wait_s=0.01, workers=2, cost=cost).profile, is_collated=False)
    one, two = (
        play_torch(replace(load(wait_s=0.01, workers=2, cost=cost), profile=profile))
        for profile in (replace(kept_apart, is_collated=True), kept_apart)
    )
    assert two.samples_per_s > 1.5 * one.samples_per_s
    assert one.most_workers_bytes == 2 * (10 + 8) * MB < two.most_workers_bytes <= 2 * (10 + 16) * MB


def test_a_collate_function_has_samples_beside_their_batch() -> None:
    profile = replace(load(wait_s=0.02).profile, has_collate=True)
    plain = play_ours(load(wait_s=0.02, step_s=0.5), 2)
    collated = play_ours(replace(load(wait_s=0.02, step_s=0.5), profile=profile), 2)
    assert plain.most_batches_bytes == 3 * 8 * MB
    assert plain.most_batches_bytes < collated.most_batches_bytes <= 5 * 8 * MB


@pytest.mark.parametrize("play", [play_torch, play_ours])
def test_a_huge_batch_is_played_through_as_fast_as_a_small_one(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = 0
    draw = random.Random.randrange

    def counted(self: random.Random, *given: int) -> int:
        nonlocal drawn
        drawn += 1
        return draw(self, *given)

    monkeypatch.setattr(random.Random, "randrange", counted)
    samples = tuple(Sample(size_bytes=size, wait_s=0.0, cpu_s=size / 1e12) for size in (1000, 3000, 20_000))
    profile = Profile(name="it", length=None, samples=samples, torchs=FREE, ours=FREE)
    outcome = play(Load(profile=profile, cores=4, batch_size=100_000, workers=4))
    assert drawn < 200_000
    # As many of each kind come as if they had been drawn one by one.
    assert outcome.samples_per_s == pytest.approx(4 / profile.cpu_s, rel=0.05)
    batch_bytes = 100_000 * profile.sample_bytes
    assert outcome.most_batches_bytes / batch_bytes == pytest.approx(
        round(outcome.most_batches_bytes / batch_bytes), rel=0.01
    )
