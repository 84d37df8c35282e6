"""Datasets and collate functions whose batches must not depend on who fetches them. At module level for spawn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


def drawn() -> tuple[float, float, float]:
    """One number from each global generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


class Sample(NamedTuple):
    image: torch.Tensor
    noise: tuple[float, float, float]


class Augmented(Dataset[Any]):
    """Same-shape samples; the number of draws differs from sample to sample, so that streams cannot fall in step."""

    def __init__(self, length: int = 83) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        for _ in range(index % 3):
            drawn()
        return torch.full((3, 5), float(index)) + torch.rand(3, 5), np.random.rand(4), *drawn()


class Structured(Dataset[Any]):
    """Every kind of container and value the default collate knows."""

    def __len__(self) -> int:
        return 41

    def __getitem__(self, index: int) -> Any:
        return {
            "named": Sample(torch.rand(2, 3), drawn()),
            "text": f"sample {index}",
            "bytes": b"%d" % index,
            "list": [index, index / 2, np.float32(index), np.arange(3) + index],
            "zero": torch.empty(0, 4),
            "flag": index % 2 == 0,
            "half": torch.full((2,), index, dtype=torch.bfloat16),
        }


class Ragged(Dataset[Any]):
    """Samples of different lengths, some of them empty."""

    def __len__(self) -> int:
        return 53

    def __getitem__(self, index: int) -> Any:
        length = random.randrange(0, 40)
        return {"tokens": torch.randint(0, 1000, (length,)), "scores": np.random.rand(length), "id": str(index)}


class Large(Dataset[Any]):
    """Samples of 1.2 MB, drawn at random."""

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(np.random.randint(0, 255, (3, 400, 1000), dtype=np.uint8)), index


class LargeRagged(Dataset[Any]):
    """Samples between nothing and 2 MB, so that rooms grow and shrink."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(np.random.randint(0, 255, random.choice([0, 10, 300_000, 2_000_000]), dtype=np.uint8))


class Changing(Dataset[Any]):
    """Shapes and types that change along the way; batches of 8 stay collatable."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        batch = index // 8
        if batch % 4 == 1:
            return torch.rand(batch + 1)
        if batch % 4 == 2:
            return index if index % 2 else float(index)
        if batch % 4 == 3:
            return np.random.rand(2) if index % 8 < 4 else torch.rand(2, dtype=torch.float64)
        return torch.rand(3)


class LongTexts(Dataset[Any]):
    """Texts and raw bytes of a few bytes up to 100 kB, beside values of fixed size. Some samples do not match the
    others."""

    def __len__(self) -> int:
        return 72

    def __getitem__(self, index: int) -> Any:
        length = int(10 ** random.uniform(0, 5))
        document = f"{index} é \ud800" + chr(97 + index % 26) * length
        label = float(index) if index % 24 == 17 else index
        return {"document": document, "raw": (random.randbytes(length), "short"), "label": label, "x": torch.rand(3)}


class ByList(Dataset[Any]):
    """Fetches lists of indices, with draws per call: sees whole batches."""

    def __len__(self) -> int:
        return 47

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("__getitems__ is there")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        drawn()
        return [(torch.tensor([index, len(indices)]), *drawn()) for index in indices]


class SplittableByList(ByList):
    """Says itself that rows may be fetched apart; draws per sample only."""

    splittable = True

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(torch.tensor([index]), random.random()) for index in indices]


class Stream(IterableDataset[Any]):
    """An iterable dataset every worker reads whole, without randomness: torch promises none here."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return ((torch.full((3,), index), str(index)) for index in range(self.length))


class SharedStream(Stream):
    """Workers share the stream out among themselves."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return ((torch.full((3,), index), index) for index in range(start, self.length, step))


def pad(samples: list[Any]) -> Any:
    """A custom collate with randomness of its own."""
    longest = max(len(sample["tokens"]) for sample in samples) + random.randrange(3)
    tokens = torch.zeros(len(samples), longest, dtype=torch.int64)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample["tokens"])] = sample["tokens"]
    return {
        "tokens": tokens,
        "scores": [sample["scores"] for sample in samples],
        "ids": tuple(sample["id"] for sample in samples),
        "drawn": drawn(),
    }


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def mixed_up(samples: list[Any]) -> list[Any]:
    order = np.random.permutation(len(samples))
    return [samples[place] for place in order] + [torch.rand(2)]
