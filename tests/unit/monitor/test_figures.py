"""Several points made one keep what each figure is for; rates come from two readings."""

from __future__ import annotations

import pytest

from penstock.monitor.figures import FIGURES, MEMORY_PARTS, as_json, figure_of, merged, part, shown
from penstock.monitor.gauges import GaugeSample, figures_between
from penstock.monitor.watched_loader import LoaderSample


def test_rates_are_averaged_over_time_memory_keeps_its_peak_and_counters_their_last() -> None:
    one = {"samples_per_s": 100.0, "tree_bytes": 9.0, "available_bytes": 3.0, "samples": 10.0, "loader.0.depth": 2.0}
    two = {"samples_per_s": 40.0, "tree_bytes": 5.0, "available_bytes": 7.0, "samples": 50.0, "loader.0.depth": 4.0}
    assert merged([(1.0, one), (2.0, two)]) == {
        "samples_per_s": pytest.approx(60.0),
        "tree_bytes": 9.0,
        "available_bytes": 3.0,
        "samples": 50.0,
        "loader.0.depth": 4.0,
    }


def test_a_figure_that_some_points_lack_is_merged_from_those_that_have_it() -> None:
    assert merged([(1.0, {}), (3.0, {"gpu.0.busy_fraction": 0.5}), (0.0, {"gpu.0.busy_fraction": 1.0})]) == {
        "gpu.0.busy_fraction": 0.5
    }


def test_the_name_of_every_figure_in_bytes_ends_in_bytes() -> None:
    assert all((figure.unit == "bytes") == name.endswith("_bytes") for name, figure in FIGURES.items())
    assert figure_of("gpu.3.used_bytes").merge == "max" and figure_of("loader.12.samples").merge == "last"
    assert figure_of("of_somebody_elses_bytes").merge == "max"
    assert part({"loader.1.depth": 2.0, "loader.10.depth": 3.0, "depth": 5.0}, "loader.1") == {"depth": 2.0}


def test_the_page_gets_unit_label_and_help_of_every_figure() -> None:
    table = as_json()
    assert list(table) == list(FIGURES) and table["loader.N.wait_fraction"]["unit"] == "fraction"
    assert all(each["label"] and each["help"].endswith(".") for each in table.values())
    assert MEMORY_PARTS == ("trainer_bytes", "workers_bytes", "arena_bytes", "cache_bytes", "other_bytes")


def test_a_value_is_shown_in_its_unit() -> None:
    assert shown("tree_bytes", 1.5 * 2**30) == "1.50 GiB" and shown("gpu.2.used_bytes", None) == "-"
    assert shown("loader.0.wait_fraction", 0.45) == "45%" and shown("samples_per_s", 1234.5) == "1,234"
    assert shown("read_bytes_per_s", 2**20) == "1.00 MiB/s" and shown("loader.1.wait_s", 125.0) == "2:05"
    assert shown("cache_hits", 1234567.0) == "1,234,567"


def reading(t_s: float, samples: int, wait_s: float, hits: float, misses: float) -> GaugeSample:
    levels = {"tree_bytes": 5.0, "cache_hits": hits, "cache_misses": misses}
    return GaugeSample(t_s, samples // 8, levels, (LoaderSample(samples, wait_s, True, {"depth": 2.0}, None),))


def test_rates_are_those_between_two_samples() -> None:
    figures = figures_between(reading(10.0, 80, 1.0, 5, 5), reading(12.0, 240, 1.5, 35, 15))
    assert figures["samples_per_s"] == figures["loader.0.samples_per_s"] == 80
    assert figures["wait_fraction"] == 0.25 and figures["cache_hit_rate"] == 0.75 and figures["steps_per_s"] == 10
    assert figures["samples"] == 240 and figures["loader.0.depth"] == 2


def test_a_wait_that_is_counted_late_is_at_most_the_whole_time() -> None:
    figures = figures_between(reading(10.0, 80, 1.0, 0, 0), reading(11.0, 80, 9.0, 0, 0))
    assert figures["wait_fraction"] == 1.0 and "cache_hit_rate" not in figures


def test_the_first_sample_has_no_rates() -> None:
    figures = figures_between(None, reading(10.0, 80, 1.0, 5, 5))
    assert figures["samples"] == 80 and "samples_per_s" not in figures
