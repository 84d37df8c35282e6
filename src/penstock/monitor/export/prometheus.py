"""Running trainings for Prometheus, and a Grafana dashboard of them.

In:  a home (``home.state_folder()``).
Out: ``exposition``: the text of a scrape, with ``CONTENT_TYPE``; ``grafana_dashboard``: JSON to import.
Runs in: web page, any number of times a second. Does not import torch.

Names, types and help texts come from ``figures.FIGURES``. Every series has the labels ``run`` (the run's id) and
``name``, and the labels ``loader``, ``gpu``, ``component``, ``rule`` and ``state`` if the run has several of these.
Rates and shares of time are not exported: ``rate()`` computes them without missing what happens between two scrapes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock.errors import PenstockError
from penstock.formatting import one_line
from penstock.monitor.figures import FIGURES, part
from penstock.monitor.runs.reader import Run, record_files

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENDED_FOR_S = 300.0
"""How long the outcome of an ended run is exported: for a few scrapes, so that no series stays forever."""
STATES = ("running", "finished", "failed", "killed")
_LONGEST_LABEL = 100


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, as Prometheus sees it."""

    name: str
    kind: Literal["counter", "gauge"] = "gauge"
    help: str
    component: str | None = None


def _metrics(prefix: str) -> dict[str, Metric]:
    """The metrics of the figures whose names begin with a prefix, by the name without the prefix."""
    found = {}
    for name, figure in FIGURES.items():
        head, dot, last = name.rpartition(".")
        if head + dot == prefix and figure.metric is not None:
            help = _COMPONENTS if figure.component is not None else figure.help
            found[last] = Metric(
                name=f"penstock_{figure.metric}", kind=figure.kind, help=help, component=figure.component
            )  # fmt: skip
    return found


_COMPONENTS = "Memory of the training and its workers, by component."
_OF_RUN, _OF_LOADER, _OF_GPU = _metrics(""), _metrics("loader.N."), _metrics("gpu.N.")

_INFO = Metric(name="penstock_run_info", help="A run and its process; always 1.")
_STATE = Metric(name="penstock_run_state", help="1 for the state of the run, 0 for the other states.")
_STARTED = Metric(name="penstock_run_start_time_seconds", help="Start of the run, seconds since 1970.")
_ENDED = Metric(name="penstock_run_end_time_seconds", help="End of the run, seconds since 1970.")
_LAST_POINT = Metric(name="penstock_last_point_time_seconds", help="Time of the latest figures, seconds since 1970.")
_ALERT = Metric(name="penstock_alert_active", help="1 while an alert is raised, 0 after it is cleared.")
_UNREADABLE = Metric(name="penstock_unreadable_runs", help="Files of recent runs that could not be read.")


class MetricSample(NamedTuple):
    metric: Metric
    labels: dict[str, str]
    value: float


def exposition(home: Path, *, now_s: float | None = None) -> bytes:
    """The figures of all running runs, and for five minutes the outcome of ended runs."""
    now_s = time.time() if now_s is None else now_s
    samples: list[MetricSample] = []
    unreadable = 0
    for path in record_files(home):
        if not _may_be_recent(path, now_s):
            continue
        try:
            with Run(path) as run:
                samples += _of_run(run, now_s)
        except PenstockError:
            # The run was removed in the meantime, or is damaged: the scrape continues with the other runs.
            unreadable += path.exists()
    samples.append(MetricSample(_UNREADABLE, {}, float(unreadable)))
    return _text(samples)


def grafana_dashboard() -> str:
    """A dashboard of these metrics, as the JSON that Grafana imports."""
    return (resources.files("penstock.monitor.export") / "grafana.json").read_text(encoding="utf-8")


# -- samples --------------------------------------------------------------------------------


def _may_be_recent(path: Path, now_s: float) -> bool:
    """Whether a run may be recent. This is decided without opening its file, because a home may hold thousands: a
    running run has a write-ahead log, or writes every second."""
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
    about = {**labels, "host": _label(facts.get("host")), "pid": _label(facts.get("pid"))}
    if facts.get("rank"):
        about["rank"] = _label(facts["rank"].get("rank"))
    state = "running" if outcome is None else outcome.state
    found = [MetricSample(_INFO, about, 1.0)]
    found += [MetricSample(_STATE, {**labels, "state": each}, float(each == state)) for each in STATES]
    if facts.get("started_s") is not None:
        found.append(MetricSample(_STARTED, labels, float(facts["started_s"])))
    if outcome is not None:
        return [*found, MetricSample(_ENDED, labels, outcome.t_s)]
    point = run.latest
    if point is not None:
        found.append(MetricSample(_LAST_POINT, labels, point.t_s))
        found += _of_figures(point.figures, facts, labels)
    for rule, raised in {each.rule: each.state for each in run.alerts()}.items():
        found.append(MetricSample(_ALERT, {**labels, "rule": _label(rule)}, float(raised == "raised")))
    return found


def _of_figures(figures: Mapping[str, float], facts: Mapping[str, Any], labels: dict[str, str]) -> list[MetricSample]:
    found = _samples(_OF_RUN, figures, labels)
    for kind, metrics, names in (
        ("loader", _OF_LOADER, _names(facts.get("loaders") or [], "name", "loader ")),
        ("gpu", _OF_GPU, _names(facts.get("gpus") or [], "index", "")),
    ):
        for number in sorted({int(name.split(".")[1]) for name in figures if name.startswith(f"{kind}.")}):
            name = names.get(number, f"loader {number}" if kind == "loader" else str(number))
            found += _samples(metrics, part(figures, f"{kind}.{number}"), {**labels, kind: name})
    return found


def _samples(metrics: Mapping[str, Metric], figures: Mapping[str, float], labels: dict[str, str]) -> list[MetricSample]:
    found = []
    for name, metric in metrics.items():
        value = figures.get(name)
        if value is not None and math.isfinite(value):
            component = {} if metric.component is None else {"component": metric.component}
            found.append(MetricSample(metric, {**labels, **component}, value))
    return found


def _names(entries: Sequence[Mapping[str, Any]], key: str, prefix: str) -> dict[int, str]:
    """Number -> a unique label: Prometheus refuses a whole scrape if two series have the same labels."""
    found: dict[int, str] = {}
    for number, entry in enumerate(entries):
        text = _label(entry.get(key)) or f"{prefix}{number}"
        found[number] = text if text not in found.values() else f"{text} ({number})"
    return found


def _label(value: Any) -> str:
    """A value as text, short and on one line: every series carries it."""
    return "" if value is None else one_line(str(value), _LONGEST_LABEL)


# -- text -----------------------------------------------------------------------------------


def _text(samples: Iterable[MetricSample]) -> bytes:
    groups: dict[str, list[MetricSample]] = {}
    for each in samples:
        groups.setdefault(each.metric.name, []).append(each)
    lines: list[str] = []
    for name, group in sorted(groups.items()):
        metric = group[0].metric
        lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
        lines += [f"{name}{_labels(each.labels)} {_number(each.value)}" for each in group]
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")


def _labels(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
