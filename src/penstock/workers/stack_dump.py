"""Where a worker's Python code is, asked from outside, even if it hangs in C with the GIL held.

In:  a signal to the worker.
Out: its Python stack as text.
Runs in: worker (prepares), trainer (asks).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path

_PATIENCE_S = 0.5
_LARGEST_BYTES = 64 << 10
_OWN_CODE = str(Path(__file__).parent)
_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None
"""Python's own handler for it runs in C; schedulers and users do not send it."""


def prepare() -> int:
    """In the worker: be ready to answer. Gives the descriptor the answer will be written to, -1 where none can be."""
    if _SIGNAL is None or not hasattr(os, "memfd_create"):
        return -1
    fd = os.memfd_create("penstock-trace", os.MFD_CLOEXEC)
    faulthandler.register(_SIGNAL, file=fd, all_threads=False, chain=False)
    return fd


def stack_of(pid: int | None, fd: int) -> str | None:
    """In the trainer: the worker's stack, most recent call first, or None if it cannot be had."""
    if pid is None or fd < 0 or _SIGNAL is None:
        return None
    answer = Path(f"/proc/{pid}/fd/{fd}")
    with contextlib.suppress(OSError):
        before = answer.stat().st_size
        os.kill(pid, _SIGNAL)
        deadline = time.monotonic() + _PATIENCE_S
        size = before
        while time.monotonic() < deadline:
            # Complete once it has stopped growing: the handler writes line by line.
            now = answer.stat().st_size
            if now > before and now == size:
                break
            size = now
            time.sleep(0.01)
        with answer.open("rb") as lines:
            lines.seek(before)
            return _users_part(lines.read(_LARGEST_BYTES).decode(errors="replace")) or None
    return None


def _users_part(stack: str) -> str:
    """The stack down to where the user's code was called from: what is below is the same for every worker."""
    kept: list[str] = []
    for line in stack.strip().splitlines():
        if _OWN_CODE in line and len(kept) > 1:
            break
        kept.append(line)
    return "\n".join(kept)
