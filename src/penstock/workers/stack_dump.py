"""Reads the Python stack of a worker from outside, even if the worker hangs in C code that holds the GIL.

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
"""A signal that schedulers and users do not send; Python's faulthandler handles it in C."""


def prepare(*, all_threads: bool = False) -> int:
    """Prepare the answer; called in the worker. Returns the descriptor to which the stack will be written, or -1 if
    that is impossible. ``all_threads``: whether samples are fetched in several threads instead of in the main thread
    alone."""
    if _SIGNAL is None or not hasattr(os, "memfd_create"):
        return -1
    fd = os.memfd_create("penstock-trace", os.MFD_CLOEXEC)
    faulthandler.register(_SIGNAL, file=fd, all_threads=all_threads, chain=False)
    return fd


def stack_of(pid: int | None, fd: int) -> str | None:
    """The worker's stack, most recent call first, or None if it cannot be read; called in the trainer."""
    if pid is None or fd < 0 or _SIGNAL is None:
        return None
    answer = Path(f"/proc/{pid}/fd/{fd}")
    with contextlib.suppress(OSError):
        before = answer.stat().st_size
        os.kill(pid, _SIGNAL)
        deadline = time.monotonic() + _PATIENCE_S
        size = before
        while time.monotonic() < deadline:
            # The handler writes line by line, so the text is complete once it has stopped growing.
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
    """The stacks of the threads that run the user's code; if there are no such threads, the stacks of all threads."""
    stacks = stack.strip().split("\n\n")
    busy = [each for each in stacks if _OWN_CODE not in "".join(each.splitlines()[1:2])]
    return "\n".join(_users_frames(each) for each in busy or stacks)


def _users_frames(stack: str) -> str:
    """The frames of a stack down to penstock's call of the user's code. The frames below this call are the same for
    every worker."""
    kept: list[str] = []
    for line in stack.strip().splitlines():
        if _OWN_CODE in line and len(kept) > 1:
            break
        kept.append(line)
    return "\n".join(kept)
