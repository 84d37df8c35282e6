"""What a loader costs, out of runs whose figures were made up of known costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.planner.costs import NUMPY_RANDOM_BYTES, Run, our_cost, rise, their_cost
from penstock.planner.profile import LoaderCost, Profile, Sample
from penstock.planner.simulate.penstock_pipeline import play_ours
from penstock.planner.simulate.pipeline import Load
from penstock.planner.simulate.torch_pipeline import play_torch

MB = 1_000_000
OURS = LoaderCost(
    worker_bytes=8 * MB, sample_s=0.001, batch_s=0.0, trainer_s=0.0005, start_s=0.0, beside_s=0.002,
    trainer_bytes=5 * MB,
)  # fmt: skip
TORCHS = LoaderCost(
    worker_bytes=12 * MB,
    sample_s=0.0,
    batch_s=0.008,
    trainer_s=0.003,
    start_s=0.0,
    creep_bytes=MB,
    trainer_bytes=5 * MB,
)
PROFILE = Profile(
    name="made up", length=1000, samples=(Sample(size_bytes=MB, wait_s=0.02, cpu_s=0.004),), ours=OURS, torchs=TORCHS
)


def load(workers: int = 2, **more: object) -> Load:
    return Load(profile=replace(PROFILE, **more), cores=2, batch_size=8, workers=workers)


def our_run(workers: int, *, batches: int = 20, slower: float = 1.0) -> Run:
    """As ours would be with so many workers: memory and processor time as the costs say."""
    outcome = play_ours(load(workers))
    return Run(
        workers=workers,
        rows=8,
        batches=batches,
        seconds=batches * 8 / outcome.samples_per_s,
        first_batch_s=outcome.first_batch_s,
        workers_cpu_s=slower * batches * 8 * (PROFILE.cpu_s + OURS.sample_s),
        trainer_cpu_s=batches * (OURS.trainer_s + OURS.beside_s),
        deliver_s=batches * OURS.trainer_s,
        collate_s=0.0,
        shared_bytes=outcome.most_batches_bytes,
        own_bytes=outcome.most_workers_bytes + OURS.trainer_bytes,
    )


def their_run(*, creep_bytes: int = MB, batches: int = 40) -> Run:
    outcome = play_torch(load(), 2, batches=0)
    built = batches + 2 * 2
    still = outcome.most_workers_bytes - 2 * 2 * TORCHS.creep_bytes
    return Run(
        workers=2,
        rows=8,
        batches=batches,
        seconds=batches * 8 / outcome.samples_per_s,
        first_batch_s=outcome.first_batch_s,
        workers_cpu_s=batches * (8 * PROFILE.cpu_s + TORCHS.batch_s),
        trainer_cpu_s=batches * TORCHS.trainer_s,
        deliver_s=None,
        collate_s=0.0,
        shared_bytes=outcome.most_batches_bytes,
        own_bytes=still + built * creep_bytes + TORCHS.trainer_bytes,
        heaps=tuple((number, number * creep_bytes) for number in range(batches)),
    )


def torchs_of(run: Run, given: Load | None = None, *, tensors: int = 1, many: Run | None = None) -> LoaderCost:
    """What is made of a run of torch's, where many workers take as much of the processor as few."""
    return their_cost(run, many or run, given or load(), 2, tensors=tensors)


def test_costs_of_ours_come_back_out_of_its_runs() -> None:
    cost = our_cost(our_run(2), our_run(6), our_run(2), load())
    assert cost.worker_bytes == pytest.approx(OURS.worker_bytes, rel=0.1)
    assert cost.trainer_bytes == pytest.approx(OURS.trainer_bytes, rel=0.3)
    assert (cost.sample_s, cost.trainer_s, cost.beside_s) == pytest.approx((0.001, 0.0005, 0.002))
    assert cost.copies == pytest.approx(1.0) and cost.crowding == 0.0


def test_workers_that_crowd_each_other_are_seen_by_their_processor_time() -> None:
    assert our_cost(our_run(2), our_run(6, slower=1.2), our_run(2), load()).crowding == pytest.approx(0.2)
    # The first run made pages that the others use again: that is no crowd, nor does it hide one.
    warm = our_cost(our_run(2, slower=1.5), our_run(6), our_run(2), load())
    assert warm.crowding == 0.0 and warm.sample_s == pytest.approx(0.001)
    hidden = our_cost(our_run(2, slower=1.5), our_run(6, slower=1.2), our_run(2), load())
    assert hidden.crowding == pytest.approx(0.2) and hidden.sample_s == pytest.approx(0.001)


def test_a_stream_that_keeps_its_workers_has_one_figure_for_them() -> None:
    cost = our_cost(our_run(2), our_run(2), our_run(2), load())
    assert cost.worker_bytes == pytest.approx(OURS.worker_bytes + OURS.trainer_bytes / 2, rel=0.1)
    assert cost.trainer_bytes == 0
    assert our_cost(our_run(2), our_run(2, slower=1.3), our_run(2), load()).crowding == 0.0, "no more, no crowd"


def test_samples_for_a_function_of_the_users_are_written_twice() -> None:
    plain, made = (our_cost(our_run(2), our_run(6), our_run(2), load(has_collate=has)) for has in (False, True))
    assert made.sample_s == pytest.approx(plain.sample_s / 2)
    assert made.batch_s == pytest.approx(8 * plain.sample_s / 2)


def test_costs_of_torchs_come_back_out_of_its_run() -> None:
    cost = torchs_of(their_run())
    # Of a process that has not loaded what penstock has.
    assert cost.worker_bytes == pytest.approx(TORCHS.worker_bytes + NUMPY_RANDOM_BYTES, rel=0.1)
    assert cost.trainer_bytes == OURS.trainer_bytes
    assert (cost.batch_s, cost.trainer_s) == pytest.approx((0.008, 0.003))
    assert cost.creep_batches == 128 and torchs_of(their_run(), tensors=8).creep_batches == 16


def test_heaps_that_creep_do_so_by_a_sample_a_batch_and_others_not_at_all() -> None:
    assert torchs_of(their_run(creep_bytes=int(0.9 * MB))).creep_bytes == MB
    assert torchs_of(their_run(creep_bytes=int(0.2 * MB))).creep_bytes == 0
    assert torchs_of(replace(their_run(), heaps=())).creep_bytes == MB, "too short to tell: the usual"
    huge = load(samples=(Sample(size_bytes=40 << 20, wait_s=0.02, cpu_s=0.004),))
    assert torchs_of(their_run(creep_bytes=40 << 20), huge).creep_bytes == 0, "mapped, each on its own"


@pytest.mark.parametrize("crept", [0.0, 0.4, 1.0])
def test_heaps_of_large_samples_creep_by_the_middle_of_what_was_seen_whatever_one_short_run_says(crept: float) -> None:
    small, large = (load(samples=(Sample(size_bytes=size, wait_s=0.02, cpu_s=0.004),)) for size in (2_000_000, 2 << 20))
    run = their_run(creep_bytes=int(crept * (2 << 20)))
    assert torchs_of(run, large).creep_bytes == int(0.75 * (2 << 20))
    assert torchs_of(run, small).creep_bytes == (2_000_000 if crept > 0.5 else 0)


@pytest.mark.parametrize("crept", [0.0, 0.2, 0.5, 0.9])
def test_what_heaps_gained_in_a_run_is_no_workers_own(crept: float) -> None:
    cost = torchs_of(their_run(creep_bytes=int(crept * MB)))
    assert cost.worker_bytes == pytest.approx(TORCHS.worker_bytes + NUMPY_RANDOM_BYTES, rel=0.1)


def test_workers_of_torchs_crowd_each_other_in_their_own_way() -> None:
    run = their_run()
    crowded = torchs_of(run, many=replace(run, workers_cpu_s=1.3 * run.workers_cpu_s))
    assert crowded.crowding == pytest.approx(0.3) and crowded.batch_s == torchs_of(run).batch_s
    assert torchs_of(run, many=replace(run, workers_cpu_s=0.8 * run.workers_cpu_s)).crowding == 0.0


def test_where_many_of_torchs_could_not_be_run_they_crowd_each_other_as_ours_do() -> None:
    known = load(ours=replace(OURS, crowding=0.2))
    assert their_cost(their_run(), None, known, 2, tensors=1).crowding == 0.2


def slower(run: Run, times: float) -> Run:
    return replace(run, seconds=times * run.seconds)


def test_what_many_take_longer_than_shared_cores_explain_is_put_down_to_those_beyond_the_cores() -> None:
    many = our_run(6)
    # 6 workers at 24 ms of waiting and computing each, and a tenth more time for all of it.
    slow = slower(many, 1.1)
    cost = our_cost(our_run(2), slow, our_run(2), load())
    assert cost.lag * 4 * 0.024 * many.samples == pytest.approx(6 * 0.1 * many.seconds, rel=0.05)
    played = play_ours(lagging(6, cost.lag))
    assert played.samples_per_s == pytest.approx(slow.samples / slow.seconds, rel=0.05)
    assert our_cost(our_run(2), many, our_run(2), load()).lag == pytest.approx(0.0, abs=0.005)


def lagging(workers: int, lag: float, cores: float = 2) -> Load:
    return replace(load(workers), cores=cores, profile=replace(PROFILE, ours=replace(OURS, lag=lag)))


def test_a_run_that_stood_still_lags_by_half_a_samples_time_and_no_more_whatever_the_workers() -> None:
    stopped = our_cost(our_run(2), slower(our_run(6), 100.0), our_run(2), load())
    assert stopped.lag * 4 == pytest.approx(0.5)
    more = [play_ours(lagging(workers, stopped.lag)).samples_per_s for workers in (6, 12, 20)]
    assert more == sorted(more)


@pytest.mark.parametrize("cores", [5.1, 5.9, 8.0])
def test_workers_that_are_hardly_more_than_the_cores_tell_no_lag(cores: float) -> None:
    enough = replace(load(), cores=cores)
    assert our_cost(our_run(2), slower(our_run(6), 1.5), our_run(2), enough).lag == 0.0


def test_workers_that_have_a_core_each_do_not_lag() -> None:
    assert play_ours(lagging(6, 0.1, cores=8)) == play_ours(replace(load(6), cores=8))
    assert play_ours(lagging(1, 0.1, cores=0.5)) == play_ours(replace(load(1), cores=0.5))


def test_workers_that_keep_all_cores_busy_tell_no_lag_but_those_who_are_one_more_than_the_cores_do() -> None:
    computes = load(samples=(Sample(size_bytes=MB, wait_s=0.004, cpu_s=0.006),))
    assert our_cost(our_run(2), slower(our_run(6), 1.5), our_run(2), computes).lag == 0.0
    few, many, three = (
        replace(
            our_run(workers),
            workers_cpu_s=160 * 0.007,
            seconds=160 / play_ours(replace(computes, workers=workers)).samples_per_s,
        )
        for workers in (2, 6, 3)
    )
    cost = our_cost(few, many, slower(three, 1.1), computes)
    assert cost.lag * 0.010 * 160 == pytest.approx(3 * 0.1 * three.seconds, rel=0.05)
    assert our_cost(few, slower(many, 1.1), three, computes).lag < 0.01


def test_samples_that_take_no_time_at_all_tell_no_lag() -> None:
    instant = load(samples=(Sample(size_bytes=MB, wait_s=0.0, cpu_s=0.0),))
    few, many = (replace(our_run(workers), workers_cpu_s=0.0) for workers in (2, 6))
    assert our_cost(few, many, few, instant).lag == 0.0


def test_whole_batches_of_single_workers_come_too_unevenly_to_tell_a_lag() -> None:
    slow = replace(our_run(6), seconds=10.0)
    assert our_cost(our_run(2), slow, our_run(2), load(is_splittable=False)).lag == 0.0


def test_no_worker_of_torchs_is_leaner_than_ours() -> None:
    lean = replace(their_run(), own_bytes=2 * (8 + 2) * MB)
    assert torchs_of(lean).worker_bytes == OURS.worker_bytes + NUMPY_RANDOM_BYTES


def test_heaps_of_samples_that_are_kept_apart_creep_no_more_than_they_did() -> None:
    # More than workers as lean as ours would take, and less than heaps that creep as usual.
    grown = play_torch(load(is_collated=False), 2, batches=0).most_workers_bytes - 2 * TORCHS.worker_bytes
    some = replace(their_run(), own_bytes=grown + TORCHS.trainer_bytes + 2 * OURS.worker_bytes + 44 * MB // 10)
    cost = torchs_of(some, load(is_collated=False))
    assert cost.worker_bytes == OURS.worker_bytes + NUMPY_RANDOM_BYTES
    assert 0 < cost.creep_bytes < 0.45 * MB


def test_the_order_of_a_long_dataset_is_the_training_processs_and_not_its_workers() -> None:
    short, long = (torchs_of(their_run(), load(length=length)) for length in (1000, 200_000))
    assert short.worker_bytes - long.worker_bytes == pytest.approx((3 * 2**19 + 45 * 200_000 - 5 * MB) / 2, rel=0.01)


@pytest.mark.parametrize(
    ("points", "steep"),
    [
        ([(n, 5 * n) for n in range(10)], 5.0),
        ([(n, -5 * n) for n in range(10)], -5.0),
        ([(n, 7) for n in range(10)], 0.0),
        ([(n, 100 * (n % 2)) for n in range(10)], 0.0),
        ([(n, 5 * n if n < 9 else 0) for n in range(10)], 5.0),
        ([(n, 5 * n) for n in range(10_000)], 5.0),
    ],
)
def test_how_steeply_points_rise_does_not_depend_on_a_few_of_them(points: list[tuple[int, int]], steep: float) -> None:
    assert rise(points) == pytest.approx(steep)
