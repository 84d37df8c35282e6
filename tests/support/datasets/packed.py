"""Datasets that are packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from support.same_samples import is_same as is_same


class Samples:
    """A list as a dataset."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Images:
    """Samples that take a known number of bytes."""

    def __init__(self, count: int, side: int = 64) -> None:
        self.count, self.side = count, side

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.from_numpy(np.random.default_rng(index).integers(0, 256, (3, self.side, self.side), np.uint8))
        return {"image": noise, "label": index, "name": f"image {index}"}


class AtRandom(Images):
    """Other samples every time they are read, as with augmentations."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"torch": torch.rand(4), "numpy": np.random.rand(3), "label": index}


class OfChance(Images):
    """Samples whose sizes are others every time, whatever the global generators are set to."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        size = int(np.random.default_rng().integers(1, 20_000))
        return {"bytes": bytes(size), "label": index}
