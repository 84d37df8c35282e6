"""What Prometheus scrapes: read back by its own parser, named by its conventions, and safe whatever a run is called."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from penstock.monitor.export.prometheus import CONTENT_TYPE, exposition, grafana_dashboard
from penstock.monitor.figures import FIGURES
from penstock.monitor.runs.format import Alert, RunOutcome
from support.recorded_runs import GIB, begin_run, fill, point_at

CACHED = {"loader.0.cache_limit_bytes": 1.0 * GIB, "loader.0.device_ahead_bytes": 5.0}


def scraped(home: Path) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Metric -> its labels -> value, as Prometheus' own client reads them."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(exposition(home).decode()):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            series = found.setdefault(sample.name, {})
            assert labels not in series, f"{sample.name}{labels} twice makes Prometheus refuse everything"
            series[labels] = sample.value
    return found


def only(home: Path, metric: str, /, **labels: str) -> float:
    wanted = set(labels.items())
    (value,) = [value for found, value in scraped(home)[metric].items() if wanted <= set(found)]
    return value


def full_run(home: Path, **facts: Any) -> Any:
    """A running run with every figure there is."""
    record = begin_run(home, **{"started_s": time.time() - 20, **facts})
    point = point_at(time.time(), 10)
    point.figures.update(CACHED)
    now_s = time.time()
    record.write(
        [point],
        alerts=[
            Alert(t_s=now_s - 3, rule="stall", state="raised", what="waits"),
            Alert(t_s=now_s - 2, rule="memory", state="raised", what="full"),
            Alert(t_s=now_s - 1, rule="stall", state="cleared", what="fed"),
        ],
    )
    return record


def test_a_running_training_is_exported_in_base_units(home: Path) -> None:
    with full_run(home):
        assert only(home, "penstock_memory_bytes", component="trainer") == 2.5 * GIB
        assert only(home, "penstock_memory_limit_bytes") == 16 * GIB
        assert only(home, "penstock_samples_total", loader="train") == 6400
        assert only(home, "penstock_wait_seconds_total", loader="train") == pytest.approx(1.0)
        assert only(home, "penstock_gpu_busy_ratio", gpu="0") == pytest.approx(0.9)
        assert only(home, "penstock_run_state", state="running") == 1
        assert only(home, "penstock_run_state", state="killed") == 0
        assert only(home, "penstock_alert_active", rule="memory") == 1
        assert only(home, "penstock_alert_active", rule="stall") == 0
        components = {dict(labels)["component"] for labels in scraped(home)["penstock_memory_bytes"]}
        assert components == {"trainer", "workers", "arena", "cache", "other"}


RATES_AND_SUMS = {
    "steps_per_s", "samples", "samples_per_s", "wait_fraction", "cache_hit_rate", "tree_is_exact", "workers", "depth",
    "worker_restarts", "processors_busy", "read_bytes_per_s",
    "loader.N.samples_per_s", "loader.N.wait_fraction", "loader.N.cache_bytes", "loader.N.cache_hits",
    "loader.N.cache_misses",
}  # fmt: skip
METRICS = {
    "alert_active", "batches_total", "budget_bytes", "cache_hits_total", "cache_limit_bytes",
    "cache_misses_total", "collate_seconds_total", "depth_batches", "device_ahead_bytes", "fetch_seconds_total",
    "gpu_allocated_bytes", "gpu_busy_ratio", "gpu_memory_total_bytes", "gpu_memory_used_bytes", "gpu_reserved_bytes",
    "in_flight_bytes", "last_point_time_seconds", "lent_bytes", "loader_budget_bytes", "memory_available_bytes",
    "memory_bytes", "memory_limit_bytes", "memory_used_bytes", "processes", "run_info", "run_start_time_seconds",
    "run_state", "samples_total", "steps_total", "swap_used_bytes", "torch_allocated_bytes", "torch_reserved_bytes",
    "tree_memory_bytes", "unreadable_runs", "wait_seconds_total", "worker_restarts_total", "workers",
    "workers_private_bytes",
}  # fmt: skip


def test_every_figure_is_exported_unless_it_is_the_rate_or_the_sum_of_others() -> None:
    assert {name for name, figure in FIGURES.items() if figure.metric is None} == RATES_AND_SUMS


def test_the_names_of_the_metrics_are_those_that_dashboards_ask_for(home: Path) -> None:
    with full_run(home):
        assert {name.removeprefix("penstock_") for name in scraped(home)} == METRICS


def test_names_follow_the_conventions(home: Path) -> None:
    with full_run(home):
        text = exposition(home).decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    helps = re.findall(r"^# HELP (\S+) .+$", text, re.MULTILINE)
    assert sorted(helps) == sorted(kinds) and len(set(helps)) == len(helps)
    for name, kind in kinds.items():
        assert re.fullmatch(r"penstock_[a-z_]+", name) and (kind == "counter") == name.endswith("_total")
        assert not re.search(r"_(ms|mb|kb|gib|percent|fraction)\b", name), name
    assert text.endswith("\n") and CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_an_ended_run_has_its_outcome_for_five_minutes_and_no_figures(home: Path) -> None:
    now_s = time.time()
    for name, ago_s in (("just", 100.0), ("long", 400.0)):
        record = begin_run(home, name, started_s=now_s - 1000)
        fill(record, 10, ended_s=now_s - ago_s)
        record.finish(RunOutcome(state="failed", t_s=now_s - ago_s, what="OSError"))
    assert only(home, "penstock_run_state", state="failed") == 1
    assert only(home, "penstock_run_end_time_seconds", name="just") == pytest.approx(now_s - 100)
    assert "penstock_memory_bytes" not in scraped(home)


def test_a_run_that_was_killed_is_exported_as_killed(home: Path) -> None:
    record = begin_run(home, started_s=time.time() - 20)
    fill(record, 10, ended_s=time.time())
    record.abandon()
    assert only(home, "penstock_run_state", state="killed") == 1


@pytest.mark.parametrize(
    "name",
    ['a"b\\c\nd{e="f"} 1', "🎉" * 5000, "\x1b[31m\x00\u2028", "\ud800 lone", "x" * 10_000, ""],
    ids=["quotes", "emoji", "escapes", "surrogate", "long", "empty"],
)
def test_hostile_names_are_escaped_cut_and_still_parse(home: Path, name: str) -> None:
    loaders = [{"name": name}, {"name": name}, {"name": None}, {}]
    with begin_run(home, name, loaders=loaders, host=name) as record:
        point = point_at(time.time(), 10)
        point.figures.update({f"loader.{number}.samples": 5.0 for number in range(5)})
        record.write([point], alerts=[Alert(t_s=time.time(), rule="memory", state="raised", what="x")])
        found = scraped(home)
    assert len(found["penstock_samples_total"]) == 5
    assert all(len(value) <= 120 for series in found.values() for labels in series for _, value in labels)
    assert len(exposition(home)) < 60_000


def test_facts_that_are_missing_do_not_end_the_scrape(home: Path) -> None:
    with full_run(home, name=None, loaders=None, gpus=[], rank=None, host=None, pid=None):
        assert only(home, "penstock_samples_total", loader="loader 0") == 6400


def test_a_damaged_file_is_counted_and_the_other_runs_are_exported(home: Path) -> None:
    with full_run(home) as record:
        record.path.with_name("261116-000000-aaaa.sqlite").write_bytes(b"no database at all" * 100)
        assert only(home, "penstock_unreadable_runs") == 1
        assert only(home, "penstock_memory_limit_bytes") == 16 * GIB


def test_a_home_without_runs_is_an_empty_scrape(home: Path) -> None:
    assert scraped(home / "nowhere") == {"penstock_unreadable_runs": {(): 0.0}}


def test_old_runs_are_skipped_without_opening_them(home: Path) -> None:
    now_s = time.time()
    record = begin_run(home, started_s=now_s - 9000)
    record.finish(RunOutcome(state="finished", t_s=now_s - 8000))
    # Would be counted as unreadable if it were opened.
    record.path.write_bytes(b"no database any more")
    os.utime(record.path, (now_s - 8000, now_s - 8000))
    assert only(home, "penstock_unreadable_runs") == 0


def test_every_metric_of_the_dashboard_is_exported(home: Path) -> None:
    board = json.loads(grafana_dashboard())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [each["definition"] for each in board["templating"]["list"]]
    with full_run(home):
        told = scraped(home)
    wanted = {name for words in asked for name in re.findall(r"penstock_\w+", words)}
    assert wanted <= set(told) and len(wanted) > 15
    for words in asked:
        for name, labels in re.findall(r"(penstock_\w+)\{([^}]*)\}", words):
            assert set(re.findall(r"(\w+)=", labels)) <= {key for series in told[name] for key, _ in series}
    counters = {name for name in wanted if name.endswith("_total")}
    assert all(re.search(rf"(rate|increase)\({name}", " ".join(asked)) for name in counters)


def test_every_panel_of_the_dashboard_has_the_unit_of_its_figures() -> None:
    units = {f"penstock_{each.metric}": each.unit for each in FIGURES.values() if each.metric is not None}
    for panel in json.loads(grafana_dashboard())["panels"]:
        asked = {name for target in panel["targets"] for name in re.findall(r"penstock_\w+", target["expr"])}
        found = {units[name] for name in asked if name in units}
        is_ratio = any("/" in target["expr"] or "rate(" in target["expr"] for target in panel["targets"])
        if found == {"bytes"} and not is_ratio:
            assert panel["fieldConfig"]["defaults"]["unit"] == "bytes", panel["title"]
        elif found == {"fraction"} or (found and is_ratio and "samples_total" not in str(asked)):
            assert panel["fieldConfig"]["defaults"]["unit"] == "percentunit", panel["title"]


def test_the_dashboard_can_be_imported_into_any_grafana() -> None:
    board = json.loads(grafana_dashboard())
    (source,) = board["__inputs"]
    assert source["type"] == "datasource" and source["pluginId"] == "prometheus"
    uid = f"${{{source['name']}}}"
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    assert all(each["datasource"]["uid"] == uid for each in [*board["panels"], *targets])
    assert board["id"] is None and [each["name"] for each in board["templating"]["list"]] == ["run"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    titles = " ".join(panel["title"] for panel in board["panels"])
    for subject in ("Memory", "Throughput", "Waiting", "GPU", "Cache", "restarts", "Alerts"):
        assert subject in titles
