"""The GPUs of this machine, which are read through NVML; a machine may have no GPU.

In:  the pynvml module if it is installed; torch if the program has loaded it.
Out: ``GpuStatus`` with one ``Gpu`` per device.
Runs in: trainer, command line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from penstock.meter.roots import Roots

_Answer = TypeVar("_Answer")
_REAL = Roots()


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device. A field is None if this device or its driver does not report the figure."""

    index: int
    """NVML's index of the device, which nvidia-smi shows too. CUDA_VISIBLE_DEVICES does not change this index."""
    name: str
    """Product name."""
    uuid: str
    """NVML's id of the device ("GPU-..."), which is the same in every process and container."""
    memory_total_bytes: int | None
    """The memory of the device."""
    memory_used_bytes: int | None
    """The memory that all processes use."""
    utilisation_percent: int | None
    """The share of the last sample period in which a kernel ran."""
    processes: dict[int, int | None] = field(default_factory=dict)
    """Process id -> the bytes of this process on the device. Inside a container the ids may be the process ids of the
    host."""
    torch_allocated_bytes: int | None = None
    """The bytes of live tensors of this process; None if torch is not loaded or has not used CUDA."""
    torch_reserved_bytes: int | None = None
    """The bytes that torch's caching allocator has reserved in this process; None if torch is not loaded or has not
    used CUDA."""


@dataclass(frozen=True, kw_only=True)
class GpuStatus:
    """The GPUs, or the reason why no GPU was found."""

    gpu_library: Literal["nvml", "missing", "no device"]
    """"nvml" if devices were read; "missing" if NVML cannot be used; "no device" if there is no GPU."""
    reason: str
    """A text that says how GPUs were found, or why not and what to do about it."""
    gpus: tuple[Gpu, ...]
    """The devices; empty unless ``gpu_library`` is "nvml"."""


def gpus(*, nvml: Any = None, roots: Roots = _REAL) -> tuple[Gpu, ...]:
    """The GPUs of this machine; empty if there are none or NVML cannot be used."""
    return gpu_status(nvml=nvml, roots=roots).gpus


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """A reading of how busy the GPUs of this process are."""

    fraction: float | None
    """The share of NVML's last sample period in which a kernel ran, averaged over the GPUs on which torch has memory
    for this process; None if there is no such GPU or NVML does not report this share."""


def gpu_use(*, read: Callable[[], tuple[Gpu, ...]] = gpus) -> GpuUse:
    """Reads how busy the GPUs of this process are now."""
    mine = [gpu for gpu in read() if gpu.torch_reserved_bytes]
    known = [gpu.utilisation_percent / 100 for gpu in mine if gpu.utilisation_percent is not None]
    return GpuUse(fraction=sum(known) / len(known) if known else None)


def gpu_status(*, nvml: Any = None, roots: Roots = _REAL) -> GpuStatus:
    """The GPUs of this machine, or the reason why no GPU was found. ``nvml`` replaces the pynvml module in tests."""
    if nvml is None:
        try:
            import pynvml as nvml
        except ImportError:
            return _none("missing", "the Python package nvidia-ml-py is not installed: pip install penstock[gpu]")
    try:
        # Only the first of these calls initialises NVML, which stays initialised until the process ends.
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        if (roots.proc / "driver" / "nvidia" / "version").exists():
            return _none("missing", f"an NVIDIA driver is loaded, but its library reports an error: {error}")
        # The library belongs to the driver, so a missing library says no more than a missing driver.
        more = "" if "Library Not Found" in str(error) else f": {error}"
        return _none("no device", f"there is no NVIDIA driver on this machine{more}")
    found = tuple(gpu for index in range(count) if (gpu := _read_gpu(nvml, index)) is not None)
    if not found:
        return _none("no device", "there is an NVIDIA driver, but this process sees no GPU")
    return GpuStatus(gpu_library="nvml", reason=f"{len(found)} GPU{'s' * (len(found) > 1)} through NVML", gpus=found)


def _none(library: Literal["missing", "no device"], reason: str) -> GpuStatus:
    return GpuStatus(gpu_library=library, reason=reason, gpus=())


def _read_gpu(nvml: Any, index: int) -> Gpu | None:
    """One device; None if the device has failed or this process may not use it."""

    def ask(question: Callable[..., _Answer], *arguments: Any) -> _Answer | None:
        # Slices of a GPU, laptop GPUs and virtual GPUs do not support every query.
        try:
            return question(*arguments)
        except nvml.NVMLError:
            return None

    device = ask(nvml.nvmlDeviceGetHandleByIndex, index)
    if device is None:
        return None
    # The first version of this call counts the driver's own memory as used; the second version does not, like
    # nvidia-smi.
    version = getattr(nvml, "nvmlMemory_v2", None)
    memory = ask(nvml.nvmlDeviceGetMemoryInfo, device, version) if version is not None else None
    memory = memory or ask(nvml.nvmlDeviceGetMemoryInfo, device)
    rates = ask(nvml.nvmlDeviceGetUtilizationRates, device)
    uuid = _text(ask(nvml.nvmlDeviceGetUUID, device))
    holders = [
        *(ask(nvml.nvmlDeviceGetComputeRunningProcesses, device) or ()),
        *(ask(nvml.nvmlDeviceGetGraphicsRunningProcesses, device) or ()),
    ]
    allocated, reserved = _torch_bytes(uuid)
    return Gpu(
        index=index,
        name=_text(ask(nvml.nvmlDeviceGetName, device)) or "unknown",
        uuid=uuid,
        memory_total_bytes=None if memory is None else memory.total,
        memory_used_bytes=None if memory is None else memory.used,
        utilisation_percent=None if rates is None else rates.gpu,
        processes={holder.pid: holder.usedGpuMemory for holder in holders},
        torch_allocated_bytes=allocated,
        torch_reserved_bytes=reserved,
    )


def _text(answer: str | bytes | None) -> str:
    """The answer as text, because older bindings return bytes."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer or ""


def _torch_bytes(uuid: str) -> tuple[int, int] | tuple[None, None]:
    """The bytes that torch has allocated and reserved on the device, found without loading torch or starting CUDA.

    Devices are matched by id, because torch's numbers depend on CUDA_VISIBLE_DEVICES and NVML's numbers do not.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None, None
    for number in range(torch.cuda.device_count()):
        if uuid.endswith(str(getattr(torch.cuda.get_device_properties(number), "uuid", None))):
            return torch.cuda.memory_allocated(number), torch.cuda.memory_reserved(number)
    return None, None
