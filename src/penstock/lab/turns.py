"""The same work through several loaders, in turns, memory watched.

In:  how to make each loader, and what a training loop does with a batch.
Out: one ``Round`` at a time.
Runs in: trainer (the command line plays it).
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.lab.comparison import Comparison, LoaderResult, Round
from penstock.lab.dataset.endless import endless
from penstock.meter import Watcher, tree_parts


class Tally(NamedTuple):
    """What a training loop has got so far."""

    samples: int = 0
    delivered_bytes: int = 0
    order: list[tuple[int, int]] | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is done with every loader."""

    make: Mapping[str, Callable[[], Iterable[Any]]]
    """Name -> a new loader."""
    use: Callable[[Any, Tally], Tally]
    """One step of the training loop; adds the batch to the tally."""
    rounds: int
    """Runs of each loader, in turns."""
    round_s: float
    """How long the clock runs."""
    warm_up_s: float = 0.0
    """How long a loader runs before the clock does."""
    settle: Callable[[], None] = field(default=lambda: None)
    """Waits for whatever the training loop has only queued."""


def take_turns(work: Work, *, on_progress: Callable[[str, float], None]) -> Comparison:
    """Run torch's loader and ours; ``on_progress`` hears who runs and how much is done."""
    runs: dict[str, list[Round]] = {name: [] for name in work.make}
    # The order alternates: whoever goes second finds warm caches and a larger heap.
    turns = [name for number in range(work.rounds) for name in list(runs)[:: (-1) ** number]]
    with warnings.catch_warnings():
        # Workers that wait more than they compute may outnumber the cores.
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        for turn, name in enumerate(turns):

            def on_batch(done: float, turn: int = turn, name: str = name) -> None:
                on_progress(name, (turn + min(1.0, done)) / len(turns))

            runs[name].append(_run(work.make[name](), work, on_batch))
    return Comparison(
        torch=LoaderResult(name="torch", rounds=tuple(runs["torch"])),
        penstock=LoaderResult(name="penstock", rounds=tuple(runs["penstock"])),
    )


def _run(loader: Iterable[Any], work: Work, on_batch: Callable[[float], None]) -> Round:
    gc.collect()
    tally = warm_up = Tally()
    first_batch_s = 0.0
    total_s = work.warm_up_s + work.round_s
    is_warm = work.warm_up_s == 0
    with Watcher(tree_parts, measures=["pss_bytes"], every_s=0.25) as watch:
        batches = endless(loader)
        began_s = start_s = time.perf_counter()
        for batch in batches:
            first_batch_s = first_batch_s or time.perf_counter() - began_s
            tally = work.use(batch, tally)
            elapsed_s = time.perf_counter() - began_s
            on_batch(elapsed_s / total_s)
            if elapsed_s >= total_s:
                break
            if not is_warm and elapsed_s >= work.warm_up_s:
                is_warm, warm_up = True, tally
                work.settle()
                start_s = time.perf_counter()
        work.settle()
        measured_s = time.perf_counter() - start_s
        # Ends the workers, outside of the measured time.
        batches.close()
    return Round(
        samples=tally.samples - warm_up.samples,
        delivered_bytes=tally.delivered_bytes - warm_up.delivered_bytes,
        elapsed_s=measured_s,
        first_batch_s=first_batch_s,
        peak_growth_bytes=watch.peak_growth("pss_bytes"),
        order=None if tally.order is None else tuple(tally.order),
    )
