"""The log line of a training, in one fixed layout because programs parse it.

In:  figures.
Out: ``[Step 100] Memory - Process: 15678.9MB (6.1%), System: 125.4/256.0GB (49.0%), GPU: 8192.0MB allocated, ...``
Runs in: trainer.

MB and GB are 2**20 and 2**30 bytes, as in the logs that teams already have. The GPU part is always there: 0.0 without a
GPU. Further figures follow, in the format and order of ``figures.FIGURES``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from penstock.monitor.figures import FIGURES
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
    for name, figure in FIGURES.items():
        # Restarts are shown only if there are any; steps per second only if samples per second are unknown.
        is_shown = figures.get(name) if name == "worker_restarts" else name in figures
        if figure.log is not None and is_shown and not (name == "steps_per_s" and "samples_per_s" in figures):
            parts.append(figure.log.format(figures[name]))
    return ", ".join(parts)


def say(level: int, text: str) -> None:
    """Log the text if the user has configured logging, else write it to stderr."""
    if _has_handler():
        LOGGER.log(level, text)
    elif sys.stderr is not None and LOGGER.level <= level and not LOGGER.disabled:
        # One write per line, so that the lines of several ranks do not mix.
        try:
            sys.stderr.write(text + "\n")
        except (OSError, ValueError):
            pass  # the terminal is closed


def _has_handler() -> bool:
    """Whether any handler other than the library's own NullHandler would get the record."""
    logger: logging.Logger | None = LOGGER
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False
