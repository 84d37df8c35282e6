"""Marks, differences and lines from readings that are written down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.planner.components import PARTS, Reading, answer, changes, components, line

MIB = 1 << 20


def reading(batch_size: int, workers_count: int, /, **parts_mib: float) -> Reading:
    known = {
        "python": 20,
        "torch": 200,
        "imports": 5,
        "dataset": 50,
        "batch": 0,
        "buffers": 0,
        "workers": 0,
        "other": 0,
    }
    parts = {name: round(count * MIB) for name, count in (known | parts_mib).items()}
    return Reading(batch_size=batch_size, workers=workers_count, parts=parts)


OURS = reading(32, 4, batch=8, buffers=16, workers=40, other=3)
OURS_HALF_BATCH = reading(16, 4, batch=4, buffers=8, workers=39, other=3.5)
OURS_HALF_WORKERS = reading(32, 2, batch=8, buffers=16, workers=20, other=2)
TORCHS = reading(32, 4, batch=8, buffers=56, workers=140, other=1)
TORCHS_HALF_BATCH = reading(16, 4, batch=4, buffers=28, workers=110, other=1)
TORCHS_HALF_WORKERS = reading(32, 2, batch=8, buffers=24, workers=70, other=1)


def marks(one: Reading, batch: Reading, workers: Reading, *, scales: bool = True, copies: bool = False) -> dict:
    found = components(one, batch, workers, dataset_scales=scales, workers_copy_dataset=copies)
    return {part.name: part.grows_with for part in found}


def test_ours_grows_with_the_batch_in_buffers_and_with_workers_only_in_their_own_memory() -> None:
    assert marks(OURS, OURS_HALF_BATCH, OURS_HALF_WORKERS) == {
        "python": (),
        "torch": (),
        "imports": (),
        "dataset": ("dataset size",),
        "batch": ("batch size",),
        "buffers": ("batch size",),
        "workers": ("workers",),
        "other": (),
    }


def test_torchs_buffers_grow_with_both() -> None:
    found = marks(TORCHS, TORCHS_HALF_BATCH, TORCHS_HALF_WORKERS, copies=True)
    assert found["buffers"] == ("batch size", "workers")
    assert found["workers"] == ("batch size", "workers", "dataset size")


def test_either_batch_size_may_be_the_larger_one() -> None:
    swapped = reading(64, 4, batch=16, buffers=32, workers=41, other=3)
    more_workers = reading(32, 8, batch=8, buffers=16, workers=80, other=3)
    assert marks(OURS, swapped, more_workers) == marks(OURS, OURS_HALF_BATCH, OURS_HALF_WORKERS)


def test_a_heap_that_differs_by_noise_does_not_grow() -> None:
    noisy = reading(16, 4, batch=4, buffers=8, workers=38.5, other=1)
    assert marks(OURS, noisy, OURS_HALF_WORKERS)["workers"] == ("workers",)
    assert marks(OURS, noisy, OURS_HALF_WORKERS)["other"] == ()


def test_a_part_that_shrinks_with_the_batch_is_not_marked() -> None:
    odd = reading(16, 4, batch=4, buffers=8, workers=90, other=3)
    assert "batch size" not in marks(OURS, odd, OURS_HALF_WORKERS)["workers"]


def test_without_workers_no_copy_of_the_dataset_is_reported() -> None:
    alone, one = reading(32, 0, batch=8), reading(32, 1, batch=8, buffers=16, workers=10)
    assert marks(alone, reading(16, 0, batch=4), one, copies=True)["workers"] == ("workers",)


def test_growth_by_a_few_kilobytes_counts_as_none() -> None:
    small, smaller = reading(24, 0, batch=48 / 1024), reading(12, 0, batch=24 / 1024)
    parts = components(small, smaller, reading(24, 1), dataset_scales=False, workers_copy_dataset=False)
    said = answer(parts, small)
    assert "Doubling the batch to 48 adds 48.0 KiB of host memory (0%): 2.00 KiB a sample" in said


def test_changes_of_the_parts_add_up_to_the_change_of_the_total() -> None:
    found = changes(TORCHS, OURS)
    assert [each.name for each in found] == list(PARTS)
    assert sum(each.change_bytes for each in found) == OURS.total_bytes - TORCHS.total_bytes
    assert {each.name: each.change_bytes // MIB for each in found}["buffers"] == -40


def test_a_memory_line_goes_through_the_measurements_and_ends_at_the_budget() -> None:
    by_batch = line(OURS, OURS_HALF_BATCH, budget_bytes=100 * MIB)
    assert by_batch.at(32) == OURS.total_bytes
    assert by_batch.at(64) - by_batch.at(32) == pytest.approx(24 * MIB)
    assert by_batch.at(10_000) == (275 + 3 + 100) * MIB
    assert by_batch.reaches(400 * MIB) is None
    assert by_batch.measured == ((16, OURS_HALF_BATCH.total_bytes), (32, OURS.total_bytes))


def test_a_memory_line_without_a_budget_gives_the_batch_size_at_the_limit() -> None:
    by_batch = line(TORCHS, TORCHS_HALF_BATCH, builds_whole=True)
    # A batch, seven ahead, and four in the hands of workers that build them.
    per_sample = (8 + 56 + 4 * 8) / 32
    assert by_batch.reaches(round((275 + 205 + 62) * MIB)) == pytest.approx(32 + 62 / per_sample, abs=1)
    assert by_batch.reaches(0) == 0


def test_memory_that_heaps_keep_does_not_change_the_slope_of_a_line() -> None:
    fuller = reading(16, 4, batch=4, buffers=28, workers=190, other=9)
    lines = [line(TORCHS, other, builds_whole=True) for other in (TORCHS_HALF_BATCH, fuller)]
    assert lines[0].per_sample_bytes == lines[1].per_sample_bytes == 3 * MIB
    assert lines[0].at(128) == lines[1].at(128)


def test_memory_while_batches_are_built_is_added_to_the_total() -> None:
    built = replace(TORCHS, building_bytes=5 * MIB)
    assert built.most_bytes == TORCHS.total_bytes + 5 * MIB and built.total_bytes == TORCHS.total_bytes
