"""A team's own table beside the plans."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.loader.rules import LoaderRules
from penstock.planner.plans import Facts, make_plans
from penstock.planner.profile import Profile, SeenSample
from penstock.planner.stated_settings import put_beside, read_stated

GB = 10**9
LIDAR = Profile(
    name="lidar", length=None, is_measured=False, samples=(SeenSample(size_bytes=120_000_000, wait_s=0.1, cpu_s=0.3),)
)


def test_the_predicted_memory_of_torch_is_near_the_teams_own_count() -> None:
    facts = Facts(cores=32, available_bytes=46 * GB, gpu_bytes=32 * GB)
    table = make_plans(LIDAR, facts, 4, rules=LoaderRules(), budget_bytes=23 * GB, step_s=0.24)
    stated = read_stated(
        {
            "original": {"workers": 16, "prefetch_factor": 8, "memory": "60GB", "speed": 1.0},
            "extreme": {"workers": 16, "prefetch_factor": 4, "memory": "31GB", "speed": 1},
            "bigger batch": {"workers": 6, "prefetch_factor": 2, "batch_size": 6},
        },
        "here",
    )
    original, extreme, bigger = put_beside(table, stated, LoaderRules())
    for each in (original, extreme):
        assert each.memory_bytes == pytest.approx(each.stated.memory_bytes, rel=0.15)
        assert each.speed == pytest.approx(1.0, abs=0.02)
    assert bigger.stated.batch_size == 6 and bigger.stated.memory_bytes is None
    # As fast, with as many batches as are needed.
    assert table["extreme"].memory.expected < 0.15 * extreme.memory_bytes and table["extreme"].speed > 0.98


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "beside must have a section for each name"),
        ({"safe": 3}, "beside must have a section for each name"),
        ({"safe": {}}, "safe has workers=None"),
        ({"safe": {"workers": -1}}, "workers=-1"),
        ({"safe": {"workers": True}}, "workers=True"),
        ({"safe": {"workers": 2, "prefetch_factor": 0}}, "prefetch_factor=0"),
        ({"safe": {"workers": 2, "memory": "much"}}, "safe: memory='much'"),
        ({"safe": {"workers": 2, "speed": "60%"}}, "speed='60%'"),
        ({"safe": {"workers": 2, "depth": 3}}, "has depth; its keys are workers"),
    ],
)
def test_wrong_stated_settings_are_named_with_their_place_in_the_file(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^p.json: .*{re.escape(said)}"):
        read_stated(given, "p.json")


def test_a_sample_that_every_worker_delivers_counts_once() -> None:
    samples = (SeenSample(size_bytes=1000, wait_s=0.02, cpu_s=0.001),)
    stream = Profile(name="it", length=None, samples=samples, is_splittable=False, is_repeated=True)
    table = make_plans(stream, Facts(cores=8, available_bytes=8 * GB), 8, rules=LoaderRules(), budget_bytes=4 * GB)
    (eight,) = put_beside(table, read_stated({"now": {"workers": 8}}, "here"), LoaderRules())
    assert eight.speed == pytest.approx(1.0, abs=0.2)
