"""What in a machine or container will hurt a training run, and what to do about each thing.

In:  ``Facts``.
Out: ``Finding``s, worst first. Pure: no clock, no files.
Runs in: command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from penstock.advice.machine_facts import Facts
from penstock.units import GIB, MIB, format_bytes

Severity = Literal["hurts", "warning", "info"]
"""hurts: expect a crash, a kill or a crawl; warning: costs speed or misleads programs; info: good to know."""

SEVERITIES: tuple[Severity, ...] = ("hurts", "warning", "info")

SHM_HURTS_BYTES = 128 * MIB
"""Below this one large batch raises a bus error; Docker's default of 64 MiB is well below."""
SHM_WARNING_BYTES = GIB
"""Below this several workers of torch's DataLoader fill it with ordinary image batches."""
FULL_FRACTION = 0.9
"""Memory, or /dev/shm, used beyond this is nearly full; earlyoom and systemd-oomd act at the same share."""
SWAP_WARNING_BYTES = 256 * MIB
"""Less than this is what any long-running host has put away and never needs back."""
OPEN_FILES_WARNING = 4096
"""torch's workers pass every tensor as an open file: 1024, the usual default, runs out with large samples."""
OPEN_FILES_HURTS = 512
"""Too few for the libraries of one training process and a few workers."""
STALL_WARNING_PERCENT = 5.0
"""Share of the last 10 s in which everything waited for memory that training is slowed by."""
STALL_HURTS_PERCENT = 20.0
"""The same where the machine crawls; systemd-oomd kills at 60."""

_RAISE_MEMORY = "docker run --memory, resources.limits.memory in Kubernetes, MemoryMax= in systemd or --mem in Slurm"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing about this machine that a training run should know."""

    id: str
    """Stable name, for programs."""
    severity: Severity
    """How bad it is."""
    what: str
    """The fact, with its numbers."""
    fix: str
    """What to do about it."""


Diagnosis = tuple[Severity, str, str] | None
"""Severity, what, fix; None when all is well."""


def find(facts: Facts) -> tuple[Finding, ...]:
    """Everything worth saying about this machine, worst first."""
    found = []
    for name, check in CHECKS.items():
        diagnosis = check(facts)
        if diagnosis is not None:
            severity, what, fix = diagnosis
            found.append(Finding(id=name, severity=severity, what=what, fix=fix))
    return worst_first(found)


def worst_first(found: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


def will_hurt(found: Iterable[Finding]) -> bool:
    """Whether the doctor ends with exit status 1."""
    return any(finding.severity != "info" for finding in found)


def _memory_full(facts: Facts) -> Diagnosis:
    limits = facts.limits
    if limits.memory_available_bytes >= (1 - FULL_FRACTION) * limits.memory_limit_bytes:
        return None
    return (
        "hurts",
        f"memory is nearly full: {format_bytes(limits.memory_available_bytes)} left of "
        f"{format_bytes(limits.memory_limit_bytes)}, working set {format_bytes(limits.working_set_bytes)}",
        f"end what else runs here (the largest first: ps aux --sort -rss | head), or raise the limit: {_RAISE_MEMORY}",
    )


def _memory_pressure(facts: Facts) -> Diagnosis:
    stalled = facts.pressure.full_avg10
    if stalled is None or stalled < STALL_WARNING_PERCENT:
        return None
    return (
        "hurts" if stalled >= STALL_HURTS_PERCENT else "warning",
        f"all tasks waited for memory during {stalled:.0f}% of the last 10 s ({facts.pressure.stall_source})",
        "run fewer programs or give the training a smaller memory budget until the stalls are gone",
    )


def _memory_limit(facts: Facts) -> Diagnosis:
    limits = facts.limits
    if limits.memory_limit_bytes >= limits.host_memory_bytes:
        return None
    return (
        "warning",
        f"memory is limited to {format_bytes(limits.memory_limit_bytes)} ({limits.memory_limit_source}); "
        f"programs that look at the host see {format_bytes(limits.host_memory_bytes)} and overshoot",
        "size workers, prefetch and caches from penstock.limits(), or raise the limit: " + _RAISE_MEMORY,
    )


def _oom_kills(facts: Facts) -> Diagnosis:
    kills = facts.pressure.oom_kills
    if not kills:
        return None
    limited = facts.limits.memory_limit_bytes < facts.limits.host_memory_bytes
    return (
        # The host's counter never goes back: as a warning, one kill would fail the doctor until a reboot.
        "warning" if limited else "info",
        f"{kills} process{'es were' if kills > 1 else ' was'} killed here for want of memory "
        f"(limit {format_bytes(facts.limits.memory_limit_bytes)})",
        f"give the loader a budget that leaves room for the model and the workers, or raise the limit: {_RAISE_MEMORY}",
    )


def _swap_used(facts: Facts) -> Diagnosis:
    limits = facts.limits
    if limits.swap_used_bytes <= 0:
        return None
    return (
        "warning" if limits.swap_used_bytes >= SWAP_WARNING_BYTES else "info",
        f"{format_bytes(limits.swap_used_bytes)} of {format_bytes(limits.swap_total_bytes)} swap is in use: "
        "memory has run short here, and pages read back from swap stall training",
        "find what was put away (grep VmSwap /proc/*/status), leave more memory free, "
        "then empty it as root of the host: swapoff -a && swapon -a",
    )


def _shm_missing(facts: Facts) -> Diagnosis:
    if facts.limits.shm_size_bytes is not None or not facts.platform.startswith("linux"):
        return None
    return (
        "hurts",
        "there is no /dev/shm: worker processes of torch's DataLoader cannot hand over tensors",
        "mount one: mount -t tmpfs -o size=8g tmpfs /dev/shm",
    )


def _shm_small(facts: Facts) -> Diagnosis:
    size_bytes = facts.limits.shm_size_bytes
    if size_bytes is None or size_bytes >= SHM_WARNING_BYTES:
        return None
    return (
        "hurts" if size_bytes < SHM_HURTS_BYTES else "warning",
        f"/dev/shm holds only {format_bytes(size_bytes)}: worker processes of torch's DataLoader pass "
        "batches through it and die of a bus error when it is full",
        "docker run --shm-size=8g (or --ipc=host); in Kubernetes mount an emptyDir with medium: Memory on "
        "/dev/shm; as root: mount -o remount,size=8g /dev/shm",
    )


def _shm_full(facts: Facts) -> Diagnosis:
    size_bytes, used_bytes = facts.limits.shm_size_bytes, facts.limits.shm_used_bytes
    if not size_bytes or used_bytes is None or used_bytes <= FULL_FRACTION * size_bytes:
        return None
    return (
        "hurts",
        f"/dev/shm is nearly full: {format_bytes(used_bytes)} of {format_bytes(size_bytes)} in use",
        "look for what dead runs left behind (ls -lS /dev/shm) and remove it, or make it larger: "
        "docker run --shm-size=8g, mount -o remount,size=8g /dev/shm",
    )


def _cpu_quota(facts: Facts) -> Diagnosis:
    limits = facts.limits
    if limits.cpu_quota is None or limits.cpu_quota >= limits.cpu_count:
        return None
    return (
        "hurts" if limits.cpu_quota < 1 else "warning",
        f"the CPU quota is {limits.cpu_quota:g} of {limits.cpu_count} cores: os.cpu_count() says "
        f"{limits.cpu_count}, and that many workers would be throttled",
        f"start at most {max(1, int(limits.cpu_usable))} busy worker(s) and set OMP_NUM_THREADS, or raise "
        "the quota: docker run --cpus, resources.limits.cpu in Kubernetes, CPUQuota= in systemd",
    )


def _cpu_affinity(facts: Facts) -> Diagnosis:
    limits = facts.limits
    if limits.cpu_affinity is None or limits.cpu_affinity >= limits.cpu_count:
        return None
    return (
        "info",
        f"this process may run on {limits.cpu_affinity} of {limits.cpu_count} cores",
        f"start at most {max(1, int(limits.cpu_usable))} busy worker(s), or widen the set: taskset, "
        "docker run --cpuset-cpus, --cpus-per-task in Slurm",
    )


def _open_files(facts: Facts) -> Diagnosis:
    soft, hard = facts.limits.open_files_soft, facts.limits.open_files_hard
    if soft is None or soft >= OPEN_FILES_WARNING:
        return None
    within_reach = hard is None or hard >= OPEN_FILES_WARNING
    return (
        "hurts" if soft < OPEN_FILES_HURTS else "warning",
        f"only {soft:,} files may be open (ulimit -n): workers that pass tensors as open files run out",
        f"ulimit -n {65536 if hard is None else min(hard, 65536)} before the run"
        if within_reach
        else f"the hard limit is {hard:,} too: docker run --ulimit nofile=65536, "
        "LimitNOFILE= in systemd, /etc/security/limits.conf",
    )


def _gpu_library(facts: Facts) -> Diagnosis:
    if facts.gpu.gpu_library != "missing":
        return None
    return (
        "info",
        f"GPUs cannot be seen: {facts.gpu.reason}",
        'where this machine has an NVIDIA GPU: pip install "penstock[gpu]", and in a container docker run '
        "--gpus all; nothing to do otherwise",
    )


def _gpu_none(facts: Facts) -> Diagnosis:
    if facts.gpu.gpu_library != "no device":
        return None
    return (
        "info",
        f"no GPU: {facts.gpu.reason}",
        "docker run --gpus all, nvidia.com/gpu in Kubernetes or --gres=gpu in Slurm where one is expected; "
        "nothing to do otherwise",
    )


CHECKS: dict[str, Callable[[Facts], Diagnosis]] = {
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
"""Finding's id -> the check that makes it."""
