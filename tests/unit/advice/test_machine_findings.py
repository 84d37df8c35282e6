"""Findings as a table: one changed fact gives one finding, of the right severity and with a fix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.advice.machine import CHECKS, MachineFacts, find_in_machine
from penstock.findings import Finding, needs_action
from penstock.meter import GpuStatus

MIB, GIB = 1 << 20, 1 << 30

NO_LIBRARY = GpuStatus(gpu_library="missing", reason="pynvml is not installed", gpus=())
NO_DEVICE = GpuStatus(gpu_library="no device", reason="no NVIDIA driver", gpus=())

PROVOKED: list[tuple[str, str, dict[str, Any]]] = [
    ("memory-full", "hurts", {"memory_available_bytes": 6 * GIB}),
    ("memory-full", "hurts", {"memory_available_bytes": 0}),
    ("memory-pressure", "warning", {"full_avg10": 5.0}),
    ("memory-pressure", "hurts", {"full_avg10": 20.0}),
    ("memory-limit", "warning", {"memory_limit_bytes": 60 * GIB, "memory_limit_source": "/box/memory.max"}),
    ("oom-kills", "info", {"oom_kills": 1}),
    ("swap-used", "info", {"swap_used_bytes": 1}),
    ("swap-used", "warning", {"swap_used_bytes": 256 * MIB}),
    ("shm-missing", "hurts", {"shm_size_bytes": None, "shm_used_bytes": None}),
    ("shm-small", "warning", {"shm_size_bytes": GIB - 1}),
    ("shm-small", "warning", {"shm_size_bytes": 128 * MIB}),
    ("shm-small", "hurts", {"shm_size_bytes": 64 * MIB}),
    ("shm-full", "hurts", {"shm_used_bytes": 30 * GIB}),
    ("cpu-quota", "warning", {"cpu_quota": 15.9, "cpu_usable": 15.9}),
    ("cpu-quota", "hurts", {"cpu_quota": 0.5, "cpu_usable": 0.5}),
    ("cpu-affinity", "info", {"cpu_affinity": 4, "cpu_usable": 4.0}),
    ("open-files", "warning", {"open_files_soft": 1024}),
    ("open-files", "hurts", {"open_files_soft": 256}),
    ("gpu-library", "info", {"gpu": NO_LIBRARY}),
    ("gpu-none", "info", {"gpu": NO_DEVICE}),
]

WELL: list[dict[str, Any]] = [
    {"memory_available_bytes": 7 * GIB},
    {"full_avg10": 4.9},
    {"full_avg10": None, "some_avg10": None, "stall_source": None},
    {"oom_kills": None},
    {"swap_total_bytes": 0},
    {"shm_size_bytes": GIB},
    {"shm_used_bytes": 16 * GIB},
    {"shm_used_bytes": None},
    {"cpu_quota": 16.0},
    {"cpu_quota": 32.0},
    {"cpu_affinity": None},
    {"open_files_soft": 4096},
    {"open_files_soft": None, "open_files_hard": None},
    {"platform": "darwin", "shm_size_bytes": None, "shm_used_bytes": None},
]


def change(facts: MachineFacts, changes: dict[str, Any]) -> MachineFacts:
    """The facts with fields of any of their parts changed."""
    for name, value in changes.items():
        if hasattr(facts, name):
            facts = replace(facts, **{name: value})
        elif hasattr(facts.limits, name):
            facts = replace(facts, limits=replace(facts.limits, **{name: value}))
        else:
            facts = replace(facts, pressure=replace(facts.pressure, **{name: value}))
    return facts


@pytest.mark.parametrize(("finding_id", "severity", "changes"), PROVOKED)
def test_one_changed_fact_makes_one_finding(
    healthy: MachineFacts, finding_id: str, severity: str, changes: dict[str, Any]
) -> None:
    (found,) = find_in_machine(change(healthy, changes))
    assert (found.id, found.severity) == (finding_id, severity)
    assert found.what and found.fix
    assert (found.what + found.fix).isascii()
    assert "None" not in found.what + found.fix


@pytest.mark.parametrize("changes", WELL, ids=str)
def test_facts_just_within_the_limits_give_no_finding(healthy: MachineFacts, changes: dict[str, Any]) -> None:
    assert find_in_machine(change(healthy, changes)) == ()


def test_a_healthy_machine_has_no_findings(healthy: MachineFacts) -> None:
    assert find_in_machine(healthy) == ()


def test_every_check_has_a_case_in_the_table() -> None:
    assert {finding_id for finding_id, _, _ in PROVOKED} == set(CHECKS)


def test_findings_come_worst_first(healthy: MachineFacts) -> None:
    found = find_in_machine(change(healthy, {"gpu": NO_DEVICE, "open_files_soft": 1024, "shm_size_bytes": 64 * MIB}))
    assert [each.severity for each in found] == ["hurts", "warning", "info"]


@pytest.mark.parametrize(("severity", "expected"), [("hurts", True), ("warning", True), ("info", False)])
def test_information_alone_does_not_fail_the_doctor(severity: Any, expected: bool) -> None:
    assert needs_action([Finding(id="x", severity=severity, what="x", fix="x")]) is expected
    assert not needs_action([])


def test_kills_inside_a_limited_container_are_a_warning(healthy: MachineFacts) -> None:
    limited = {"memory_limit_bytes": 60 * GIB, "memory_limit_source": "/box/memory.max"}
    found = find_in_machine(change(healthy, limited | {"oom_kills": 3}))
    kills = next(each for each in found if each.id == "oom-kills")
    assert kills.severity == "warning"
    assert "killed 3 processes" in kills.what


def test_the_memory_limit_is_shown_with_its_source_and_both_sizes(healthy: MachineFacts) -> None:
    (found,) = find_in_machine(
        change(healthy, {"memory_limit_bytes": 60 * GIB, "memory_limit_source": "/box/memory.max"})
    )
    for part in ("60.0 GiB", "/box/memory.max", "64.0 GiB"):
        assert part in found.what


def test_the_fix_for_open_files_depends_on_the_hard_limit(healthy: MachineFacts) -> None:
    (reachable,) = find_in_machine(change(healthy, {"open_files_soft": 1024, "open_files_hard": 8192}))
    assert reachable.fix.startswith("run ulimit -n 8192")
    (unlimited,) = find_in_machine(change(healthy, {"open_files_soft": 1024, "open_files_hard": None}))
    assert unlimited.fix.startswith("run ulimit -n 65536")
    (stuck,) = find_in_machine(change(healthy, {"open_files_soft": 1024, "open_files_hard": 1024}))
    assert "hard limit is only 1,024" in stuck.fix
