"""Keeps a few shards of a process open; the one that was used least recently is closed to open another shard.

In:  shard numbers of a catalog.
Out: sources that any thread may read from.
Runs in: trainer and worker; after a fork the child opens its own sources.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

from penstock.data.sources import Source, is_remote
from penstock.data.tar.local_copies import ShardCopies, open_shard

_MOST_OPEN = 64
_MOST_COPIES_OPEN = 4
"""Few, because a deleted copy takes up disk space until the last process has closed it."""


class OpenShards:
    """The open sources of one process."""

    def __init__(self, locations: list[str], versions: list[str], copies: ShardCopies) -> None:
        self._locations, self._versions, self._copies = locations, versions, copies
        self._most = _MOST_COPIES_OPEN if any(map(is_remote, locations)) else _MOST_OPEN
        self._forget()

    def get(self, shard: int) -> Source:
        # A lock that another thread held at the fork would stay locked in the child for ever.
        if self._pid != os.getpid():
            self._forget()
        with self._lock:
            source = self._open.get(shard)
            if source is not None:
                self._open.move_to_end(shard)
                return source
        location = self._locations[shard]
        source = open_shard(location, self._versions[shard], self._copies if is_remote(location) else None)
        with self._lock:
            # Two threads may have opened the shard. Neither source is closed here, because another thread may be
            # reading from it, and its descriptor number could then already belong to another file. A source is closed
            # with its last reference.
            source = self._open.setdefault(shard, source)
            self._open.move_to_end(shard)
            if len(self._open) > self._most:
                self._open.popitem(last=False)
        return source

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._open: OrderedDict[int, Source] = OrderedDict()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_pid", "_lock", "_open")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._forget()
