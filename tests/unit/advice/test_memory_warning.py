"""Advice about full memory names the user's own settings and the bytes that each would free."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.advice.memory_warning import AdvisedLoader, memory_full, moves, warning_text

MIB, GIB = 1 << 20, 1 << 30
FIGURES: dict[str, float] = {
    "used_bytes": 15.0 * GIB, "limit_bytes": 16.0 * GIB, "tree_bytes": 12.0 * GIB, "trainer_bytes": 2.0 * GIB,
    "loader.0.workers": 12, "loader.0.workers_private_bytes": 3.0 * GIB, "loader.0.depth": 24,
    "loader.0.in_flight_bytes": 5.0 * GIB, "loader.0.cache_bytes": 4.0 * GIB, "loader.0.cache_limit_bytes": 4.0 * GIB,
}  # fmt: skip


def subject(keys: dict[str, str] | None = None, **configuration: Any) -> AdvisedLoader:
    return AdvisedLoader(name="train", is_only=True, configuration=configuration, keys=keys or {})


def test_each_setting_has_the_name_in_the_users_file_and_the_bytes_it_frees() -> None:
    keys = {
        "num_workers": "TRAIN.NUM_WORKERS",
        "prefetch_factor": "TRAIN.PREFETCH_FACTOR",
        "cache": "DATA.CACHE_SIZE_GB",
    }
    text = warning_text(
        memory_full(FIGURES, [subject(keys, prefetch_factor=2)], warn_at=0.9, run_id="261116-0554-abcd")
    )
    first, *lines = text.splitlines()
    assert first.startswith("WARNING: memory is 93.8% full (15.0 GiB of 16.0 GiB, warning at 90%)")
    # 15 - 0.85 x 16 = 1.4 GiB must be freed.
    assert "   lower TRAIN.NUM_WORKERS from 12 to 6: frees about 1.50 GiB" in lines
    assert "   lower TRAIN.PREFETCH_FACTOR from 2 to 1: frees about 2.40 GiB" not in lines
    assert any(line.startswith("   lower DATA.CACHE_SIZE_GB from 4 to 2.6: frees about 1.40 GiB") for line in lines)
    assert lines[-1].startswith("   now, while it runs: penstock set 261116-0554-abcd ")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"cache": "DATA.CACHE_SIZE_GB"}, "DATA.CACHE_SIZE_GB from 2 to 0.5"),  # settings read it as GiB
        ({"cache": "data.cache"}, "data.cache from 2.00 GiB to 512 MiB"),
        ({}, "cache from 2.00 GiB to 512 MiB"),
    ],
)
def test_a_size_is_written_in_the_unit_of_its_key(keys: dict[str, str], said: str) -> None:
    (move,) = moves(subject(keys), {"cache_bytes": 1.0 * GIB, "cache_limit_bytes": 2.0 * GIB}, 16 * GIB)
    assert move.what == said


def test_the_advice_names_prefetch_or_depth_whichever_the_user_set() -> None:
    figures = {"depth": 24.0, "workers": 6.0, "in_flight_bytes": 25.0 * GIB}
    (by_prefetch,) = moves(subject(prefetch_factor=4, depth=None), figures, 10 * GIB)
    assert by_prefetch.what == "prefetch_factor from 4 to 3" and by_prefetch.valve == "depth=18"
    assert by_prefetch.frees_bytes == 6 * GIB
    (by_depth,) = moves(subject(prefetch_factor=4, depth=24), figures, 10 * GIB)
    assert by_depth.what.startswith("depth (batches ahead) from 24 to 14") and by_depth.frees_bytes == 10 * GIB


def test_with_several_loaders_each_is_named() -> None:
    two = [
        AdvisedLoader(name="train", is_only=False, configuration={}, keys={}),
        AdvisedLoader(name="eval", is_only=False, configuration={}, keys={}),
    ]
    figures = {**FIGURES, "loader.1.workers": 4, "loader.1.workers_private_bytes": 2.0 * GIB}
    text = warning_text(memory_full(figures, two, warn_at=0.9, run_id="x"))
    assert "num_workers of train from 12 to 6" in text and "num_workers of eval from 4 to 2" in text
    assert "loader='train'" in text


def test_if_the_loaders_hold_little_the_training_itself_is_named() -> None:
    small = {name: value for name, value in FIGURES.items() if not name.startswith("loader")}
    text = warning_text(memory_full(small, [subject()], warn_at=0.9, run_id="x"))
    assert "the training process itself takes 2.00 GiB" in text and "batch_size" in text and "\n" not in text
