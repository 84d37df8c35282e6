"""The doctor's finding about a dataset's containers: severity, cost and fix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.advice.dataset import DatasetFacts, find_in_dataset, inspect_dataset
from penstock.advice.machine import MachineFacts
from penstock.lab.dataset.containers import Container, Containers

MIB = 1 << 20


def facts_of(per_worker_bytes: int, kind: str = "list", holds: str = "str") -> DatasetFacts:
    container = Container(
        path="dataset.samples",
        kind=kind,
        holds=holds,
        items=1_000_000,
        bytes=per_worker_bytes + 8 * MIB,
        per_worker_bytes=per_worker_bytes,
    )
    return DatasetFacts(type="d.D", length=3, containers=Containers(found=(container,), complete=True))


@pytest.mark.parametrize(
    ("per_worker_bytes", "available_bytes", "severity"),
    [
        (7 * MIB, 48 << 30, None),
        (8 * MIB, 48 << 30, "info"),
        (63 * MIB, 48 << 30, "info"),
        (64 * MIB, 48 << 30, "warning"),
        (64 * MIB, 5 << 30, "warning"),
        (64 * MIB, 4 << 30, "hurts"),
        (1024 * MIB, 48 << 30, "hurts"),
    ],
)
def test_the_severity_follows_from_bytes_workers_and_memory(
    per_worker_bytes: int, available_bytes: int, severity: str | None, healthy: MachineFacts
) -> None:
    facts = replace(healthy, limits=replace(healthy.limits, memory_available_bytes=available_bytes))
    said = find_in_dataset(facts_of(per_worker_bytes), facts)
    assert [finding.severity for finding in said] == ([] if severity is None else [severity])


def test_the_finding_names_the_container_its_cost_and_the_fix(healthy: MachineFacts) -> None:
    (finding,) = find_in_dataset(facts_of(100 * MIB), healthy)
    assert finding.id == "python-containers"
    assert "dataset.samples (list, 1,000,000 × str)" in finding.what
    assert "100 MiB per worker, 1.56 GiB for 16" in finding.what
    assert "dataset.samples: penstock.data.SharedList(...)" in finding.fix
    (finding,) = find_in_dataset(facts_of(100 * MIB, holds="float"), healthy)
    assert "numpy.array" in finding.fix
    (finding,) = find_in_dataset(facts_of(100 * MIB, holds="Sample"), healthy)
    assert "Parquet" in finding.fix


def test_the_cost_is_calculated_for_the_given_workers(healthy: MachineFacts) -> None:
    (finding,) = find_in_dataset(facts_of(100 * MIB), healthy, 32)
    assert "100 MiB per worker, 3.12 GiB for 32" in finding.what
    few = replace(healthy, limits=replace(healthy.limits, cpu_usable=2.5, memory_available_bytes=4 << 30))
    (finding,) = find_in_dataset(facts_of(100 * MIB), few)
    assert "200 MiB for 2" in finding.what and finding.severity == "warning"
    (finding,) = find_in_dataset(facts_of(100 * MIB), few, 16)
    assert finding.severity == "hurts"


def test_a_dataset_whose_length_fails_has_no_length() -> None:
    class Broken(list[int]):
        def __len__(self) -> int:
            raise RuntimeError("not yet")

    assert inspect_dataset(Broken()).length is None
    assert inspect_dataset([1, 2, 3]).length == 3
