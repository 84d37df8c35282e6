"""What CUDA's kernels allocate for themselves while an operation runs.

In:  an operation's arguments and results, the card.
Out: ``Need``: bytes that live until the operation ends.
Runs in: the tracing thread.

Kernels of torch itself are modelled after their sources. What cuDNN takes is chosen by a heuristic inside it: those
needs are guesses, and estimates carry a range for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from penstock.gpu.card import Card
from penstock.gpu.trace.reductions import Reduction, reduction

_ROWS_PER_THREAD = 10
_HALF = (torch.float16, torch.bfloat16)
_SORT_FREE_INDICES = 3072
"""Up to this many indices, an embedding's gradient needs no sorting."""


@dataclass(frozen=True)
class Need:
    """Bytes for the time of an operation."""

    size_bytes: int
    is_guess: bool = False
    reduction: Reduction | None = None
    """The sum it is for, which knows how it changes with the batch."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operation that ran."""

    args: Any
    out: Any
    card: Card


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What an operation needs beside its results."""

    needs: Callable[[Call], Iterator[Need]] | None = None
    in_turn: bool = False
    """One after the other, not all at once."""
    uses_blas: bool = False
    """cuBLAS computes it."""


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _rounded(count: int, to: int) -> int:
    return -(-count // to) * to


def _embedding_backward(call: Call) -> Iterator[Need]:
    """Sorting the indices; then a partial sum for every stretch of equal ones."""
    grad, indices, rows = call.args[:3]
    count, width = indices.numel(), grad.shape[-1]
    if not grad.is_contiguous():
        yield Need(_bytes(grad))
    # Few indices need none of this; needs of no bytes keep steps of different batch sizes alike, event by event.
    index_bytes = indices.element_size() if count > _SORT_FREE_INDICES else 0
    segments = min(count, rows)
    partial = count // _ROWS_PER_THREAD + segments
    for places in (count, count, count, segments, segments, partial):
        yield Need(places * index_bytes)  # sorted, where they were, where stretches of equal ones start, ...
    yield Need(partial * width * 4 if index_bytes else 0)


def _flash_attention_backward(call: Call) -> Iterator[Need]:
    """Row sums, the query's gradient in float32, and gradients of keys and values for every head that shares them."""
    query, key = call.args[1:3]
    batch, heads, length, width = query.shape
    rows = _rounded(length, 128)
    wide = _rounded(width, 32 if width <= 128 else 64)
    yield Need(batch * heads * rows * 4)
    yield Need(batch * heads * rows * wide * 4)
    if key.shape[1] != heads:
        for _ in range(2):
            yield Need(batch * key.shape[2] * heads * width * query.element_size())


def _cudnn_attention_backward(call: Call) -> Iterator[Need]:
    """The same in one piece."""
    yield Need(sum(need.size_bytes for need in _flash_attention_backward(call)) + 256)


def _efficient_attention_backward(call: Call) -> Iterator[Need]:
    """Row sums, for which float32 needs a product as large as the output; in half precision float32 gradients."""
    query, key, value = call.args[1:4]
    batch, heads, length, _ = query.shape
    yield Need(batch * heads * length * value.shape[-1] * 4 if query.element_size() == 4 else 0)
    yield Need(batch * heads * length * 4)
    if query.element_size() < 4 and value.shape[-1] > 128:
        yield Need((query.numel() + key.numel() + value.numel()) * 4)


def _convolution(call: Call) -> Iterator[Need]:
    """cuDNN's tensor-core kernels want channels last: input and weight are copied, unless they lie so already."""
    given, weight = call.args[:2]
    if _is_copied(given, weight):
        yield Need(_bytes(given) + _bytes(weight), is_guess=True)


def _convolution_backward(call: Call) -> Iterator[Need]:
    """The input's gradient, then the weight's: each with both sides copied."""
    grad, given, weight = call.args[:3]
    if _is_copied(given, weight):
        for part in call.out[:2]:
            if part is not None:
                yield Need(_bytes(given) + _bytes(weight) + _bytes(grad), is_guess=True)


def _is_copied(given: torch.Tensor, weight: torch.Tensor) -> bool:
    """A kernel of one pixel is a matrix product in any layout."""
    return (
        given.dim() == 4
        and any(size > 1 for size in weight.shape[2:])
        and not given.is_contiguous(memory_format=torch.channels_last)
    )


def _safe_softmax(call: Call) -> Iterator[Need]:
    """It looks for rows that are masked altogether."""
    yield Need(call.out.numel())
    yield Need(call.out.numel() // max(1, call.out.shape[call.args[1]]))


def _norm_backward(call: Call) -> Iterator[Need]:
    """Partial sums of the weight's gradient."""
    width = math.prod(call.args[2])
    for _ in range(2):
        yield Need(128 * width * 4)


def _sum(call: Call) -> Iterator[Need]:
    """A copy in the type of the result, where the kernel does not read the values as they are; partial sums."""
    given, kind, card = call.args[0], call.out.dtype, call.card
    is_read_as_is = given.dtype == kind or (given.dtype in _HALF and kind == torch.float32)
    yield Need(0 if is_read_as_is else given.numel() * call.out.element_size())
    dims = call.args[1] if len(call.args) > 1 else None
    summed = given if is_read_as_is else torch.empty_strided(given.shape, given.stride(), dtype=kind, device="meta")
    needed = reduction(summed, dims, card.multiprocessors, card.threads_per_multiprocessor)
    yield Need(needed.scratch_bytes, reduction=needed)


def _rules() -> dict[Any, Rule]:
    aten = torch.ops.aten
    products = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default)
    found: dict[Any, Rule] = dict.fromkeys(products, Rule(uses_blas=True))
    found[aten.embedding_dense_backward.default] = Rule(needs=_embedding_backward)
    found[aten.convolution.default] = Rule(needs=_convolution)
    found[aten.convolution_backward.default] = Rule(needs=_convolution_backward, in_turn=True)
    for name in (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim):
        found[name] = Rule(needs=_sum)
    found[aten.native_layer_norm_backward.default] = Rule(needs=_norm_backward)
    if hasattr(aten, "_safe_softmax"):
        found[aten._safe_softmax.default] = Rule(needs=_safe_softmax)
    attention = {
        "_scaled_dot_product_flash_attention_backward": _flash_attention_backward,
        "_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
        "_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
    }
    for name, needs in attention.items():
        if hasattr(aten, name):
            found[getattr(aten, name).default] = Rule(needs=needs)
    return found


RULES = _rules()
"""By operation."""
