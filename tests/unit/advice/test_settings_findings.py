"""Findings about a settings file as a table: one file on one machine gives one finding."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest

from penstock import settings
from penstock.advice.machine import MachineFacts
from penstock.advice.settings import CHECKS, find_in_settings
from penstock.meter import GpuStatus

GIB = 1 << 30
GOOD = {"num_workers": 4, "persistent_workers": True, "batch_size": 8}
NO_GPU = GpuStatus(gpu_library="no device", reason="no NVIDIA driver", gpus=())


def found_in(source: dict[str, Any], facts: MachineFacts) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = settings.load(source)
    return {finding.id: finding for finding in find_in_settings(said, facts)}


PROVOKED: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("no-loader-keys", "info", {"lr": 1}, "no key", "num_workers"),
    ("batch-size-missing", "warning", {"num_workers": 4, "persistent_workers": True, "max_img_per_gpu": 48},
     "max_img_per_gpu=48", "sequence_length"),
    ("workers-over-cpus", "warning", {**GOOD, "num_workers": 17}, "num_workers=17 for 16 usable CPUs", "to 8"),
    ("workers-over-cpus", "hurts", {**GOOD, "num_workers": 36}, "36", "to 8"),
    ("workers-over-half", "info", {**GOOD, "num_workers": 9}, "num_workers=9: that is more than half of the 16", "8"),
    ("workers-per-rank", "info", {**GOOD, "num_gpus": 3, "num_workers": 5},
     "num_workers=5 per rank x 3 ranks = 15 workers on this node", "set it to 1"),
    ("no-workers", "info", {"batch_size": 8}, "num_workers is not set", "to 8"),
    ("prefetch-many", "warning", {**GOOD, "num_workers": 8, "prefetch_factor": 8},
     "8 workers x prefetch_factor 8 = 64 batches of 8 samples ahead per rank, 64 per node", "prefetch_factor to 4"),
    ("cache-over-half", "hurts", {**GOOD, "DATA": {"CACHE_SIZE_GB": 33}}, "DATA.CACHE_SIZE_GB is 33.0 GiB",
     "set DATA.CACHE_SIZE_GB to 16"),
    ("cache-over-half", "hurts", {**GOOD, "cache": "33GiB"}, "more than half of this machine's 64.0 GiB",
     'set cache to "16384MiB"'),
    ("memory-over-available", "hurts", {**GOOD, "memory": "49GiB"}, "48.0 GiB is available", "24.0 GiB"),
    ("keep-in-memory", "warning", {**GOOD, "keep_in_memory": True}, "4 workers copy", "ParquetDataset"),
    ("workers-not-kept", "info", {"num_workers": 4}, "4 workers start again", "persistent_workers to true"),
]  # fmt: skip


@pytest.mark.parametrize(("finding_id", "severity", "source", "evidence", "change"), PROVOKED)
def test_a_file_makes_its_finding_with_evidence_and_the_change_to_make(
    healthy: MachineFacts, finding_id: str, severity: str, source: dict[str, Any], evidence: str, change: str
) -> None:
    found = found_in(source, healthy)
    finding = found[finding_id]
    assert finding.severity == severity and evidence in finding.what and change in finding.fix
    assert (finding.what + finding.fix).isascii() and "None" not in finding.what + finding.fix


def test_a_good_file_has_no_findings(healthy: MachineFacts) -> None:
    cached = {**GOOD, "cache": "16GiB", "memory": "8GB", "prefetch_factor": 2, "pin_memory": True, "device": "cuda"}
    assert found_in(GOOD, healthy) == found_in(cached, healthy) == {}


def test_settings_that_need_missing_hardware_are_found(healthy: MachineFacts) -> None:
    bare = replace(healthy, gpu=NO_GPU)
    assert found_in({**GOOD, "pin_memory": True}, bare)["pin-without-gpu"].severity == "info"
    assert found_in({**GOOD, "device": "cuda:1"}, bare)["device-missing"].severity == "hurts"
    full = replace(healthy, limits=replace(healthy.limits, memory_available_bytes=8 * GIB))
    assert "8.00 GiB is available now" in found_in({**GOOD, "cache": "16GiB"}, full)["cache-over-available"].what
    half = replace(healthy, limits=replace(healthy.limits, cpu_usable=0.5))
    assert "for 0.5 usable CPUs" in found_in(GOOD, half)["workers-over-cpus"].what


def test_arguments_that_need_workers_are_found_without_workers(healthy: MachineFacts) -> None:
    source = {"train_ds": {"num_workers": 0, "prefetch_factor": 4}}
    finding = found_in(source, healthy)["workers-needed"]
    assert "train_ds.num_workers=0, so nothing uses train_ds.prefetch_factor=4" in finding.what
    windows = replace(healthy, platform="win32")
    assert 'with backend="thread"' in found_in({"num_workers": 0}, windows)["no-workers"].fix


def test_every_check_of_settings_has_a_case() -> None:
    elsewhere = {"pin-without-gpu", "device-missing", "cache-over-available", "workers-needed"}
    assert {row[0] for row in PROVOKED} | elsewhere == set(CHECKS)
