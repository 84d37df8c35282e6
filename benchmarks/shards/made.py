"""Shards written by webdataset: large members like images, and small texts.

In:  a folder.
Out: shards in that folder.
Runs in: the harness.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

CASES = {"images": 1000, "texts": 10_000}
"""Samples per shard."""
SHARDS = 2


def make(case: str, folder: Path, *, is_quick: bool) -> str:
    """Write the shards; return their name with braces."""
    from webdataset.writer import TarWriter

    chance = np.random.default_rng(0)
    samples = CASES[case] // (20 if is_quick else 1)
    for shard in range(SHARDS):
        with TarWriter(str(folder / f"{case}-{shard:03d}.tar")) as out:
            for number in range(samples):
                out.write({"__key__": f"{shard:03d}/{number:06d}", **_sample(case, number, chance)})
    return str(folder / f"{case}-{{000..{SHARDS - 1:03d}}}.tar")


def _sample(case: str, number: int, chance: np.random.Generator) -> dict[str, Any]:
    if case == "images":
        # This member is not decoded: both readers would use the same decoder.
        return {"img": chance.bytes(100_000), "json": {"number": number, "label": "cat"}, "cls": number % 10}
    row = np.full(16, number, np.float32)
    return {"txt": f"{number:>9} " * 200, "json": {"number": number}, "cls": number % 10, "npy": row}
