"""How large segments are made, and which free one is reused for a need.

In:  needs in bytes.
Out: capacities, and the limits of reuse.
Runs in: trainer; the planner's simulator gets the same numbers through ``LoaderRules``.
Imports neither torch nor numpy.
"""

from __future__ import annotations

import mmap

PAGE_BYTES = mmap.PAGESIZE
_LARGE_STEP_BYTES = 64 << 10
REUSE_UP_TO = 2.0
"""A free segment over this many times the need is closed instead of reused: its bytes are wanted elsewhere."""
REUSE_ANY_BELOW_BYTES = 1 << 20
"""Below this size a loose fit wastes less than a new segment costs."""
RECENT_NEEDS = 64
"""Needs that are remembered, to tell which free segments are of use."""


def round_up(count: int, step: int) -> int:
    return -(-count // step) * step


def capacity_for(need_bytes: int) -> int:
    """How large a segment for ``need_bytes`` is made: whole pages, coarser once the rounding is negligible."""
    return round_up(max(need_bytes, 1), PAGE_BYTES if need_bytes < 16 * _LARGE_STEP_BYTES else _LARGE_STEP_BYTES)
