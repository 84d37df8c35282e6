"""The front of the cache: one per node and name, bounded in bytes, over a disk tier if there is one.

In:  keys, values, functions that load what is missing.
Out: values, the caller's own; figures of the whole node.
Runs in: trainer and worker.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import uuid
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from penstock.cache import registry
from penstock.cache.cached_dataset import CachedDataset, is_loading_whole_for
from penstock.cache.fingerprint import fingerprint_again
from penstock.cache.keys import digest
from penstock.cache.policy.forecast import Plan
from penstock.cache.policy.policies import LEFTOVERS, LRU, NEXT_USE, STATIC, Leftovers, Lru, NextUse, Static
from penstock.cache.policy.shared_forecasts import Plans
from penstock.cache.store import open_stores as opened
from penstock.cache.store.counts import counts as counts_of
from penstock.cache.store.disk import Disk
from penstock.cache.store.disk_files import folder_key, free_bytes, open_files, taken_bytes
from penstock.cache.store.locks import TooLong
from penstock.cache.store.memory import Memory
from penstock.cache.store.portable import Portable, read_portable
from penstock.cache.store.region import H_AUTO, H_GROUPS, H_LIMIT, H_POLICY, MOST_GROUPS, PAGE_BYTES
from penstock.cache.store.store import Tier
from penstock.cache.store.values import Packed, least_bytes, unpack
from penstock.errors import CacheError, ConfigError
from penstock.units import format_bytes, parse_size
from penstock.workers import forecast_position
from penstock.workers.child.kept_generators import KeptGenerators
from penstock.workers.rng import mix, seed_stretch

LEAST_BYTES = 1_000_000
DEFAULT_SHARE = 0.25
"""Of the machine's or container's memory, where no limit is given: 16 GB of 64, 32 of 128, 64 of 256."""
DEFAULT_DISK_SHARE = 0.5
"""Of the room the disk has, where no limit is given."""
_LOADING_WITHIN_S = 60.0
"""How long to wait for another process that loads the same value."""
_MOST_VIRTUAL_BYTES = 1 << 44
"""Of the 128 TiB a process can address."""

_POLICIES = {"auto": LRU, "static": STATIC, "lru": LRU, "next-use": NEXT_USE}
"""What each begins with; ``auto`` changes once it is known how keys are used."""


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """A cache's figures, over all processes that have it open."""

    items: int
    bytes: int
    """Memory of values and index."""
    limit_bytes: int
    hits: int
    """Lookups that needed no load, whichever tier had the value."""
    misses: int
    hit_rate: float
    """Share of lookups that were hits; 0 before the first."""
    evictions: int
    passed: int
    """Values that were not kept: no room, or larger than the limit."""
    disk_items: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    disk_hits: int = 0
    """Hits that came from disk."""
    disk_corrupt: int = 0
    """Values found damaged on disk, and removed."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a cache needs to know about where it runs. Travels to workers, so both are functions of a module."""

    memory_bytes: Callable[[], int]
    """What the machine or container has in all."""
    headroom_bytes: Callable[[], int]
    """What it can still give."""


class Cache:
    """Values by key, shared by every process of this node that opens the same name."""

    def __init__(
        self,
        limit: object = "auto",
        policy: str = "auto",
        name: str | None = None,
        disk: str | Path | None = None,
        *,
        disk_limit: object = "auto",
        fingerprint: str = "",
        machine: Machine,
    ) -> None:
        if policy not in _POLICIES:
            raise ConfigError(f"policy={policy!r} is none of {', '.join(_POLICIES)}")
        self.name = name or f"unnamed-{uuid.uuid4().hex[:12]}"
        if name is None and multiprocessing.parent_process() is not None:
            warnings.warn(
                "this cache is made in a process that another one has started, and so is one of as many as there are "
                "such processes; give it a name and they share one, or make it in the first and hand it over (as "
                "dataset.cache, for instance)",
                RuntimeWarning,
                stacklevel=3,
            )
        self.policy = policy
        self.disk = None if disk is None else Path(disk).expanduser().resolve()
        self.fingerprint = fingerprint
        self._machine = machine
        self._limit_bytes = self._bytes_of(limit)
        self._disk_limit = parse_size(disk_limit, name="disk_limit")
        self._open()

    def _bytes_of(self, limit: object) -> int:
        size = parse_size("auto" if limit is None else limit, name="limit")
        count = size.resolve(self._machine.memory_bytes(), auto_fraction=DEFAULT_SHARE)
        if count < LEAST_BYTES:
            raise ConfigError(
                f"a cache of {format_bytes(count)} is too small; the least is {format_bytes(LEAST_BYTES)}"
            )
        return count

    # -- opening ------------------------------------------------------------------------------

    def _open(self) -> None:
        self._memory = opened.take(self.name, self._open_memory)
        self._closer = weakref.finalize(self, opened.let_go, self.name)
        self._on_disk: Tier | None = None
        if self.disk is not None:
            try:
                key = folder_key(self.disk)
                self._on_disk = opened.take(key, self._open_disk)
            except OSError as problem:
                self._closer()
                raise CacheError(f"disk={str(self.disk)!r} cannot be used: {problem}; give another folder") from problem
            except BaseException:
                self._closer()
                raise
            self._disk_closer = weakref.finalize(self, opened.let_go, key)
        self._warned: set[str] = set()
        self._seed = digest(self.fingerprint) if self.fingerprint else b""
        self._claims: set[int] = set()
        """What loaders have claimed through here."""
        self._groups: dict[str, int] = {}
        """Groups that were asked for here, and what the disk tier calls them."""

    def _open_memory(self) -> tuple[Tier, Callable[[], None]]:
        region, path = registry.open_region(self.name, self._make_memory, Memory)
        registry.remove_stale()
        policies: dict[int, Any] = {STATIC: Static(), LRU: Lru()}
        tier = Tier(region, policies, headroom_bytes=self._machine.headroom_bytes, position=forecast_position.current)
        policies[NEXT_USE] = NextUse(Plans(region, tier), forecast_position.current)
        return tier, lambda: registry.leave(path, region.lock_fd)

    def _make_memory(self, lock_fd: int) -> Memory:
        virtual_bytes = min(4 * max(self._machine.memory_bytes(), self._limit_bytes), _MOST_VIRTUAL_BYTES)
        virtual_bytes = virtual_bytes // PAGE_BYTES * PAGE_BYTES
        made = Memory.create(
            lock_fd, limit_bytes=self._limit_bytes, virtual_bytes=virtual_bytes, policy=_POLICIES[self.policy]
        )
        made.header[H_AUTO] = self.policy == "auto"
        return made

    def _open_disk(self) -> tuple[Tier, Callable[[], None]]:
        folder = self.disk
        assert folder is not None
        room_bytes = max(LEAST_BYTES, free_bytes(folder) + taken_bytes(folder))
        limit_bytes = max(LEAST_BYTES, self._disk_limit.resolve(room_bytes, auto_fraction=DEFAULT_DISK_SHARE))
        with open_files(folder, limit_bytes=limit_bytes, policy=LEFTOVERS) as (fds, is_first):
            region = Disk(*fds)
            policies: dict[int, Any] = {}
            tier = Tier(region, policies, headroom_bytes=lambda: free_bytes(folder))
            if is_first:
                tier.begin()
                region.join()
            policies[LEFTOVERS] = Leftovers(region.header[H_GROUPS : H_GROUPS + MOST_GROUPS])
        return tier, lambda: None

    # -- use ----------------------------------------------------------------------------------

    def get(self, key: Any, default: Any = None) -> Any:
        """The value, as the caller's own, or ``default``."""
        found = self._find(self._known(key))
        return default if found is None else found[0]

    def put(self, key: Any, value: Any) -> bool:
        """Keep a value; False if there is no room for it, or it cannot be kept."""
        return self._keep(self._known(key), value)

    def get_or_load(self, key: Any, load: Callable[[], Any], *, group: str = "", keeps_generators: bool = True) -> Any:
        """The value, loaded and kept if it is not there.

        ``load`` runs under a seed derived from the key, and the global generators are put back afterwards: a hit and a
        miss leave the same randomness to what comes after. Not so without ``keeps_generators``, for callers that seed
        them before they draw again. Keys of one ``group`` are not those of another; when a disk is full, groups that
        no process has asked for since it opened the cache make room for those that were.
        """
        known = self._known(key, group)
        found = self._memory.get(known.digest)
        if found is not None:
            return unpack(found)
        if not group and is_loading_whole_for(self.name):
            self._warn(
                "parts",
                "the dataset asks this cache for parts of its samples, and the whole samples are kept in it too, which "
                "leaves little room for either. Give the dataset keys(index), or do not wrap it or give the loader its "
                "cache",
            )
        try:
            with self._memory.loading.held(known.number, _LOADING_WITHIN_S):
                # Whoever held the lock was loading the same value.
                again = self._find(known, counts=False)
                return self._load(known, load, keeps_generators) if again is None else again[0]
        except TooLong:
            return self._load(known, load, keeps_generators)

    def is_on_disk(self, key: Any, *, group: str = "") -> bool:
        return self._on_disk is not None and self._on_disk.has(self._known(key, group).digest)

    def put_on_disk(self, key: Any, value: Any, *, group: str = "") -> bool:
        """Keep a value on disk; False if there is no room for it, or it cannot be kept there."""
        return self._keep_on_disk(self._known(key, group), value)

    def wrap(self, dataset: Any, *, fingerprint: str | None = None) -> CachedDataset:
        """The dataset with its samples in this cache, by index.

        What tells its samples from those of other datasets is derived from the dataset (its class and code, and what
        it was made with), or given as ``fingerprint``.
        """
        self._suit(repeats=False)
        return CachedDataset(dataset, self, fingerprint_again(dataset) if fingerprint is None else fingerprint)

    @property
    def limit_bytes(self) -> int:
        """The limit in force, index included."""
        return int(self._memory.region.header[H_LIMIT])

    # -- a loader's side ------------------------------------------------------------------------

    def publish(self, plan: Plan, claim: int | None, now: int) -> int | None:
        """Say what an epoch needs when, and that it is at batch ``now``. Gives the claim under which that is known, to
        be given back with the epoch's next plan; None if the policy does not ask, or there is no room for it."""
        self._suit(repeats=plan.repeats)
        if int(self._memory.region.header[H_POLICY]) != NEXT_USE:
            return None
        if claim is None:
            claim = self._plans.claim()
            self._claims.add(claim)
        try:
            if self._plans.publish(claim, plan, now):
                return claim
        except BaseException:
            self.withdraw(claim)
            raise
        self.withdraw(claim)
        return None

    def advance(self, claim: int, now: int) -> None:
        self._plans.advance(claim, now)

    def withdraw(self, claim: int) -> None:
        """The epoch is over. Any thread, also within the garbage collector."""
        if claim in self._claims:
            self._claims.discard(claim)
            self._plans.withdraw(claim)

    @property
    def asks_for_plans(self) -> bool:
        """Whether knowing what is needed next makes any difference here."""
        header = self._memory.region.header
        return bool(header[H_AUTO]) or int(header[H_POLICY]) == NEXT_USE

    @property
    def plans(self) -> int:
        """Loaders that have said what they need."""
        return self._plans.count()

    @property
    def _plans(self) -> Plans:
        return self._memory.policies[NEXT_USE].oracle

    def _suit(self, *, repeats: bool) -> None:
        """Choose the policy, if it is ours to choose: of keys used once an epoch none has more hits than static."""
        header = self._memory.region.header
        if header[H_AUTO] and (repeats or int(header[H_POLICY]) == LRU):
            header[H_POLICY] = NEXT_USE if repeats else STATIC

    # -- inside -------------------------------------------------------------------------------

    def digest_of(self, key: Any) -> bytes:
        """What a key without a group is known by."""
        return digest(key) if not self._seed else digest((self._seed, key))

    def _known(self, key: Any, group: str = "") -> _Known:
        if self._on_disk is None:
            return _Known(self.digest_of((group, key) if group else key), 0)
        number = self._groups.get(group)
        if number is None:
            number = int.from_bytes(digest((self.fingerprint, group))[:8], "little") | 1
            with contextlib.suppress(TooLong, OSError):
                self._on_disk.ask_for(number)
                self._groups[group] = number
        return _Known(self.digest_of((group, key) if group else key), number)

    def _find(self, known: _Known, *, counts: bool = True) -> tuple[Any] | None:
        """The value from the nearest tier that has it."""
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
            self._warn("read", f"the cache in {self.disk} cannot be read ({problem}); values are loaded instead")
            return None
        # Somebody may have put a newer one meanwhile.
        self._keep_in_memory(known, value, replaces=False)
        return (value,)

    def _load(self, known: _Known, load: Callable[[], Any], keeps_generators: bool) -> Any:
        with KeptGenerators() if keeps_generators else contextlib.nullcontext():
            seed_stretch(mix(known.number), 0)
            value = load()
        self._keep(known, value)
        return value

    def _keep(self, known: _Known, value: Any) -> bool:
        in_memory = self._keep_in_memory(known, value)
        return self._keep_on_disk(known, value) or in_memory

    def _keep_in_memory(self, known: _Known, value: Any, *, replaces: bool = True) -> bool:
        if self._memory.refuses(known.digest, least_bytes(value)):
            return False
        try:
            packed = Packed(value)
        except Exception as problem:
            self._warn("value", f"a value cannot be cached, and so is loaded every time: {problem}")
            # Nor may the one before it be taken for it.
            self._memory.remove(known.digest)
            return False
        kept = self._put(self._memory, known, packed, replaces=replaces)
        if self._memory.is_short:
            stats = self.stats()
            self._warn(
                "room",
                f"the machine has no memory left for the cache, which holds {format_bytes(stats.bytes)} of "
                f"{format_bytes(stats.limit_bytes)}; it grows no further. Lower its limit, or batch_size or "
                "num_workers",
            )
        return kept

    def _keep_on_disk(self, known: _Known, value: Any) -> bool:
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
            self._warn("disk", f"the disk of {self.disk} is nearly full; the cache there grows no further")
        return kept

    def _put(self, tier: Tier, known: _Known, packed: Any, *, replaces: bool = True) -> bool:
        try:
            return tier.put(known.digest, packed, replaces=replaces, group=known.group)
        except (TooLong, OSError) as problem:
            self._warn("write", f"the cache cannot be written to ({problem}); values are loaded instead")
            return False

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, RuntimeWarning, stacklevel=5)

    # -- valves and gauges ----------------------------------------------------------------------

    def resize(self, limit: object) -> None:
        """Change the limit now, for every process; what is over it goes back to the system at once."""
        self._memory.resize(self._bytes_of(limit))

    def clear(self) -> None:
        """Forget every value, on disk too."""
        for tier in self._tiers():
            tier.clear()

    def stats(self) -> CacheStats:
        """Figures of the whole node."""
        counts = counts_of(self._memory.region)
        del counts["corrupt"]
        disk = {}
        if self._on_disk is not None:
            there = counts_of(self._on_disk.region)
            disk = {f"disk_{word}": there[word] for word in ("items", "bytes", "limit_bytes", "hits", "corrupt")}
            counts["hits"] += there["hits"]
            counts["misses"] = max(0, counts["misses"] - there["hits"])
        asked = counts["hits"] + counts["misses"]
        return CacheStats(**counts, **disk, hit_rate=counts["hits"] / asked if asked else 0.0)

    def print_stats(self, name: str = "Cache") -> None:
        stats = self.stats()
        print(f"[{name}] Cache Stats:")
        print(f"  - Size: {stats.items} items")
        print(f"  - Memory: {stats.bytes / 2**20:.1f} / {stats.limit_bytes / 2**20:.1f} MB")
        print(f"  - Hit Rate: {100 * stats.hit_rate:.2f}% ({stats.hits} hits / {stats.misses} misses)", flush=True)
        if stats.passed:
            print(f"  - Not kept: {stats.passed} times there was no room, or a value is larger than all", flush=True)

    def close(self) -> None:
        """Let go of it. The memory goes when the last process has; what is on disk stays."""
        for claim in tuple(self._claims):
            self.withdraw(claim)
        self._closer()
        if self._on_disk is not None:
            self._disk_closer()
            self._on_disk = cast(Tier, _Closed())
        self._memory = cast(Tier, _Closed())

    def _tiers(self) -> list[Tier]:
        return [tier for tier in (self._memory, self._on_disk) if tier is not None]

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("name", "policy", "disk", "fingerprint", "_machine", "_limit_bytes", "_disk_limit")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


class _Known(NamedTuple):
    """A key."""

    digest: bytes
    group: int
    """What it belongs to on disk."""

    @property
    def number(self) -> int:
        """Another for every key, and the same in every process."""
        return int.from_bytes(self.digest[:8], "little")


class _Closed:
    """Stands where a tier was."""

    def __getattr__(self, name: str) -> Any:
        raise CacheError("this cache is closed")
