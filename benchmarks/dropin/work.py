"""Common work of real programs: datasets, and the arguments their loaders get.

In:  nothing; every dataset is made up, in memory or by waiting.
Out: ``WORK``: one entry per kind of work.
Runs in: the child, and its workers.
"""

from __future__ import annotations

import collections
import functools
import io
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate, get_worker_info

_MANY = 10_000_000
_ENDLESS = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Work:
    """One kind of work."""

    dataset: Callable[[], Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of both loaders."""
    epochs: int = 0
    """Time this many whole epochs, from the loader's construction; 0: the rate in the middle of a long one."""
    first_only: bool = False
    """Leave every epoch after its first batch."""
    mean_sample_s: float | None = None
    """What a sample costs where it only waits: the ideal rate is workers / mean."""
    takes_workers: bool = True
    """False: measured without workers only."""


class Made(Dataset[Any]):
    """A map-style dataset whose samples a function makes from their index."""

    def __init__(self, make: Callable[[int], Any], length: int = _MANY) -> None:
        self._make, self._length = make, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


class MadeInLists(Made):
    """The same, asked for several samples at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self._make(index) for index in indices]


class Stream(IterableDataset[Any]):
    """The same samples as a stream that its workers share."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return (self._make(index) for index in range(first, _ENDLESS, step))


class Chunks(Dataset[Any]):
    """A file of compressed chunks, of which each process keeps the one it read last."""

    def __init__(self, chunk_rows: int, read_s: float) -> None:
        self._chunk_rows, self._read_s = chunk_rows, read_s
        self._number, self._chunk = -1, np.empty(0)

    def __len__(self) -> int:
        return _MANY

    def __getitem__(self, index: int) -> np.ndarray:
        number, row = divmod(index, self._chunk_rows)
        if number != self._number:
            spin(self._read_s)
            self._number, self._chunk = number, np.full((self._chunk_rows, 2048), number, np.float32)
        return self._chunk[row]


class Names(Dataset[int]):
    """A list of file names, as many datasets hold; what it costs is to get it into the workers."""

    def __init__(self, count: int) -> None:
        self._names = [f"/data/train/class_{number % 1000:04}/image_{number:08}.jpg" for number in range(count)]

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> int:
        return len(self._names[index])


class Record:
    """A sample of a user's own class."""

    def __init__(self, index: int) -> None:
        self.name, self.label, self.points = f"scan {index}", index % 10, torch.full((64, 3), float(index))


class Subclass(torch.Tensor):
    """A tensor class such as torchvision's."""


def spin(seconds: float) -> None:
    """Use a processor for a while."""
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


def waits(seconds_of: Callable[[int], float], index: int) -> np.ndarray:
    """A sample of 4 KB that comes after a wait."""
    time.sleep(seconds_of(index))
    return np.full(1024, index, np.float32)


def every_37th(index: int) -> float:
    return 0.050 if index % 37 == 0 else 0.002


def heavy_tail(index: int) -> float:
    return 0.400 if index % 151 == 75 else 0.010


def exponential(index: int) -> float:
    return min(0.1, random.Random(index).expovariate(1 / 0.005))


_MEAN_EXPONENTIAL_S = 0.005


def padded(samples: list[list[int]]) -> dict[str, torch.Tensor]:
    """Token lists to one tensor and its mask."""
    longest = max(map(len, samples))
    tokens = torch.zeros(len(samples), longest, dtype=torch.int64)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample)] = torch.tensor(sample)
    return {"tokens": tokens, "mask": tokens != 0}


def as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def zipped(samples: list[Any]) -> tuple[Any, ...]:
    """What detection models get: a tuple of images and one of targets."""
    return tuple(zip(*samples, strict=True))


def without_none(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


@functools.cache
def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (256, 256, 3), np.uint8))


@functools.cache
def jpeg() -> bytes:
    file = io.BytesIO()
    picture().save(file, "JPEG", quality=90)
    return file.getvalue()


def decoded(_: int) -> torch.Tensor:
    with Image.open(io.BytesIO(jpeg())) as image:
        return torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1)


def augmented(_: int) -> torch.Tensor:
    """Transforms with temporaries of 3 MB."""
    image = torch.ones(3, 512, 512)
    return ((image * 1.5 - 0.5).clamp(0, 1) - 0.4) / 0.2


def augmented_large(_: int) -> np.ndarray:
    """Transforms with temporaries of 12 MB."""
    image = np.ones((1024, 1024, 3), np.float32)
    return np.clip(image * 1.5 - 0.5, 0, 1)[:256, :256].copy()


def detection(index: int) -> tuple[torch.Tensor, dict[str, Any]]:
    count = index % 7 + 1
    return torch.zeros(3, 256, 256), {"boxes": torch.zeros(count, 4), "labels": torch.zeros(count, dtype=torch.int64)}


def slow(make: Callable[[int], Any], seconds: float) -> Callable[[int], Any]:
    """The same samples, each after some computing."""

    def made(index: int) -> Any:
        spin(seconds)
        return make(index)

    return made


_ROWS = torch.zeros(1000, 784)
_TOKENS = list(range(1, 301))


def _row(index: int) -> torch.Tensor:
    return _ROWS[index % 1000]


def _row_and_label(index: int) -> tuple[torch.Tensor, int]:
    return _ROWS[index % 1000], index


def _fields(index: int) -> dict[str, Any]:
    return {f"field {number}": torch.tensor(float(index)) for number in range(30)}


def _nested(index: int) -> dict[str, Any]:
    return {"meta": {"sizes": [1, 2, 3], "pair": ("x", 2.5)}, "names": [str(number) for number in range(30)]}


def _pad(index: int) -> list[int]:
    return _TOKENS[: 50 + index % 250]


def _of(make: Callable[[int], Any], batch_size: int | None, **more: Any) -> Work:
    return Work(dataset=lambda: Made(make), arguments={"batch_size": batch_size, **more})


def _uneven(seconds_of: Callable[[int], float], mean_s: float) -> Work:
    return Work(
        dataset=lambda: Made(functools.partial(waits, seconds_of)),
        arguments={"batch_size": 16},
        mean_sample_s=mean_s,
    )


WORK: dict[str, Work] = {
    # -- default collate ------------------------------------------------------------------------
    "784 floats, 64": _of(_row_and_label, 64),
    "tiny tuples, 64": _of(lambda index: (index, float(index)), 64),
    "one float row, 1": _of(_row, 1),
    "one float row, no batches": _of(_row, None),
    "30 fields, 32": _of(_fields, 32),
    "lists of 128 numbers, 16": _of(lambda _: {"ids": _TOKENS[:128], "mask": _TOKENS[:128]}, 16),
    "short texts, 64": _of(lambda index: {"text": "hello world " * 5, "id": index}, 64),
    "texts of 10 kB, 64": _of(lambda index: {"text": "hello wor " * 1000, "id": index}, 64),
    "bytes of 100 kB, 32": _of(lambda index: bytes(100_000), 32),
    "uint8 images, 32": _of(lambda _: torch.from_numpy(np.asarray(picture()).copy()), 32),
    "JPEG decoded, 32": _of(decoded, 32),
    "3 MB temporaries, 16": _of(augmented, 16),
    "12 MB temporaries, 16": _of(augmented_large, 16),
    "tensor subclass, 16": _of(lambda _: torch.zeros(3, 256, 256).as_subclass(Subclass), 16),
    "UserDict, 64": _of(lambda index: collections.UserDict(a=_row(index), b=index), 64),
    "ask for lists, 64": Work(dataset=lambda: MadeInLists(_row_and_label), arguments={"batch_size": 64}),
    "chunks in order, 32": Work(dataset=lambda: Chunks(64, 0.010), arguments={"batch_size": 32}),
    "computes 1 ms, 8": _of(slow(_row, 0.001), 8),
    # -- a collate function of the user's -----------------------------------------------------------
    "padded token lists, 32": _of(_pad, 32, collate_fn=padded),
    "padded token lists, 0.3 ms each, 32": _of(slow(_pad, 0.0003), 32, collate_fn=padded),
    "PIL images, 16": _of(lambda _: picture().copy(), 16, collate_fn=as_they_are),
    "PIL images, 1 ms each, 16": _of(slow(lambda _: picture().copy(), 0.001), 16, collate_fn=as_they_are),
    "detection, zipped, 16": _of(detection, 16, collate_fn=zipped),
    "filtered, default collate, 32": _of(lambda i: (torch.zeros(3, 128, 128), i), 32, collate_fn=without_none),
    "tensor subclass, zipped, 16": _of(
        lambda i: (torch.zeros(3, 256, 256).as_subclass(Subclass), i), 16, collate_fn=zipped
    ),
    "user's objects, 32": _of(Record, 32, collate_fn=as_they_are),
    "nested objects, 32": _of(_nested, 32, collate_fn=as_they_are),
    "ragged tensors to 1.2 MB, 16": _of(lambda i: torch.zeros(1000 * (1 + i % 300)), 16, collate_fn=as_they_are),
    # -- streams ------------------------------------------------------------------------------------
    "stream of 784 floats, 64": Work(dataset=lambda: Stream(_row_and_label), arguments={"batch_size": 64}),
    "stream of JPEG, 32": Work(dataset=lambda: Stream(decoded), arguments={"batch_size": 32}),
    # -- waits and uneven costs -----------------------------------------------------------------------
    "waits 5 ms, 16": _uneven(lambda _: 0.005, 0.005),
    "waits 2 ms, every 37th 50 ms, 16": _uneven(every_37th, 0.002 + 0.048 / 37),
    "waits 10 ms, every 151st 400 ms, 16": _uneven(heavy_tail, 0.010 + 0.390 / 151),
    "waits exponential 5 ms, 16": _uneven(exponential, _MEAN_EXPONENTIAL_S),
    "stream, waits exponential 5 ms, 16": Work(
        dataset=lambda: Stream(functools.partial(waits, exponential)),
        arguments={"batch_size": 16},
        mean_sample_s=_MEAN_EXPONENTIAL_S,
    ),
    # -- edges ------------------------------------------------------------------------------------------
    "10 epochs of 4 batches": Work(dataset=lambda: Made(_row, 128), arguments={"batch_size": 32}, epochs=10),
    "50 epochs of 4 batches, persistent": Work(
        dataset=lambda: Made(_row, 128), arguments={"batch_size": 32, "persistent_workers": True}, epochs=50
    ),
    "first batch, 10 times": Work(
        dataset=lambda: Made(_row, 6400), arguments={"batch_size": 32}, epochs=10, first_only=True
    ),
    "first batch, spawn, a million names": Work(
        dataset=lambda: Names(1_000_000),
        arguments={"batch_size": 32, "multiprocessing_context": "spawn"},
        epochs=1,
        first_only=True,
    ),
    # -- without workers ----------------------------------------------------------------------------------
    "no workers: 784 floats, 64": Work(
        dataset=lambda: Made(_row_and_label), arguments={"batch_size": 64}, takes_workers=False
    ),
    "no workers: one float row, 1": Work(dataset=lambda: Made(_row), arguments={"batch_size": 1}, takes_workers=False),
    "no workers: one float row, no batches": Work(
        dataset=lambda: Made(_row), arguments={"batch_size": None}, takes_workers=False
    ),
    "no workers: TensorDataset, 8": Work(
        dataset=lambda: TensorDataset(torch.zeros(1, 784).expand(_MANY, 784), torch.zeros(1).expand(_MANY)),
        arguments={"batch_size": 8},
        takes_workers=False,
    ),
    "no workers: first batch, 200 times": Work(
        dataset=lambda: Made(_row, 6400),
        arguments={"batch_size": 32},
        epochs=200,
        first_only=True,
        takes_workers=False,
    ),
}
