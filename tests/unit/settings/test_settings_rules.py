"""Which key takes precedence, what is refused, and which values follow from others."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import penstock
from penstock import settings
from penstock.errors import ConfigError
from penstock.settings.aliases import ALIASES, ARGUMENTS, FACTS
from penstock.units import GIB


def arguments(source: dict[str, Any], section: str = "train", **overrides: Any) -> dict[str, Any]:
    return settings.load(source, section, overrides=overrides).arguments


def test_every_alias_targets_an_argument_of_the_loader_or_a_fact() -> None:
    promised = {*inspect.signature(penstock.DataLoader).parameters, "autotune"}
    assert set(ARGUMENTS) <= promised
    assert {alias.target for alias in ALIASES.values()} == {*ARGUMENTS, *FACTS}


def test_penstock_s_own_names_count_at_the_top_and_in_sections_about_loading() -> None:
    ours = {
        "batch_size": 4, "num_workers": "auto", "memory": "8GB", "autotune": True, "device": "cuda:1", "cache": "20GB",
        "seeding": "worker", "backend": "thread", "in_order": False, "multiprocessing_context": "spawn",
    }  # fmt: skip
    assert arguments(ours) == arguments({"data": ours}) == arguments({"a": {"dataloader": ours}}) == ours
    assert arguments({"penstock": {"name": "frames", "timeout": 3}}) == {"name": "frames", "timeout": 3}


def test_common_words_of_other_programs_are_ignored() -> None:
    assert arguments({
        "name": "run 7", "backend": "nccl", "seeding": 42, "timeout": 1800, "device": "auto!", "cache": "/data/cache",
        "data": {"name": "kitti", "patch_size": 16, "batch_sampler": "x", "shuffle_n": 2048, "path": ["a", "b"]},
        "model": {"batch_size": 2, "memory": 4, "tokenizer": {"num_workers": 3}},
        "optimizer": {"memory": "x", "num_worker": 3},
        "predict": {"batch_size": 1},
        "search": {"pin_mem": 1},
    }) == {}  # fmt: skip


def test_keys_are_found_in_any_case_and_at_any_depth() -> None:
    assert arguments({"Experiment": {"cfg": {"Num-Workers": 3}}}) == {"num_workers": 3}
    assert arguments({"model": {"train_ds": {"Batch Size": 3}}}) == {"batch_size": 3}
    assert arguments({"data.train.num_workers": 3}) == {"num_workers": 3}


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("num_worker", "num_workers"), ("num_wrokers", "num_workers"), ("NUM_WORKERSS", "num_workers"),
        ("prefech_factor", "prefetch_factor"), ("pin_mem", "pin_memory"), ("batchsize", "batch_size"),
        ("eval_bacth_size", "batch_size"), ("persistant_workers", "persistent_workers"), ("bs", "batch_size"),
        ("CACHE_SIZE_MB", "cache_size_gb"), ("dataloader_prefetch_per_workers", "dataloader_prefetch_per_worker"),
        ("max_imgs_per_gpu", "max_img_per_gpu"), ("use_ram_cach", "use_ram_cache"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("section", ["data", "train_ds", None])
def test_a_misspelt_key_is_refused_with_what_was_probably_meant(key: str, meant: str, section: str | None) -> None:
    with pytest.raises(ConfigError) as refused:
        settings.load({key: 1} if section is None else {section: {key: 1}})
    assert key in str(refused.value) and f"{meant} was probably meant" in str(refused.value)


def test_two_keys_that_disagree_are_refused_by_name_and_value() -> None:
    clash = {"prefetch_factor": 4, "data": {"dataloader_prefetch_per_worker": 1}}
    with pytest.raises(ConfigError) as refused:
        settings.load(clash)
    for part in ("prefetch_factor=4", "data.dataloader_prefetch_per_worker=1", "disagree"):
        assert part in str(refused.value)
    assert arguments(clash, prefetch_factor=2) == {"prefetch_factor": 2}, "the call decides"
    with pytest.raises(ConfigError, match=r"DATA.num_workers=4 and TRAIN.num_workers=8 disagree"):
        settings.load({"DATA": {"num_workers": 4}, "TRAIN": {"num_workers": 8}})
    with pytest.raises(ConfigError, match="disagree about cache"):
        settings.load({"cache": "50GB", "data": {"CACHE_SIZE_GB": 50}})


def test_two_keys_that_agree_are_both_listed() -> None:
    found = settings.load({"cache": "50GiB", "data": {"CACHE_SIZE_GB": 50}, "num_workers": 2, "n_workers": 2.0})
    assert found.arguments == {"cache": "50GiB", "num_workers": 2}
    assert [row.key for row in found.explain()] == ["num_workers", "n_workers", "cache", "data.CACHE_SIZE_GB"]


def test_an_inner_section_s_key_takes_precedence_over_the_same_key_outside() -> None:
    found = settings.load({"num_workers": 2, "data": {"num_workers": 4, "train": {"num_workers": 8}}})
    assert found.arguments == {"num_workers": 8}
    assert [row.remark for row in found.explain() if row.value is None] == [
        "not used: data.num_workers is more specific", "not used: data.train.num_workers is more specific",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="disagree"):
        settings.load({"num_workers": 2, "search_space": {"num_workers": 8}})


def test_evaluation_uses_its_own_keys_first_and_training_s_for_the_rest() -> None:
    source = {
        "num_workers": 8, "train_ds": {"batch_size": 16, "prefetch_factor": 4, "shuffle": True, "drop_last": True},
        "validation_ds": {"batch_size": 4, "num_workers": 2}, "test_ds": {"batch_size": 1},
    }  # fmt: skip
    assert arguments(source)["num_workers"] == 8 and arguments(source)["shuffle"] is True
    expected = {"batch_size": 4, "num_workers": 2, "prefetch_factor": 4}
    assert arguments(source, "val") == arguments(source, "validation") == arguments(source, "eval") == expected
    assert arguments(source, "test") == {**expected, "batch_size": 1}
    remarks = {row.argument: row.remark for row in settings.load(source, "val").explain()}
    assert remarks["prefetch_factor"] == "from training" and remarks["batch_size"] == ""


def test_evaluation_can_unset_what_training_sets_and_has_a_batch_of_its_own() -> None:
    source = {"max_img_per_gpu": 32, "sequence_length": 8, "prefetch_factor": 4, "num_workers": 2,
              "eval": {"batch_size": 1, "prefetch_factor": None}}  # fmt: skip
    assert arguments(source, "eval") == {"batch_size": 1, "num_workers": 2}
    assert arguments(source)["batch_size"] == 4


@pytest.mark.parametrize("section", ["", "model", "both", 3, None])
def test_a_section_that_is_neither_training_nor_evaluation_is_refused(section: Any) -> None:
    with pytest.raises(ConfigError, match="neither training nor evaluation"):
        settings.load({"num_workers": 1}, section)


def test_without_workers_what_needs_them_is_dropped_with_one_warning() -> None:
    source = {"train_ds": {"num_workers": 0, "persistent_workers": True, "prefetch_factor": 4}}
    with pytest.warns(UserWarning, match="prefetch_factor=4 and persistent_workers=True are dropped") as caught:
        found = settings.load(source)
    assert len(caught) == 1 and found.arguments == {"num_workers": 0}
    assert {row.remark for row in found.explain() if row.value is None} == {"dropped: no workers"}
    with pytest.warns(UserWarning, match="prefetch_factor=4 is dropped"):
        assert arguments({"prefetch_factor": 4}, num_workers=0) == {"num_workers": 0}
    assert arguments(source, num_workers=2)["prefetch_factor"] == 4, "the call gives some"


def test_the_cache_switch_turns_the_cache_on_and_off() -> None:
    sized = {"CACHE_SIZE_GB": 1.5}
    assert arguments({"DATA": {"USE_RAM_CACHE": True, **sized}}) == {"cache": 3 * GIB // 2}
    assert arguments({"DATA": {"USE_RAM_CACHE": True}}) == {"cache": "auto"}
    found = settings.load({"DATA": {"USE_RAM_CACHE": False, **sized}})
    assert found.arguments == {} and "dropped: DATA.USE_RAM_CACHE is false" in str(found.explain())
    assert arguments({"DATA": {"USE_RAM_CACHE": False, **sized}}, cache="2GB") == {"cache": "2GB"}
    for off in (0, False):
        assert arguments({"cache": off}) == {}
    assert arguments({"CACHE_SIZE_GB": 0}) == {}
    assert arguments({"cache": True}) == {"cache": "auto"}


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("num_workers", "eight", "is text; a number is needed"),
        ("num_workers", -1, "negative; at least 0"),
        ("num_workers", True, "true or false; a number"),
        ("num_workers", 2.5, "not a whole number"),
        ("num_workers", [4], "a list; a number"),
        ("num_workers", float("nan"), "finite"),
        ("num_workers", 10**400, "more than 1,000,000,000"),
        ("num_workers", "${workers}", "reference"),
        ("batch_size", 0, "too small; at least 1"),
        ("batch_size", "16 - 32", "range; write one number, such as 16"),
        ("batch_size", "8~16", "range"),
        ("prefetch_factor", 0, "at least 1"),
        ("persistent_workers", "maybe", "neither true nor false"),
        ("pin_memory", 2, "neither true nor false"),
        ("cache_size_gb", "50GB", "is text"),
        ("cache_size_gb", -1, "negative"),
        ("cache_size_gb", 53687091200, "in GiB, not in bytes"),
        ("memory", "lots", "is not a size"),
        ("memory", 64, "64 bytes; write a unit"),
        ("memory_gb", 0, "less than one byte"),
        ("seeding", "none", "batch or worker"),
        ("multiprocessing_context", "threads", "fork, spawn or forkserver"),
        ("max_img_per_gpu", "x", "is text"),
    ],
)  # fmt: skip
def test_an_invalid_value_gives_one_line_with_key_and_value(key: str, value: Any, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings.load({"data": {key: value}})
    message = str(refused.value)
    assert f"data.{key}=" in message and why in message and "\n" not in message and len(message) < 300


@pytest.mark.parametrize("value", ["8", 8.0, " 8 ", "8.0", "8e0"])
def test_a_number_in_quotes_is_a_number(value: Any) -> None:
    assert arguments({"num_workers": value}) == {"num_workers": 8}


@pytest.mark.parametrize(("value", "meant"), [("yes", True), ("OFF", False), (1, True), (0, False), ("True", True)])
def test_flags_are_read_in_their_usual_spellings(value: Any, meant: bool) -> None:
    assert arguments({"pin_memory": value}) == {"pin_memory": meant}


def test_null_keeps_the_loader_s_default() -> None:
    assert arguments({"num_workers": None, "batch_size": None, "cache": None, "memory": None}) == {}
    assert arguments({"n_workers": None, "num_workers": 4}) == {"num_workers": 4}


def test_a_section_for_a_value_and_a_list_for_a_section_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.batch_size is a section .*but one value is needed"):
        settings.load({"data": {"batch_size": {"train": 8, "val": 4}}})
    with pytest.raises(ConfigError, match=r"train_ds is a list of sections, so batch_size"):
        settings.load({"train_ds": [{"batch_size": 8, "path": "a"}]})
    assert arguments({"datasets": [{"path": "a"}], "batch_size": 8}) == {"batch_size": 8}


def test_mistakes_in_facts_that_decide_no_argument_never_stop_a_loader() -> None:
    found = settings.load({"accum_steps": "auto", "train": {"max_steps": 5}, "data": {"max_steps": 6}, "num_gpus": [1]})
    assert found.arguments == {} and found.facts == {}
    assert arguments({"max_img_per_gpu": "many", "USE_RAM_CACHE": "so"}, batch_size=2, cache=None) == {
        "batch_size": 2, "cache": None,
    }  # fmt: skip


def test_a_sampler_in_the_call_drops_the_arguments_that_torch_refuses_beside_it() -> None:
    source = {"batch_size": 8, "shuffle": True, "drop_last": True, "num_workers": 0}
    sampler = [[0, 1]]
    assert arguments(source, batch_sampler=sampler) == {"num_workers": 0, "batch_sampler": sampler}
    assert arguments(source, sampler=[0]) == {"batch_size": 8, "drop_last": True, "num_workers": 0, "sampler": [0]}
    assert arguments(source, batch_size=None) == {"shuffle": True, "num_workers": 0, "batch_size": None}
