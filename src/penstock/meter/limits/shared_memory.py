"""/dev/shm: how large it is and how full.

In:  the file system mounted there.
Out: ``SharedMemory``.
Runs in: trainer, command line.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.meter.roots import Roots


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """A tmpfs. Both None where there is none."""

    size_bytes: int | None
    """What may be stored in it."""
    used_bytes: int | None
    """What is stored in it."""


def read_shared_memory(roots: Roots, host_memory_bytes: int) -> SharedMemory:
    try:
        found = roots.statvfs(roots.dev_shm)
    except OSError:
        return SharedMemory(size_bytes=None, used_bytes=None)
    if found.f_blocks == 0:
        # A tmpfs mounted with size=0 has no limit of its own and does not count its blocks.
        return SharedMemory(size_bytes=host_memory_bytes, used_bytes=None)
    return SharedMemory(
        size_bytes=found.f_blocks * found.f_frsize,
        used_bytes=(found.f_blocks - found.f_bfree) * found.f_frsize,
    )
