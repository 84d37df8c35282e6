"""What unit tests of several rooms ask for: a healthy machine, as facts and as files, and folders of their own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.advice.machine import MachineFacts
from penstock.meter import Gpu, GpuStatus, Limits, Pressure
from support.machines.healthy import FakeMachine

GIB = 1 << 30


@pytest.fixture
def healthy() -> MachineFacts:
    """64 GiB, 16 cores, one GPU, nothing wrong."""
    return MachineFacts(
        platform="linux",
        limits=Limits(
            memory_limit_bytes=64 * GIB,
            memory_limit_source="host",
            host_memory_bytes=64 * GIB,
            memory_available_bytes=48 * GIB,
            working_set_bytes=16 * GIB,
            swap_total_bytes=8 * GIB,
            swap_used_bytes=0,
            shm_size_bytes=32 * GIB,
            shm_used_bytes=0,
            open_files_soft=65536,
            open_files_hard=1048576,
            open_files_used=20,
            cpu_count=16,
            cpu_affinity=16,
            cpu_quota=None,
            cpu_usable=16.0,
            cgroup="v2",
            unknown=(),
        ),
        pressure=Pressure(
            stall_source="host",
            some_avg10=0.0,
            full_avg10=0.0,
            oom_kills=0,
            high_events=0,
            max_events=0,
            swap_used_bytes=0,
            swapped_in_bytes=0,
        ),
        gpu=GpuStatus(
            gpu_library="nvml",
            reason="1 device",
            gpus=(
                Gpu(
                    index=0,
                    name="NVIDIA H200",
                    uuid="GPU-0",
                    memory_total_bytes=141 * GIB,
                    memory_used_bytes=GIB,
                    utilisation_percent=7,
                ),
            ),
        ),
    )


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short, because sockets live in it."""
    folder = Path(tempfile.mkdtemp(prefix="ps-"))
    monkeypatch.setenv("PENSTOCK_HOME", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The caches of a test are its own: loaders of the same dataset share the cache they make of a size."""
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield
    assert not list(folder.glob("penstock/*")), "a cache's file was left behind"
