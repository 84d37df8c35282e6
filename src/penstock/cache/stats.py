"""A cache's figures.

In:  counts of its stores.
Out: ``CacheStats``.
Runs in: trainer and worker.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """A cache's figures, over all processes that have it open."""

    items: int
    bytes: int
    """Memory of values and index."""
    limit_bytes: int
    hits: int
    """Lookups that needed no load, from memory or disk."""
    misses: int
    hit_rate: float
    """Share of lookups that were hits; 0 before the first lookup."""
    evictions: int
    passed: int
    """Values that were not kept, because there was no room or because they exceed the limit."""
    disk_items: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    disk_hits: int = 0
    """Hits that came from disk."""
    disk_corrupt: int = 0
    """Values found damaged on disk, and removed."""

    @classmethod
    def of(cls, memory: dict[str, int], disk: dict[str, int] | None) -> CacheStats:
        """From the counts of the store in memory and of the one on disk, if there is one."""
        counts, on_disk = dict(memory), {}
        del counts["corrupt"]
        if disk is not None:
            on_disk = {f"disk_{word}": disk[word] for word in ("items", "bytes", "limit_bytes", "hits", "corrupt")}
            # A value that is on disk but not in memory is a miss of the store in memory and a hit of the cache.
            counts["hits"] += disk["hits"]
            counts["misses"] = max(0, counts["misses"] - disk["hits"])
        lookups = counts["hits"] + counts["misses"]
        return cls(**counts, **on_disk, hit_rate=counts["hits"] / lookups if lookups else 0.0)

    def print(self, name: str) -> None:
        print(f"[{name}] Cache Stats:")
        print(f"  - Size: {self.items} items")
        print(f"  - Memory: {self.bytes / 2**20:.1f} / {self.limit_bytes / 2**20:.1f} MB")
        print(f"  - Hit Rate: {100 * self.hit_rate:.2f}% ({self.hits} hits / {self.misses} misses)", flush=True)
        if self.passed:
            print(f"  - Not kept: {self.passed} values that found no room or exceed the limit", flush=True)
