"""Datasets for fault tests. At module level for spawn.

In:  indices.
Out: samples that tell by whom, and with which randomness, they were made.
Runs in: workers, and the test process as the oracle.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info


def noise(index: int, values: int) -> torch.Tensor:
    """The index and draws from all three global generators: equal only if seeds and place are."""
    drawn = torch.tensor([index, random.random(), np.random.rand(), float(torch.rand(()))], dtype=torch.float64)
    return drawn.repeat(-(-values // 4))[:values]


class Noisy(Dataset[Any]):
    def __init__(self, length: int, *, values: int = 8, sample_s: float = 0.0) -> None:
        self.length, self.values, self.sample_s = length, values, sample_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.sample_s:
            time.sleep(self.sample_s)
        return noise(index, self.values)


class Ragged(Noisy):
    """Larger and larger samples of changing shape: no template holds, and no guess of the size does."""

    def __getitem__(self, index: int) -> Any:
        return {"noise": noise(index, self.values + 64 * index)}


class WithPid(Noisy):
    """Samples that say who made them, besides."""

    def __getitem__(self, index: int) -> Any:
        return {"noise": super().__getitem__(index), "pid": os.getpid()}


class Deadly(Noisy):
    """Kills its worker at one index, always."""

    def __init__(self, length: int, at: int, **more: Any) -> None:
        super().__init__(length, **more)
        self.at, self.home = at, os.getpid()

    def __getitem__(self, index: int) -> Any:
        if index == self.at and os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Leaving(Noisy):
    """Leaves the worker at one index, always: by sys.exit, or with ``at_once`` without a farewell."""

    def __init__(self, length: int, at: int, *, at_once: bool) -> None:
        super().__init__(length)
        self.at, self.at_once = at, at_once

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            (os._exit if self.at_once else sys.exit)(5)
        return super().__getitem__(index)


class Hungry(Noisy):
    """Eats all the memory there is at one index; with ``once``, a path, the first time only."""

    def __init__(self, length: int, at: int, once: str | None = None) -> None:
        super().__init__(length)
        self.at, self.once = at, once

    def __getitem__(self, index: int) -> Any:
        if index == self.at and (self.once is None or not Path(self.once).exists()):
            if self.once is not None:
                Path(self.once).touch()
            _ = [bytearray(b"x") * (1 << 20) for _ in range(20_000)]
        return super().__getitem__(index)


class Failing(Noisy):
    def __init__(self, length: int, at: int, **more: Any) -> None:
        super().__init__(length, **more)
        self.at = at

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            raise ValueError(f"sample {index} is broken")
        return super().__getitem__(index)


class Sitting(Noisy):
    """Sits in sample ``at`` for 1,000 s; with ``gil`` in C code that never lets another thread run."""

    def __init__(self, length: int, *, at: int = 0, seat_s: int = 1000, gil: bool = False) -> None:
        super().__init__(length)
        self.at, self.seat_s, self.gil = at, seat_s, gil

    def __getitem__(self, index: int) -> Any:
        if index >= self.at:
            self.sit_here()
        return super().__getitem__(index)

    def sit_here(self) -> None:
        # Not print: its buffer would be the trainer's.
        os.write(1, b"sitting %d\n" % os.getpid())
        if self.gil:
            ctypes.PyDLL(None).sleep(self.seat_s)
        else:
            time.sleep(self.seat_s)


class Stream(IterableDataset[Any]):
    """Every worker reads its own share of ``length``."""

    def __init__(self, length: int, *, values: int = 8, sample_s: float = 0.0) -> None:
        self.length, self.values, self.sample_s = length, values, sample_s

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.length, step):
            if self.sample_s:
                time.sleep(self.sample_s)
            yield self.sample(index)

    def sample(self, index: int) -> Any:
        return torch.full((self.values,), index)


class DeadlyStream(Stream):
    def __init__(self, length: int, at: int, **more: Any) -> None:
        super().__init__(length, **more)
        self.at, self.home = at, os.getpid()

    def sample(self, index: int) -> Any:
        if index == self.at and os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample(index)


class FailingStream(Stream):
    def __init__(self, length: int, at: int, **more: Any) -> None:
        super().__init__(length, **more)
        self.at = at

    def sample(self, index: int) -> Any:
        if index == self.at:
            raise ValueError(f"sample {index} is broken")
        return super().sample(index)


class StatefulSampler(Sampler[int]):
    """A shuffled order it draws itself, and a place in it: state_dict as torchdata's samplers have it."""

    def __init__(self, length: int, seed: int = 0) -> None:
        self.length, self.seed, self.epoch, self.at = length, seed, 0, 0
        self._resumes = False

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        if not self._resumes:
            self.at = 0
        self._resumes = False
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        while self.at < self.length:
            self.at += 1
            yield order[self.at - 1]
        self.epoch += 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at, self._resumes = state["epoch"], state["at"], True


def listed(samples: list[Any]) -> list[Any]:
    """A collate function of the user's own, with randomness: samples stay apart."""
    return [*samples, torch.rand(2), random.random()]


def joined(samples: list[Any]) -> torch.Tensor:
    """A collate function whose result is one large tensor."""
    flat = [s["noise"] if isinstance(s, dict) else s for s in samples]
    return torch.cat([*flat, torch.rand(2, dtype=torch.float64)])


def plain(batch: Any) -> Any:
    """A batch as nested lists, to compare and to keep without holding memory of the loader."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items() if key != "pid"}
    if isinstance(batch, (list, tuple)):
        return [plain(value) for value in batch]
    return batch
