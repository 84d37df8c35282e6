"""The files of a store in memory.

In:  values, from any process of the node that has the store open.
Out: private copies of them.
Runs in: trainer and worker.

The memory has no name and does not count towards /dev/shm. The kernel releases it when the last process has closed it.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from penstock.cache.store.region import META_BYTES, PAGE_BYTES, Extent, Region, write_header, write_pieces

_WORTH_THREADS_BYTES = 256 << 10
_WORTH_A_CALL_BYTES = 16 * PAGE_BYTES
_MAPPED_AT_A_TOUCH_BYTES = 64 << 10
"""How many bytes of a file in memory Linux maps around a page that is touched."""


class Memory(Region):
    @staticmethod
    def create(lock_fd: int, *, limit_bytes: int, virtual_bytes: int, policy: int) -> Memory:
        """Memory for a new, empty store. It takes ``virtual_bytes`` of address space, but only pages in use take
        memory."""
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

    def write(self, digest: bytes, place: Extent, packed: Any) -> None:
        target = self.values[place.offset : place.offset + packed.total_bytes]
        if place.has_pages:
            _map(target)
            packed.write(target)
        elif packed.total_bytes >= _WORTH_A_CALL_BYTES:
            # The kernel does not zero pages that one call writes whole, and such a call takes no page fault for each
            # page.
            write_pieces(self.data_fd, packed.pieces(), place.offset)
            _map(target)
        else:
            packed.write(target)


def _map(target: np.ndarray) -> None:
    """Touch pages that exist already. The kernel maps many pages at a time, and meters count the mapped pages for this
    process."""
    target[::_MAPPED_AT_A_TOUCH_BYTES].max()


def copied(source: np.ndarray) -> np.ndarray:
    """A copy of ``source`` in private memory."""
    if len(source) < _WORTH_THREADS_BYTES:
        return source.copy()
    # The copy is made in torch's memory, because numpy requests huge pages, which a virtual machine may have to fetch
    # from its host first. That takes ten times as long as fetching small pages.
    if not _is_forked:
        # torch copies with all its threads, which may not exist in a forked process.
        return torch.from_numpy(source).clone().numpy()
    copy = torch.empty(len(source), dtype=torch.uint8).numpy()
    np.copyto(copy, source)
    return copy


_is_forked = False


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


os.register_at_fork(after_in_child=_note_fork)
