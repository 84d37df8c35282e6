"""The cache as users see it: the cache room's, told about this machine.

In:  sizes as users write them, the meter.
Out: ``Cache``, ``LRUCache``.
Runs in: trainer and worker.
"""

from __future__ import annotations

from pathlib import Path

from penstock.cache import cache as room
from penstock.meter import headroom_bytes, limits

_LEFT_TO_TRAINING = 1 / 16
"""Of the machine's or container's memory: where less is free, the cache grows no further."""


def memory_bytes() -> int:
    return limits().memory_limit_bytes


def spare_bytes() -> int:
    return headroom_bytes() - int(_LEFT_TO_TRAINING * memory_bytes())


_MACHINE = room.Machine(memory_bytes=memory_bytes, headroom_bytes=spare_bytes)


class Cache(room.Cache):
    """Values by key, shared by all workers and ranks of this node that open the same name, bounded in bytes.

    ``limit``: a size such as ``"50GB"``, a share of the machine's or container's memory such as ``0.3``; a quarter of
    it if not given. Covers values and index. Whoever opens a name first sets limit and policy.
    ``policy``: ``"static"`` fills and never evicts, ``"lru"`` evicts what was not used for longest, ``"next-use"``
    what is needed last, where the order is known, and is ``"lru"`` where it is not; ``"auto"`` chooses.
    ``name``: processes that give the same one share; without one, this process and its workers do.
    ``disk``: a folder for a second tier that survives the run, bounded by ``disk_limit`` (half of the disk's free room
    if not given). It holds tensors, arrays, numbers, texts, bytes and lists, tuples and dicts of them.
    ``fingerprint``: mixed into every key; change it when what is computed under the same keys changes.
    """

    def __init__(
        self,
        limit: object = "auto",
        policy: str = "auto",
        name: str | None = None,
        disk: str | Path | None = None,
        *,
        disk_limit: object = "auto",
        fingerprint: str = "",
    ) -> None:
        super().__init__(
            limit, policy, name, disk, disk_limit=disk_limit, fingerprint=fingerprint, machine=_MACHINE
        )  # fmt: skip


class LRUCache(Cache):
    """A cache that evicts what was not used for longest; its limit is given in GiB."""

    def __init__(self, max_memory_gb: float = 50.0, name: str | None = None) -> None:
        super().__init__(int(max_memory_gb * 2**30), "lru", name)
