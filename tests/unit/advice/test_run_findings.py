"""Findings about a run, one piece of evidence changed at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.advice.run import CHECKS, Evidence, find_in_run
from penstock.planner.feeding import Feeding

MIB, GIB = 1 << 20, 1 << 30

CALM = Evidence(
    batch_size=16, workers=4, depth=2, cores=8, limit_bytes=64 * GIB, used_bytes=20 * GIB, budget_bytes=8 * GIB,
    batch_bytes=64 * MIB, shared_batches=True, samples_per_s=100.0, wait_fraction=0.01, cpu_fraction=0.9, fetch_s=0.3,
    has_gpu=True, gpu_busy=0.9, cache_hit_rate=0.9, cache_lookups=10_000, cache_bytes=4 * GIB,
    cache_limit_bytes=5 * GIB, swap_growth_bytes=0, kills=0, torch_used_bytes=22 * GIB,
)  # fmt: skip


def test_a_calm_run_has_no_findings() -> None:
    assert find_in_run(CALM) == ()


CASES: list[tuple[dict[str, Any], str, str, str, str]] = [
    ({"used_bytes": 45 * GIB}, "out-of-memory", "warning", "70%", "lower cache to 3.00 GiB"),
    ({"used_bytes": 50 * GIB}, "out-of-memory", "hurts", "78%", "num_workers from 4 to 2"),
    ({"kills": 1}, "out-of-memory", "hurts", "killed 1 process", "batch_size from 16 to 8"),
    ({"swap_growth_bytes": GIB}, "swap-growth", "hurts", "swap grew by 1.00 GiB", "until swap stops growing"),
    ({"torch_used_bytes": 60 * GIB}, "torch-out-of-memory", "info", "60.0 GiB", "stay with penstock"),
    ({"wait_fraction": 0.4}, "data-starved", "warning", "40%", "raise num_workers from 4 to 8"),
    ({"wait_fraction": 0.1}, "data-starved", "info", "10%", "raise num_workers from 4 to 8"),
    ({"wait_fraction": 0.4, "workers": 8}, "data-starved", "warning", "40%", "raise cache"),
    ({"wait_fraction": 0.4, "workers": 8, "cache_hit_rate": None}, "data-starved", "warning", "40%", "with cache="),
    ({"wait_fraction": 0.4, "workers": 8, "cpu_fraction": 0.1}, "data-starved", "warning", "40%", "from 8 to 16"),
    ({"gpu_busy": 0.5, "wait_fraction": None}, "gpu-use", "warning", "50%", "raise num_workers from 4"),
    ({"gpu_busy": 0.5}, "gpu-use", "info", "50%", "loading is not the cause"),
    ({"gpu_busy": 0.97}, "gpu-use", "info", "97%", "nothing to do"),
    ({"cache_hit_rate": 0.1, "cache_bytes": 5 * GIB}, "cache-hit-rate", "warning", "10.00%", "SequenceSampler"),
    ({"cache_hit_rate": 0.1}, "cache-hit-rate", "info", "10.00%", "after an epoch"),
    ({"workers": 12}, "workers-over-cores", "warning", "12 workers on 8", "to 8"),
    ({"workers": 40, "cpu_fraction": 0.1}, "workers-over-cores", "warning", "40 workers", "to 32"),
    ({"workers": 0, "wait_fraction": 0.5}, "no-workers", "warning", "50%", "set num_workers to 8"),
    ({"containers_bytes": 80 * MIB, "containers": "dataset.paths"}, "python-containers", "warning", "320 MiB for all 4",
     "SharedList"),
    ({"containers_bytes": 4 * GIB, "containers": "dataset.paths"}, "python-containers", "hurts", "16.0 GiB for all 4",
     "SharedList"),
    ({"shared_batches": False}, "whole-batches", "warning", "4 batches of 64.0 MiB", "without __getitems__"),
    ({"shared_batches": False, "batch_bytes": MIB}, "whole-batches", "info", "4 batches of 1.00", "lower num_workers"),
    ({"fetch_s": 0.0002}, "tiny-batches", "info", "200 µs", "num_workers=0"),
    ({"pins": True, "has_gpu": False}, "pin-without-gpu", "info", "no GPU", "pin_memory"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "name", "severity", "said", "fix"), CASES)
def test_each_finding_comes_with_its_numbers_and_its_change(
    changed: dict[str, Any], name: str, severity: str, said: str, fix: str
) -> None:
    (found,) = find_in_run(replace(CALM, **changed))
    assert (found.id, found.severity) == (name, severity)
    assert said in found.what
    assert fix in found.fix


@pytest.mark.parametrize(
    "changed",
    [
        {"used_bytes": 41 * GIB},
        {"cache_hit_rate": 0.1, "cache_lookups": 100},
        {"workers": 12, "cpu_fraction": 0.2},
        {"shared_batches": False, "workers": 1},
        {"shared_batches": False, "batch_bytes": MIB, "fetch_s": 0.002},
        {"fetch_s": 0.0002, "workers": 0},
        {"swap_growth_bytes": MIB},
        {"swap_growth_bytes": None, "kills": None, "cache_hit_rate": None, "wait_fraction": None, "gpu_busy": None},
    ],
)
def test_usual_values_give_no_finding(changed: dict[str, Any]) -> None:
    assert find_in_run(replace(CALM, **changed)) == ()


def test_the_change_names_the_users_own_keys() -> None:
    keys = {"num_workers": "TRAIN.NUM_WORKERS", "batch_size": "TRAIN.BATCH_SIZE", "cache": "DATA.CACHE_SIZE_GB"}
    (found,) = find_in_run(replace(CALM, used_bytes=60 * GIB, keys=keys))
    assert "TRAIN.NUM_WORKERS from 4 to 2" in found.fix
    assert "TRAIN.BATCH_SIZE from 16 to 8" in found.fix
    assert "DATA.CACHE_SIZE_GB" in found.fix


def test_the_worst_finding_comes_first() -> None:
    found = find_in_run(replace(CALM, fetch_s=0.0002, wait_fraction=0.4, swap_growth_bytes=GIB))
    assert [each.severity for each in found] == ["hurts", "warning", "info"]


def test_every_check_has_a_case() -> None:
    assert {case[1] for case in CASES} == set(CHECKS)


@pytest.mark.parametrize(
    ("wait_s", "compute_s", "said"),
    [
        (0.1, 9.9, "Loading is not the bottleneck"),
        (1.0, 9.0, "Loading costs a little"),
        (6.0, 4.0, "Loading is the bottleneck"),
    ],
)
def test_the_verdict_follows_from_the_times(wait_s: float, compute_s: float, said: str) -> None:
    feeding = Feeding(batch_size=8, batches=100, wait_s=wait_s, compute_s=compute_s, most_samples_per_s=200.0)
    assert feeding.verdict().startswith(said)
    assert f"{wait_s * 10:.3g} ms" in feeding.verdict()
    assert f"({feeding.wait_fraction:.0%})" in feeding.verdict()


@pytest.mark.parametrize(
    ("wait_s", "most_samples_per_s", "said"),
    [
        (0.1, 50.0, "could deliver 82.5 samples/s, 1 times as many"),
        (1.0, 50.0, "A step of 160 ms or longer"),
        (1.0, 200.0, "A step of 106 ms or longer"),  # the step itself takes 96 ms, and waits
        (6.0, 20.0, "the loader alone delivers at most 51.3"),
        (6.0, 200.0, "the loader alone delivers at most 200"),
    ],
)
def test_no_figure_of_the_verdict_contradicts_another(wait_s: float, most_samples_per_s: float, said: str) -> None:
    """The loader was timed alone and with the step, at different moments and with different load on the cores."""
    feeding = Feeding(batch_size=8, batches=100, wait_s=wait_s, compute_s=9.6, most_samples_per_s=most_samples_per_s)
    assert said in feeding.verdict()


def test_without_a_step_the_verdict_names_the_shortest_step_without_waiting() -> None:
    feeding = Feeding(batch_size=8, batches=100, wait_s=4.0, compute_s=0.0, most_samples_per_s=200.0)
    assert feeding.wait_fraction is None
    assert feeding.fed_step_s == pytest.approx(0.04)
    assert "200 samples/s, a batch of 8 every 40 ms: a training step of 40 ms or longer" in feeding.verdict()
