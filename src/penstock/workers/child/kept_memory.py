"""Decides whether a worker keeps the memory of a sample for the next sample, or returns it to the kernel.

In:  the end of every sample; whether the trainer's budget has room for kept memory.
Out: settings of glibc's malloc, and returned memory.
Runs in: worker, in a process of its own.

The kernel maps and clears returned memory again for every sample, which can take longer than the sample itself. Kept
memory cannot be used for batches. So memory is kept only where the kernel takes a large share of the worker's time, the
budget has room, and samples are alike: among uneven samples, kept memory would be as large as the largest sample.
"""

from __future__ import annotations

import ctypes
import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_RETURNED_FROM_BYTES = 1 << 20
"""Blocks of at least this size are returned as soon as they are freed, unless memory is kept."""
_TOP_BYTES = 4 << 20
"""Smaller freed blocks stay in the process, up to this many bytes in all."""
_MOST_MAPPINGS = 1 << 16
"""glibc's own limit on the number of mapped blocks."""

_CACHED_BELOW_BYTES, _CACHED_BLOCKS = 1040, 7
"""Each thread caches free blocks of every size below the first number, and of each size as many as the second
number."""

_WINDOW_S = 0.1
_KERNEL_SHARE = 0.35
_WINDOWS = 2
"""In this many windows in a row the kernel must take ``_KERNEL_SHARE`` of the time. One window is not enough: filling
new segments takes time once."""
_PROBES = 4
"""Memory is returned after each of this many samples, which shows how much memory each sample takes."""
_ALIKE = 1.5
_MOST_TIMES, _MOST_MORE_BYTES = 2.25, 4 << 20
"""Kept memory may be the memory of one sample times the first number, plus the second number: blocks do not always fit
where others were."""
_LEAST_SAMPLES = 8
"""If kept memory exceeds its limit twice within fewer samples than this, the samples are not alike."""
_LEAST_BYTES = 1 << 20
"""A sample that takes less memory than this gains nothing."""
_PROBE_EVERY_S = 10.0
_LONGEST_RETURN_S, _RETURN_S_PER_BYTE = 0.02, 1e-9
"""If the kernel takes longer than this to take memory back, no memory is kept."""
_LONGEST_PAUSE_S = 300.0


class Malloc(Protocol):
    """The C library's allocator."""

    def keep(self) -> None: ...
    def give_back(self) -> None: ...
    def trim(self) -> None: ...


class GlibcMalloc:
    """glibc's allocator, for the whole process."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        self._libc = libc
        libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        libc.free.argtypes = [ctypes.c_void_p]
        self.give_back()

    def keep(self) -> None:
        """Serve large blocks from the heap, and leave freed blocks in the heap."""
        self._libc.mallopt(_M_MMAP_MAX, 0)
        self._libc.mallopt(_M_TRIM_THRESHOLD, -1)
        self._fill_cache()

    def give_back(self) -> None:
        """Return large blocks to the kernel as soon as they are freed."""
        self._libc.mallopt(_M_MMAP_MAX, _MOST_MAPPINGS)
        self._libc.mallopt(_M_MMAP_THRESHOLD, _RETURNED_FROM_BYTES)
        self._libc.mallopt(_M_TRIM_THRESHOLD, _TOP_BYTES)

    def _fill_cache(self) -> None:
        """Fill the thread's cache of small free blocks. Otherwise the scraps of aligned large blocks end up in this
        cache, and the free space between the scraps is never joined again: the next large block does not fit."""
        blocks = [self._libc.malloc(size) for size in range(8, _CACHED_BELOW_BYTES, 16) for _ in range(_CACHED_BLOCKS)]
        for block in blocks:
            self._libc.free(block)

    def trim(self) -> None:
        """Return all free memory to the kernel, wherever it lies in the heap."""
        self._libc.malloc_trim(0)


def glibc_malloc() -> GlibcMalloc | None:
    """The allocator, or None if it is not glibc's."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return GlibcMalloc(libc) if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def _kernel_s() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime


def _queued_s() -> float:
    """How long this thread was ready to run but had no core, as reported by the kernel."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class KeptMemory:
    """Decides for one worker whether memory is kept. Call ``sample_done`` whenever a sample has been written and
    dropped."""

    def __init__(
        self,
        malloc: Malloc,
        anonymous_bytes: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
        kernel_s: Callable[[], float] = _kernel_s,
        queued_s: Callable[[], float] = _queued_s,
    ) -> None:
        self._malloc = malloc
        self._anonymous_bytes = anonymous_bytes
        self._clock = clock
        self._kernel_s = kernel_s
        self._queued_s = queued_s
        self._allowed = False
        self._keeps = False
        self._probes: deque[int] = deque(maxlen=_PROBES)
        """The memory that each of the latest samples took, of those that began without kept memory."""
        self._probes_left = 0
        self._base_bytes = 0
        """The anonymous memory of the process when memory was last returned."""
        self._samples_kept = 0
        """The number of samples since kept memory last exceeded its limit."""
        self._next_probe_s = 0.0
        self._pause_s = _PROBE_EVERY_S
        self._not_before_s = 0.0
        self._windows = 0
        self._window_began_s = clock()
        self._kernel_then_s = self._queued_then_s = 0.0

    def allow(self, allowed: bool) -> None:
        """Set whether the budget has room for kept memory. If it has no room, all kept memory is returned now."""
        self._allowed = allowed
        if not allowed:
            self._stop()
        self._begin_window(self._clock())

    def sample_done(self) -> None:
        if self._keeps:
            self._watch()
        elif self._allowed:
            self._consider()

    # -- while memory is returned -----------------------------------------------------------

    def _consider(self) -> None:
        """Begin to keep memory if the kernel takes a large share of the time."""
        now = self._clock()
        spent_s = now - self._window_began_s
        if spent_s < _WINDOW_S or now < self._not_before_s:
            return
        # Other processes on the same cores must not hide the time that the kernel takes.
        spent_s = max(spent_s - (self._queued_s() - self._queued_then_s), 1e-9)
        share = (self._kernel_s() - self._kernel_then_s) / spent_s
        self._windows = self._windows + 1 if share >= _KERNEL_SHARE else 0
        self._begin_window(now)
        if self._windows >= _WINDOWS:
            self._keeps = True
            self._malloc.keep()
            self._probe(_PROBES)

    def _begin_window(self, now: float) -> None:
        self._window_began_s, self._kernel_then_s, self._queued_then_s = now, self._kernel_s(), self._queued_s()

    # -- while memory is kept ---------------------------------------------------------------

    def _watch(self) -> None:
        held_bytes = self._anonymous_bytes() - self._base_bytes
        now = self._clock()
        self._samples_kept += 1
        if self._probes_left:
            self._probes_left -= 1
            self._probes.append(self._trim(held_bytes))
            if not self._probes_left and self._keeps:
                self._judge(now)
        elif held_bytes > _MOST_TIMES * max(self._probes) + _MOST_MORE_BYTES:
            is_rare, self._samples_kept = self._samples_kept >= _LEAST_SAMPLES, 0
            usual_bytes = max(self._probes)
            # The rest is memory that the dataset holds.
            if self._trim(held_bytes) > usual_bytes and self._keeps and not is_rare:
                self._pause(now)
        elif now >= self._next_probe_s:
            self._probe(1)

    def _judge(self, now: float) -> None:
        """Continue to keep memory only if samples take much memory and are alike."""
        if min(self._probes) < _LEAST_BYTES or max(self._probes) > _ALIKE * min(self._probes):
            self._pause(now)
        else:
            self._next_probe_s = now + _PROBE_EVERY_S

    def _probe(self, samples: int) -> None:
        self._probes_left = samples
        self._trim(0)

    def _trim(self, held_bytes: int) -> int:
        """Return free memory to the kernel; returns how much of ``held_bytes`` that was."""
        kernel_then_s = self._kernel_s()
        self._malloc.trim()
        before, self._base_bytes = self._base_bytes + held_bytes, self._anonymous_bytes()
        returned_bytes = max(0, before - self._base_bytes)
        if self._kernel_s() - kernel_then_s > _LONGEST_RETURN_S + returned_bytes * _RETURN_S_PER_BYTE:
            # The inherited heap has very many holes, and every trim calls the kernel for each hole.
            self._pause_s = _LONGEST_PAUSE_S
            self._pause(self._clock())
        return returned_bytes

    def _pause(self, now: float) -> None:
        """Return memory for a while, because keeping it did not help; each further pause is twice as long."""
        self._stop()
        self._not_before_s = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _stop(self) -> None:
        if self._keeps:
            self._keeps = False
            self._malloc.give_back()
            self._malloc.trim()
        self._windows = self._probes_left = self._samples_kept = 0
        self._probes.clear()
