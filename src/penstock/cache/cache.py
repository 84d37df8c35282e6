"""The front of the cache: one per node and name, bounded in bytes.

In:  keys, values, functions that load what is missing.
Out: values, the caller's own; figures of the whole node.
Runs in: trainer and worker.
"""

from __future__ import annotations

import os
import threading
import uuid
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cache import registry
from penstock.cache.keys import digest
from penstock.cache.locks import TooLong, release, wait_for
from penstock.cache.policies import Lru, Policy, Static
from penstock.cache.ram import RamTier
from penstock.cache.region import L_KEYS, Region
from penstock.cache.values import Packed, unpack
from penstock.errors import ConfigError
from penstock.units import format_bytes
from penstock.workers.seeds import KeptGenerators, mix, seed_stretch

LEAST_BYTES = 1 << 20
_LOADING_WITHIN_S = 60.0
"""How long to wait for another process that loads the same value."""
_KEY_LOCKS = 1 << 30

_POLICIES: dict[str, Callable[[], Policy]] = {"static": Static, "lru": Lru}


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """A cache's figures, over all processes that have it open."""

    items: int
    bytes: int
    """Memory of values and index."""
    limit_bytes: int
    hits: int
    misses: int
    hit_rate: float
    """Share of lookups that were hits; 0 before the first."""
    evictions: int
    passed: int
    """Values that were not kept: no room, or larger than the limit."""


class Cache:
    """Values by key, shared by every process of this node that opens the same name."""

    def __init__(
        self, limit_bytes: int, *, policy: str, name: str | None, headroom_bytes: Callable[[], int], host_bytes: int
    ) -> None:
        """``headroom_bytes`` says what the machine or container can still give, ``host_bytes`` what it has in all."""
        if policy not in _POLICIES:
            raise ConfigError(f"policy={policy!r} is none of {', '.join(_POLICIES)}")
        if limit_bytes < LEAST_BYTES:
            raise ConfigError(
                f"a cache of {format_bytes(limit_bytes)} is too small; the least is {format_bytes(LEAST_BYTES)}"
            )
        self.name = name or f"unnamed-{uuid.uuid4().hex[:12]}"
        self.policy = policy
        self._headroom_bytes = headroom_bytes
        self._host_bytes = host_bytes
        self._limit_bytes = limit_bytes
        self._open()

    def _open(self) -> None:
        self._shared = _share(self.name, self._make)
        self._ram = RamTier(self._shared.region, _POLICIES[self.policy](), headroom_bytes=self._headroom_bytes)
        self._closer = weakref.finalize(self, _let_go, self.name)
        self._warned = False

    def _make(self, lock_fd: int) -> Region:
        virtual_bytes = 4 * max(self._host_bytes, self._limit_bytes)
        return Region.create(lock_fd, limit_bytes=self._limit_bytes, virtual_bytes=virtual_bytes // 4096 * 4096)

    # -- use ----------------------------------------------------------------------------------

    def get(self, key: Any, default: Any = None) -> Any:
        """The value, as the caller's own, or ``default``."""
        found = self._ram.get(digest(key))
        return default if found is None else unpack(found)

    def put(self, key: Any, value: Any) -> bool:
        """Keep a value; False if there is no room for it, or it cannot be kept."""
        return self._put(digest(key), value)

    def get_or_load(self, key: Any, load: Callable[[], Any]) -> Any:
        """The value, loaded and kept if it is not there.

        ``load`` runs under a seed derived from the key, and the global generators are put back afterwards: a hit and a
        miss leave the same randomness to what comes after.
        """
        known = digest(key)
        found = self._ram.get(known)
        if found is not None:
            return unpack(found)
        at = L_KEYS + int.from_bytes(known[:8], "little") % _KEY_LOCKS
        try:
            wait_for(self._shared.region.lock_fd, at, _LOADING_WITHIN_S)
        except TooLong:
            return self._load(known, load)
        try:
            # Whoever held the lock was loading the same value.
            found = self._ram.get(known, counts=False)
            return self._load(known, load) if found is None else unpack(found)
        finally:
            release(self._shared.region.lock_fd, at)

    def _load(self, known: bytes, load: Callable[[], Any]) -> Any:
        with KeptGenerators():
            seed_stretch(mix(int.from_bytes(known[:8], "little")), 0)
            value = load()
        self._put(known, value)
        return value

    def _put(self, known: bytes, value: Any) -> bool:
        try:
            packed = Packed(value)
        except Exception as problem:
            self._warn(f"a value cannot be cached, and so is loaded every time: {problem}")
            return False
        try:
            kept = self._ram.put(known, packed)
        except (TooLong, OSError) as problem:
            self._warn(f"the cache cannot be written to ({problem}); values are loaded instead")
            return False
        if self._ram.is_short:
            self._warn(
                f"the machine has no memory left for the cache, which holds {format_bytes(self.stats().bytes)} of "
                f"{format_bytes(self.stats().limit_bytes)}; it grows no further. Lower its limit, or batch_size or "
                "num_workers"
            )
        return kept

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    # -- valves and gauges ----------------------------------------------------------------------

    def resize(self, limit_bytes: int) -> None:
        """Change the limit now, for every process; what is over it goes back to the system at once."""
        if limit_bytes < LEAST_BYTES:
            raise ConfigError(
                f"a cache of {format_bytes(limit_bytes)} is too small; the least is {format_bytes(LEAST_BYTES)}"
            )
        self._ram.resize(limit_bytes)

    def clear(self) -> None:
        """Forget every value."""
        self._ram.clear()

    def stats(self) -> CacheStats:
        counts = self._ram.counts()
        asked = counts["hits"] + counts["misses"]
        return CacheStats(**counts, hit_rate=counts["hits"] / asked if asked else 0.0)

    def print_stats(self, name: str = "Cache") -> None:
        stats = self.stats()
        print(f"[{name}] Cache Stats:")
        print(f"  - Size: {stats.items} items")
        print(f"  - Memory: {stats.bytes / 2**20:.1f} / {stats.limit_bytes / 2**20:.1f} MB")
        print(f"  - Hit Rate: {100 * stats.hit_rate:.2f}% ({stats.hits} hits / {stats.misses} misses)", flush=True)

    def close(self) -> None:
        """Let go of it. The memory goes when the last process has."""
        self._closer()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("name", "policy", "_headroom_bytes", "_host_bytes", "_limit_bytes")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


def _check_limit(limit_bytes: int) -> None:
    if limit_bytes < LEAST_BYTES:
        least = format_bytes(LEAST_BYTES)
        raise ConfigError(f"a cache of {format_bytes(limit_bytes)} is too small; the least is {least}")


# -- one view per process and name ------------------------------------------------------------------


@dataclass
class _Shared:
    region: Region
    path: Path
    pid: int
    users: int = 1


_open_here: dict[str, _Shared] = {}
_lock = threading.Lock()


def _share(name: str, make: Callable[[int], Region]) -> _Shared:
    with _lock:
        shared = _open_here.get(name)
        if shared is None:
            shared = _open_here[name] = _Shared(*registry.open_region(name, make), os.getpid())
        else:
            shared.users += 1
        return shared


def _let_go(name: str) -> None:
    with _lock:
        shared = _open_here.get(name)
        if shared is None:
            return
        shared.users -= 1
        if shared.users:
            return
        del _open_here[name]
        if shared.pid == os.getpid():
            # A forked child is not listed, and its parent is not done.
            registry.leave(shared.path, shared.region.lock_fd)
        shared.region.close()


def _forget_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)
