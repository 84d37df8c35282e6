"""The demo's dataset: big samples, each of which takes a little while to arrive, the same on every machine.

In:  a seed.
Out: samples as dictionaries of pixels and an index.
Runs in: trainer (to build it), worker (to fetch from it).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import Dataset


class BigSamples(Dataset[dict[str, Any]]):
    """``length`` samples of ``sample_bytes`` each; a fetch waits ``wait_s``, as a disk or a network would."""

    def __init__(self, *, length: int, sample_bytes: int, wait_s: float, seed: int = 0) -> None:
        self._length = length
        self._wait_s = wait_s
        generator = torch.Generator().manual_seed(seed)
        self._source = torch.randint(0, 256, (sample_bytes,), dtype=torch.uint8, generator=generator)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        time.sleep(self._wait_s)
        return {"pixels": self._source + (index % 251), "index": index}
