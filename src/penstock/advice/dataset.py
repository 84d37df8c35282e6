"""What the doctor knows about a dataset: the Python containers in it, and what they will do to workers.

In:  a dataset, the machine's ``Facts``.
Out: ``DatasetFacts``, and the finding they give rise to.
Runs in: command line; the dataset is loaded, so torch is too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.advice.machine import Finding, Severity
from penstock.advice.machine_facts import Facts
from penstock.lab.dataset.containers import Container, Containers, find_containers
from penstock.units import MIB, format_bytes

INFO_BYTES, WARNING_BYTES = 8 * MIB, 64 * MIB
"""Copied by every worker: below the first, less than what any worker takes anyway."""
HURTS_FRACTION = 0.25
"""Of the memory that is left, copied by all workers; batches and the model need the rest."""
_SHOWN_CONTAINERS = 3
_PLAIN = {"str", "bytes", "int", "float", "bool", "NoneType", "tuple", "list", "dict"}
_NUMBERS = {"int", "float", "bool"}


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """A dataset as its workers will get it."""

    type: str
    """Its class."""
    length: int | None
    """Number of samples, where it says."""
    containers: Containers
    """Large containers in it."""

    @property
    def per_worker_bytes(self) -> int:
        return self.containers.per_worker_bytes

    def as_json(self) -> dict[str, Any]:
        names = ("path", "kind", "items", "bytes", "per_worker_bytes")
        return {
            "type": self.type,
            "length": self.length,
            "containers": [{name: getattr(found, name) for name in names} for found in self.containers.found],
            "complete": self.containers.complete,
        }


def look_into(dataset: Any) -> DatasetFacts:
    kind = type(dataset)
    try:
        length = len(dataset)
    except Exception:
        length = None  # a stream, or one that knows only once it runs
    return DatasetFacts(
        type=f"{kind.__module__}.{kind.__qualname__}", length=length, containers=find_containers(dataset)
    )


def find_in_dataset(dataset: DatasetFacts, facts: Facts, workers: int | None = None) -> tuple[Finding, ...]:
    """What is worth saying about the dataset on this machine, with so many workers; by default one for each usable
    processor."""
    workers = max(1, int(facts.limits.cpu_usable)) if workers is None else workers
    per_worker = dataset.per_worker_bytes
    if per_worker < INFO_BYTES:
        return ()
    costly = [container for container in dataset.containers.found if container.per_worker_bytes >= MIB]
    named = "; ".join(describe(container) for container in costly[:_SHOWN_CONTAINERS])
    more = f"; and {len(costly) - _SHOWN_CONTAINERS} more" if len(costly) > _SHOWN_CONTAINERS else ""
    afresh = sum(container.bytes for container in costly)
    what = (
        f"workers copy what they read of {named}{more}: {format_bytes(per_worker)} in each worker, "
        f"{format_bytes(workers * per_worker)} in {workers} "
        f"(started by spawn, {format_bytes(afresh)} each at once)"
    )
    severity = _severity(per_worker, workers, dataset, facts)
    return (Finding(id="python-containers", severity=severity, what=what, fix=_fix(costly)),)


def describe(container: Container) -> str:
    """A container in a few words."""
    return f"{container.path} ({container.kind}, {container.items:,} × {container.holds})"


def _severity(per_worker_bytes: int, workers: int, dataset: DatasetFacts, facts: Facts) -> Severity:
    # The machine was looked at before the dataset was loaded.
    held = sum(container.bytes for container in dataset.containers.found)
    left = max(0, facts.limits.memory_available_bytes - held)
    if per_worker_bytes < WARNING_BYTES:
        return "info"
    return "hurts" if per_worker_bytes * workers > HURTS_FRACTION * left else "warning"


def _fix(costly: list[Container]) -> str:
    advice = []
    for container in costly[:_SHOWN_CONTAINERS]:
        if container.holds in _NUMBERS and container.kind in ("list", "tuple"):
            advice.append(f"{container.path}: numpy.array(...) or penstock.data.SharedList(...)")
        elif container.holds in _PLAIN and container.kind in ("list", "tuple", "deque", "array of object"):
            advice.append(f"{container.path}: penstock.data.SharedList(...)")
        elif container.holds in _PLAIN:
            advice.append(f"{container.path}: penstock.data.SharedList(...) of its items, found by index")
        else:
            advice.append(f"{container.path}: keep its fields in arrays, in a penstock.data.SharedList or in Parquet")
    return "keep it once for all workers: " + "; ".join(advice)
