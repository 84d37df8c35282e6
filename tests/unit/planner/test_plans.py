"""Plans as tables: facts in, plans out. No process is started and nothing is read."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import settings
from penstock.errors import ConfigError
from penstock.loader.rules import LoaderRules
from penstock.planner.choices import worker_counts
from penstock.planner.plans import NAMES, Facts, PlanTable, allowed_bytes, make_plans
from penstock.planner.profile import LoaderCost, Profile, SeenSample

MB, GB = 10**6, 10**9
COST = LoaderCost(worker_bytes=10 * MB, sample_s=1e-5, batch_s=2e-4, trainer_s=3e-4, start_s=0.02)


def profile_of(size_bytes: int = MB, wait_s: float = 0.0, cpu_s: float = 0.02, **more: Any) -> Profile:
    samples = (SeenSample(size_bytes=size_bytes, wait_s=wait_s, cpu_s=cpu_s),)
    return Profile(**{"name": "images", "length": 1000, "samples": samples, "ours": COST, **more})


def plans_of(profile: Profile | None = None, batch_size: int = 16, **more: Any) -> PlanTable:
    names = ("cores", "available_bytes", "gpu_bytes", "ranks")
    facts = Facts(**{"cores": 8, "available_bytes": 16 * GB, **{key: more.pop(key) for key in names if key in more}})
    given = {"rules": LoaderRules(), "budget_bytes": 8 * GB, **more}
    return make_plans(profile_of() if profile is None else profile, facts, batch_size, **given)


@pytest.mark.parametrize("budget_bytes", [1, 100 * MB, 8 * GB])
@pytest.mark.parametrize("step_s", [None, 0.0, 0.05, 10.0])
@pytest.mark.parametrize("cores", [0.5, 1, 8, 64])
def test_there_are_always_five_plans_in_order_and_one_of_them_is_recommended(
    budget_bytes: int, step_s: float | None, cores: float
) -> None:
    table = plans_of(cores=cores, budget_bytes=budget_bytes, step_s=step_s)
    assert tuple(plan.name for plan in table.plans) == NAMES
    assert table.recommended in table.plans
    assert max(plan.speed for plan in table.plans) == 1.0
    assert all((plan.wait is None) == (step_s is None) for plan in table.plans)
    assert all(0 < plan.memory.low < plan.memory.expected < plan.memory.high for plan in table.plans)


def test_each_plan_is_at_least_as_fast_as_the_one_before_it() -> None:
    safe, balanced, fast, extreme, _ = plans_of(profile_of(40 * MB)).plans
    assert safe.speed >= 0.6 and balanced.speed >= 0.85
    assert safe.workers < balanced.workers < fast.workers <= extreme.workers
    assert safe.memory.expected < balanced.memory.expected < fast.memory.expected


@pytest.mark.parametrize("budget_bytes", [1, 8 * GB])
@pytest.mark.parametrize(
    ("batch_s", "cpu_s", "batch_size", "is_splittable"),
    [(3e-4, 3e-6, 32, False), (3e-4, 1e-5, 8, False), (2e-4, 3e-6, 8, False), (1e-4, 5e-6, 8, True)],
)
def test_a_safer_plan_never_takes_more_than_a_faster_one(
    batch_s: float, cpu_s: float, batch_size: int, is_splittable: bool, budget_bytes: int
) -> None:
    # Cheap samples: in a simulation, fewer batches ahead than the loader's own come out faster.
    ours = replace(COST, sample_s=1e-6 if is_splittable else 0.0, batch_s=batch_s, trainer_s=max(2e-4, batch_s))
    profile = profile_of(4000, 1e-5, cpu_s, ours=ours, is_splittable=is_splittable)
    taken = [plan.memory.expected for plan in plans_of(profile, batch_size, cores=2, budget_bytes=budget_bytes).plans]
    assert taken[:4] == sorted(taken[:4])


def test_the_recommended_one_takes_least_of_those_as_fast_as_any_within_the_budget() -> None:
    # One worker does all there is to do: the rest is memory for nothing.
    table = plans_of(step_s=10.0)
    assert {plan.workers for plan in table.plans} == {1}
    assert table.recommended.memory.high == min(plan.memory.high for plan in table.plans)
    # Six workers' work: fewer would make the training wait.
    table = plans_of(step_s=0.055)
    assert table.recommended.name == "fast" and table.recommended.workers == 6
    assert table.recommended.wait is not None and table.recommended.wait < 0.02


@pytest.mark.parametrize("budget_mb", range(60, 1500, 60))
def test_the_recommended_one_never_exceeds_the_budget_while_any_fits(budget_mb: int) -> None:
    table = plans_of(profile_of(4 * MB), budget_bytes=budget_mb * MB)
    fitting = [plan for plan in table.plans[:4] if plan.memory.high <= budget_mb * MB]
    assert table.recommended.fits == bool(fitting)
    if fitting:
        assert table.recommended.memory.high <= budget_mb * MB
        assert table.recommended.samples_per_s.expected >= 0.98 * max(plan.samples_per_s.expected for plan in fitting)
    assert ("No plan fits" in table.explain()) == (not fitting)


def test_a_larger_budget_is_never_slower() -> None:
    speeds = [
        plans_of(profile_of(4 * MB), budget_bytes=budget_mb * MB).recommended.samples_per_s.expected
        for budget_mb in range(200, 1500, 100)
    ]
    assert all(later >= 0.98 * earlier for earlier, later in itertools.pairwise(speeds))
    assert speeds[-1] > 2 * speeds[0]


def test_if_no_plan_fits_the_smallest_is_recommended_with_its_numbers() -> None:
    table = plans_of(profile_of(100 * MB), budget_bytes=50 * MB)
    best = table.recommended
    assert not best.fits
    assert best.memory.high == min(plan.memory.high for plan in table.plans[:4])
    assert "No plan fits 47.7 MiB" in table.explain() and "no smaller batch fits the limit" in table.explain()
    assert best.arguments()["memory"] == "47MiB"
    assert any("more memory than the limit" in con for con in best.cons)


def test_if_no_plan_fits_the_note_names_the_smallest_budget_and_it_suffices() -> None:
    profile = profile_of(4 * MB)
    table = plans_of(profile, budget_bytes=60 * MB)
    least = table.least
    # Less than any of the five plans: none of them is made for the least memory.
    assert not table.recommended.fits and least.memory_bytes < min(plan.memory.high for plan in table.plans)
    allow_mib = -(-least.memory_bytes // (1 << 20))
    assert least.batch_size is not None and 1 <= least.batch_size < 16
    assert f"Allow {allow_mib}MiB for these settings" in table.explain()
    assert f"or lower the batch size to {least.batch_size}." in table.explain()
    assert plans_of(profile, budget_bytes=allow_mib << 20).recommended.fits
    assert not plans_of(profile, budget_bytes=(allow_mib - 2) << 20).recommended.fits
    assert plans_of(profile, least.batch_size, budget_bytes=60 * MB).recommended.fits
    assert not plans_of(profile, least.batch_size + 1, budget_bytes=60 * MB).recommended.fits
    assert plans_of(profile).least.batch_size is None


def test_a_stream_that_every_worker_reads_whole_gets_one_worker_and_the_reason() -> None:
    table = plans_of(profile_of(wait_s=0.02, cpu_s=0.001, is_splittable=False, is_repeated=True))
    assert {plan.workers for plan in table.plans} == {1}
    assert "get_worker_info" in table.explain() and "more workers than cores" not in table.explain()
    assert "get_worker_info" not in plans_of(profile_of(wait_s=0.02, cpu_s=0.001)).explain()


def test_plans_without_runs_of_the_loaders_have_a_note_and_a_wider_range() -> None:
    run, not_run = plans_of(profile_of(wait_s=1.0)), plans_of(profile_of(wait_s=1.0, has_runs=False))
    assert "too long to run the loaders" in not_run.explain() and "too long" not in run.explain()
    assert not_run.recommended.memory.high > run.recommended.memory.high


def test_the_bigger_batch_is_half_as_large_again_and_never_recommended() -> None:
    for batch_size, larger in ((1, 2), (2, 3), (4, 6), (32, 48)):
        table = plans_of(batch_size=batch_size)
        assert table["bigger batch"].batch_size == larger
        assert table.recommended.batch_size == batch_size
    words = " ".join(plans_of()["bigger batch"].cons)
    assert "convergence" in words and "NaN" in words and "GPU memory" in words


@pytest.mark.parametrize(
    ("wait_s", "cpu_s", "is_measured", "most"),
    [(0.0, 0.02, True, 4), (0.02, 0.02, True, 12), (1.0, 0.001, True, 16), (1.0, 0.001, False, 4)],
)
def test_more_workers_than_cores_only_where_samples_were_measured_to_wait(
    wait_s: float, cpu_s: float, is_measured: bool, most: int
) -> None:
    counts = worker_counts(profile_of(wait_s=wait_s, cpu_s=cpu_s, is_measured=is_measured), 4)
    assert counts[0] == 1 and max(counts) == pytest.approx(most, abs=1)


def test_plans_with_the_same_settings_have_a_note_and_the_smallest_has_no_drawback() -> None:
    table = plans_of(step_s=10.0)
    assert "The plans safe, balanced, fast, extreme are the same settings here" in table.explain()
    assert table.recommended.name == "safe" and table.recommended.cons == ()
    slower = plans_of(profile_of(40 * MB))
    assert "The plans fast, extreme are the same settings" in slower.explain()
    assert slower["safe"].cons == ("the GPU may wait for data",)


def test_a_quota_of_less_than_a_core_still_gets_one_worker() -> None:
    assert {plan.workers for plan in plans_of(cores=0.25).plans} == {1}


def test_risk_is_the_share_of_free_memory_of_all_ranks_together() -> None:
    profile = profile_of(100 * MB)
    high = int(plans_of(profile, available_bytes=10**15, budget_bytes=10**15)["extreme"].memory.high)
    for share, risk in ((0.5, "low"), (0.7, "medium"), (0.95, "high")):
        plan = plans_of(profile, available_bytes=int(high / share), budget_bytes=10**15)["extreme"]
        assert plan.risk == risk, share
        assert (plan.risk == "low") == ("close other programs, and watch the memory" not in " ".join(plan.cons))
    assert plans_of(profile, available_bytes=high * 4, budget_bytes=10**15, ranks=3)["extreme"].risk != "low"


def test_workers_are_given_per_rank_and_per_node() -> None:
    table = plans_of(ranks=3, step_s=0.055)
    assert table.recommended.workers_on_node == 3 * table.recommended.workers
    assert "6 per rank, 18 on this node (3 ranks)" in table.explain()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"is_picklable": False}, "cannot be pickled"),
        ({"holds_gil": False}, 'backend="thread"'),
        ({"is_splittable": False}, "built whole by one worker"),
        ({"containers_bytes": 100 * MB}, "Python containers"),
        ({"is_measured": False}, "Nothing was measured"),
        ({"wait_s": 1.0}, "Bound by waiting: 98%"),
        ({"wait_s": 0.0}, "Bound by the processor: 100%"),
    ],
)
def test_notes_report_the_facts_of_the_profile(more: dict[str, Any], said: str) -> None:
    assert said in plans_of(profile_of(**more)).explain()
    assert said in ("Bound by the processor: 100%",) or said not in plans_of().explain()


def test_figures_that_were_only_stated_have_a_wider_range() -> None:
    measured, stated = (plans_of(profile_of(is_measured=each)).recommended.memory for each in (True, False))
    assert stated.high / stated.expected > measured.high / measured.expected


def test_uneven_samples_widen_the_range_less_in_large_batches() -> None:
    uneven = profile_of(samples=tuple(SeenSample(size_bytes=size * MB, wait_s=0, cpu_s=0.02) for size in (1, 1, 1, 9)))
    few, many = (plans_of(uneven, batch_size=size).recommended.memory for size in (2, 128))
    assert few.high / few.expected > many.high / many.expected > 1.1


def test_the_yaml_is_read_back_by_the_settings_room_as_the_same_arguments(tmp_path: Path) -> None:
    table = plans_of(gpu_bytes=24 * GB, ranks=2)
    for plan in (None, *table.plans):
        path = tmp_path / "plan.yaml"
        path.write_text(table.to_yaml(plan))
        assert settings.load(path).arguments == (plan or table.recommended).arguments()
    assert table.recommended.pin_memory


def test_the_name_of_a_dataset_cannot_break_the_yaml(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(plans_of(profile_of(name="a\nnum_workers: 99\n#")).to_yaml())
    assert settings.load(path).arguments["num_workers"] != 99


def test_everything_is_json_and_the_recommended_is_named() -> None:
    table = plans_of(step_s=0.1)
    answer = json.loads(json.dumps(table.as_json()))
    assert answer["recommended"] in NAMES and len(answer["plans"]) == 5
    assert answer["profile"]["samples"] == 1 and answer["profile"]["sample_bytes"] == MB


def test_a_plan_is_found_by_name_and_no_other() -> None:
    table = plans_of()
    assert table["safe"] is table.plans[0]
    with pytest.raises(KeyError, match="there are safe, balanced"):
        table["quick"]


def test_a_batch_size_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size=0"):
        plans_of(batch_size=0)


@pytest.mark.parametrize(
    ("memory", "ranks", "allowed"),
    [("8GB", 4, 8 * GB), (5000, 2, 5000), (0.25, 2, GB), ("50%", 1, 4 * GB), ("auto", 1, 4 * GB), ("auto", 4, GB)],
)
def test_a_size_is_each_rank_s_own_and_a_share_is_divided_among_them(memory: Any, ranks: int, allowed: int) -> None:
    assert allowed_bytes(memory, 8 * GB, ranks, LoaderRules()) == allowed


def test_long_times_are_written_out_and_short_ones_have_three_digits() -> None:
    assert "2,000 ms of waiting" in plans_of(profile_of(wait_s=2.0)).explain()
    assert "takes 0.00321 ms of computing" in plans_of(profile_of(cpu_s=3.21e-6)).explain()


def test_more_workers_are_called_useless_only_if_more_were_tried() -> None:
    waiting = plans_of(profile_of(4000, wait_s=2.0, cpu_s=1e-4), cores=2)
    assert waiting.recommended.workers == 8 and "8 workers are the most that a plan has on 2 cores" in waiting.explain()
    busy = plans_of(profile_of(4000), cores=2)
    assert "more workers or batches ahead would not make loading faster" in busy.explain()
    assert (
        "more workers or batches ahead would not make loading faster" in plans_of(profile_of(4000), cores=0.5).explain()
    )


def test_one_worker_is_not_too_many_for_half_a_core() -> None:
    assert "more workers than" not in plans_of(cores=0.5).explain()


def test_a_batch_larger_than_the_dataset_has_a_note() -> None:
    assert "A batch of 32 is more than the 3 samples there are" in plans_of(profile_of(length=3), 32).explain()
    assert "there are" not in plans_of(profile_of(length=32), 32).explain()
