"""Rules about a dataset: the large Python containers in it, which every worker eventually copies.

In:  a dataset, the ``MachineFacts``.
Out: ``DatasetFacts``, and a ``Finding`` where the copies are large.
Runs in: command line; imports torch with the dataset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.advice.machine import MachineFacts
from penstock.findings import Finding, Severity
from penstock.lab.dataset.containers import Container, Containers, find_containers
from penstock.units import MIB, format_bytes

INFO_BYTES, WARNING_BYTES = 8 * MIB, 64 * MIB
"""Bytes that each worker copies: from the first number on there is a finding, from the second on it is a warning.
Copies below the first are smaller than the rest of a worker's memory."""
HURTS_FRACTION = 0.25
"""Share of the free memory that the copies of all workers may take; batches and the model need the rest."""
_SHOWN_CONTAINERS = 3
_PLAIN = {"str", "bytes", "int", "float", "bool", "NoneType", "tuple", "list", "dict"}
_NUMBERS = {"int", "float", "bool"}


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """A dataset as its workers receive it."""

    type: str
    """The dataset's class."""
    length: int | None
    """Number of samples; None: it has no length."""
    containers: Containers
    """The large containers in it."""

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


def inspect_dataset(dataset: Any) -> DatasetFacts:
    kind = type(dataset)
    try:
        length = len(dataset)
    except Exception:
        length = None  # a stream, or a dataset that has a length only while it is read
    return DatasetFacts(
        type=f"{kind.__module__}.{kind.__qualname__}", length=length, containers=find_containers(dataset)
    )


def find_in_dataset(dataset: DatasetFacts, facts: MachineFacts, workers: int | None = None) -> tuple[Finding, ...]:
    """The cost of the dataset's containers on this machine. ``workers`` defaults to one per usable core."""
    workers = max(1, int(facts.limits.cpu_usable)) if workers is None else workers
    per_worker = dataset.per_worker_bytes
    if per_worker < INFO_BYTES:
        return ()
    costly = [container for container in dataset.containers.found if container.per_worker_bytes >= MIB]
    named = "; ".join(describe(container) for container in costly[:_SHOWN_CONTAINERS])
    more = f"; and {len(costly) - _SHOWN_CONTAINERS} more" if len(costly) > _SHOWN_CONTAINERS else ""
    afresh = sum(container.bytes for container in costly)
    what = (
        f"each worker copies what it reads of {named}{more}: {format_bytes(per_worker)} per worker, "
        f"{format_bytes(workers * per_worker)} for {workers} workers "
        f"(a worker started by spawn copies {format_bytes(afresh)} when it starts)"
    )
    severity = _severity(per_worker, workers, dataset, facts)
    return (Finding(id="python-containers", severity=severity, what=what, fix=_fix(costly)),)


def describe(container: Container) -> str:
    """Path, type and content of a container."""
    return f"{container.path} ({container.kind}, {container.items:,} × {container.holds})"


def _severity(per_worker_bytes: int, workers: int, dataset: DatasetFacts, facts: MachineFacts) -> Severity:
    # The facts date from before the dataset was loaded.
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
            advice.append(f"{container.path}: penstock.data.SharedList(...) of its items, looked up by index")
        else:
            advice.append(f"{container.path}: keep its fields in arrays, in a penstock.data.SharedList or in Parquet")
    return "keep one copy for all workers: " + "; ".join(advice)
