"""How large new segments are, and which free segment is reused for a need.

In:  needs in bytes.
Out: capacities; whether a free segment is reused for a need.
Runs in: trainer; the planner's simulator gets the same numbers through ``LoaderRules``.
Imports neither torch nor numpy.
"""

from __future__ import annotations

import mmap

PAGE_BYTES = mmap.PAGESIZE
_LARGE_STEP_BYTES = 64 << 10
_REUSE_UP_TO = 2.0
"""A free segment that is more than this many times as large as the need is not reused, because other batches need its
bytes."""
_REUSE_ANY_BELOW_BYTES = 1 << 20
"""Segments below this size are always reused, because unused bytes cost less than a new segment."""
RECENT_NEEDS = 64
"""The number of recent needs that are remembered, to find free segments that are too large for all of these needs."""


def round_up(count: int, step: int) -> int:
    return -(-count // step) * step


def capacity_for(need_bytes: int) -> int:
    """The size of a new segment for ``need_bytes``: whole pages, or coarser steps where the rounding is negligible."""
    return round_up(max(need_bytes, 1), PAGE_BYTES if need_bytes < 16 * _LARGE_STEP_BYTES else _LARGE_STEP_BYTES)


def is_too_large(free_bytes: int, need_bytes: int) -> bool:
    """Whether a free segment of ``free_bytes`` would waste memory on a need of ``need_bytes``."""
    return free_bytes > max(_REUSE_UP_TO * need_bytes, _REUSE_ANY_BELOW_BYTES)


def may_reuse(free_bytes: int, need_bytes: int) -> bool:
    """Whether a free segment of ``free_bytes`` is used for a need of ``need_bytes``."""
    return free_bytes >= need_bytes and not is_too_large(free_bytes, need_bytes)
