"""The other limits: swap, shared memory, open files, processors; and machines that say nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.meter import Roots, headroom_bytes, limits, memory, pressure, spare_files
from support.machines import layouts as machines
from support.machines.layouts import GIB, MIB, Filesystem, build


def test_swap_is_the_hosts_where_the_host_sets_the_limit(tmp_path: Path) -> None:
    found = limits(roots=build(tmp_path, machines.no_cgroups()))
    assert (found.swap_total_bytes, found.swap_used_bytes) == (8 * GIB, GIB)


def test_swap_is_the_groups_where_a_v2_group_sets_the_limit(tmp_path: Path) -> None:
    found = limits(roots=build(tmp_path, machines.docker_v2_in_namespace()))
    assert (found.swap_total_bytes, found.swap_used_bytes) == (GIB, 64 * MIB)


def test_swap_is_what_memory_and_swap_together_leave_in_a_v1_group(tmp_path: Path) -> None:
    files = machines.docker_v1() | {"cgroup/memory/memory.memsw.limit_in_bytes": f"{5 * GIB}\n"}
    found = limits(roots=build(tmp_path, files))
    assert (found.swap_total_bytes, found.swap_used_bytes) == (3 * GIB, 3 * MIB)


def test_size_and_use_of_shared_memory_are_those_of_the_file_system(tmp_path: Path) -> None:
    small = Filesystem(f_blocks=16384, f_bfree=4096)
    found = limits(roots=build(tmp_path, machines.no_cgroups(), shm=small))
    assert (found.shm_size_bytes, found.shm_used_bytes) == (64 * MIB, 48 * MIB)


def test_a_tmpfs_without_a_size_is_as_large_as_memory(tmp_path: Path) -> None:
    found = limits(roots=build(tmp_path, machines.no_cgroups(), shm=Filesystem(f_blocks=0, f_bfree=0)))
    assert (found.shm_size_bytes, found.shm_used_bytes) == (64 * GIB, None)


def test_open_files_are_limited_softly_and_hard(tmp_path: Path) -> None:
    found = limits(roots=build(tmp_path, machines.no_cgroups()))
    assert (found.open_files_soft, found.open_files_hard, found.open_files_used) == (1024, 1048576, 3)
    assert spare_files(roots=build(tmp_path / "again", machines.no_cgroups())) == 1021


def test_unlimited_open_files_are_no_number(tmp_path: Path) -> None:
    files = machines.no_cgroups() | {"proc/self/limits": "Max open files   unlimited   unlimited   files\n"}
    roots = build(tmp_path, files)
    found = limits(roots=roots)
    assert (found.open_files_soft, found.open_files_hard) == (None, None)
    assert spare_files(roots=roots) is None


def test_affinity_counts_only_processors_that_exist(tmp_path: Path) -> None:
    files = machines.no_cgroups() | {"proc/self/status": "Cpus_allowed_list:\t2-3,6,128-255\n"}
    found = limits(roots=build(tmp_path, files))
    assert (found.cpu_count, found.cpu_affinity, found.cpu_usable) == (8, 3, 3.0)


def test_the_smaller_of_affinity_and_quota_is_usable(tmp_path: Path) -> None:
    files = machines.v2_host() | {"proc/self/status": "Cpus_allowed_list:\t0\n"}
    assert limits(roots=build(tmp_path, files)).cpu_usable == 1.0


def test_an_old_kernel_without_memavailable_counts_free_and_inactive_file(tmp_path: Path) -> None:
    files = machines.no_cgroups()
    files["proc/meminfo"] = files["proc/meminfo"].replace("MemAvailable:", "Other:")
    assert limits(roots=build(tmp_path, files)).memory_available_bytes == 3 * GIB


def test_a_machine_with_no_files_at_all_answers_and_names_what_is_unknown(tmp_path: Path) -> None:
    nowhere = Roots(
        proc=tmp_path / "proc",
        cgroup=tmp_path / "cg",
        cpu=tmp_path / "cpu",
        dev_shm=tmp_path / "shm",
        platform="linux",
    )
    found = limits(roots=nowhere)
    assert found.memory_limit_bytes > 0
    assert found.memory_available_bytes > 0
    assert found.cpu_count == os.cpu_count()
    assert found.cpu_usable >= 1
    assert found.shm_size_bytes is None
    assert {note.split(":")[0] for note in found.unknown} == {
        "host_memory_bytes",
        "cpu_affinity",
        "shm_size_bytes",
        "open_files_used",
    }


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_platforms_give_what_psutil_gives_and_name_the_rest(platform: str) -> None:
    roots = Roots(platform=platform)
    found = limits(roots=roots)
    unknown = {note.split(":")[0] for note in found.unknown}
    assert found.memory_limit_source == "host"
    assert 0 < found.memory_available_bytes <= found.memory_limit_bytes
    assert 0 < headroom_bytes(roots=roots) <= found.memory_limit_bytes
    assert found.cgroup == "none"
    assert {"memory_limit_bytes", "shm_size_bytes", "cpu_quota"} <= unknown
    assert ("cpu_affinity" in unknown) == (platform == "darwin")
    assert ("open_files_soft" in unknown) == (platform == "win32")


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_tree_memory_on_other_platforms_has_rss_and_uss_and_no_pss(platform: str) -> None:
    exact = memory(roots=Roots(platform=platform))
    cheap = memory(exact=False, roots=Roots(platform=platform))
    assert exact.processes[0].pid == cheap.processes[0].pid == os.getpid()
    assert exact.rss_bytes > 0
    assert exact.uss_bytes is not None
    assert cheap.uss_bytes is None
    assert exact.pss_bytes is None
    assert not exact.exact


def test_tree_memory_on_other_platforms_is_empty_for_a_process_that_has_ended() -> None:
    report = memory(2**22 + 1, roots=Roots(platform="darwin"))
    assert report.processes == ()
    assert report.skipped == (2**22 + 1,)


def test_pressure_on_other_platforms_is_swap_alone() -> None:
    found = pressure(roots=Roots(platform="darwin"))
    assert found.swap_used_bytes is not None
    assert (found.some_avg10, found.oom_kills, found.stall_source) == (None, None, None)


def test_this_machine_answers_through_the_public_names() -> None:
    found = penstock.limits()
    assert 0 < found.memory_available_bytes <= found.memory_limit_bytes <= found.host_memory_bytes
    assert 0 < found.cpu_usable <= found.cpu_count
    assert penstock.memory().rss_bytes > 0


def test_the_meter_loads_neither_torch_nor_psutil_nor_nvml() -> None:
    heavy = "import sys, penstock.meter as m; m.limits(); m.memory(); m.pressure(); m.headroom_bytes()\n"
    heavy += "print(sorted({'torch', 'psutil', 'numpy', 'pynvml'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"
