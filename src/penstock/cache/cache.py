"""Keeps values by key in memory and optionally on disk, bounded in bytes and shared by the processes of a node.

In:  keys, values, functions that load missing values.
Out: the caller's own copies of values; figures of the whole node.
Runs in: trainer and worker.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import uuid
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

from penstock.cache import registry
from penstock.cache.cached_dataset import CachedDataset, is_loading_whole_for
from penstock.cache.fingerprint import fingerprint_again
from penstock.cache.keys import digest
from penstock.cache.policy.forecast import Forecast
from penstock.cache.policy.policies import LEFTOVERS, LRU, NEXT_USE, STATIC, Leftovers, Lru, NextUse, Static
from penstock.cache.policy.shared_forecasts import SharedForecasts
from penstock.cache.stats import CacheStats
from penstock.cache.store import open_stores
from penstock.cache.store.disk import Disk, folder_key, free_bytes, open_files, taken_bytes
from penstock.cache.store.locks import TooLong
from penstock.cache.store.memory import Memory
from penstock.cache.store.portable import Portable, read_portable
from penstock.cache.store.region import H_AUTO, H_GROUPS, H_LIMIT, H_POLICY, MOST_GROUPS, PAGE_BYTES
from penstock.cache.store.store import Store
from penstock.cache.store.values import PackedValue, least_bytes, unpack
from penstock.errors import CacheError, ConfigError
from penstock.meter import headroom_bytes, limits
from penstock.units import format_bytes, parse_size
from penstock.workers import forecast_position
from penstock.workers.kept_generators import KeptGenerators, the_watch
from penstock.workers.rng import GeneratorUsed, is_beside_others, mix, seed_stretch

LEAST_BYTES = 1_000_000
DEFAULT_SHARE = 0.25
"""The default limit, as a share of the machine's or container's memory: 16 GB of 64 GB."""
DEFAULT_DISK_SHARE = 0.5
"""The default limit on disk, as a share of the disk's free space."""
_LEFT_TO_TRAINING = 1 / 16
"""The share of the machine's or container's memory that a cache leaves free; with less free, a cache does not grow."""
_LOADING_WITHIN_S = 60.0
"""How long to wait for another process that loads the same value."""
_MOST_VIRTUAL_BYTES = 1 << 44
"""The most address space that a cache takes; a process can address 128 TiB."""

_POLICIES = {"auto": LRU, "static": STATIC, "lru": LRU, "next-use": NEXT_USE}
"""Name -> the policy that a cache starts with; ``auto`` changes it once the cache has seen how keys are used."""


class Cache:
    """Keeps values by key for all workers and ranks of this node that open the same name, bounded in bytes.

    ``limit``: a size such as ``"50GB"``, or a share of the machine's or container's memory such as ``0.3``; by default
    a quarter. The limit covers values and index. The first process that opens a name sets limit and policy.
    ``policy``: ``"static"`` fills and never evicts; ``"lru"`` evicts the least recently used value; ``"next-use"``
    evicts the value that is needed last, or acts as ``"lru"`` if that is unknown; ``"auto"`` chooses.
    ``name``: processes that pass the same name share one cache. Without a name, this process and its workers share it.
    ``disk``: a folder for a second store that survives the run, bounded by ``disk_limit`` (by default half of the
    disk's free space). This store holds tensors, arrays, numbers, texts, bytes, and lists, tuples and dicts of these.
    ``fingerprint``: a text that becomes part of every key; change it when the values computed for the same keys change.
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
        if policy not in _POLICIES:
            raise ConfigError(f"policy={policy!r} is not one of {', '.join(_POLICIES)}")
        self.name = name or f"unnamed-{uuid.uuid4().hex[:12]}"
        if name is None and multiprocessing.parent_process() is not None:
            warnings.warn(
                "Cache created inside a worker process: every worker gets its own. Pass name= to share one, or create "
                "it in the main process and pass it to the workers, for instance as dataset.cache.",
                RuntimeWarning,
                stacklevel=2,
            )
        self.policy = policy
        self.disk = None if disk is None else Path(disk).expanduser().resolve()
        self.fingerprint = fingerprint
        self._limit_bytes = _limit_bytes(limit)
        self._disk_limit = parse_size(disk_limit, name="disk_limit")
        self._open()

    # -- opening ------------------------------------------------------------------------------

    def _open(self) -> None:
        self._memory = open_stores.acquire(self.name, self._open_memory)
        self._closer = weakref.finalize(self, open_stores.release, self.name)
        self._on_disk: Store | None = None
        if self.disk is not None:
            try:
                key = folder_key(self.disk)
                self._on_disk = open_stores.acquire(key, self._open_disk)
            except OSError as problem:
                self._closer()
                raise CacheError(f"disk={str(self.disk)!r} cannot be used: {problem}. Use another folder.") from problem
            except BaseException:
                self._closer()
                raise
            self._disk_closer = weakref.finalize(self, open_stores.release, key)
        self._warned: set[str] = set()
        self._seed = digest(self.fingerprint) if self.fingerprint else b""
        self._claims: set[int] = set()
        """Claims of loaders that use this object."""
        self._groups: dict[str, int] = {}
        """Groups requested through this object, and their numbers in the store on disk."""

    def _open_memory(self) -> tuple[Store, Callable[[], None]]:
        region, path = registry.open_region(self.name, self._make_memory, Memory)
        registry.remove_stale()
        policies: dict[int, Any] = {STATIC: Static(), LRU: Lru()}
        store = Store(region, policies, headroom_bytes=_spare_bytes, position=forecast_position.current)
        policies[NEXT_USE] = NextUse(SharedForecasts(region, store), forecast_position.current)
        return store, lambda: registry.leave(path, region.lock_fd)

    def _make_memory(self, lock_fd: int) -> Memory:
        virtual_bytes = min(4 * max(limits().memory_limit_bytes, self._limit_bytes), _MOST_VIRTUAL_BYTES)
        virtual_bytes = virtual_bytes // PAGE_BYTES * PAGE_BYTES
        made = Memory.create(
            lock_fd, limit_bytes=self._limit_bytes, virtual_bytes=virtual_bytes, policy=_POLICIES[self.policy]
        )
        made.header[H_AUTO] = self.policy == "auto"
        return made

    def _open_disk(self) -> tuple[Store, Callable[[], None]]:
        folder = self.disk
        assert folder is not None
        space_bytes = max(LEAST_BYTES, free_bytes(folder) + taken_bytes(folder))
        limit_bytes = max(LEAST_BYTES, self._disk_limit.resolve(space_bytes, auto_fraction=DEFAULT_DISK_SHARE))
        with open_files(folder, limit_bytes=limit_bytes, policy=LEFTOVERS) as (fds, is_first):
            region = Disk(*fds)
            policies: dict[int, Any] = {}
            store = Store(region, policies, headroom_bytes=lambda: free_bytes(folder))
            if is_first:
                store.begin()
                region.join()
            policies[LEFTOVERS] = Leftovers(region.header[H_GROUPS : H_GROUPS + MOST_GROUPS])
        return store, lambda: None

    # -- use ----------------------------------------------------------------------------------

    def get(self, key: Any, default: Any = None) -> Any:
        """A private copy of the value, or ``default`` if there is no value."""
        found = self._find(self._known(key))
        return default if found is None else found[0]

    def put(self, key: Any, value: Any) -> bool:
        """Keep a value; False if there is no room for the value, or it cannot be kept."""
        return self._keep(self._known(key), value)

    def get_or_load(self, key: Any, load: Callable[[], Any], *, group: str = "", keeps_generators: bool = True) -> Any:
        """The value; if it is missing, ``load`` is called, and its result is kept.

        ``load`` runs under a seed derived from the key, and the global random generators are restored afterwards, so
        hits and misses leave the generators in the same state. Pass ``keeps_generators=False`` to save this time if you
        seed the generators before you use them again. Keys of different ``group``s are different keys. On a full disk,
        groups that no process has requested since the cache was opened make room for requested groups.
        """
        known = self._known(key, group)
        found = self._memory.get(known.digest)
        if found is not None:
            return unpack(found)
        if not group and is_loading_whole_for(self.name):
            self._warn(
                "parts",
                "The dataset keeps parts of its samples in this cache, which also keeps the whole samples, so neither "
                "has much room. Give the dataset a method keys(index), or do not wrap it and do not pass this cache "
                "to the loader.",
            )
        try:
            with self._memory.loading.held(known.number, _LOADING_WITHIN_S):
                # The thread that held this lock before was loading the same value.
                again = self._find(known, counts=False)
                return self._load(known, load, keeps_generators) if again is None else again[0]
        except TooLong:
            return self._load(known, load, keeps_generators)

    def is_on_disk(self, key: Any, *, group: str = "") -> bool:
        return self._on_disk is not None and self._on_disk.has(self._known(key, group).digest)

    def put_on_disk(self, key: Any, value: Any, *, group: str = "") -> bool:
        """Keep a value on disk; False if there is no room for the value, or it cannot be kept there."""
        return self._keep_on_disk(self._known(key, group), value)

    def wrap(self, dataset: Any, *, fingerprint: str | None = None) -> CachedDataset:
        """A dataset that keeps the samples of ``dataset`` in this cache, by index.

        A fingerprint keeps the samples of different datasets apart. The fingerprint is derived from the dataset (its
        class and code, and its attributes) unless you pass ``fingerprint``.
        """
        self._choose_policy(repeats=False)
        return CachedDataset(dataset, self, fingerprint_again(dataset) if fingerprint is None else fingerprint)

    @property
    def limit_bytes(self) -> int:
        """The current limit, which includes the index."""
        return int(self._memory.region.header[H_LIMIT])

    # -- for loaders --------------------------------------------------------------------------

    def publish(self, forecast: Forecast, claim: int | None, now: int) -> int | None:
        """Publish the keys that an epoch at batch ``now`` is going to need.

        Returns the claim to pass with the epoch's next forecast; None if the policy reads no forecasts or this forecast
        does not fit.
        """
        self._choose_policy(repeats=forecast.repeats)
        if int(self._memory.region.header[H_POLICY]) != NEXT_USE:
            return None
        if claim is None:
            claim = self._forecasts.claim()
            self._claims.add(claim)
        try:
            if self._forecasts.publish(claim, forecast, now):
                return claim
        except BaseException:
            self.withdraw(claim)
            raise
        self.withdraw(claim)
        return None

    def advance(self, claim: int, now: int) -> None:
        self._forecasts.advance(claim, now)

    def withdraw(self, claim: int) -> None:
        """Withdraw the forecast of a finished epoch. Any thread may call this, also inside the garbage collector."""
        if claim in self._claims:
            self._claims.discard(claim)
            self._forecasts.withdraw(claim)

    @property
    def uses_forecasts(self) -> bool:
        """Whether the policy reads forecasts, or may read them later."""
        header = self._memory.region.header
        return bool(header[H_AUTO]) or int(header[H_POLICY]) == NEXT_USE

    @property
    def forecasts(self) -> int:
        """The number of loaders with a forecast."""
        return self._forecasts.count()

    @property
    def _forecasts(self) -> SharedForecasts:
        return self._memory.policies[NEXT_USE].oracle

    def _choose_policy(self, *, repeats: bool) -> None:
        """Choose for ``auto``: static if keys are used once an epoch, when no policy has more hits; else next-use."""
        header = self._memory.region.header
        if header[H_AUTO] and (repeats or int(header[H_POLICY]) == LRU):
            header[H_POLICY] = NEXT_USE if repeats else STATIC

    # -- inside -------------------------------------------------------------------------------

    def digest_of(self, key: Any) -> bytes:
        """The digest of a key without a group."""
        return digest(key) if not self._seed else digest((self._seed, key))

    def _known(self, key: Any, group: str = "") -> _KnownKey:
        if self._on_disk is None:
            return _KnownKey(self.digest_of((group, key) if group else key), 0)
        number = self._groups.get(group)
        if number is None:
            number = int.from_bytes(digest((self.fingerprint, group))[:8], "little") | 1
            with contextlib.suppress(TooLong, OSError):
                self._on_disk.note_group(number)
                self._groups[group] = number
        return _KnownKey(self.digest_of((group, key) if group else key), number)

    def _find(self, known: _KnownKey, *, counts: bool = True) -> tuple[Any] | None:
        """The value from memory or else from disk."""
        found = self._memory.get(known.digest, counts=counts)
        if found is not None:
            return (unpack(found),)
        if self._on_disk is None:
            return None
        try:
            found = self._on_disk.get(known.digest)
            if found is None:
                return None
            try:
                value = read_portable(found)
            except ValueError:
                self._on_disk.remove_corrupt(known.digest)
                return None
        except (TooLong, OSError) as problem:
            self._warn("read", f"The cache in {self.disk} cannot be read ({problem}); values are loaded instead.")
            return None
        # Another process may have put a newer value meanwhile.
        self._keep_in_memory(known, value, replaces=False)
        return (value,)

    def _load(self, known: _KnownKey, load: Callable[[], Any], keeps_generators: bool) -> Any:
        if is_beside_others():
            # Generators that are not used need no seed.
            value = load()
            if the_watch().used():
                raise GeneratorUsed
            self._keep(known, value)
            return value
        with KeptGenerators() if keeps_generators else contextlib.nullcontext():
            seed_stretch(mix(known.number), 0)
            value = load()
        self._keep(known, value)
        return value

    def _keep(self, known: _KnownKey, value: Any) -> bool:
        in_memory = self._keep_in_memory(known, value)
        return self._keep_on_disk(known, value) or in_memory

    def _keep_in_memory(self, known: _KnownKey, value: Any, *, replaces: bool = True) -> bool:
        if self._memory.refuses(known.digest, least_bytes(value)):
            return False
        try:
            packed = PackedValue(value)
        except Exception as problem:
            self._warn("value", f"A value cannot be cached, so it is loaded every time: {problem}")
            # Otherwise lookups would return the previous value of this key.
            self._memory.remove(known.digest)
            return False
        kept = self._put(self._memory, known, packed, replaces=replaces)
        if self._memory.is_short:
            stats = self.stats()
            self._warn(
                "room",
                f"The machine has no memory left for the cache, which holds {format_bytes(stats.bytes)} of "
                f"{format_bytes(stats.limit_bytes)} and does not grow further. Lower the limit of the cache, "
                "batch_size or num_workers.",
            )
        return kept

    def _keep_on_disk(self, known: _KnownKey, value: Any) -> bool:
        if self._on_disk is None:
            return False
        try:
            packed = Portable(value)
        except CacheError as problem:
            self._warn("value", str(problem))
            self._on_disk.remove(known.digest)
            return False
        kept = self._put(self._on_disk, known, packed)
        if self._on_disk.is_short:
            self._warn("disk", f"The disk of {self.disk} is nearly full; the cache there does not grow further.")
        return kept

    def _put(self, store: Store, known: _KnownKey, packed: Any, *, replaces: bool = True) -> bool:
        try:
            return store.put(known.digest, packed, replaces=replaces, group=known.group)
        except (TooLong, OSError) as problem:
            self._warn("write", f"The cache cannot be written to ({problem}); values are loaded instead.")
            return False

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, RuntimeWarning, stacklevel=5)

    # -- valves and gauges ----------------------------------------------------------------------

    def resize(self, limit: object) -> None:
        """Change the limit now, for every process; memory beyond it is released to the system at once."""
        self._memory.resize(_limit_bytes(limit))

    def clear(self) -> None:
        """Remove every value, on disk too."""
        self._memory.clear()
        if self._on_disk is not None:
            self._on_disk.clear()

    def stats(self) -> CacheStats:
        """Figures of the whole node."""
        on_disk = None if self._on_disk is None else self._on_disk.region.counts()
        return CacheStats.of(self._memory.region.counts(), on_disk)

    def print_stats(self, name: str = "Cache") -> None:
        self.stats().print(name)

    def close(self) -> None:
        """Close the cache in this process. The last process to close it releases its memory; values on disk stay."""
        for claim in tuple(self._claims):
            self.withdraw(claim)
        self._closer()
        if self._on_disk is not None:
            self._disk_closer()
            self._on_disk = cast(Store, _ClosedStore())
        self._memory = cast(Store, _ClosedStore())

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("name", "policy", "disk", "fingerprint", "_limit_bytes", "_disk_limit")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


class LRUCache(Cache):
    """A cache that evicts the least recently used value; its limit is given in GiB."""

    def __init__(self, max_memory_gb: float = 50.0, name: str | None = None) -> None:
        super().__init__(int(max_memory_gb * 2**30), "lru", name)


def _limit_bytes(limit: object) -> int:
    size = parse_size("auto" if limit is None else limit, name="limit")
    count = size.resolve(limits().memory_limit_bytes, auto_fraction=DEFAULT_SHARE)
    if count < LEAST_BYTES:
        raise ConfigError(f"A cache of {format_bytes(count)} is too small; give at least {format_bytes(LEAST_BYTES)}.")
    return count


def _spare_bytes() -> int:
    return headroom_bytes() - int(_LEFT_TO_TRAINING * limits().memory_limit_bytes)


class _KnownKey(NamedTuple):
    digest: bytes
    group: int
    """The number of the key's group in the store on disk."""

    @property
    def number(self) -> int:
        """A number that is the same in every process, and differs between keys."""
        return int.from_bytes(self.digest[:8], "little")


class _ClosedStore:
    """Takes the place of a store that was closed."""

    def __getattr__(self, name: str) -> Any:
        raise CacheError("This cache is closed.")
