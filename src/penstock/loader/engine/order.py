"""How one pipeline hands out work.

In:  the loader's arguments, its dataset and collate function.
Out: ``Order``.
Runs in: trainer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Order:
    """How this pipeline hands out work; fixed for an epoch."""

    rows: bool
    """Rows are written in place, under torch's default collate."""
    splittable: bool
    """Several workers may fetch rows of one batch."""
    bound: bool
    """Batches belong to workers in turn, as in torch: iterable datasets and seeding="worker"."""
    keeps_generators: bool
    """Workers' generators run on from batch to batch and epoch to epoch: seeding="worker"."""
    in_order: bool
    batch_rows: int
    """Nominal batch length, for estimates."""
