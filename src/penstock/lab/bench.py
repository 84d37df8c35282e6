"""The bench's measurement: a dataset through torch's DataLoader and ours, and what the link to a device can do.

In:  a dataset, ``BenchSettings``.
Out: ``Measured``.
Runs in: trainer (the command line plays it).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

import penstock
from penstock.device.copy_stream import move
from penstock.errors import ConfigError, DataError
from penstock.lab.comparison import Comparison
from penstock.lab.dataset.sample_probe import weigh
from penstock.lab.turns import Tally, Work, take_turns

_LINK_BYTES = 256 << 20
_WARM_UP_SHARE = 0.25
_LEAST_WARM_UP_S = 0.5


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What both loaders are given; the budget goes to ours alone, torch's has none."""

    target: str
    """The dataset's name."""
    batch_size: int
    """Samples in a batch."""
    workers: int
    """Worker processes."""
    memory: str | int | float
    """Budget of our loader."""
    prefetch_factor: int | None = None
    """Batches torch's loader keeps ahead for each worker, and a ceiling for ours; None: their own."""
    device: str | None
    """Where batches are delivered; None leaves them in host memory."""
    shuffle: bool
    """Whether samples are read in random order."""
    step_time: float
    """Seconds a pretended training step takes."""
    seconds: float
    """How long a run lasts."""
    rounds: int
    """Runs of each loader, in turns."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What came of it."""

    comparison: Comparison
    link_bytes_per_s: float | None
    """What pinned memory is copied to the device at, with nothing in the way; None without a CUDA device."""

    def as_json(self) -> dict[str, Any]:
        return {"link_bytes_per_s": self.link_bytes_per_s, **self.comparison.as_json()}


def check_device(device: str | None) -> None:
    """Raise, before anything is loaded, what is wrong with a device."""
    problem = None if device is None else _problem_with(device)
    if problem is not None:
        raise ConfigError(
            f"nothing can be delivered on {device!r}: {problem}; leave --device out, or name one that is here"
        )


def _problem_with(name: str) -> str | None:
    try:
        device = torch.device(name)
        if device.type != "cuda":
            torch.empty(1, device=device)
            return None
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        return str(problem).splitlines()[0]
    # Not by trying: workers forked afterwards would inherit a CUDA context.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return "torch finds no CUDA device"
    return None if (device.index or 0) < count else f"there are {count} CUDA devices"


def bench(
    dataset: Any, collate_fn: Callable[[Any], Any] | None, settings: BenchSettings,
    *, on_progress: Callable[[str, float], None],
) -> Measured:  # fmt: skip
    """Run both loaders in turns; ``on_progress`` hears who runs and how much is done."""
    device = None if settings.device is None else torch.device(settings.device)
    cuda = device if device is not None and device.type == "cuda" else None
    given: dict[str, Any] = {
        "batch_size": settings.batch_size,
        "num_workers": settings.workers,
        "collate_fn": collate_fn,
        "persistent_workers": settings.workers > 0,
        "prefetch_factor": settings.prefetch_factor if settings.workers else None,
    }
    if not isinstance(dataset, IterableDataset):
        given["shuffle"] = settings.shuffle
        # Every batch has as many samples then, whatever the collate function makes of them.
        given["drop_last"] = True
        length = len(dataset)
        if length == 0:
            raise DataError("it is empty: there is no sample to run")
        if length < settings.batch_size:
            raise DataError(
                f"it has {length} sample{'s' * (length > 1)} and a batch {settings.batch_size}; lower --batch-size"
            )

    def torchs() -> Iterable[Any]:
        return _Moved(TorchDataLoader(dataset, pin_memory=cuda is not None, **given), device)

    def ours() -> Iterable[Any]:
        return penstock.DataLoader(dataset, memory=settings.memory, device=settings.device, **given)

    def use(batch: Any, tally: Tally) -> Tally:
        if settings.step_time:
            time.sleep(settings.step_time)
        return Tally(tally.samples + settings.batch_size, tally.delivered_bytes + weigh(batch))

    work = Work(
        make={"torch": torchs, "penstock": ours},
        use=use,
        rounds=settings.rounds,
        round_s=settings.seconds,
        warm_up_s=max(_LEAST_WARM_UP_S, _WARM_UP_SHARE * settings.seconds),
        settle=(lambda: torch.cuda.synchronize(cuda)) if cuda else (lambda: None),
    )
    comparison = take_turns(work, on_progress=lambda name, done: on_progress(f"{name}'s DataLoader", done))
    if not all(each.samples for result in (comparison.torch, comparison.penstock) for each in result.rounds):
        raise DataError(
            f"it gave no batch within a round of {settings.seconds:g} s; raise --seconds, or look at "
            "whether the dataset is empty"
        )
    # Last: workers forked earlier must not inherit a CUDA context.
    return Measured(comparison=comparison, link_bytes_per_s=_link_bytes_per_s(cuda) if cuda else None)


class _Moved:
    """A loader whose batches are moved as a training loop would."""

    def __init__(self, loader: Iterable[Any], device: torch.device | None) -> None:
        self._loader = loader
        self._device = device

    def __iter__(self) -> Any:
        if self._device is None:
            return iter(self._loader)
        device = self._device
        return (move(batch, device) for batch in self._loader)


def _link_bytes_per_s(device: torch.device) -> float:
    host = torch.empty(_LINK_BYTES, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(host, device=device)
    rates = []
    for _ in range(4):
        torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        for _ in range(4):
            there.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        rates.append(4 * host.nbytes / (time.perf_counter() - began_s))
    return max(rates)
