"""Sums on CUDA: the memory that torch's reduction kernel takes for partial results.

In:  a tensor and the dimensions summed over.
Out: ``Reduction``: the bytes needed, for these sizes and others.
Runs in: the tracing thread; pure.

torch spreads a sum of many rows with few results over many blocks, and each block writes its part to memory first. For
the gradient of a bias, the parts can take more memory than the gradient that is summed. The number of blocks depends on
the card. The rules are those of torch 2.11's kernel; trainings recorded on an H200 agree with them except for a few KiB
of counters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

_MOST_THREADS = 512
_WARP = 32
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""The least and the most values that one thread sums."""
_WIDEST = 4
"""The most neighbouring results, or inputs, that one thread handles at once."""
_MOST_OFFSET = 2**31 - 1
"""Larger tensors are summed in halves: the kernel counts in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """One sum."""

    results: int
    inputs: int
    """Values in each of them."""
    item_bytes: int
    """Size of a value."""
    sum_bytes: int
    """Size of a partial sum."""
    is_along_rows: bool
    """The values of one sum are neighbours in memory."""
    is_whole: bool
    """The sum covers the whole tensor, which has no gaps."""
    width: int
    """Neighbouring results that one thread handles."""
    multiprocessors: int
    threads: int
    """Threads that a multiprocessor runs at once."""

    @property
    def scratch_bytes(self) -> int:
        """Memory for partial sums."""
        results, inputs = self.results, self.inputs
        if not results or not inputs:
            return 0
        while results * inputs * self.item_bytes > _MOST_OFFSET:
            if results > 1 and (self.is_along_rows or inputs == 1):
                results = -(-results // 2)
            else:
                inputs = -(-inputs // 2)
        return self._scratch_bytes(results, inputs)

    def _scratch_bytes(self, results: int, inputs: int) -> int:
        across, down = (inputs, results) if self.is_along_rows else (results, inputs)
        if self.is_whole and across > 128:
            across //= _WIDEST
        across = max(1, across // self.width)
        most = _MOST_THREADS // self.width
        columns = min(_power_of_two(across, most), _WARP)
        rows = min(_power_of_two(down, most), most // columns)
        columns = min(_power_of_two(across, most), most // rows)
        values = -(-inputs // columns) if self.is_along_rows else inputs
        at_once = 1 if self.is_along_rows else columns
        if values < rows * _LEAST_VALUES and values < _MOST_VALUES:
            return 0  # each row of a block has its own results
        values = -(-values // rows)
        blocks = -(-(results // self.width) // at_once)
        enough = self.multiprocessors * (self.threads // (columns * rows))
        if values < _MOST_VALUES or blocks > enough:
            return 0
        parts = max(min(-(-enough // max(1, blocks)), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
        if parts <= 1:
            return 0
        return self.sum_bytes * results * parts * (1 if self.is_along_rows else columns * self.width)


def reduction(tensor: torch.Tensor, dims: Iterable[int] | None, multiprocessors: int, threads: int = 2048) -> Reduction:
    """The sum of ``tensor`` over ``dims``; None or empty: over all dimensions."""
    summed = {dim % tensor.dim() for dim in dims or range(tensor.dim())} if tensor.dim() else set()
    within = _joined(place for dim, place in _numbered(tensor) if dim in summed)
    beside = _joined(place for dim, place in _numbered(tensor) if dim not in summed)
    is_along_rows = not beside or bool(within and within[0][0] < beside[0][0])
    width = 1
    if not is_along_rows and beside[0][0] == 1:
        width = _WIDEST
        for number in [beside[0][1], *(stride for stride, _ in within + beside[1:])]:
            while number % width:
                width //= 2
    results = math.prod(size for _, size in beside)
    is_single = tensor.dtype.is_floating_point and tensor.element_size() <= 4
    sum_bytes = 4 if is_single else max(8, tensor.element_size())
    return Reduction(
        results=results,
        inputs=tensor.numel() // max(1, results),
        item_bytes=tensor.element_size(),
        sum_bytes=sum_bytes,
        is_along_rows=is_along_rows,
        is_whole=not beside and len(within) == 1 and within[0][0] == 1,
        width=width,
        multiprocessors=multiprocessors,
        threads=threads,
    )


def _numbered(tensor: torch.Tensor) -> list[tuple[int, tuple[int, int]]]:
    """Dimension -> stride and size, without dimensions of size 1."""
    return [(dim, (tensor.stride(dim), size)) for dim, size in enumerate(tensor.shape) if size != 1]


def _joined(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Strides and sizes, smallest stride first; dimensions without a gap between them become one."""
    joined: list[tuple[int, int]] = []
    for stride, size in sorted(places):
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = joined[-1][0], joined[-1][1] * size
        else:
            joined.append((stride, size))
    return joined


def _power_of_two(count: int, most: int) -> int:
    """The largest power of two up to ``count``, and at most ``most``."""
    return most if count >= most else 1 << (count.bit_length() - 1)


def between(first: Reduction, second: Reduction, share: float) -> Reduction:
    """The same sum, with sizes interpolated between two that are known."""

    def at(one: int, other: int) -> int:
        return max(1, round(one + share * (other - one)))

    # With a batch of one, strides do not show the layout: take the layout from the larger batch.
    larger = max(first, second, key=lambda one: one.results * one.inputs)
    return replace(larger, results=at(first.results, second.results), inputs=at(first.inputs, second.inputs))
