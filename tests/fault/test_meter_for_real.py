"""The meter inside real control groups and over real processes.

A process is started, told to hold what a test wants, and asked what the meter says from where it stands. It
answers on its standard output, and lives until its standard input closes, so nothing here waits for a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.meter import MemoryReport, TreeMeter, memory
from penstock.meter.kernel_files import parse_counters, read_text
from penstock.meter.processes.tree import Children
from support.faults.control_groups import control_group, enter, limit_memory

MIB, GIB = 1 << 20, 1 << 30
NOBODY = 65534

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def run_until_closed(code: str, *, before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    """A Python process that runs ``code`` and stays until its standard input closes."""
    script = f"import json, os, sys\n{code}\nsys.stdout.flush()\nsys.stdin.read()\n"
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )


@contextlib.contextmanager
def running(code: str, *, before: Callable[[], None] | None = None) -> Iterator[tuple[int, str]]:
    """The id of a process that has come to the end of ``code``, and the line it printed."""
    process = run_until_closed(code, before=before)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield process.pid, process.stdout.readline()
    finally:
        process.stdin.close()
        process.wait(timeout=60)
        process.stdout.close()


REPORT = """
import penstock.meter as meter
found = meter.limits()
print(json.dumps({"limit": found.memory_limit_bytes, "source": found.memory_limit_source,
                  "available": found.memory_available_bytes, "headroom": meter.headroom_bytes(),
                  "usable": found.cpu_usable, "quota": found.cpu_quota, "host": found.host_memory_bytes}))
"""


@linux
@pytest.mark.root
def test_a_one_gigabyte_group_shows_its_limit_and_what_is_left_of_it() -> None:
    held = 600 * MIB
    with control_group("memory", "limit") as (group,):
        limit_memory(group, 10**9)
        hold = f"held = bytearray({held})\nheld[::4096] = b'x' * len(held[::4096])\n"
        with running(hold + REPORT, before=enter(group)) as (pid, line):
            found = json.loads(line)
            stat = parse_counters((group / "memory.stat").read_text())
            usage_file = group / "memory.usage_in_bytes"
            usage = int((usage_file if usage_file.exists() else group / "memory.current").read_text())
            inactive = stat.get("total_inactive_file", stat["inactive_file"])
            private = memory(pid).uss_bytes
    limit = 10**9 // 4096 * 4096
    assert found["limit"] == limit < found["host"]
    assert found["source"].startswith(str(group))
    left = limit - (usage - inactive)
    assert found["available"] == pytest.approx(left, rel=0.05)
    assert found["headroom"] == pytest.approx(left, rel=0.05)
    # A figure made of the kernel's own counters could be wrong in both places; what was allocated could not.
    assert private is not None
    assert held < private
    assert found["available"] == pytest.approx(limit - private, rel=0.05)


@linux
@pytest.mark.root
def test_the_tighter_parent_of_a_group_is_the_limit() -> None:
    with control_group("memory", "outer", "inner") as (outer, inner):
        limit_memory(outer, 300 * MIB)
        limit_memory(inner, 800 * MIB)
        with running(REPORT, before=enter(inner)) as (_, line):
            found = json.loads(line)
    assert found["limit"] == 300 * MIB
    assert Path(found["source"]).parent == outer
    assert found["available"] < 300 * MIB


@linux
@pytest.mark.root
def test_memory_of_a_sibling_in_the_same_parent_is_not_available() -> None:
    with control_group("memory", "shared", "mine") as (outer, mine):
        limit_memory(outer, 500 * MIB)
        sibling = outer / "sibling"
        sibling.mkdir()
        try:
            hold = f"held = bytearray({200 * MIB})\nheld[::4096] = b'x' * len(held[::4096])\nprint()"
            with running(hold, before=enter(sibling)), running(REPORT, before=enter(mine)) as (_, line):
                found = json.loads(line)
        finally:
            sibling.rmdir()
    assert 250 * MIB < found["available"] < 300 * MIB


@linux
@pytest.mark.root
def test_files_in_shared_memory_are_not_available_though_they_are_page_cache() -> None:
    with control_group("memory", "shm") as (group,):
        limit_memory(group, 500 * MIB)
        hold = f"fd = os.memfd_create('held')\nos.posix_fallocate(fd, 0, {200 * MIB})\n"
        with running(hold + REPORT, before=enter(group)) as (_, line):
            found = json.loads(line)
    assert 250 * MIB < found["available"] < 300 * MIB


@linux
@pytest.mark.root
def test_half_a_processor_is_half_a_processor() -> None:
    with control_group("cpu", "quota") as (group,):
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text("50000 100000")
        else:
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text("50000")
        with running(REPORT, before=enter(group)) as (_, line):
            found = json.loads(line)
    assert found["quota"] == 0.5
    assert found["usable"] == 0.5


FORK_FOUR = f"""
shared = bytearray({GIB})
shared[::4096] = b"x" * len(shared[::4096])
ready, done = os.pipe(), os.pipe()
for child in range(4):
    if os.fork() == 0:
        own = b"y" * {8 * MIB}
        os.write(ready[1], b".")
        os.close(done[1])
        os.read(done[0], 1)
        os._exit(0)
os.close(done[0])
for child in range(4):
    os.read(ready[0], 1)
print("ready")
"""


@linux
def test_four_children_sharing_a_gibibyte_are_one_gibibyte_and_their_own_pages() -> None:
    with running(FORK_FOUR) as (pid, line):
        assert line == "ready\n"
        report = memory(pid)
        assert report.pss_bytes is not None
        assert report.uss_bytes is not None
        truth = sum(
            parse_counters(Path(f"/proc/{one.pid}/smaps_rollup").read_text())["Pss"] for one in report.processes
        )
        meter = TreeMeter(pid)
        first, second = meter.poll(), meter.poll()
    assert len(report.processes) == 5
    assert report.exact
    assert report.skipped == ()
    assert report.rss_bytes > 5 * GIB
    assert report.pss_bytes == pytest.approx(truth, rel=0.02)
    assert GIB + 32 * MIB < report.pss_bytes < 1.15 * GIB
    assert 32 * MIB <= report.uss_bytes < 200 * MIB
    assert (first.exact, second.exact) == (True, False)
    assert second.pss_bytes == pytest.approx(truth, rel=0.02)


CHURN = """
print("churning", flush=True)
import threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True:
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
"""


@linux
@pytest.mark.parametrize("exact", [True, False])
def test_children_that_die_while_they_are_read_are_tolerated(exact: bool) -> None:
    with running(CHURN) as (pid, line):
        assert line == "churning\n"
        meter = TreeMeter(pid, exact_every_s=0)
        reports: list[MemoryReport] = []
        # As many looks as it takes to catch some children alive and some dying; pytest's timeout bounds it.
        while len(reports) < 200 or not _caught_both(reports):
            reports.append(memory(pid, exact=exact))
            reports.append(meter.poll())
    assert all(report.processes[0].pid == pid for report in reports)
    assert all(one.rss_bytes > 0 for report in reports for one in report.processes)


def _caught_both(reports: list[MemoryReport]) -> bool:
    return any(report.skipped for report in reports) and any(len(report.processes) > 1 for report in reports)


@linux
def test_a_zombie_holds_no_memory() -> None:
    make_zombie = """
read, write = os.pipe()
child = os.fork()
if child == 0:
    os._exit(0)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
print(child)
"""
    with running(make_zombie) as (pid, line):
        zombie = int(line)
        for exact in (True, False):
            report = memory(pid, exact=exact)
            assert [one.pid for one in report.processes] == [pid]
            assert report.skipped == (zombie,)


@linux
@pytest.mark.parametrize("exact", [True, False])
def test_kernel_threads_hold_no_memory(exact: bool) -> None:
    if read_text("/proc/2/comm") != "kthreadd\n":
        pytest.skip("kernel threads cannot be seen from this container")
    report = memory(2, exact=exact)
    assert (report.processes, report.rss_bytes, report.skipped) == ((), 0, (2,))


LOOK_AS_NOBODY = f"""
sys.path[:0] = {[path for path in sys.path if path]!r}
from penstock.meter import memory
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
report = memory(os.getppid())
print(json.dumps({{"rss": report.rss_bytes, "pss": report.pss_bytes, "skipped": report.skipped,
                  "pids": [one.pid for one in report.processes]}}))
"""


@linux
@pytest.mark.root
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may become another user")
def test_processes_of_another_user_count_in_rss_and_are_named_as_skipped() -> None:
    with running(LOOK_AS_NOBODY) as (pid, line):
        found = json.loads(line)
        assert os.getpid() in found["pids"]
        assert os.getpid() in found["skipped"]
        assert pid in found["pids"]
        assert found["rss"] > 0
        # Root reads them all, whoever they belong to.
        assert memory(pid).skipped == ()


@linux
def test_a_kernel_that_keeps_no_lists_of_children_gives_the_same_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running(FORK_FOUR.replace(str(GIB), str(MIB))) as (pid, line):
        assert line == "ready\n"
        listed = {one.pid for one in memory(pid, exact=False).processes}
        monkeypatch.setattr(Children, "_listed", lambda self, pid: None)
        assert {one.pid for one in memory(pid, exact=False).processes} == listed
    assert len(listed) == 5


@linux
def test_a_tree_of_hundreds_is_read_whole() -> None:
    fork_many = """
ready, done = os.pipe(), os.pipe()
for child in range(300):
    if os.fork() == 0:
        os.close(done[1])
        os.write(ready[1], b".")
        os.read(done[0], 1)
        os._exit(0)
os.close(done[0])
seen = 0
while seen < 300:
    seen += len(os.read(ready[0], 300))
print("ready")
"""
    with running(fork_many) as (pid, line):
        assert line == "ready\n"
        assert len(memory(pid, exact=False).processes) == 301
        report = memory(pid)
        assert len(report.processes) == 301
        assert report.pss_bytes is not None
        assert report.pss_bytes < report.rss_bytes
