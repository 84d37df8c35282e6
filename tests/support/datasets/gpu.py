"""Samples whose every byte tells which they are. At module level for spawn."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset


class Numbered(Dataset[Any]):
    """Sample ``n`` is ``values`` times ``n``, as int64."""

    def __init__(self, count: int, values: int) -> None:
        self.count, self.values = count, values

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.values,), index, dtype=torch.int64)


class Mixed(Numbered):
    """A sample of every kind of thing."""

    def __getitem__(self, index: int) -> Any:
        return {"x": super().__getitem__(index), "text": f"sample {index}", "pair": (index, float(index))}


class Movable:
    """A batch type with ways of its own to be pinned and moved."""

    def __init__(self, x: torch.Tensor, how: str = "") -> None:
        self.x, self.how = x, how

    def pin_memory(self) -> Movable:
        return Movable(self.x.pin_memory(), self.how + "pinned ")

    def to(self, device: torch.device, non_blocking: bool = False) -> Movable:
        return Movable(self.x.to(device, non_blocking=non_blocking), self.how + "moved ")


def movable(samples: list[torch.Tensor]) -> Movable:
    return Movable(torch.stack(samples))


def sparse(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples).to_sparse()
