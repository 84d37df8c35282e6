"""The log line of memory, one layout for everyone who reads or parses it.

In:  figures.
Out: ``[Step 100] Memory - Process: 15678.9MB (6.1%), System: 125.4/256.0GB (49.0%), GPU: 8192.0MB allocated, ...``
Runs in: trainer.

MB and GB are 2**20 and 2**30 bytes, as in the logs people have. The GPU's part is always there: 0.0 without one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from penstock.units import GIB, MIB

LOGGER = logging.getLogger("penstock.monitor")


def log_line(label: str, figures: Mapping[str, float]) -> str:
    process, used, limit = (figures.get(name, 0.0) for name in ("tree_bytes", "used_bytes", "limit_bytes"))
    share = 100 / limit if limit else 0.0
    allocated, reserved = figures.get("gpu_allocated_bytes", 0.0), figures.get("gpu_reserved_bytes", 0.0)
    parts = [
        f"[{label}] Memory - Process: {process / MIB:.1f}MB ({process * share:.1f}%)",
        f"System: {used / GIB:.1f}/{limit / GIB:.1f}GB ({used * share:.1f}%)",
        f"GPU: {allocated / MIB:.1f}MB allocated",
        f"{reserved / MIB:.1f}MB reserved",
    ]
    if "samples_per_s" in figures:
        parts.append(f"Samples: {figures['samples_per_s']:.1f}/s")
    elif "steps_per_s" in figures:
        parts.append(f"Steps: {figures['steps_per_s']:.2f}/s")
    if "wait_fraction" in figures:
        parts.append(f"Wait: {figures['wait_fraction']:.1%}")
    if "cache_hit_rate" in figures:
        parts.append(f"Cache hit rate: {figures['cache_hit_rate']:.2%}")
    if figures.get("worker_restarts"):
        parts.append(f"Worker restarts: {figures['worker_restarts']:.0f}")
    return ", ".join(parts)


def say(level: int, text: str) -> None:
    """Through logging where the user has set that up, and on stderr where nobody would see it otherwise."""
    if _is_heard():
        LOGGER.log(level, text)
    elif sys.stderr is not None and LOGGER.level <= level and not LOGGER.disabled:
        # One write: lines of several ranks must not mix.
        try:
            sys.stderr.write(text + "\n")
        except (OSError, ValueError):
            pass  # a terminal that is gone, or closed: nobody reads it


def _is_heard() -> bool:
    """Whether anything but the library's own silence is attached."""
    logger: logging.Logger | None = LOGGER
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False
