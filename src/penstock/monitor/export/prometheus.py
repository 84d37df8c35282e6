"""Running trainings for Prometheus: every figure under a name and a unit by its conventions, and a Grafana dashboard.

In:  a home (``home.state_folder()``).
Out: ``exposition``: text for a scrape, with ``CONTENT_TYPE``; ``grafana_dashboard``: JSON to import.
Runs in: web page; any number of times a second. Does not import torch.

Labels: ``run`` (its id) and ``name`` on everything, ``loader``, ``gpu``, ``component``, ``rule``, ``state`` where there
are several. Rates and shares of time are left to ``rate()``: a scrape every 30 s must not miss what lies between.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock.errors import PenstockError
from penstock.formatting import one_line
from penstock.monitor.figures import part
from penstock.monitor.runs.format import SUFFIX
from penstock.monitor.runs.home import runs_folder
from penstock.monitor.runs.reader import Run

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENDED_FOR_S = 300.0
"""How long the outcome of a run that is over is still told: a few scrapes, and no series that stays for ever."""
STATES = ("running", "finished", "failed", "killed")
_LONGEST_LABEL = 100
_MOST_LOADERS, _MOST_GPUS, _MOST_RULES = 64, 64, 64


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric: what Prometheus is told of it."""

    name: str
    kind: Literal["counter", "gauge"]
    what: str
    component: str | None = None
    """Which part of the whole a figure is, where several figures make one metric."""


def _counter(name: str, what: str) -> Metric:
    return Metric(name=f"penstock_{name}_total", kind="counter", what=what)


def _gauge(name: str, what: str, component: str | None = None) -> Metric:
    return Metric(name=f"penstock_{name}", kind="gauge", what=what, component=component)


_MEMORY = "Memory of the training and its workers, by component."

OF_RUN = {
    "step": _counter("steps", "Training steps."),
    "trainer_bytes": _gauge("memory_bytes", _MEMORY, "trainer"),
    "workers_bytes": _gauge("memory_bytes", _MEMORY, "workers"),
    "arena_bytes": _gauge("memory_bytes", _MEMORY, "arena"),
    "cache_bytes": _gauge("memory_bytes", _MEMORY, "cache"),
    "other_bytes": _gauge("memory_bytes", _MEMORY, "other"),
    "tree_bytes": _gauge("tree_memory_bytes", "Memory of the training and its workers, pages they share once."),
    "limit_bytes": _gauge("memory_limit_bytes", "The smallest memory limit: a container's, or the machine's memory."),
    "used_bytes": _gauge("memory_used_bytes", "In use of that limit, by everybody inside it."),
    "available_bytes": _gauge("memory_available_bytes", "What could still be used."),
    "swap_used_bytes": _gauge("swap_used_bytes", "Swap in use where the limit is set."),
    "budget_bytes": _gauge("budget_bytes", "What the loaders may take together."),
    "processes": _gauge("processes", "Processes of the training."),
    "cache_hits": _counter("cache_hits", "Lookups in the caches that needed no load, the whole node's."),
    "cache_misses": _counter("cache_misses", "Lookups in the caches that did, the whole node's."),
    "gpu_allocated_bytes": _gauge("torch_allocated_bytes", "Live tensors of the training, all GPUs."),
    "gpu_reserved_bytes": _gauge("torch_reserved_bytes", "What torch's allocator keeps, all GPUs."),
}
OF_LOADER = {
    "samples": _counter("samples", "Samples handed out."),
    "batches": _counter("batches", "Batches handed out."),
    "wait_s": _counter("wait_seconds", "Time the training loop waited for data."),
    "fetch_s": _counter("fetch_seconds", "Time in the dataset, all workers together."),
    "collate_s": _counter("collate_seconds", "Time in collating, all workers together."),
    "worker_restarts": _counter("worker_restarts", "Workers that died and were started again."),
    "workers": _gauge("workers", "Workers there are to be."),
    "depth": _gauge("depth_batches", "Batches that may be ahead."),
    "in_flight_bytes": _gauge("in_flight_bytes", "Batches being filled, ready, lent, or kept for reuse."),
    "lent_bytes": _gauge("lent_bytes", "Of those in flight, batches the training loop holds."),
    "workers_private_bytes": _gauge("workers_private_bytes", "Private memory of a loader's workers."),
    "budget_bytes": _gauge("loader_budget_bytes", "What a loader may take."),
    "device_ahead_bytes": _gauge("device_ahead_bytes", "Batches copied ahead to the GPU."),
    "cache_limit_bytes": _gauge("cache_limit_bytes", "What a loader's cache may take."),
}
OF_GPU = {
    "used_bytes": _gauge("gpu_memory_used_bytes", "Memory in use on a GPU, by anyone."),
    "total_bytes": _gauge("gpu_memory_total_bytes", "Memory of a GPU."),
    "busy_fraction": _gauge("gpu_busy_ratio", "Share of the time a kernel ran on a GPU."),
    "allocated_bytes": _gauge("gpu_allocated_bytes", "Live tensors of the training on a GPU."),
    "reserved_bytes": _gauge("gpu_reserved_bytes", "What torch's allocator keeps on a GPU."),
}
LEFT_OUT = frozenset(
    {
        "steps_per_s", "samples", "samples_per_s", "wait_fraction", "cache_hit_rate", "tree_is_exact", "workers",
        "depth", "worker_restarts",
        "loader.samples_per_s", "loader.wait_fraction", "loader.cache_bytes", "loader.cache_hits",
        "loader.cache_misses",
    }
)  # fmt: skip
"""Figures that are the rate or the sum of others that are there; a cache is told once for the run, not per loader."""

_INFO = _gauge("run_info", "A run and where it is; always 1.")
_STATE = _gauge("run_state", "1 for the state a run is in.")
_STARTED = _gauge("run_start_time_seconds", "When a run began, since 1970.")
_ENDED = _gauge("run_end_time_seconds", "When a run ended, since 1970.")
_HEARD = _gauge("last_point_time_seconds", "When a run's figures were taken, since 1970.")
_ALERT = _gauge("alert_active", "1 while an alert stands, 0 once it is over.")
_UNREADABLE = _gauge("unreadable_runs", "Files of recent runs that could not be read.")


class MetricSample(NamedTuple):
    metric: Metric
    labels: dict[str, str]
    value: float


def exposition(home: Path, *, now_s: float | None = None) -> bytes:
    """All runs that go on, and for five minutes the outcome of those that are over."""
    now_s = time.time() if now_s is None else now_s
    samples: list[MetricSample] = []
    unreadable = 0
    for path in sorted(runs_folder(home).glob(f"*{SUFFIX}")):
        if not _may_be_recent(path, now_s):
            continue
        try:
            with Run(path) as run:
                samples += _of_run(run, now_s)
        except PenstockError:
            # Removed meanwhile, or damaged: the others are to be scraped all the same.
            unreadable += path.exists()
    samples.append(MetricSample(_UNREADABLE, {}, float(unreadable)))
    return _text(samples)


def grafana_dashboard() -> str:
    """A dashboard of these metrics, as the JSON that Grafana imports."""
    return (resources.files("penstock.monitor.export") / "grafana.json").read_text(encoding="utf-8")


# -- what there is to tell ------------------------------------------------------------------


def _may_be_recent(path: Path, now_s: float) -> bool:
    """Without opening it: a home may hold thousands of runs. One that goes on writes every second, or has its log."""
    log = path.with_name(f"{path.name}-wal")
    try:
        return log.exists() or path.stat().st_mtime > now_s - ENDED_FOR_S
    except OSError:
        return False


def _of_run(run: Run, now_s: float) -> list[MetricSample]:
    facts, outcome = run.facts, run.outcome
    if outcome is not None and not abs(now_s - outcome.t_s) <= ENDED_FOR_S:
        return []
    labels = {"run": _label(run.id), "name": _label(facts.get("name"))}
    about = {**labels, "host": _label(facts.get("host")), "pid": _label(facts.get("pid")), **_rank(facts.get("rank"))}
    state = "running" if outcome is None else outcome.state
    found = [MetricSample(_INFO, about, 1.0)]
    found += [MetricSample(_STATE, {**labels, "state": each}, float(each == state)) for each in STATES]
    if isinstance(facts.get("started_s"), (int, float)):
        found.append(MetricSample(_STARTED, labels, float(facts["started_s"])))
    if outcome is not None:
        return [*found, MetricSample(_ENDED, labels, outcome.t_s)]
    point = run.latest
    if point is not None:
        found.append(MetricSample(_HEARD, labels, point.t_s))
        found += _of_figures(point.figures, facts, labels)
    states = {each.rule: each.state for each in run.alerts()}
    for rule, raised in list(_unique(states).items())[:_MOST_RULES]:
        found.append(MetricSample(_ALERT, {**labels, "rule": rule}, float(raised == "raised")))
    return found


def _of_figures(figures: Mapping[str, float], facts: Mapping[str, Any], labels: dict[str, str]) -> list[MetricSample]:
    found = _told(OF_RUN, figures, labels)
    names = _named(facts.get("loaders"), "name", "loader ")
    for number in range(_MOST_LOADERS):
        own = part(figures, f"loader.{number}")
        found += _told(OF_LOADER, own, {**labels, "loader": names.get(number, f"loader {number}")})
    indices = _named(facts.get("gpus"), "index", "")
    for number in range(_MOST_GPUS):
        own = part(figures, f"gpu.{number}")
        found += _told(OF_GPU, own, {**labels, "gpu": indices.get(number, str(number))})
    return found


def _told(metrics: Mapping[str, Metric], figures: Mapping[str, float], labels: dict[str, str]) -> list[MetricSample]:
    found = []
    for name, metric in metrics.items():
        value = figures.get(name)
        if value is not None and math.isfinite(value):
            component = {} if metric.component is None else {"component": metric.component}
            found.append(MetricSample(metric, {**labels, **component}, value))
    return found


def _named(entries: Any, key: str, prefix: str) -> dict[int, str]:
    """Number -> a label of its own: two series with the same labels make Prometheus refuse the whole scrape."""
    given = entries if isinstance(entries, list) else []
    found: dict[int, str] = {}
    for number, entry in enumerate(given):
        text = _label(entry.get(key) if isinstance(entry, dict) else None) or f"{prefix}{number}"
        found[number] = text if text not in found.values() else f"{text} ({number})"
    return found


def _unique(states: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, (rule, state) in enumerate(states.items()):
        text = _label(rule)
        found[text if text not in found else f"{text} ({number})"] = state
    return found


def _rank(rank: Any) -> dict[str, str]:
    return {"rank": _label(rank.get("rank"))} if isinstance(rank, dict) else {}


def _label(value: Any) -> str:
    """Text of anybody's, short and on one line: every series carries it."""
    return "" if value is None else one_line(str(value), _LONGEST_LABEL)


# -- how it is written ----------------------------------------------------------------------


def _text(samples: Iterable[MetricSample]) -> bytes:
    groups: dict[str, list[MetricSample]] = {}
    for each in samples:
        groups.setdefault(each.metric.name, []).append(each)
    lines: list[str] = []
    for name, group in sorted(groups.items()):
        metric = group[0].metric
        lines += [f"# HELP {name} {metric.what}", f"# TYPE {name} {metric.kind}"]
        lines += [f"{name}{_labels(each.labels)} {_number(each.value)}" for each in group]
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")


def _labels(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
