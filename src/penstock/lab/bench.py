"""Runs of torch's DataLoader and penstock's over the same dataset, in turns; also the rate of the link to a device.

In:  a dataset and ``BenchSettings``; or functions that make each loader, and a training step.
Out: ``BenchResult``; ``LoaderComparison``.
Runs in: trainer (here, the command line).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

import penstock
from penstock.device.copy_stream import move
from penstock.errors import ConfigError, DataError
from penstock.lab.comparison import LoaderComparison, LoaderResult, Round
from penstock.lab.dataset.sample_probe import weigh
from penstock.lab.timed_run import TimedRun, without_warnings
from penstock.meter import tree_parts

_LINK_BYTES = 256 << 20
_WARM_UP_SHARE = 0.25
_LEAST_WARM_UP_S = 0.5


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """The settings of both loaders. The budget is for penstock's loader only, because torch's loader has no budget."""

    target: str
    """The name of the dataset."""
    batch_size: int
    """The number of samples in a batch."""
    workers: int
    """Worker processes."""
    memory: str | int | float
    """The budget of penstock's loader."""
    prefetch_factor: int | None = None
    """The batches that torch's loader keeps ahead for each worker, and the most that penstock's loader keeps ahead;
    None for the default of each loader."""
    device: str | None
    """The device to which batches are delivered; None leaves batches in host memory."""
    shuffle: bool
    """Whether samples are read in random order."""
    step_time: float
    """The seconds that a pretended training step takes."""
    seconds: float
    """The seconds that a round lasts."""
    rounds: int
    """The number of rounds of each loader. The loaders take turns."""


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """The result of comparing both loaders."""

    comparison: LoaderComparison
    link_bytes_per_s: float | None
    """The rate of copies from pinned memory to the device while nothing else runs; None without a CUDA device."""

    def as_json(self) -> dict[str, Any]:
        return {"link_bytes_per_s": self.link_bytes_per_s, **self.comparison.as_json()}


def check_device(device: str | None) -> None:
    """Raise an error before anything is loaded if batches cannot be delivered to ``device``."""
    problem = None if device is None else _problem_with(device)
    if problem is not None:
        raise ConfigError(
            f"batches cannot be delivered to {device!r}: {problem}; leave --device out, or name an existing device"
        )


def _problem_with(name: str) -> str | None:
    try:
        device = torch.device(name)
        if device.type != "cuda":
            torch.empty(1, device=device)
            return None
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        return str(problem).splitlines()[0]
    # The device is not used for this check: workers that are forked later would inherit its CUDA context.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return "torch finds no CUDA device"
    return None if (device.index or 0) < count else f"there are {count} CUDA devices"


@dataclass
class Tally:
    """The samples and bytes that the training loop received in one round."""

    samples: int = 0
    delivered_bytes: int = 0
    order: list[tuple[int, int]] | None = None


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The description of how each loader is run."""

    make: Mapping[str, Callable[[], Iterable[Any]]]
    """Name of a loader -> a function that makes a new one."""
    use: Callable[[Any, Tally], None]
    """One step of the training loop, which adds the batch to the tally."""
    rounds: int
    """The number of rounds of each loader. The loaders take turns."""
    round_s: float
    """The seconds of a round that are measured."""
    warm_up_s: float = 0.0
    """The seconds that a loader runs before the measurement starts."""
    settle: Callable[[], None] = field(default=lambda: None)
    """A function that waits for work that the training loop has only queued."""


def compare_loaders(rounds: Rounds, *, on_progress: Callable[[str, float], None]) -> LoaderComparison:
    """Run torch's loader and penstock's in turns. ``on_progress`` gets the name of the loader that runs and the share
    of all rounds that is done."""
    results: dict[str, list[Round]] = {name: [] for name in rounds.make}
    # The order alternates, because the loader that runs second finds warm caches and a larger heap.
    turns = [name for number in range(rounds.rounds) for name in list(results)[:: (-1) ** number]]
    with without_warnings():
        for turn, name in enumerate(turns):

            def on_batch(done: float, turn: int = turn, name: str = name) -> None:
                on_progress(name, (turn + min(1.0, done)) / len(turns))

            results[name].append(_one_round(rounds.make[name](), rounds, on_batch))
    return LoaderComparison(
        torch=LoaderResult(name="torch", rounds=tuple(results["torch"])),
        penstock=LoaderResult(name="penstock", rounds=tuple(results["penstock"])),
    )


def _one_round(loader: Iterable[Any], rounds: Rounds, on_batch: Callable[[float], None]) -> Round:
    tally, began_s, total_s = Tally(), time.perf_counter(), rounds.warm_up_s + rounds.round_s
    with TimedRun(
        loader,
        tree_parts,
        measures=["pss_bytes"],
        every_s=0.25,
        step=lambda batch: rounds.use(batch, tally),
        on_batch=lambda: on_batch((time.perf_counter() - began_s) / total_s),
    ) as run:
        warm_up, samples, delivered_bytes = None, 0, 0
        if rounds.warm_up_s:
            warm_up = run.measure(lambda timing: timing.elapsed_s < rounds.warm_up_s)
            samples, delivered_bytes = tally.samples, tally.delivered_bytes
            rounds.settle()
        timing = run.measure(lambda timing: timing.elapsed_s < rounds.round_s)
        rounds.settle()
        elapsed_s = time.perf_counter() - timing.began_s
    return Round(
        samples=tally.samples - samples,
        delivered_bytes=tally.delivered_bytes - delivered_bytes,
        elapsed_s=elapsed_s,
        first_batch_s=(warm_up or timing).first_batch_s,
        peak_growth_bytes=run.watch.peak_growth("pss_bytes"),
        order=None if tally.order is None else tuple(tally.order),
    )


def bench(
    dataset: Any, collate_fn: Callable[[Any], Any] | None, settings: BenchSettings,
    *, on_progress: Callable[[str, float], None],
) -> BenchResult:  # fmt: skip
    """Run both loaders in turns. ``on_progress`` gets the name of the loader that runs and the share of all rounds that
    is done."""
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
        # With drop_last every batch has the same number of samples, so the collate function's result need not be
        # counted.
        given |= {"shuffle": settings.shuffle, "drop_last": True}
        length = len(dataset)
        if length == 0:
            raise DataError("the dataset is empty: it has no sample to load")
        if length < settings.batch_size:
            raise DataError(
                f"the dataset has {length} sample{'s' * (length > 1)}, but a batch has {settings.batch_size}; "
                "lower --batch-size"
            )

    def use(batch: Any, tally: Tally) -> None:
        if settings.step_time:
            time.sleep(settings.step_time)
        tally.samples += settings.batch_size
        tally.delivered_bytes += weigh(batch)

    rounds = Rounds(
        make={
            "torch": lambda: _Moved(TorchDataLoader(dataset, pin_memory=cuda is not None, **given), device),
            "penstock": lambda: penstock.DataLoader(dataset, memory=settings.memory, device=settings.device, **given),
        },
        use=use,
        rounds=settings.rounds,
        round_s=settings.seconds,
        warm_up_s=max(_LEAST_WARM_UP_S, _WARM_UP_SHARE * settings.seconds),
        settle=(lambda: torch.cuda.synchronize(cuda)) if cuda else (lambda: None),
    )
    comparison = compare_loaders(rounds, on_progress=lambda name, done: on_progress(f"{name}'s DataLoader", done))
    # The link is measured last: workers must not be forked with a CUDA context, which they would inherit.
    return BenchResult(comparison=comparison, link_bytes_per_s=_link_bytes_per_s(cuda) if cuda else None)


class _Moved:
    """A loader whose batches are copied to a device in the way that a training loop copies them."""

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
