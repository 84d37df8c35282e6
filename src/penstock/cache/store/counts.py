"""What a tier has counted, over all threads that use it and used it.

In:  a region.
Out: figures by name.
Runs in: trainer, worker, command line.
"""

from __future__ import annotations

from penstock.cache.store.region import (
    H_CORRUPT,
    H_EVICTIONS,
    H_HITS,
    H_ITEMS,
    H_LIMIT,
    H_MISSES,
    H_PASSED,
    H_VALUE_BYTES,
    R_CORRUPT,
    R_HITS,
    R_MISSES,
    R_PASSED,
    Region,
)


def counts(region: Region) -> dict[str, int]:
    header, rows = region.header, region.rows

    def total(inherited: int, word: int) -> int:
        return int(header[inherited]) + int(rows[:, word].sum())

    return {
        "items": int(header[H_ITEMS]),
        "bytes": int(header[H_VALUE_BYTES]) + region.index_bytes,
        "limit_bytes": int(header[H_LIMIT]),
        "hits": total(H_HITS, R_HITS),
        "misses": total(H_MISSES, R_MISSES),
        "evictions": int(header[H_EVICTIONS]),
        "passed": total(H_PASSED, R_PASSED),
        "corrupt": total(H_CORRUPT, R_CORRUPT),
    }
