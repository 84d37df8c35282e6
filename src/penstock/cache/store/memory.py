"""A tier in memory.

In:  values, from any process of a node that has the tier open.
Out: private copies of them.
Runs in: trainer and worker.

The memory has no name and does not count against /dev/shm; it goes with the last process that has it open.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from penstock.cache.store.region import META_BYTES, PAGE_BYTES, Place, Region, write_header, write_pieces

_WORTH_THREADS_BYTES = 256 << 10
_WORTH_A_CALL_BYTES = 16 * PAGE_BYTES
_MAPPED_AT_A_TOUCH_BYTES = 64 << 10
"""How much of a file that is in memory already Linux maps around a page that is touched."""


class Memory(Region):
    @staticmethod
    def create(lock_fd: int, *, limit_bytes: int, virtual_bytes: int, policy: int) -> Memory:
        """Memory for a new tier, empty. Of ``virtual_bytes``, only what is in use exists."""
        fds: list[int] = []
        try:
            for name in ("penstock-cache-index", "penstock-cache"):
                fds.append(os.memfd_create(name, os.MFD_CLOEXEC))
            os.ftruncate(fds[0], META_BYTES)
            os.ftruncate(fds[1], virtual_bytes)
            write_header(fds[0], limit_bytes=limit_bytes, virtual_bytes=virtual_bytes, policy=policy)
            return Memory(fds[0], fds[1], lock_fd)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def read(self, digest: bytes, offset: int, used_bytes: int) -> np.ndarray | None:
        return copied(self.values[offset : offset + used_bytes])

    def write(self, digest: bytes, place: Place, packed: Any) -> None:
        target = self.values[place.offset : place.offset + packed.total_bytes]
        if place.has_pages:
            _map(target)
            packed.write(target)
        elif packed.total_bytes >= _WORTH_A_CALL_BYTES:
            # Pages that are written whole as they are made need not be zeroed first, nor made writable one by one.
            write_pieces(self.data_fd, packed.pieces(), place.offset)
            _map(target)
        else:
            packed.write(target)


def _map(target: np.ndarray) -> None:
    """Touch what is in memory already: it is mapped many pages at a time, and counts as this process's memory, where
    whoever watches it looks."""
    target[::_MAPPED_AT_A_TOUCH_BYTES].max()


def copied(source: np.ndarray) -> np.ndarray:
    """The same bytes in memory of their own."""
    if len(source) < _WORTH_THREADS_BYTES:
        return source.copy()
    # Into torch's memory: numpy's own would ask for huge pages, which a virtual machine may have to fetch from its host
    # first, at ten times the time of small ones.
    if not _is_forked:
        # By as many threads as torch would take; in a forked child they may not exist any more.
        return torch.from_numpy(source).clone().numpy()
    copy = torch.empty(len(source), dtype=torch.uint8).numpy()
    np.copyto(copy, source)
    return copy


_is_forked = False


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


os.register_at_fork(after_in_child=_note_fork)
