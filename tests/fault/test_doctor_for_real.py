"""The doctor inside real limits: a memory cgroup, a CPU quota, a small /dev/shm. Needs root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.root

MIB = 1 << 20
LIMIT_BYTES = 10**9
DOCTOR = [sys.executable, "-m", "penstock", "doctor", "--json"]


def controller_dir(controller: str) -> Path:
    """This process's own cgroup under a controller, v1 or v2, writable; skips where there is none."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("needs root to make cgroups and mounts")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return existing(Path("/sys/fs/cgroup") / controller / path.lstrip("/"))
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            here = existing(Path("/sys/fs/cgroup") / line[3:].lstrip("/"))
            if controller in (here / "cgroup.subtree_control").read_text().split():
                return here
    pytest.skip(f"the {controller} controller cannot be delegated from this process's cgroup")


def existing(directory: Path) -> Path:
    if not os.access(directory, os.W_OK):
        pytest.skip(f"{directory} is not here, or is read-only")
    return directory


def remove(group: Path) -> None:
    deadline_s = time.monotonic() + 10
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            # Its last process is still being reaped.
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


@pytest.fixture
def memory_group() -> Iterator[Path]:
    group = controller_dir("memory") / f"penstock-test-{uuid.uuid4().hex[:12]}"
    group.mkdir()
    try:
        limit_file = group / "memory.max"
        if not limit_file.exists():
            limit_file = group / "memory.limit_in_bytes"
        limit_file.write_text(str(LIMIT_BYTES))
        yield group
    finally:
        remove(group)


@pytest.fixture
def cpu_group() -> Iterator[Path]:
    group = controller_dir("cpu") / f"penstock-test-{uuid.uuid4().hex[:12]}"
    group.mkdir()
    try:
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text("50000 100000")
        else:
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text("50000")
        yield group
    finally:
        remove(group)


def run_in_group(group: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command as a member of the group from its first instruction on."""
    enter = 'echo $$ > "$0" && exec "$@"'
    return subprocess.run(
        ["sh", "-c", enter, str(group / "cgroup.procs"), *command],
        capture_output=True,
        text=True,
        timeout=120,
    )


def doctor_answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def finding_ids(answer: dict[str, Any]) -> set[str]:
    return {finding["id"] for finding in answer["findings"]}


def used_bytes(group: Path) -> int:
    usage_file = group / "memory.current"
    if not usage_file.exists():
        usage_file = group / "memory.usage_in_bytes"
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return int(usage_file.read_text()) - reclaimable


@pytest.mark.parametrize("held_bytes", [0, 600 * 10**6], ids=["empty", "600 MB held"])
def test_a_real_memory_limit_is_reported_with_the_headroom_left_in_it(memory_group: Path, held_bytes: int) -> None:
    hold = (
        "import sys; held = bytearray(int(sys.argv[1])); held[::4096] = b'x' * len(held[::4096]); "
        "print('ready', flush=True); sys.stdin.read()"
    )
    enter = 'echo $$ > "$0" && exec "$@"'
    command = [sys.executable, "-c", hold, str(held_bytes)]
    with subprocess.Popen(
        ["sh", "-c", enter, str(memory_group / "cgroup.procs"), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        truth_bytes = LIMIT_BYTES - used_bytes(memory_group)
        answer = doctor_answer(run_in_group(memory_group, DOCTOR))
        holder.communicate()
    assert answer["memory"]["limit_bytes"] == pytest.approx(LIMIT_BYTES, abs=4096)
    assert answer["memory"]["available_bytes"] == pytest.approx(truth_bytes, rel=0.05)
    assert "memory-limit" in finding_ids(answer)


def test_a_real_quota_of_half_a_core_is_reported(cpu_group: Path) -> None:
    answer = doctor_answer(run_in_group(cpu_group, DOCTOR))
    assert answer["cpu"]["quota"] == pytest.approx(0.5)
    assert answer["cpu"]["usable"] == pytest.approx(0.5)
    quota = next(finding for finding in answer["findings"] if finding["id"] == "cpu-quota")
    assert quota["severity"] == "hurts"


def test_a_real_small_dev_shm_is_flagged() -> None:
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("needs root to mount")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine does not allow mount namespaces")
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", mount, "sh", *DOCTOR],
        capture_output=True,
        text=True,
        timeout=120,
    )
    answer = doctor_answer(done)
    assert answer["shm"]["size_bytes"] == 64 * MIB
    small = next(finding for finding in answer["findings"] if finding["id"] == "shm-small")
    assert small["severity"] == "hurts"
    assert "64.0 MiB" in small["what"]
    assert "--shm-size" in small["fix"]


def test_a_real_kill_for_want_of_memory_is_remembered(memory_group: Path) -> None:
    too_much = "held = bytearray(2 * 10**9); held[::4096] = b'x' * len(held[::4096])"
    killed = run_in_group(memory_group, [sys.executable, "-c", too_much])
    assert killed.returncode == -9 or killed.returncode == 137
    answer = doctor_answer(run_in_group(memory_group, DOCTOR))
    assert answer["pressure"]["oom_kills"] >= 1
    assert "oom-kills" in finding_ids(answer)
