"""Random samples through random loaders: penstock gives what torch's DataLoader gives, result or error.

One program is a loader with random arguments over a dataset that changes its structure every few batches; one batch of
it is one case. torch without workers says what is right. Where torch's collate function refuses something only inside
a worker (tensors with gradients, quantized and conjugate ones), that error is right too. torch's own loader with
workers is no judge: it loses some values (conjugate bits, attributes of tensors), and waits for ever for others.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate
from torch.utils.data._utils import worker as torch_worker

import penstock
from support.random_samples import ListedSamples, RandomSamples, difference
from support.torch_oracle import TORCH, Event, events

_STRETCHES = 40
_OF_STACK = ("stack expects each tensor to be equal size", "Trying to resize storage", "stack(): functions with out=")


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def _zipped(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))


def _filtered(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def _first(samples: list[Any]) -> Any:
    return samples[0]


def _with_count(samples: list[Any]) -> dict[str, Any]:
    return {"count": len(samples), "samples": samples, "order": torch.arange(len(samples))}


class Streamed(IterableDataset[Any]):
    """The rows of a dataset in order. A row that raises ends nothing: the next row follows."""

    def __init__(self, rows: Dataset[Any]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return _Rows(self._rows)


class _Rows:
    def __init__(self, rows: Any) -> None:
        self._rows, self._at = rows, -1

    def __iter__(self) -> _Rows:
        return self

    def __next__(self) -> Any:
        self._at += 1
        if self._at >= len(self._rows):
            raise StopIteration
        return self._rows[self._at]


def program(seed: int, *, slow_starts: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of both loaders, and those of penstock's alone."""
    chance = random.Random(seed)
    rows = chance.choice([1, 2, 3, 5, 8])
    dataset: Any = chance.choice([RandomSamples, RandomSamples, ListedSamples])(seed, _STRETCHES, 3 * rows)
    arguments: dict[str, Any] = {}
    workers = chance.choice([0, 1, 2, 3])
    if chance.random() < 0.15:
        dataset, workers = Streamed(dataset), min(1, workers)
        arguments |= {"batch_size": rows, "drop_last": chance.random() < 0.5}
    elif chance.random() < 0.15:
        arguments |= {"batch_size": None}
    elif chance.random() < 0.3:
        # Shuffled within each stretch: samples of different structures rarely make a batch.
        order = [
            first + at for first in range(0, len(dataset), 3 * rows) for at in chance.sample(range(3 * rows), 3 * rows)
        ]
        arguments |= {"batch_sampler": [order[at : at + rows] for at in range(0, len(order), rows)]}
    else:
        arguments |= {"batch_size": rows, "drop_last": chance.random() < 0.3}
    collates: list[Callable[[Any], Any] | None] = [None, None, None, _as_they_are, _zipped, _filtered, _first]
    if arguments.get("batch_size", 0) is not None:
        arguments["collate_fn"] = chance.choice([*collates, _with_count])
    arguments["dataset"] = dataset
    ours: dict[str, Any] = {
        "num_workers": workers,
        "backend": chance.choice(["process", "process", "process", "thread"]),
        "memory": chance.choice(["10MB", "200MB", "auto"]),
    }
    if workers and ours["backend"] == "process":
        ours["persistent_workers"] = chance.random() < 0.3
        if slow_starts and chance.random() < 0.1:
            ours["multiprocessing_context"] = chance.choice(["spawn", "forkserver"])
    return arguments, ours


def check(seed: int, *, slow_starts: bool) -> int:
    """Run one program; returns its number of cases."""
    arguments, ours = program(seed, slow_starts=slow_starts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        right = events(TORCH(**arguments))
        with penstock.DataLoader(**arguments, **ours) as loader:
            got = events(loader)
        in_a_worker: list[Event] | None = None
        assert len(got) == len(right), _named(seed, arguments, ours)
        for number, one in enumerate(got):
            text = _event_difference(one, right[number])
            if text is not None and one.error is not None:
                in_a_worker = in_a_worker or events_as_in_a_worker(arguments)
                text = _event_difference(one, in_a_worker[number])
            assert text is None, f"{_named(seed, arguments, ours)}, case {number}: {text}"
    return len(right)


def _named(seed: int, arguments: dict[str, Any], ours: dict[str, Any]) -> str:
    short = {name: value for name, value in arguments.items() if name != "batch_sampler"}
    return f"program {seed}: {short} {ours}"


def events_as_in_a_worker(arguments: dict[str, Any]) -> list[Event]:
    """What torch's collate function makes of the same samples inside a worker, without a worker."""
    torch_worker._worker_info = torch_worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=arguments["dataset"])
    try:
        return events(TORCH(**arguments))
    finally:
        torch_worker._worker_info = None


def _event_difference(got: Event, right: Event) -> str | None:
    if got.error is not right.error:
        return f"{got.error} {got.says} is not {right.error} {right.says}"
    if right.error is None:
        return difference(got.batch, right.batch)
    # torch.stack names one of two faults of the same tensors: their sizes, or what it cannot write into given memory.
    if right.error is RuntimeError and right.says.startswith(_OF_STACK) and _OF_STACK[-1] in got.says:
        return None
    # A worker's error ends with the type and the message.
    same = got.says.removeprefix(f"{right.error.__name__}: ") == right.says
    return None if same else f"{got.says!r} is not {right.says!r}"


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 5, 79, 100])
def test_random_samples_come_as_torch_gives_them(seed: int) -> None:
    assert check(seed, slow_starts=False) > 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_twenty_thousand_random_cases_come_as_torch_gives_them() -> None:
    cases, seed = 0, 1000
    while cases < 20_000:
        cases += check(seed, slow_starts=True)
        seed += 1
