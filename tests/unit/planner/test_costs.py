"""What a loader costs, from runs whose figures were made up of known costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.loader.rules import LoaderRules
from penstock.planner.costs import TORCHS_EXTRA_BYTES, LoaderRun, penstocks_cost, torchs_cost
from penstock.planner.profile import LoaderCost, Profile, SeenSample
from penstock.planner.simulate.penstock_pipeline import simulate_penstock
from penstock.planner.simulate.pipeline import Load
from penstock.planner.simulate.torch_pipeline import simulate_torch

MB = 1_000_000
OURS = LoaderCost(
    worker_bytes=8 * MB, sample_s=0.001, batch_s=0.0, trainer_s=0.0005, start_s=0.0, beside_s=0.002,
    trainer_bytes=5 * MB,
)  # fmt: skip
TORCHS = LoaderCost(
    worker_bytes=12 * MB, sample_s=0.0, batch_s=0.008, trainer_s=0.003, start_s=0.0, trainer_bytes=5 * MB
)
PROFILE = Profile(
    name="made up", length=1000, samples=(SeenSample(size_bytes=MB, wait_s=0.02, cpu_s=0.004),), ours=OURS,
    torchs=TORCHS,
)  # fmt: skip


def load(workers: int = 2, **more: Any) -> Load:
    return Load(profile=replace(PROFILE, **more), rules=LoaderRules(), cores=2, batch_size=8, workers=workers)


def our_run(workers: int, *, batches: int = 20, slower: float = 1.0) -> LoaderRun:
    """As penstock's would be with so many workers: memory and processor time as the costs say."""
    outcome = simulate_penstock(load(workers))
    return LoaderRun(
        rows=8,
        batches=batches,
        first_batch_s=outcome.first_batch_s,
        workers_cpu_s=slower * batches * 8 * (PROFILE.cpu_s + OURS.sample_s),
        trainer_cpu_s=batches * (OURS.trainer_s + OURS.beside_s),
        deliver_s=batches * OURS.trainer_s,
        collate_s=0.0,
        shared_bytes=outcome.most_batches_bytes,
        own_bytes=outcome.most_workers_bytes + OURS.trainer_bytes,
    )


def torchs_run(*, batches: int = 40) -> LoaderRun:
    outcome = simulate_torch(load(), 2, batches=0)
    return LoaderRun(
        rows=8,
        batches=batches,
        first_batch_s=outcome.first_batch_s,
        workers_cpu_s=batches * (8 * PROFILE.cpu_s + TORCHS.batch_s),
        trainer_cpu_s=batches * TORCHS.trainer_s,
        deliver_s=None,
        collate_s=0.0,
        shared_bytes=outcome.most_batches_bytes,
        own_bytes=0,
    )


def ours_of(few: LoaderRun, many: LoaderRun, given: Load | None = None, *, workers: int = 6) -> LoaderCost:
    return penstocks_cost(few, many, given or load(), workers)


def test_costs_of_penstocks_loader_are_recovered_from_its_runs() -> None:
    cost = ours_of(our_run(2), our_run(6))
    assert cost.worker_bytes == pytest.approx(OURS.worker_bytes, rel=0.1)
    assert cost.trainer_bytes == pytest.approx(OURS.trainer_bytes, rel=0.3)
    assert (cost.sample_s, cost.trainer_s, cost.beside_s) == pytest.approx((0.001, 0.0005, 0.002))
    assert cost.copies == pytest.approx(1.0)


def test_time_for_making_pages_does_not_count_as_a_cost_of_samples() -> None:
    assert ours_of(our_run(2, slower=1.5), our_run(6)).sample_s == pytest.approx(0.001)
    assert ours_of(our_run(2), our_run(6, slower=1.5)).sample_s == pytest.approx(0.001)


def test_a_stream_with_fixed_workers_has_one_memory_figure_for_them() -> None:
    cost = ours_of(our_run(2), our_run(2), workers=2)
    assert cost.worker_bytes == pytest.approx(OURS.worker_bytes + OURS.trainer_bytes / 2, rel=0.1)
    assert cost.trainer_bytes == 0


def test_samples_for_a_custom_collate_function_are_written_twice() -> None:
    plain, made = (ours_of(our_run(2), our_run(6), load(has_collate=has)) for has in (False, True))
    assert made.sample_s == pytest.approx(plain.sample_s / 2)
    assert made.batch_s == pytest.approx(8 * plain.sample_s / 2)


def test_batches_built_whole_have_a_cost_per_batch_and_none_per_sample() -> None:
    cost = ours_of(our_run(2), our_run(6), load(is_splittable=False))
    assert cost.sample_s == 0.0 and cost.batch_s == pytest.approx(8 * 0.001)


def test_times_of_torchs_loader_are_recovered_from_its_run() -> None:
    cost = torchs_cost(torchs_run(), load(), 2, tensors=1)
    assert (cost.batch_s, cost.trainer_s) == pytest.approx((0.008, 0.003))
    assert cost.copies == pytest.approx(1.0) and cost.start_s == pytest.approx(0.0, abs=0.001)


def test_memory_of_torchs_workers_follows_from_that_of_penstocks() -> None:
    cost = torchs_cost(torchs_run(), load(), 2, tensors=1)
    assert cost.worker_bytes == OURS.worker_bytes + TORCHS_EXTRA_BYTES
    assert cost.trainer_bytes == OURS.trainer_bytes


@pytest.mark.parametrize(("tensors", "batches"), [(0, 128), (1, 128), (8, 16), (500, 1)])
def test_heaps_forget_a_batch_of_many_tensors_sooner(tensors: int, batches: int) -> None:
    assert torchs_cost(torchs_run(), load(), 2, tensors=tensors).creep_batches == batches


def test_costs_of_smaller_batches_are_scaled_to_the_batches_that_are_planned_for() -> None:
    twice = replace(load(), batch_size=16)
    assert torchs_cost(torchs_run(), twice, 2, tensors=1).batch_s == pytest.approx(0.016)
