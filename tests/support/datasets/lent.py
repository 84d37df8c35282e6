"""Datasets that write their samples into memory from ``penstock.empty``, well and badly.

Runs in: trainer and worker.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

import penstock

SHAPE = (280, 300)
"""Two of these make a row large enough to be written on its own."""

Sample = Callable[["Lent", int], Any]


def is_lent(value: torch.Tensor | np.ndarray) -> bool:
    """Whether a tensor or array lies in a segment."""
    return "memfd:penstock" in mapping_at(torch.as_tensor(value).data_ptr())


def mapping_at(address: int) -> str:
    """The kernel's line about the mapping at an address of this process; empty if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < end:
            return line
    return ""


def filled(value: float, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return penstock.empty(shape).fill_(value)


class Lent:
    """``length`` samples, made by a function that may keep what it likes in ``kept``."""

    def __init__(self, sample: Sample, length: int = 32) -> None:
        self.sample, self.length = sample, length
        self.kept: list[tuple[Any, Any]] = []
        """Tensors and arrays, and the value that each must hold for ever."""

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.check_kept()
        return self.sample(self, index)

    def check_kept(self) -> None:
        for tensor, value in self.kept:
            assert (tensor == value).all(), f"{tensor} instead of {value}"


class LentStream(IterableDataset[Any]):
    """The same samples as a stream, which scribbles over each when it is asked for the next."""

    def __init__(self, sample: Sample, length: int = 32) -> None:
        self.made = Lent(sample, length)

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.made.length, step):
            sample = self.made[index]
            scribbles = is_lent(sample["a"]) and not self.made.kept
            yield sample
            if scribbles:
                sample["a"][:] = -1


# -- good ---------------------------------------------------------------------------------


def in_order(_: Lent, i: int) -> Any:
    return {"a": filled(i), "b": filled(-i)}


def as_arrays(_: Lent, i: int) -> Any:
    a, b = penstock.empty(SHAPE).numpy(), penstock.empty(SHAPE).numpy()
    a[:] = i
    flat = np.frombuffer(b.data, np.float32)
    flat[:] = -i
    return {"a": a, "b": flat.reshape(SHAPE)}


def by_a_thread(_: Lent, i: int) -> Any:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(filled(i)))
    thread.start()
    thread.join()
    return {"a": found.pop(), "b": filled(-i)}


def of_every_dtype(_: Lent, i: int) -> Any:
    dtypes = (torch.bfloat16, torch.uint8, torch.complex64, torch.bool, torch.float8_e4m3fn)
    return [penstock.empty((300, 301), dtype).copy_(torch.full((300, 301), i % 3)) for dtype in dtypes]


def through_a_transform(_: Lent, i: int) -> Any:
    raw = filled(i)
    return {"a": torch.add(raw, 1, out=penstock.empty_like(raw)), "b": filled(-i)}


# -- bad ----------------------------------------------------------------------------------


def swapped(_: Lent, i: int) -> Any:
    b, a = filled(-i), filled(i)
    return {"a": a, "b": b}


def sometimes_swapped(made: Lent, i: int) -> Any:
    return swapped(made, i) if i % 3 else in_order(made, i)


def twice(_: Lent, i: int) -> Any:
    a = filled(i)
    return {"a": a, "b": a}


def the_second_for_both(_: Lent, i: int) -> Any:
    a, b = filled(i), filled(-i)
    del a
    return {"a": b, "b": b}


def too_many(_: Lent, i: int) -> Any:
    taken = [filled(i + k) for k in range(5)]
    return {"a": taken[3], "b": taken[1]}


def dropped_and_taken_again(_: Lent, i: int) -> Any:
    for k in range(3):
        filled(k)
    return {"a": filled(i), "b": filled(-i)}


def of_other_shapes(_: Lent, i: int) -> Any:
    return {"a": filled(i, (560, 300))[::2], "b": filled(-i, (300, 280)).T}


def as_views(_: Lent, i: int) -> Any:
    a, b = penstock.empty(SHAPE), penstock.empty(SHAPE)
    a.copy_(torch.arange(a.numel()).view(SHAPE) + i)
    b.copy_(a * 2)
    return {"a": b.flip(0), "b": a.as_strided(SHAPE, (1, SHAPE[0]))}


def a_part_of_another_leaf(_: Lent, i: int) -> Any:
    a = filled(i)
    a[0] = torch.arange(SHAPE[1]) * i
    return {"first": a[0], "a": torch.full(SHAPE, 7.0), "b": filled(-i), "last": a[-1, -1]}


def kept(made: Lent, i: int) -> Any:
    a = filled(i)
    made.kept.append((a, i))
    return {"a": a, "b": filled(-i)}


def kept_and_not_returned(made: Lent, i: int) -> Any:
    made.kept.append((filled(100 + i), 100 + i))
    return {"a": torch.full(SHAPE, float(i)), "b": torch.full(SHAPE, float(-i))}


def a_view_kept(made: Lent, i: int) -> Any:
    a = filled(i)
    made.kept.append((a.numpy()[3:, ::2], i))
    return {"a": a, "b": filled(-i)}


def kept_and_changed(made: Lent, i: int) -> Any:
    if made.kept:
        made.kept.pop()[0].fill_(-99)
    a = filled(i)
    made.kept.append((a, i))
    return {"a": a, "b": filled(-i)}


def one_for_all_samples(made: Lent, i: int) -> Any:
    if not made.kept:
        made.kept = [(filled(0), 0), (filled(0), 0)]
    (a, _), (b, _) = made.kept
    made.kept = [(a.fill_(i), i), (b.fill_(-i), -i)]
    return {"a": a, "b": b}


def in_a_cycle(_: Lent, i: int) -> Any:
    a = filled(i)
    cycle: list[Any] = [a]
    cycle.append(cycle)
    return {"a": a, "b": filled(-i)}


def needing_gradients(_: Lent, i: int) -> Any:
    return {"a": filled(i), "b": filled(-i).requires_grad_()}


def of_two_structures(_: Lent, i: int) -> Any:
    sample = {"a": filled(i), "b": filled(-i)}
    return sample if i // 4 % 2 else {**sample, "c": torch.zeros(3)}


def with_a_forked_child(made: Lent, i: int) -> Any:
    """The child keeps what it inherits, and scribbles over it when later batches have been made."""
    a, b = filled(i), filled(-i)
    if i % 16 == 3:
        go, stop = os.pipe()
        if os.fork() == 0:
            os.close(stop)
            os.read(go, 1)
            for tensor in (a, b, filled(-7), filled(-8)):
                tensor.fill_(-1234)
            os._exit(0)
        os.close(go)
        made.kept.append((np.float32(stop), stop))
    elif i % 16 == 9 and made.kept:
        os.close(int(made.kept.pop()[1]))
        os.wait()
    return {"a": a, "b": b}


GOOD = (in_order, as_arrays, by_a_thread, of_every_dtype, dropped_and_taken_again)
BAD = (
    swapped, sometimes_swapped, through_a_transform, twice, the_second_for_both, too_many, of_other_shapes, as_views,
    a_part_of_another_leaf, kept, kept_and_not_returned, a_view_kept, kept_and_changed, one_for_all_samples, in_a_cycle,
    of_two_structures, with_a_forked_child,
)  # fmt: skip
