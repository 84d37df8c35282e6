"""The demo's measurement: the same dataset through torch's DataLoader and ours, in turns, memory watched.

In:  ``DemoSettings``.
Out: one ``Round`` at a time, then a ``Comparison``.
Runs in: trainer (the command line plays it).
"""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock.cli.demo_dataset import BigSamples
from penstock.cli.demo_result import Comparison, LoaderResult, Round
from penstock.units import MIB


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What both loaders are given; the budget goes to ours alone, torch's has none."""

    sample_bytes: int = 8 * MIB
    """Size of one sample."""
    wait_s: float = 0.02
    """How long a sample takes to arrive."""
    batch_size: int = 8
    """Samples in a batch."""
    workers: int = 4
    """Worker processes."""
    step_s: float = 0.03
    """How long the pretended training step takes."""
    memory_bytes: int = 320 * MIB
    """Budget of our loader."""
    rounds: int = 2
    """Runs of each loader, in turns."""
    round_s: float = 3.5
    """How long a run lasts."""
    most_batches: int = 200
    """Batches in the dataset: more than any loader gets through in ``round_s``."""


class GrowthWatch:
    """Samples the memory (PSS) of this process and its workers from a thread, and keeps the peak."""

    def __init__(self, *, every_s: float = 0.25) -> None:
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="penstock-demo-growth", daemon=True)
        self._start_bytes: int | None = None
        self._peak_bytes: int | None = None

    @property
    def peak_growth_bytes(self) -> int | None:
        """Most memory seen, less what there was at the start; None where PSS cannot be read."""
        if self._start_bytes is None or self._peak_bytes is None:
            return None
        return max(0, self._peak_bytes - self._start_bytes)

    def __enter__(self) -> GrowthWatch:
        self._start_bytes = self._peak_bytes = penstock.memory().pss_bytes
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            seen_bytes = penstock.memory().pss_bytes
            if seen_bytes is not None and self._peak_bytes is not None:
                self._peak_bytes = max(self._peak_bytes, seen_bytes)


def compare(settings: DemoSettings, *, on_progress: Callable[[str, float], None]) -> Comparison:
    """Run both loaders ``rounds`` times in turns; ``on_progress`` hears who runs and how much is done."""
    dataset = BigSamples(
        length=settings.most_batches * settings.batch_size,
        sample_bytes=settings.sample_bytes,
        wait_s=settings.wait_s,
    )
    runs: dict[str, list[Round]] = {"torch": [], "penstock": []}
    # The order alternates: whoever goes second finds warm caches and a larger heap.
    turns = [name for number in range(settings.rounds) for name in list(runs)[:: (-1) ** number]]
    with warnings.catch_warnings():
        # Workers that wait more than they compute may outnumber the cores.
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        for turn, name in enumerate(turns):

            def on_batch(elapsed_s: float, turn: int = turn, name: str = name) -> None:
                on_progress(name, (turn + min(1.0, elapsed_s / settings.round_s)) / len(turns))

            runs[name].append(_run(_LOADERS[name](dataset, settings), settings, on_batch))
    return Comparison(
        torch=LoaderResult(name="torch", rounds=tuple(runs["torch"])),
        penstock=LoaderResult(name="penstock", rounds=tuple(runs["penstock"])),
    )


def _run(loader: Iterable[dict[str, torch.Tensor]], settings: DemoSettings, on_batch: Callable[[float], None]) -> Round:
    gc.collect()
    order: list[tuple[int, int]] = []
    first_batch_s = elapsed_s = 0.0
    with GrowthWatch() as watch:
        start_s = time.perf_counter()
        batches = iter(loader)
        for batch in batches:
            if not order:
                first_batch_s = time.perf_counter() - start_s
            order += zip(batch["index"].tolist(), batch["pixels"][:, -1].tolist(), strict=True)
            time.sleep(settings.step_s)
            elapsed_s = time.perf_counter() - start_s
            on_batch(elapsed_s)
            if elapsed_s >= settings.round_s:
                break
        # Ends the workers, outside of the measured time.
        del batches
    return Round(
        samples=len(order),
        elapsed_s=elapsed_s,
        first_batch_s=first_batch_s,
        peak_growth_bytes=watch.peak_growth_bytes,
        order=tuple(order),
    )


def _common(settings: DemoSettings) -> dict[str, Any]:
    return {
        "batch_size": settings.batch_size,
        "num_workers": settings.workers,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(0),
    }


_LOADERS: dict[str, Callable[[BigSamples, DemoSettings], Iterable[dict[str, torch.Tensor]]]] = {
    "torch": lambda dataset, settings: TorchDataLoader(dataset, **_common(settings)),
    "penstock": lambda dataset, settings: penstock.DataLoader(
        dataset, **_common(settings), memory=settings.memory_bytes
    ),
}
