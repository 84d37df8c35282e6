"""Sums on CUDA: the memory for partial results that torch's reduction kernel takes.

In:  a tensor, and the dimensions over which it is summed.
Out: ``Reduction``, which gives the needed bytes for these sizes and for other sizes.
Runs in: the tracing thread; pure.

torch spreads a sum of many rows with few results over many blocks, and each block first writes its partial sum to
memory. For the gradient of a bias, the partial sums can take more memory than the gradient that is summed. The number
of blocks depends on the card. The rules come from the kernel of torch 2.11; trainings that were recorded on an H200
agree with these rules, except for a few KiB of counters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

_MOST_THREADS = 512
_WARP = 32
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""The smallest and the largest number of values that one thread sums."""
_WIDEST = 4
"""The largest number of neighbouring results or inputs that one thread handles at the same time."""
_MOST_OFFSET = 2**31 - 1
"""The largest offset in a tensor that is summed as a whole. A larger tensor is summed in halves, because the kernel
counts in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """One sum."""

    results: int
    inputs: int
    """The number of values that are summed for each result."""
    item_bytes: int
    """The size of a value."""
    sum_bytes: int
    """The size of a partial sum."""
    is_along_rows: bool
    """Whether the values of one sum are neighbours in memory."""
    is_whole: bool
    """Whether the sum covers the whole tensor, without gaps."""
    width: int
    """The number of neighbouring results that one thread handles."""
    multiprocessors: int
    threads: int
    """The threads that a multiprocessor runs at the same time."""

    @property
    def scratch_bytes(self) -> int:
        """The bytes that partial sums take."""
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
    """The sum of ``tensor`` over ``dims``; None or no dimensions stands for all dimensions."""
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
    """Pairs of a dimension and its stride and size; dimensions of size 1 are left out."""
    return [(dim, (tensor.stride(dim), size)) for dim, size in enumerate(tensor.shape) if size != 1]


def _joined(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The strides and sizes, smallest stride first; dimensions without a gap between them are joined to one."""
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
    """The same sum for a batch size between two known batch sizes. Its sizes are interpolated."""

    def at(one: int, other: int) -> int:
        return max(1, round(one + share * (other - one)))

    # The layout comes from the larger batch, because strides do not show the layout of a batch of one.
    larger = max(first, second, key=lambda one: one.results * one.inputs)
    return replace(larger, results=at(first.results, second.results), inputs=at(first.inputs, second.inputs))
