"""Stretches: consecutive rows of a batch that share one seed and are never divided between tasks.

In:  the length of a batch.
Out: rows per stretch.
Runs in: both. Imports neither torch nor numpy.
"""

from __future__ import annotations

STRETCHES_PER_BATCH = 8
"""The most stretches in a batch. Seeding costs 8 µs per stretch, and more workers than stretches cannot share one
batch."""


def stretch_rows(batch_rows: int) -> int:
    """How many consecutive rows share one seed."""
    return max(1, -(-batch_rows // STRETCHES_PER_BATCH))
