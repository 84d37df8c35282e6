"""The settings files of five teams: the arguments that each one gives."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from penstock import settings
from penstock.errors import ConfigError
from penstock.units import GIB

FILES = Path(__file__).parent / "files"

EXPECTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "s0.toml": ({"batch_size": 4, "num_workers": 4, "prefetch_factor": 1}, {"accumulation_steps": 2}),
    "s1_balanced.yaml": ({"num_workers": 8, "prefetch_factor": 3, "persistent_workers": True}, {}),
    "s1_aggressive.yaml": ({"num_workers": 12, "prefetch_factor": 4, "persistent_workers": True}, {}),
    "s1_extreme.yaml": ({"num_workers": 16, "prefetch_factor": 4, "persistent_workers": True}, {}),
    "s1_short.yaml": ({"num_workers": 8, "prefetch_factor": 3, "persistent_workers": True}, {}),
    "s2_low.json": ({"batch_size": 24, "num_workers": 0, "pin_memory": False}, {"ultra_low_mem": False}),
    "s2_standard.json": ({"batch_size": 8, "num_workers": 4, "pin_memory": True}, {"keep_in_memory": True}),
    "s3_linux.yaml": (
        {"batch_size": 8, "num_workers": 8, "pin_memory": True, "persistent_workers": True, "prefetch_factor": 4},
        {},
    ),
    "s3_windows.yaml": (
        {"batch_size": 8, "num_workers": 0, "pin_memory": True, "persistent_workers": False},
        {},
    ),
    "s3_8gb.yaml": ({"batch_size": 4, "num_workers": 8, "prefetch_factor": 2}, {}),
    "s4_usual.yaml": ({"num_workers": 12, "prefetch_factor": 4, "cache": 50 * GIB}, {"use_cache": True}),
    "s4_less.yaml": ({"batch_size": 1, "num_workers": 8, "cache": 30 * GIB}, {}),
    "s4_more.yaml": ({"num_workers": 16, "prefetch_factor": 6, "cache": 80 * GIB}, {}),
}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("section", ["train", "eval", "val", "validation", "test"])
def test_a_team_s_file_gives_evaluation_the_arguments_of_training(name: str, section: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = settings.load(FILES / name, section)
    assert (found.arguments, found.facts) == EXPECTED[name]


def test_images_per_gpu_without_a_sequence_length_leave_the_batch_to_the_caller() -> None:
    with pytest.warns(UserWarning, match="max_img_per_gpu gives batch_size only together with sequence_length"):
        found = settings.load(FILES / "s1_gpu.yaml")
    assert found.arguments == {"num_workers": 6, "prefetch_factor": 2, "persistent_workers": True}
    assert found.facts == {"images_per_gpu": 48, "accumulation_steps": 6}


@pytest.mark.parametrize(("images", "batch"), [(32, 4), (48, 6), (50, 6), (8, 1)])
def test_images_per_gpu_over_sequence_length_is_the_batch(images: int, batch: int) -> None:
    found = settings.load({"max_img_per_gpu": images, "data": {"sequence_length": 8}})
    assert found.arguments == {"batch_size": batch}
    row = next(entry for entry in found.explain() if entry.argument == "batch_size")
    assert row.key == "max_img_per_gpu" and f"{images} / data.sequence_length 8 = {batch}" in row.remark
    assert ("images unused" in row.remark) == (images % 8 != 0)


def test_images_for_less_than_one_sample_and_two_batch_sizes_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_img_per_gpu=4 images are fewer than one sample has \(seq_len=8\)"):
        settings.load({"max_img_per_gpu": 4, "seq_len": 8})
    with pytest.raises(ConfigError, match=r"batch_size=5 and max_img_per_gpu=32 .*disagree about batch_size"):
        settings.load({"max_img_per_gpu": 32, "seq_len": 8, "batch_size": 5})
    assert settings.load({"max_img_per_gpu": 32, "seq_len": 8, "batch_size": 4}).arguments == {"batch_size": 4}


def test_a_range_of_batch_sizes_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        settings.load(FILES / "s3_24gb.yaml")
    message = str(refused.value)
    assert "s3_24gb.yaml, line 2: train_ds.batch_size='16-32' is a range; write one number, such as 16" in message
    assert settings.load(FILES / "s3_24gb.yaml", overrides={"batch_size": 24}).arguments["batch_size"] == 24


def test_every_row_names_their_key_our_argument_and_the_value() -> None:
    rows = settings.load(FILES / "s4_usual.yaml").explain()
    assert [(row.key, row.argument, row.value, row.line) for row in rows] == [
        ("TRAIN.NUM_WORKERS", "num_workers", 12, 6),
        ("TRAIN.PREFETCH_FACTOR", "prefetch_factor", 4, 7),
        ("DATA.CACHE_SIZE_GB", "cache", 50 * GIB, 3),
        ("DATA.USE_RAM_CACHE", "use_cache", True, 2),
    ]
    printed = str(rows).splitlines()
    assert printed[0].split() == ["their", "key", "our", "argument", "value", "remark"]
    assert printed[3].startswith("DATA.CACHE_SIZE_GB") and "50.0 GiB" in printed[3]


def test_names_of_transformers_and_deepspeed_are_known() -> None:
    hub = {
        "per_device_train_batch_size": 8, "per_device_eval_batch_size": 2, "dataloader_num_workers": 4,
        "dataloader_pin_memory": True, "dataloader_prefetch_factor": 2, "max_steps": -1,
    }  # fmt: skip
    assert settings.load(hub).arguments == {
        "batch_size": 8, "num_workers": 4, "pin_memory": True, "prefetch_factor": 2,
    }  # fmt: skip
    assert settings.load(hub, "eval").arguments["batch_size"] == 2
    deepspeed = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    found = settings.load(deepspeed)
    assert found.arguments == {"batch_size": 4} and found.facts == {"accumulation_steps": 2}
    auto = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "num_workers": "auto"}
    assert settings.load(auto).arguments == {"num_workers": "auto"}
