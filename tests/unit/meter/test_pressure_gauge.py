"""Stalls, kills and swapping, in one sample and between two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.meter import pressure
from penstock.meter.kernel_files import PAGE_BYTES
from support.machines import layouts as machines
from support.machines.layouts import GIB, MIB, build


def test_a_v2_group_shows_its_own_stalls_and_events(tmp_path: Path) -> None:
    roots = build(tmp_path, machines.docker_v2_in_namespace())
    found = pressure(roots=roots)
    assert found.stall_source == str(roots.cgroup)
    assert (found.some_avg10, found.full_avg10) == (12.34, 6.0)
    assert (found.oom_kills, found.high_events, found.max_events) == (4, 11, 5)


def test_a_v1_group_shows_the_hosts_stalls_and_its_own_kills(tmp_path: Path) -> None:
    found = pressure(roots=build(tmp_path, machines.v1_host()))
    assert (found.stall_source, found.some_avg10, found.full_avg10) == ("host", 1.5, 0.25)
    assert (found.oom_kills, found.high_events, found.max_events) == (2, None, 7)


def test_a_hybrid_host_has_stalls_from_v2_and_kills_from_v1(tmp_path: Path) -> None:
    roots = build(tmp_path, machines.hybrid_host())
    found = pressure(roots=roots)
    assert (found.stall_source, found.some_avg10) == (str(roots.cgroup / "unified" / "job"), 3.0)
    assert found.oom_kills == 2


def test_without_cgroups_kills_are_the_hosts(tmp_path: Path) -> None:
    found = pressure(roots=build(tmp_path, machines.no_cgroups()))
    assert (found.oom_kills, found.high_events, found.max_events) == (3, None, None)
    assert found.swap_used_bytes == GIB
    assert found.swapped_in_bytes == 1000 * PAGE_BYTES


def test_a_kernel_without_psi_has_no_stalls(tmp_path: Path) -> None:
    files = machines.no_cgroups()
    del files["proc/pressure/memory"]
    found = pressure(roots=build(tmp_path, files))
    assert (found.stall_source, found.some_avg10, found.full_avg10) == (None, None, None)


def test_kills_and_growth_of_swap_are_differences_of_two_samples(tmp_path: Path) -> None:
    roots = build(tmp_path, machines.no_cgroups())
    before = pressure(roots=roots)
    (roots.proc / "vmstat").write_text("pswpin 1500\noom_kill 5\n")
    meminfo = (roots.proc / "meminfo").read_text()
    used_before = f"SwapFree:        {7 * GIB // 1024}"
    (roots.proc / "meminfo").write_text(meminfo.replace(used_before, f"SwapFree: {(7 * GIB - 64 * MIB) // 1024}"))
    after = pressure(roots=roots)
    assert after.swap_growth_bytes(before) == 64 * MIB
    assert after.oom_kills_since(before) == 2


def test_differences_are_unknown_where_the_kernel_does_not_count(tmp_path: Path) -> None:
    known = pressure(roots=build(tmp_path, machines.no_cgroups()))
    unknown = replace(known, oom_kills=None, swap_used_bytes=None)
    for later, earlier in ((known, unknown), (unknown, known)):
        assert later.oom_kills_since(earlier) is None
        assert later.swap_growth_bytes(earlier) is None


def test_a_kill_counter_that_went_back_starts_from_zero(tmp_path: Path) -> None:
    """The process was moved to a fresh cgroup: its events begin again."""
    roots = build(tmp_path, machines.docker_v2_in_namespace())
    before = pressure(roots=roots)
    (roots.cgroup / "memory.events").write_text("high 0\nmax 1\noom_kill 1\n")
    assert pressure(roots=roots).oom_kills_since(before) == 1
