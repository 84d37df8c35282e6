"""A healthy machine, as facts and as files, for tests that change one thing about it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_machine import FakeMachine

from penstock.advice.machine_facts import MachineFacts
from penstock.meter import Gpu, GpuStatus, Limits, Pressure

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
