"""Stalls, kills and swapping, now and between two polls."""

from __future__ import annotations

from pathlib import Path

from penstock.meter import PressureMeter, pressure
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


def test_rates_are_differences_over_the_time_between_two_polls(tmp_path: Path) -> None:
    clock = iter([10.0, 12.0])
    roots = build(tmp_path, machines.no_cgroups())
    meter = PressureMeter(clock=lambda: next(clock), roots=roots)
    first = meter.poll()
    assert (first.swap_in_bytes_per_s, first.swap_growth_bytes, first.oom_kills) == (None, None, None)
    assert first.elapsed_s == 0
    (roots.proc / "vmstat").write_text("pswpin 1500\noom_kill 5\n")
    meminfo = (roots.proc / "meminfo").read_text()
    used_before = f"SwapFree:        {7 * GIB // 1024}"
    (roots.proc / "meminfo").write_text(meminfo.replace(used_before, f"SwapFree: {(7 * GIB - 64 * MIB) // 1024}"))
    second = meter.poll()
    assert second.elapsed_s == 2
    assert second.swap_in_bytes_per_s == 250 * PAGE_BYTES
    assert second.swap_growth_bytes == 64 * MIB
    assert second.oom_kills == 2


def test_a_counter_that_went_back_starts_from_nothing(tmp_path: Path) -> None:
    """The process was moved to a fresh cgroup: its events begin again."""
    roots = build(tmp_path, machines.docker_v2_in_namespace())
    meter = PressureMeter(clock=lambda: 0.0, roots=roots)
    meter.poll()
    (roots.cgroup / "memory.events").write_text("high 0\nmax 1\noom_kill 0\n")
    rates = meter.poll()
    assert (rates.oom_kills, rates.max_events) == (0, 1)
    assert rates.swap_in_bytes_per_s is None
