"""Limits, headroom and quota in every layout of control groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.meter import headroom_bytes, limits
from support.machines import layouts as machines
from support.machines.layouts import GIB, MIB, Files, build


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    cgroup: str
    limit: int
    source: str
    available: int
    working_set: int
    quota: float | None


LAYOUTS: list[tuple[Callable[[], Files], Expected]] = [
    (
        machines.no_cgroups,
        Expected(cgroup="none", limit=64 * GIB, source="host", available=48 * GIB, working_set=16 * GIB, quota=None),
    ),
    (
        machines.v1_host,
        Expected(
            cgroup="v1",
            limit=4 * GIB,
            source="memory/user.slice/user-1000.slice/memory.limit_in_bytes",
            available=2 * GIB,
            working_set=2 * GIB,
            quota=2.0,
        ),
    ),
    (
        machines.v2_host,
        Expected(
            cgroup="v2",
            limit=3 * GIB,
            source="user.slice/user-1000.slice/session-2.scope/memory.high",
            available=2 * GIB,
            working_set=GIB,
            quota=1.5,
        ),
    ),
    (
        machines.hybrid_host,
        Expected(
            cgroup="hybrid",
            limit=2 * GIB,
            source="memory/job/7/memory.limit_in_bytes",
            available=GIB + 512 * MIB,
            working_set=512 * MIB,
            quota=0.5,
        ),
    ),
    (
        machines.nested_v2,
        Expected(
            cgroup="v2",
            limit=6 * GIB,
            source="batch/team/memory.max",
            available=GIB + 256 * MIB,
            working_set=5 * GIB - 256 * MIB,
            quota=0.5,
        ),
    ),
    (
        machines.docker_v1,
        Expected(
            cgroup="v1",
            limit=2 * GIB,
            source="memory/memory.limit_in_bytes",
            available=GIB + 256 * MIB,
            working_set=768 * MIB,
            quota=0.5,
        ),
    ),
    (
        machines.docker_v2_in_namespace,
        Expected(
            cgroup="v2",
            limit=2 * GIB,
            source="memory.max",
            available=GIB + 256 * MIB,
            working_set=768 * MIB,
            quota=0.5,
        ),
    ),
    (
        machines.kubernetes_burstable_v1,
        Expected(
            cgroup="v1",
            limit=4 * GIB,
            source="memory/memory.stat (hierarchical_memory_limit)",
            available=2 * GIB,
            working_set=2 * GIB,
            quota=1.5,
        ),
    ),
    (
        machines.kubernetes_burstable_v2,
        Expected(
            cgroup="v2",
            limit=4 * GIB,
            source="kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod8c1f.slice/memory.max",
            available=2 * GIB,
            working_set=2 * GIB,
            quota=2.0,
        ),
    ),
]


@pytest.mark.parametrize(("layout", "expected"), LAYOUTS, ids=[layout.__name__ for layout, _ in LAYOUTS])
def test_every_layout_gives_its_tightest_limit(layout: Callable[[], Files], expected: Expected, tmp_path: Path) -> None:
    roots = build(tmp_path, layout())
    found = limits(roots=roots)
    source = expected.source if expected.source == "host" else str(roots.cgroup / expected.source)
    assert found.cgroup == expected.cgroup
    assert found.memory_limit_bytes == expected.limit
    assert found.memory_limit_source == source
    assert found.host_memory_bytes == 64 * GIB
    assert found.memory_available_bytes == expected.available
    assert found.working_set_bytes == expected.working_set
    assert found.cpu_quota == expected.quota
    assert found.unknown == ()


@pytest.mark.parametrize("layout", [layout for layout, _ in LAYOUTS])
def test_the_cheap_headroom_is_the_headroom_of_the_full_report(layout: Callable[[], Files], tmp_path: Path) -> None:
    roots = build(tmp_path, layout())
    assert headroom_bytes(roots=roots) == limits(roots=roots).memory_available_bytes


def test_headroom_can_be_least_in_a_group_that_does_not_have_the_smallest_limit(tmp_path: Path) -> None:
    files = machines.nested_v2() | machines.group("batch", machines.memory_v2(32 * GIB, 31 * GIB + 512 * MIB, 0))
    found = limits(roots=build(tmp_path, files))
    assert found.memory_limit_bytes == 6 * GIB
    assert found.memory_available_bytes == 512 * MIB


def test_a_full_host_leaves_no_headroom_in_an_empty_container(tmp_path: Path) -> None:
    files = machines.docker_v2_in_namespace()
    host = machines.host(available=100 * MIB, membership="0::/\n", mounts=[machines.v2_mount()])
    assert limits(roots=build(tmp_path, files | host)).memory_available_bytes == 100 * MIB


def test_headroom_over_the_limit_is_zero_not_negative(tmp_path: Path) -> None:
    files = machines.docker_v2_in_namespace() | machines.group("", machines.memory_v2(GIB, 2 * GIB, 0))
    assert headroom_bytes(roots=build(tmp_path, files)) == 0


def test_a_process_moved_to_another_group_gets_that_groups_headroom(tmp_path: Path) -> None:
    roots = build(tmp_path, machines.nested_v2())
    assert headroom_bytes(roots=roots) == GIB + 256 * MIB
    (roots.proc / "self" / "cgroup").write_text("0::/batch\n")
    assert headroom_bytes(roots=roots) == 12 * GIB


def test_a_limit_changed_while_running_is_seen_by_the_cheap_poll(tmp_path: Path) -> None:
    roots = build(tmp_path, machines.docker_v2_in_namespace())
    headroom_bytes(roots=roots)
    (roots.cgroup / "memory.max").write_text(f"{GIB}\n")
    assert headroom_bytes(roots=roots) == 256 * MIB


@pytest.mark.parametrize("content", ["", "garbage\n", "-1\n", "max\n", "\x00\x01", "1e9\n", "9" * 5000, "٣٤\n"])
def test_a_limit_file_without_a_number_sets_no_limit(content: str, tmp_path: Path) -> None:
    files = machines.docker_v2_in_namespace() | {"cgroup/memory.max": content}
    assert limits(roots=build(tmp_path, files)).memory_limit_source == "host"


def test_v1_says_no_limit_with_another_number_on_64_kib_pages(tmp_path: Path) -> None:
    files = machines.docker_v1() | {"cgroup/memory/memory.limit_in_bytes": "9223372036854710272\n"}
    files["cgroup/memory/memory.stat"] = "hierarchical_memory_limit 9223372036854710272\ntotal_inactive_file 0\n"
    assert limits(roots=build(tmp_path, files)).memory_limit_source == "host"


def test_a_limit_above_the_hosts_memory_does_not_count(tmp_path: Path) -> None:
    files = machines.docker_v2_in_namespace() | {"cgroup/memory.max": f"{900 * GIB}\n"}
    assert limits(roots=build(tmp_path, files)).memory_limit_bytes == 64 * GIB


def test_a_limit_without_usage_says_so(tmp_path: Path) -> None:
    files = machines.docker_v2_in_namespace()
    del files["cgroup/memory.current"]
    found = limits(roots=build(tmp_path, files))
    assert found.memory_available_bytes == 2 * GIB
    assert [note.split(":")[0] for note in found.unknown] == ["working_set_bytes"]


def test_a_path_that_does_not_exist_under_the_mount_falls_back_to_what_does(tmp_path: Path) -> None:
    files = machines.docker_v2_in_namespace() | {"proc/self/cgroup": "0::/docker/on/the/host\n"}
    found = limits(roots=build(tmp_path, files))
    assert found.memory_limit_bytes == 2 * GIB
    assert [note.split(":")[0] for note in found.unknown] == ["memory_limit_bytes"]


def test_a_namespace_entered_without_a_mount_of_its_own_says_that_its_group_is_hidden(tmp_path: Path) -> None:
    files = machines.nested_v2() | machines.host(membership="0::/\n", mounts=[machines.v2_mount("/../../..")])
    found = limits(roots=build(tmp_path, files))
    assert found.memory_limit_source == "host"
    assert [note.split(":")[0] for note in found.unknown] == ["memory_limit_bytes"]


def test_of_two_mounts_the_one_that_shows_the_own_group_is_read(tmp_path: Path) -> None:
    elsewhere = machines.v2_mount("/other", "/sys/fs/cgroup/other")
    files = machines.nested_v2() | machines.group("other", machines.memory_v2(MIB, 0, 0))
    files["proc/self/mountinfo"] += elsewhere + "\n"
    assert limits(roots=build(tmp_path, files)).memory_limit_bytes == 6 * GIB


def test_a_removed_group_falls_back_to_its_parent(tmp_path: Path) -> None:
    files = machines.nested_v2() | {"proc/self/cgroup": "0::/batch/team/gone (deleted)\n"}
    assert limits(roots=build(tmp_path, files)).memory_limit_bytes == 6 * GIB


def test_a_group_outside_the_namespace_never_leaves_the_mount(tmp_path: Path) -> None:
    files = machines.docker_v2_in_namespace() | {"proc/self/cgroup": "0::/../../escape\n"}
    files |= {"escape/memory.max": "1\n", "cgroup/escape/memory.max": "2\n"}
    assert limits(roots=build(tmp_path / "a" / "b", files)).memory_limit_bytes == 2 * GIB


def test_mount_points_and_groups_with_spaces_are_found(tmp_path: Path) -> None:
    files = machines.host(
        membership="0::/my jobs/a:b\n",
        mounts=[machines.v2_mount(root="/my\\040jobs", point="/sys/fs/cgroup/of\\040mine\\134x")],
    )
    files |= machines.group("of mine\\x/a:b", machines.memory_v2(GIB, 0, 0))
    assert limits(roots=build(tmp_path, files)).memory_limit_bytes == GIB


def test_a_later_mount_on_the_same_point_replaces_the_earlier(tmp_path: Path) -> None:
    files = machines.host(membership="0::/x\n", mounts=[machines.v2_mount("/x"), machines.v2_mount("/")])
    files |= machines.group("", machines.memory_v2(2 * GIB, 0, 0))
    files |= machines.group("x", machines.memory_v2(GIB, 0, 0))
    assert limits(roots=build(tmp_path, files)).memory_limit_bytes == GIB


def test_a_second_narrower_mount_does_not_hide_the_ancestors(tmp_path: Path) -> None:
    narrow = machines.v2_mount("/batch/team/run", "/sys/fs/cgroup/batch/team/run")
    files = machines.nested_v2()
    files["proc/self/mountinfo"] += narrow + "\n"
    assert limits(roots=build(tmp_path, files)).memory_limit_bytes == 6 * GIB


def test_a_cgroup_whose_controller_is_not_mounted_is_reported_unknown(tmp_path: Path) -> None:
    found = limits(roots=build(tmp_path, machines.host(membership="4:memory:/x\n0::/\n", mounts=[])))
    assert found.memory_limit_bytes == 64 * GIB
    assert found.cgroup == "none"
    assert [note.split(":")[0] for note in found.unknown] == ["memory_limit_bytes"]


@pytest.mark.parametrize(
    "content", ["max\n", "", "50000\n", "0 100000\n", "50000 0\n", "-1 100000\n", "a b\n", "1 2 3\n"]
)
def test_a_quota_that_is_none_is_none(content: str, tmp_path: Path) -> None:
    files = machines.docker_v2_in_namespace() | {"cgroup/cpu.max": content}
    found = limits(roots=build(tmp_path, files))
    assert found.cpu_quota is None
    assert found.cpu_usable == 8.0
