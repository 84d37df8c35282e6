"""GPUs through a stand-in for NVML."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.meter import Roots, gpu_status, gpus
from support.machines import layouts as machines
from support.machines.layouts import GIB, build


class NVMLError(Exception):
    pass


class FakeNvml:
    """As many devices as told, which refuse the questions they are told to refuse."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 0x2000028

    def __init__(self, count: int = 1, *, refuses: tuple[str, ...] = (), text: type = str) -> None:
        self.count = count
        self.refuses = refuses
        self.text = text

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "refuses"):
            return self._refuse
        return object.__getattribute__(self, name)

    def _refuse(self, *_: object) -> None:
        raise NVMLError("Not Supported")

    def _say(self, text: str) -> str | bytes:
        return text if self.text is str else text.encode()

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, device: int) -> str | bytes:
        return self._say("NVIDIA H200")

    def nvmlDeviceGetUUID(self, device: int) -> str | bytes:
        return self._say(f"GPU-{device}-abc")

    def nvmlDeviceGetMemoryInfo(self, device: int, version: int | None = None) -> SimpleNamespace:
        if version is not None and "v2 memory" in self.refuses:
            raise NVMLError("Function Not Found")
        return SimpleNamespace(total=141 * GIB, used=2 * GIB if version else 3 * GIB)

    def nvmlDeviceGetUtilizationRates(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=4242, usedGpuMemory=GIB), SimpleNamespace(pid=4343, usedGpuMemory=None)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, device: int) -> list[SimpleNamespace]:
        return []


def test_every_device_is_described() -> None:
    status = gpu_status(nvml=FakeNvml(2))
    assert status.gpu_library == "nvml"
    assert [gpu.index for gpu in status.gpus] == [0, 1]
    gpu = status.gpus[0]
    assert (gpu.name, gpu.uuid) == ("NVIDIA H200", "GPU-0-abc")
    assert (gpu.memory_total_bytes, gpu.memory_used_bytes, gpu.utilisation_percent) == (
        141 * GIB,
        2 * GIB,
        87,
    )
    assert gpu.processes == {4242: GIB, 4343: None}
    assert gpus(nvml=FakeNvml(2)) == status.gpus


def test_older_drivers_and_bindings_are_understood() -> None:
    (gpu,) = gpus(nvml=FakeNvml(refuses=("v2 memory",), text=bytes))
    assert gpu.memory_used_bytes == 3 * GIB
    assert gpu.name == "NVIDIA H200"


def test_bindings_that_know_one_kind_of_memory_question_are_asked_that_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(FakeNvml, "nvmlMemory_v2")
    assert gpus(nvml=FakeNvml())[0].memory_used_bytes == 3 * GIB


def test_a_device_that_answers_little_is_still_a_device() -> None:
    refuses = (
        "nvmlDeviceGetName",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetGraphicsRunningProcesses",
    )
    (gpu,) = gpus(nvml=FakeNvml(refuses=refuses))
    assert (gpu.name, gpu.memory_total_bytes, gpu.memory_used_bytes) == ("unknown", None, None)
    assert (gpu.utilisation_percent, gpu.processes) == (None, {})


def test_no_device_is_a_normal_answer() -> None:
    assert gpu_status(nvml=FakeNvml(0)).gpu_library == "no device"
    assert gpus(nvml=FakeNvml(0)) == ()


def test_a_device_that_fell_off_the_bus_is_left_out() -> None:
    assert gpus(nvml=FakeNvml(refuses=("nvmlDeviceGetHandleByIndex",))) == ()


def test_no_driver_library_and_no_driver_means_no_device(tmp_path: Path) -> None:
    status = gpu_status(nvml=FakeNvml(refuses=("nvmlInit",)), roots=build(tmp_path, machines.no_cgroups()))
    assert status.gpu_library == "no device"
    assert "Not Supported" in status.reason


def test_a_driver_whose_library_does_not_answer_is_a_missing_library(tmp_path: Path) -> None:
    files = machines.no_cgroups() | {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64\n"}
    status = gpu_status(nvml=FakeNvml(refuses=("nvmlInit",)), roots=build(tmp_path, files))
    assert status.gpu_library == "missing"


def test_missing_bindings_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    status = gpu_status()
    assert status.gpu_library == "missing"
    assert "penstock[gpu]" in status.reason
    assert status.gpus == ()


def fake_torch(*, initialized: bool) -> SimpleNamespace:
    """torch sees one device, which is NVML's second: CUDA_VISIBLE_DEVICES=1."""
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_initialized=lambda: initialized,
            device_count=lambda: 1,
            get_device_properties=lambda number: SimpleNamespace(uuid="1-abc"),
            memory_allocated=lambda number: 5 * GIB,
            memory_reserved=lambda number: 6 * GIB,
        )
    )


def test_torchs_figures_go_to_the_device_torch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(initialized=True))
    first, second = gpus(nvml=FakeNvml(2))
    assert (first.torch_allocated_bytes, first.torch_reserved_bytes) == (None, None)
    assert (second.torch_allocated_bytes, second.torch_reserved_bytes) == (5 * GIB, 6 * GIB)


def test_a_torch_that_has_not_used_cuda_is_left_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(initialized=False))
    assert gpus(nvml=FakeNvml(1))[0].torch_allocated_bytes is None


def test_this_machine_answers_one_way_or_another() -> None:
    status = gpu_status(roots=Roots())
    assert status.gpu_library in ("nvml", "missing", "no device")
    assert bool(status.gpus) == (status.gpu_library == "nvml")
    assert status.reason
