"""The budget against the kernel: real control groups that kill, a real 64 MB /dev/shm.

Every training here is a process of its own. It prints one line of JSON, unless the kernel was quicker.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_meter_for_real import control_group, enter, limit_memory

MIB = 1 << 20

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="control groups and tmpfs"),
    pytest.mark.xdist_group("budget for real"),
]

TRAINING = """
import json, sys, time, warnings
import torch
import penstock
warnings.simplefilter("ignore")

class Images(torch.utils.data.Dataset):
    def __init__(self, count, sample_bytes, sample_s):
        self.count, self.sample_bytes, self.sample_s = count, sample_bytes, sample_s
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        time.sleep(self.sample_s)
        return torch.full((self.sample_bytes,), index % 251, dtype=torch.uint8)

def train(kind, *, count, sample_bytes, sample_s, batch_size, workers, step_s=0.0, **more):
    torch.set_num_threads(1)
    loader = {"torch": torch.utils.data.DataLoader, "penstock": penstock.DataLoader}[kind](
        Images(count, sample_bytes, sample_s), batch_size=batch_size, num_workers=workers, **more)
    batches, began, first_s = 0, time.perf_counter(), None
    for number, batch in enumerate(loader):
        if first_s is None:
            first_s = time.perf_counter() - began
        assert int(batch[0, 0]) == number * batch_size % 251 and int(batch[-1, -1]) == int(batch[-1, 0])
        batches += 1
        if step_s:
            time.sleep(step_s)
    spent_s = time.perf_counter() - began
    peak = loader.stats().peak_in_flight_bytes if kind == "penstock" else 0
    # The first batch waits for processes to start, which is not throughput.
    rate = (count - batch_size) / (spent_s - first_s)
    print(json.dumps({"batches": batches, "samples_per_s": rate, "peak": peak}), flush=True)
"""


def train(code: str, *, group: Path | None = None, prefix: tuple[str, ...] = ()) -> tuple[int, dict[str, Any], str]:
    """Exit status, the line of JSON, and what was said on standard error."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", TRAINING + code],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=None if group is None else enter(group),
        cwd="/",
        check=False,
    )
    lines = done.stdout.splitlines()
    return done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr


def base_bytes(group: Path) -> int:
    """What a process that imported everything takes in a group, before any batch."""
    code = TRAINING + "print(open(sys.argv[1]).read())"
    usage = group / "memory.usage_in_bytes"
    counter = usage if usage.exists() else group / "memory.current"
    done = subprocess.run(
        [sys.executable, "-c", code, str(counter)],
        capture_output=True,
        text=True,
        preexec_fn=enter(group),
        cwd="/",
        check=True,
    )
    return int(done.stdout)


def was_killed(status: int, errors: str) -> bool:
    """The kernel took the trainer, or one of its workers."""
    return status == -signal.SIGKILL or "killed by signal: Killed" in errors or "SIGKILL" in errors


ARGUMENTS = "count=960, sample_bytes=1 << 20, sample_s=0.01, batch_size=32, workers=4"
BATCHES = 30
TORCH_DIES = f"train('torch', {ARGUMENTS}, prefetch_factor=4, step_s=0.15)"
"""A step that takes longer than loading: sixteen batches of 32 MiB pile up, as many as torch was allowed."""


def test_penstock_finishes_at_full_speed_where_torch_is_killed() -> None:
    with control_group("memory", "budget") as (group,):
        room = 320 * MIB
        limit_memory(group, base_bytes(group) + room)
        status, found, errors = train(TORCH_DIES, group=group)
        assert not found and was_killed(status, errors), f"torch was to die here: {status} {found} {errors[-500:]}"
        limited, unlimited = 0.0, 0.0
        # In turn, and the best of each until they are alike: others use this machine too.
        for _ in range(5):
            status, found, errors = train(f"train('penstock', {ARGUMENTS}, memory={room - 60 * MIB})", group=group)
            assert status == 0, errors
            assert found["batches"] == BATCHES
            assert found["peak"] <= room
            limited = max(limited, found["samples_per_s"])
            status, found, errors = train(f"train('penstock', {ARGUMENTS})")
            assert status == 0, errors
            unlimited = max(unlimited, found["samples_per_s"])
            if limited >= 0.9 * unlimited:
                break
    assert limited >= 0.9 * unlimited, f"{limited:.0f} samples/s under the limit, {unlimited:.0f} without"


def test_the_default_budget_survives_where_torch_is_killed() -> None:
    """memory="auto" in a container: no number from the user at all."""
    with control_group("memory", "auto") as (group,):
        limit_memory(group, base_bytes(group) + 320 * MIB)
        status, found, errors = train(TORCH_DIES, group=group)
        assert not found and was_killed(status, errors), f"torch was to die here: {status} {found} {errors[-500:]}"
        status, found, errors = train(f"train('penstock', {ARGUMENTS}, step_s=0.15)", group=group)
    assert status == 0, errors
    assert found["batches"] == BATCHES


def test_a_budget_larger_than_the_container_is_held_by_the_container() -> None:
    """The user allowed more than there is: the machine's headroom bounds what is set aside, batch by batch."""
    with control_group("memory", "generous") as (group,):
        limit_memory(group, base_bytes(group) + 320 * MIB)
        arguments = "count=160, sample_bytes=8 << 20, sample_s=0.002, batch_size=8, workers=2, step_s=0.02"
        status, found, errors = train(f"train('penstock', {arguments}, memory=4 << 30)", group=group)
    assert status == 0, f"{status} {errors[-800:]}"
    assert found["batches"] == 20


def test_a_batch_the_container_cannot_hold_is_an_error_with_numbers_and_not_a_kill() -> None:
    code = """
loader = penstock.DataLoader(Images(16, 32 << 20, 0.0), batch_size=16, num_workers=2, memory=2 << 30)
try:
    for batch in loader:
        pass
except penstock.BudgetError as error:
    print(json.dumps({"error": str(error), "left": loader.stats().in_flight_bytes}), flush=True)
loader.close()
small = penstock.DataLoader(Images(16, 1 << 20, 0.0), batch_size=4, num_workers=2)
assert sum(1 for _ in small) == 4
"""
    with control_group("memory", "giant") as (group,):
        limit_memory(group, base_bytes(group) + 300 * MIB)
        status, found, errors = train(code, group=group)
    assert status == 0, f"{status} {errors[-800:]}"
    assert "512 MiB" in found["error"] and "batch 0" in found["error"], found
    assert found["error"].count("MiB") >= 2, found
    assert found["left"] == 0


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
def test_batches_larger_than_dev_shm_flow() -> None:
    """88 MB batches through a private mount with a /dev/shm of 64 MB, docker's default."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    prefix = ("unshare", "-m", "sh", "-c", mount, "sh")
    probe = subprocess.run([*prefix, "df", "-m", "/dev/shm"], capture_output=True, text=True, check=False)
    if probe.returncode or " 64 " not in probe.stdout:
        pytest.skip(f"cannot mount here: {probe.stderr}")
    arguments = "count=80, sample_bytes=11_000_000, sample_s=0.0, batch_size=8, workers=2"
    status, found, errors = train(f"train('penstock', {arguments})", prefix=prefix)
    assert status == 0, errors
    assert found["batches"] == 10
    status, found, errors = train(f"train('torch', {arguments})", prefix=prefix)
    assert not found, f"torch was to fail here, or this test shows nothing: {status} {found}"


PEAK = """
import gc, json, sys, warnings
warnings.simplefilter("ignore")
import torch
from support.datasets import sized as data
import penstock
torch.set_num_threads(1)
MIB = 1 << 20
group = sys.argv[1]

def counter(name):
    return int(open(f"{group}/{name}").read())

def peak_of(sizes, workers, memory, kind="Sized", collate=None):
    gc.collect()
    base = counter("memory.usage_in_bytes")
    open(f"{group}/memory.max_usage_in_bytes", "w").write("0")
    loader = penstock.DataLoader(getattr(data, kind)(sizes), batch_size=data.BATCH_ROWS, num_workers=workers,
                                 memory=memory, collate_fn=collate and getattr(data, collate))
    with loader:
        for number, batch in enumerate(loader):
            assert all(int(row[0]) == int(row[-1]) for row in batch)
            del batch
    return counter("memory.max_usage_in_bytes") - base

SAME, VARYING = [30 * MIB] * 20, [30 * MIB, 41 * MIB, 52 * MIB, 63 * MIB, 20 * MIB] * 5
peak_of([MIB, 30 * MIB] * 2, 2, 400 * MIB)
peak_of([MIB, 30 * MIB] * 2, 2, 400 * MIB, collate="stacked")
"""
_KERNEL_BYTES_PER_WORKER = 5 * MIB
"""Page tables and task structures the kernel charges to the group: no memory of ours, and no part of PSS."""


@pytest.mark.soak  # peaks depend on who is measured when: open for collate functions of one's own
@pytest.mark.parametrize(
    ("call", "workers", "memory"),
    [
        pytest.param("SAME, 4, {}", 4, 260 * MIB, id="same sizes"),
        pytest.param("SAME, 4, {}", 4, 140 * MIB, id="same sizes, tight"),
        pytest.param("SAME, 4, {}, collate='stacked'", 4, 200 * MIB, id="same sizes, own collate"),
        pytest.param("SAME, 4, {}, 'SizedWhole'", 4, 260 * MIB, id="whole batches"),
        pytest.param("SAME, 4, {}, 'SizedWhole', 'stacked'", 4, 400 * MIB, id="whole batches, own collate"),
        pytest.param("VARYING, 4, {}", 4, 260 * MIB, id="varying sizes"),
        pytest.param("VARYING, 4, {}, collate='stacked'", 4, 300 * MIB, id="varying sizes, own collate"),
        pytest.param("VARYING, 1, {}, 'SizedStream'", 1, 200 * MIB, id="stream of varying sizes"),
        pytest.param("([1024] * 20 + [60 * MIB] + [1024] * 20) * 3, 2, {}", 2, 200 * MIB, id="giants"),
        pytest.param("[24 * MIB] * 16, 3, {}", 3, 96 * MIB, id="room for two batches and the workers, no more"),
        # Unpickled bytes are the user's own memory: one batch of 32 MiB in the loop's hands is on top.
        pytest.param("[32 * MIB] * 14, 1, {} - 32 * MIB, 'SizedBytes', 'listed'", 1, 232 * MIB, id="encoded images"),
        pytest.param("[32 * MIB] * 14, 3, {} - 32 * MIB, 'SizedBytes', 'listed'", 3, 232 * MIB, id="encoded images, 3"),
        pytest.param("[32 * MIB] * 14, 1, {} - 32 * MIB, 'SizedBytes'", 1, 232 * MIB, id="raw bytes"),
        pytest.param("[32 * MIB] * 14, 3, {} - 32 * MIB, 'SizedBytes'", 3, 232 * MIB, id="raw bytes, 3"),
    ],
)
def test_the_kernels_own_peak_stays_inside_the_budget(call: str, workers: int, memory: int) -> None:
    """The group's high-water mark misses nothing, unlike any sampling of PSS."""
    with control_group("memory", "peak") as (group,):
        if not (group / "memory.max_usage_in_bytes").exists():
            pytest.skip("no resettable high-water mark in this version of control groups")
        done = subprocess.run(
            [sys.executable, "-c", PEAK + f"print(peak_of({call.format(memory)}))", str(group)],
            capture_output=True,
            text=True,
            timeout=120,
            preexec_fn=enter(group),
            check=False,
        )
    assert done.returncode == 0, done.stderr[-800:]
    peak = int(done.stdout)
    allowed = int(1.03 * memory) + workers * _KERNEL_BYTES_PER_WORKER
    assert peak <= allowed, f"peak {peak >> 20} MiB under a budget of {memory >> 20} MiB"
