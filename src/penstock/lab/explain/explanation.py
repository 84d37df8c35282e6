"""The result of an explanation: components, changes, feeding, findings and the chart.

In:  ``Explained``, the ``MachineFacts``, the argument names of the user's own settings.
Out: ``Explanation``, from which the page, the JSON output and the chart are made.
Runs in: command line. Imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from penstock.advice.machine import MachineFacts
from penstock.advice.run import Evidence, find_in_run
from penstock.charts.host_memory import HostMemoryChart
from penstock.findings import Finding
from penstock.lab.explain.breakdown import MemoryRun
from penstock.lab.explain.job import Explained, Job
from penstock.planner.components import Change, Component, MemoryLine, answer, changes, components, line
from penstock.planner.feeding import Feeding

_NAMED_CONTAINERS = 3


@dataclass(frozen=True)
class Explanation:
    """All results."""

    job: Job
    explained: Explained
    facts: MachineFacts
    keys: Mapping[str, str]
    """Argument -> the name of the argument in the user's own settings."""
    against: tuple[Job, Explained] | None = None

    @cached_property
    def ours(self) -> tuple[Component, ...]:
        seen = self.explained
        return self._components(seen.ours, seen.ours_other_batch, seen.ours_other_workers)

    @cached_property
    def torchs(self) -> tuple[Component, ...]:
        seen = self.explained
        return self._components(seen.torchs, seen.torchs_other_batch, seen.torchs_other_workers)

    def _components(self, run: MemoryRun, batch: MemoryRun | None, workers: MemoryRun | None) -> tuple[Component, ...]:
        assert batch is not None and workers is not None
        copied = sum(each[2] for each in self.explained.containers)
        return components(
            run.reading, batch.reading, workers.reading, dataset_scales=self.explained.dataset_scales,
            workers_copy_dataset=self.explained.dataset_scales and copied > 0,
        )  # fmt: skip

    @property
    def answer(self) -> str:
        return answer(self.ours, self.explained.ours.reading)

    @cached_property
    def feeding(self) -> Feeding:
        plain, run = self.explained.ours, self.explained.with_step or self.explained.ours
        batch_size = plain.reading.batch_size
        return Feeding(
            batch_size=batch_size,
            batches=max(1, run.batches),
            wait_s=run.wait_s,
            compute_s=run.step_s,
            most_samples_per_s=plain.samples_per_s,
            gpu_use=run.gpu_use,
        )

    @cached_property
    def found(self) -> tuple[Finding, ...]:
        """The findings, worst first."""
        return find_in_run(self.evidence)

    @property
    def evidence(self) -> Evidence:
        seen, limits = self.explained, self.facts.limits
        run, stats = seen.ours, seen.ours.stats
        assert stats is not None and run.budget_bytes is not None
        copied = [each for each in seen.containers if each[2]]
        fetch_s = stats.stages.fetch_s / max(1, stats.batches)
        elsewhere_bytes = limits.memory_limit_bytes - limits.memory_available_bytes
        cache = stats.cache
        return Evidence(
            batch_size=run.reading.batch_size,
            workers=run.reading.workers,
            depth=stats.depth,
            cores=limits.cpu_usable,
            limit_bytes=limits.memory_limit_bytes,
            used_bytes=elsewhere_bytes + run.reading.most_bytes,
            torch_used_bytes=elsewhere_bytes + seen.torchs.reading.most_bytes,
            budget_bytes=run.budget_bytes,
            batch_bytes=run.reading.parts["batch"],
            shared_batches=stats.shared_batches,
            samples_per_s=self.feeding.samples_per_s,
            wait_fraction=self.feeding.wait_fraction,
            cpu_fraction=seen.cpu_fraction,
            fetch_s=fetch_s if stats.batches else None,
            has_gpu=bool(self.facts.gpu.gpus),
            pins=bool(self.job.settings["pin_memory"]),
            cache_hit_rate=None if cache is None else cache.hit_rate,
            cache_lookups=0 if cache is None else cache.hits + cache.misses,
            cache_bytes=0 if cache is None else cache.bytes,
            cache_limit_bytes=0 if cache is None else cache.limit_bytes,
            swap_growth_bytes=seen.swap_growth_bytes,
            kills=seen.kills,
            containers_bytes=sum(each[2] for each in copied),
            containers=", ".join(each[0] for each in copied[:_NAMED_CONTAINERS]),
            keys=self.keys,
        )

    def changes(self) -> dict[str, tuple[Change, ...]]:
        """Loader -> the changes from this configuration to the other configuration; empty if there is only one."""
        if self.against is None:
            return {}
        other = self.against[1]
        return {
            "penstock": changes(self.explained.ours.reading, other.ours.reading),
            "torch": changes(self.explained.torchs.reading, other.torchs.reading),
        }

    def chart(self) -> HostMemoryChart:
        limits = self.facts.limits
        return HostMemoryChart(
            title=f"{self.job.target}, {self.job.settings['workers']} workers",
            lines={"penstock": self._line(ours=True), "torch": self._line(ours=False)},
            # The limit leaves out memory that other programs use, which is not available to this training.
            limit_bytes=limits.memory_available_bytes,
            batch_size=self.explained.ours.reading.batch_size,
        )

    def _line(self, *, ours: bool) -> MemoryLine:
        seen = self.explained
        run, other = (seen.ours, seen.ours_other_batch) if ours else (seen.torchs, seen.torchs_other_batch)
        assert other is not None
        return line(run.reading, other.reading, budget_bytes=run.budget_bytes, builds_whole=not ours)

    def as_json(self) -> dict[str, Any]:
        seen = self.explained
        result: dict[str, Any] = {
            "target": self.job.target,
            "settings": self.job.settings,
            "dataset": {"type": seen.dataset_type, "length": seen.length},
            "loaders": {
                "penstock": _as_json(seen.ours, self.ours, self._line(ours=True)),
                "torch": _as_json(seen.torchs, self.torchs, self._line(ours=False)),
            },
            "answer": self.answer,
            "loading": {
                **asdict(self.feeding),
                "samples_per_s": self.feeding.samples_per_s,
                "wait_fraction": self.feeding.wait_fraction,
                "fed_step_s": self.feeding.fed_step_s,
                "verdict": self.feeding.verdict(),
            },
            "findings": [finding.as_json() for finding in self.found],
        }
        if self.against is not None:
            result["against"] = {
                "target": self.against[0].target,
                "settings": self.against[0].settings,
                "changes": {
                    name: [asdict(each) | {"change_bytes": each.change_bytes} for each in found]
                    for name, found in self.changes().items()
                },
            }
        return result


def _as_json(run: MemoryRun, parts: tuple[Component, ...], by_batch: MemoryLine) -> dict[str, Any]:
    return {
        "total_bytes": run.reading.total_bytes,
        "most_bytes": run.reading.most_bytes,
        "page_cache_bytes": run.reading.page_cache_bytes,
        "components": [asdict(part) for part in parts],
        "samples_per_s": run.samples_per_s,
        "first_batch_s": run.first_batch_s,
        "by_batch_size": asdict(by_batch),
    }
