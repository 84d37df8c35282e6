"""Trains the same steps with and without the monitor, block by block in one process.

In:  a request: kind of work, pairs of blocks, steps of a block.
Out: time of a step in each block; the cost of ``step()``, a log line and the monitor's thread.
Runs in: its own child, in every run.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.data import Dataset

import penstock
from child import Harness

STEP_S = 0.05
_WORKERS = 2
_STEPS_TIMED = 1_000_000


class Rows(Dataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64, 64), float(index))


def interpreter_work(count: int) -> None:
    """Holds the interpreter's lock all the time: the monitor's thread waits for the interpreter to switch threads."""
    total = 0
    for number in range(count):
        total += number & 7


def torch_work(count: int) -> None:
    """Runs kernels, as a training on the CPU does, and releases the lock meanwhile."""
    side = torch.ones(256, 256)
    for _ in range(count):
        torch.mm(side, side)


WORKS: dict[str, Callable[[int], None]] = {"interpreter": interpreter_work, "torch": torch_work}


def calibrated(work: Callable[[int], None]) -> int:
    """The amount of work of a step, from the fastest of several trials: a busy moment must not shorten steps."""
    count, best_s = 64, float("inf")
    while best_s > STEP_S * 2 or best_s < STEP_S / 4:
        began_s = time.perf_counter()
        work(count)
        best_s = time.perf_counter() - began_s
        count = max(1, int(count * (4 if best_s < STEP_S / 16 else STEP_S / best_s)))
    for _ in range(5):
        began_s = time.perf_counter()
        work(count)
        best_s = min(best_s, time.perf_counter() - began_s)
    return max(1, int(count * STEP_S / best_s))


def block_s(
    batches: Iterator[Any], work: Callable[[int], None], count: int, steps: int, step: Callable[[], None]
) -> float:
    """Mean seconds of a step in a block."""
    began_s = time.perf_counter()
    for _ in range(steps):
        next(batches)
        work(count)
        step()
    return (time.perf_counter() - began_s) / steps


def main() -> None:
    warnings.filterwarnings("ignore")
    harness = Harness()
    work = WORKS[harness.request["work"]]
    pairs, steps = harness.request["pairs"], harness.request["steps"]
    with ExitStack() as stack:
        os.environ["PENSTOCK_HOME"] = stack.enter_context(tempfile.TemporaryDirectory())
        loader = penstock.DataLoader(Rows(8 * steps * (2 * pairs + 2)), 8, num_workers=_WORKERS, memory="256MB")
        batches = iter(loader)
        count = calibrated(work)
        block_s(batches, work, count, steps // 4, lambda: None)
        with_s: list[float] = []
        without_s: list[float] = []
        cpu_shares: list[float] = []
        for pair in range(pairs):
            # The order in a pair alternates, so that a machine that becomes slower affects both.
            for monitored in (True, False) if pair % 2 else (False, True):
                if not monitored:
                    without_s.append(block_s(batches, work, count, steps, lambda: None))
                    continue
                with penstock.Monitor(loader, run="bench") as monitor:
                    with_s.append(block_s(batches, work, count, steps, monitor.step))
                    cpu_shares.append(monitor._ticker.cpu_s / (with_s[-1] * steps))
        step_s, line_s = costs(loader)
        harness.result(
            with_s=with_s,
            without_s=without_s,
            overhead_percent=[100 * (on / off - 1) for on, off in zip(with_s, without_s, strict=True)],
            thread_percent=100 * sum(cpu_shares) / len(cpu_shares),
            step_ns=1e9 * step_s,
            line_us=1e6 * line_s,
        )


def costs(loader: Any) -> tuple[float, float]:
    """Seconds of one ``step()`` and of one log line."""
    with penstock.Monitor(loader, every=None) as monitor:
        began_s = time.perf_counter()
        for _ in range(_STEPS_TIMED):
            monitor.step()
        step_s = (time.perf_counter() - began_s) / _STEPS_TIMED
        lines = 50
        began_s = time.perf_counter()
        for _ in range(lines):
            monitor._log_step()
        return step_s, (time.perf_counter() - began_s) / lines


if __name__ == "__main__":
    main()
