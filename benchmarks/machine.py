"""The machine of a measurement, and the use of it by other programs.

In:  /proc, git, installed packages, the meter.
Out: the fingerprint in every file of results; processors in use.
Runs in: the harness.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import penstock

_PACKAGES = ("torch", "numpy", "penstock", "spdl-core", "torchdata", "grain")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def fingerprint() -> dict[str, Any]:
    """The machine, the software and the limits, as they are now."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted": bool(_git("status", "--porcelain", "--", "src")),
        "huge_pages": _read(_HUGE_PAGES / "enabled"),
        "huge_pages_shmem": _read(_HUGE_PAGES / "shmem_enabled"),
        "load_average": os.getloadavg(),
        "limits": asdict(penstock.limits()),
    }


def describe(machine: dict[str, Any]) -> str:
    """The fingerprint in two lines, for people."""
    gib = machine["limits"]["memory_limit_bytes"] / 2**30
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    commit = (machine["commit"] or "no commit")[:10] + (" + changes" if machine["uncommitted"] else "")
    return (
        f"{machine['cpu']}, {machine['limits']['cpu_usable']:g} of {machine['cores']} cores, {gib:.1f} GiB, "
        f"Linux {machine['kernel']}\nPython {machine['python']}, {packages} ({commit})"
    )


def busy_cpus(over_s: float = 0.2) -> float:
    """Processors in use over the next ``over_s`` seconds; call it while no contender runs."""
    before, began_s = _busy_ticks(), time.monotonic()
    time.sleep(over_s)
    ticks = _busy_ticks() - before
    return ticks / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began_s)


def _busy_ticks() -> int:
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    with Path("/proc/stat").open() as lines:
        ticks = dict(zip(names, map(int, lines.readline().split()[1:]), strict=False))
    return sum(ticks.values()) - ticks["idle"] - ticks["iowait"]


def _cpu_model() -> str:
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "-C", str(here.parent), *arguments], capture_output=True, text=True, timeout=10)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
