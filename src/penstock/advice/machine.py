"""Rules about a machine or container: what in it will hurt a training run, and what to do about it.

In:  ``Roots``, from which all facts are read at one moment.
Out: ``MachineFacts``, for pages and JSON; ``Finding``s about them, worst first.
Runs in: command line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from penstock import meter
from penstock.findings import Diagnosis, Finding, run_checks
from penstock.formatting import counted
from penstock.meter import GpuStatus, Limits, Pressure, Roots
from penstock.units import GIB, MIB, format_bytes

SHM_HURTS_BYTES = 128 * MIB
"""In a /dev/shm smaller than this, a single large batch causes a bus error. Docker's default is 64 MiB."""
SHM_WARNING_BYTES = GIB
"""A few workers of torch's DataLoader fill a /dev/shm smaller than this with ordinary image batches."""
FULL_FRACTION = 0.9
"""Share in use from which memory or /dev/shm counts as nearly full; earlyoom and systemd-oomd act at this share."""
SWAP_WARNING_BYTES = 256 * MIB
"""A host that has run for long usually has less than this in swap, in pages that nothing reads back."""
OPEN_FILES_WARNING = 4096
"""A limit below this is a warning: torch's workers pass every tensor as an open file, and the usual limit of 1024 is
too low for large samples."""
OPEN_FILES_HURTS = 512
"""Fewer open files than this are not enough for the libraries of one training process and a few workers."""
STALL_WARNING_PERCENT = 5.0
"""Share of the last 10 s in which all tasks waited for memory; from here on training slows down."""
STALL_HURTS_PERCENT = 20.0
"""Share of the last 10 s in which all tasks waited for memory; from here on the machine hardly makes progress.
systemd-oomd kills processes at 60%."""

_RAISE_MEMORY = "docker run --memory, resources.limits.memory in Kubernetes, MemoryMax= in systemd or --mem in Slurm"


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """The meter's answers at one moment."""

    platform: str
    """As in ``sys.platform``: a missing /dev/shm, for example, is a finding on Linux and normal on macOS."""
    limits: Limits
    """Memory, swap, shared memory, open files and processors."""
    pressure: Pressure
    """Stalls, kills and swapping."""
    gpu: GpuStatus
    """The GPUs, or why there are none."""

    def as_json(self) -> dict[str, Any]:
        """The facts by subject, under the names that checks rely on."""
        limits = self.limits
        return {
            "platform": self.platform,
            "memory": {
                "limit_bytes": limits.memory_limit_bytes,
                "limit_source": limits.memory_limit_source,
                "host_bytes": limits.host_memory_bytes,
                "available_bytes": limits.memory_available_bytes,
                "working_set_bytes": limits.working_set_bytes,
            },
            "swap": {"total_bytes": limits.swap_total_bytes, "used_bytes": limits.swap_used_bytes},
            "shm": {"size_bytes": limits.shm_size_bytes, "used_bytes": limits.shm_used_bytes},
            "open_files": {
                "soft": limits.open_files_soft,
                "hard": limits.open_files_hard,
                "used": limits.open_files_used,
            },
            "cpu": {
                "count": limits.cpu_count,
                "affinity": limits.cpu_affinity,
                "quota": limits.cpu_quota,
                "usable": limits.cpu_usable,
            },
            "cgroup": limits.cgroup,
            "pressure": asdict(self.pressure),
            "gpu": asdict(self.gpu),
            "unknown": list(limits.unknown),
        }


def gather_facts(roots: Roots) -> MachineFacts:
    return MachineFacts(
        platform=roots.platform,
        limits=meter.limits(roots=roots),
        pressure=meter.pressure(roots=roots),
        gpu=meter.gpu_status(roots=roots),
    )


def find_in_machine(facts: MachineFacts) -> tuple[Finding, ...]:
    """All findings about this machine, worst first."""
    return run_checks(CHECKS, facts)


def _memory_full(facts: MachineFacts) -> Diagnosis:
    limits = facts.limits
    if limits.memory_available_bytes >= (1 - FULL_FRACTION) * limits.memory_limit_bytes:
        return None
    return (
        "hurts",
        f"memory is nearly full: {format_bytes(limits.memory_available_bytes)} left of "
        f"{format_bytes(limits.memory_limit_bytes)}, working set {format_bytes(limits.working_set_bytes)}",
        f"stop other programs (list the largest: ps aux --sort -rss | head), or raise the limit: {_RAISE_MEMORY}",
    )


def _memory_pressure(facts: MachineFacts) -> Diagnosis:
    stalled = facts.pressure.full_avg10
    if stalled is None or stalled < STALL_WARNING_PERCENT:
        return None
    return (
        "hurts" if stalled >= STALL_HURTS_PERCENT else "warning",
        f"all tasks waited for memory during {stalled:.0f}% of the last 10 s ({facts.pressure.stall_source})",
        "run fewer programs, or give the training a smaller memory budget, until the stalls stop",
    )


def _memory_limit(facts: MachineFacts) -> Diagnosis:
    limits = facts.limits
    if limits.memory_limit_bytes >= limits.host_memory_bytes:
        return None
    return (
        "warning",
        f"memory is limited to {format_bytes(limits.memory_limit_bytes)} ({limits.memory_limit_source}); "
        f"programs that read the host's memory see {format_bytes(limits.host_memory_bytes)} and exceed the limit",
        "choose workers, prefetch and caches by penstock.limits(), or raise the limit: " + _RAISE_MEMORY,
    )


def _oom_kills(facts: MachineFacts) -> Diagnosis:
    kills = facts.pressure.oom_kills
    if not kills:
        return None
    limited = facts.limits.memory_limit_bytes < facts.limits.host_memory_bytes
    return (
        # The host's counter is reset only by a reboot: a warning would fail the doctor until then.
        "warning" if limited else "info",
        f"the kernel has killed {counted(kills, 'process', 'processes')} here because memory ran out "
        f"(limit {format_bytes(facts.limits.memory_limit_bytes)})",
        f"give the loader a budget that leaves room for the model and the workers, or raise the limit: {_RAISE_MEMORY}",
    )


def _swap_used(facts: MachineFacts) -> Diagnosis:
    limits = facts.limits
    if limits.swap_used_bytes <= 0:
        return None
    return (
        "warning" if limits.swap_used_bytes >= SWAP_WARNING_BYTES else "info",
        f"{format_bytes(limits.swap_used_bytes)} of {format_bytes(limits.swap_total_bytes)} swap is in use: "
        "memory ran short here, and training stalls while pages are read back from swap",
        "find the processes that were swapped out (grep VmSwap /proc/*/status), leave more memory free, "
        "then empty the swap as root on the host: swapoff -a && swapon -a",
    )


def _shm_missing(facts: MachineFacts) -> Diagnosis:
    if facts.limits.shm_size_bytes is not None or not facts.platform.startswith("linux"):
        return None
    return (
        "hurts",
        "there is no /dev/shm: worker processes of torch's DataLoader cannot pass tensors to the training",
        "mount a tmpfs there: mount -t tmpfs -o size=8g tmpfs /dev/shm",
    )


def _shm_small(facts: MachineFacts) -> Diagnosis:
    size_bytes = facts.limits.shm_size_bytes
    if size_bytes is None or size_bytes >= SHM_WARNING_BYTES:
        return None
    return (
        "hurts" if size_bytes < SHM_HURTS_BYTES else "warning",
        f"/dev/shm holds only {format_bytes(size_bytes)}: worker processes of torch's DataLoader pass "
        "batches through it and crash with a bus error when it is full",
        "docker run --shm-size=8g (or --ipc=host); in Kubernetes mount an emptyDir with medium: Memory on "
        "/dev/shm; as root: mount -o remount,size=8g /dev/shm",
    )


def _shm_full(facts: MachineFacts) -> Diagnosis:
    size_bytes, used_bytes = facts.limits.shm_size_bytes, facts.limits.shm_used_bytes
    if not size_bytes or used_bytes is None or used_bytes <= FULL_FRACTION * size_bytes:
        return None
    return (
        "hurts",
        f"/dev/shm is nearly full: {format_bytes(used_bytes)} of {format_bytes(size_bytes)} in use",
        "remove files that ended runs left behind (ls -lS /dev/shm), or make it larger: "
        "docker run --shm-size=8g, mount -o remount,size=8g /dev/shm",
    )


def _cpu_quota(facts: MachineFacts) -> Diagnosis:
    limits = facts.limits
    if limits.cpu_quota is None or limits.cpu_quota >= limits.cpu_count:
        return None
    return (
        "hurts" if limits.cpu_quota < 1 else "warning",
        f"the CPU quota is {limits.cpu_quota:g} of {limits.cpu_count} cores: os.cpu_count() returns "
        f"{limits.cpu_count}, but the kernel would throttle that many workers",
        f"start at most {counted(max(1, int(limits.cpu_usable)), 'worker')} and set OMP_NUM_THREADS, or raise "
        "the quota: docker run --cpus, resources.limits.cpu in Kubernetes, CPUQuota= in systemd",
    )


def _cpu_affinity(facts: MachineFacts) -> Diagnosis:
    limits = facts.limits
    if limits.cpu_affinity is None or limits.cpu_affinity >= limits.cpu_count:
        return None
    return (
        "info",
        f"this process may run on {limits.cpu_affinity} of {limits.cpu_count} cores",
        f"start at most {counted(max(1, int(limits.cpu_usable)), 'worker')}, or allow more cores: taskset, "
        "docker run --cpuset-cpus, --cpus-per-task in Slurm",
    )


def _open_files(facts: MachineFacts) -> Diagnosis:
    soft, hard = facts.limits.open_files_soft, facts.limits.open_files_hard
    if soft is None or soft >= OPEN_FILES_WARNING:
        return None
    within_reach = hard is None or hard >= OPEN_FILES_WARNING
    return (
        "hurts" if soft < OPEN_FILES_HURTS else "warning",
        f"a process may open only {soft:,} files (ulimit -n): workers pass tensors as open files and reach that limit",
        f"run ulimit -n {65536 if hard is None else min(hard, 65536)} before the training"
        if within_reach
        else f"the hard limit is only {hard:,}; raise it: docker run --ulimit nofile=65536, "
        "LimitNOFILE= in systemd, /etc/security/limits.conf",
    )


def _gpu_library(facts: MachineFacts) -> Diagnosis:
    if facts.gpu.gpu_library != "missing":
        return None
    return (
        "info",
        f"GPUs cannot be detected: {facts.gpu.reason}",
        'if this machine has an NVIDIA GPU: pip install "penstock[gpu]", and in a container docker run '
        "--gpus all; otherwise there is nothing to do",
    )


def _gpu_none(facts: MachineFacts) -> Diagnosis:
    if facts.gpu.gpu_library != "no device":
        return None
    return (
        "info",
        f"no GPU: {facts.gpu.reason}",
        "if you expect a GPU: docker run --gpus all, nvidia.com/gpu in Kubernetes or --gres=gpu in Slurm; "
        "otherwise there is nothing to do",
    )


CHECKS: dict[str, Callable[[MachineFacts], Diagnosis]] = {
    "memory-full": _memory_full,
    "memory-pressure": _memory_pressure,
    "memory-limit": _memory_limit,
    "oom-kills": _oom_kills,
    "swap-used": _swap_used,
    "shm-missing": _shm_missing,
    "shm-small": _shm_small,
    "shm-full": _shm_full,
    "cpu-quota": _cpu_quota,
    "cpu-affinity": _cpu_affinity,
    "open-files": _open_files,
    "gpu-library": _gpu_library,
    "gpu-none": _gpu_none,
}
"""Id of a finding -> its check."""
