"""What CUDA's kernels allocate for themselves while an operation runs.

In:  an operation's arguments and results.
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

_ROWS_PER_THREAD = 10
_SORT_FREE_INDICES = 3072
"""Up to this many indices, an embedding's gradient needs no sorting."""


@dataclass(frozen=True)
class Need:
    """Bytes for the time of an operation."""

    size_bytes: int
    is_guess: bool = False


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What an operation needs beside its results."""

    needs: Callable[[Any, Any], Iterator[Need]] | None = None
    """From its arguments and its results."""
    in_turn: bool = False
    """One after the other, not all at once."""
    uses_blas: bool = False
    """cuBLAS computes it."""


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _rounded(count: int, to: int) -> int:
    return -(-count // to) * to


def _embedding_backward(args: Any, out: Any) -> Iterator[Need]:
    """Sorting the indices; then a partial sum for every stretch of equal ones."""
    grad, indices, rows = args[0], args[1], args[2]
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


def _fused_attention_backward(args: Any, out: Any) -> Iterator[Need]:
    """Flash and cuDNN: row sums, and the query's gradient in float32."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = _rounded(length, 128)
    wide = _rounded(width, 32 if width <= 128 else 64)
    yield Need(batch * heads * rows * 4)
    yield Need(batch * heads * rows * wide * 4)
    if key.shape[1] != heads:
        for _ in range(2):
            yield Need(batch * key.shape[2] * heads * width * query.element_size())


def _efficient_attention_backward(args: Any, out: Any) -> Iterator[Need]:
    """Row sums; in half precision also the gradients in float32."""
    query, key, value = args[1], args[2], args[3]
    batch, heads, length, _ = query.shape
    yield Need(batch * heads * length * 4)
    if query.element_size() < 4 and value.shape[-1] > 128:
        yield Need((query.numel() + key.numel() + value.numel()) * 4)


def _convolution(args: Any, out: Any) -> Iterator[Need]:
    """cuDNN's tensor-core kernels want channels last: input and weight are copied, unless they lie so already."""
    given, weight = args[0], args[1]
    if _is_copied(given, weight):
        yield Need(_bytes(given) + _bytes(weight), is_guess=True)


def _convolution_backward(args: Any, out: Any) -> Iterator[Need]:
    """The input's gradient, then the weight's: each with both sides copied."""
    grad, given, weight = args[0], args[1], args[2]
    if _is_copied(given, weight):
        for part in out[:2]:
            if part is not None:
                yield Need(_bytes(given) + _bytes(weight) + _bytes(grad), is_guess=True)


def _is_copied(given: torch.Tensor, weight: torch.Tensor) -> bool:
    """A kernel of one pixel is a matrix product in any layout."""
    return (
        given.dim() == 4
        and any(size > 1 for size in weight.shape[2:])
        and not given.is_contiguous(memory_format=torch.channels_last)
    )


def _safe_softmax(args: Any, out: Any) -> Iterator[Need]:
    """It looks for rows that are masked altogether."""
    yield Need(out.numel())
    yield Need(out.numel() // max(1, out.shape[args[1]]))


def _norm_backward(args: Any, out: Any) -> Iterator[Need]:
    """Partial sums of the weight's gradient."""
    width = math.prod(args[2])
    for _ in range(2):
        yield Need(128 * width * 4)


def _rules() -> dict[Any, Rule]:
    aten = torch.ops.aten
    products = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default)
    found: dict[Any, Rule] = dict.fromkeys(products, Rule(uses_blas=True))
    found[aten.embedding_dense_backward.default] = Rule(needs=_embedding_backward)
    found[aten.convolution.default] = Rule(needs=_convolution)
    found[aten.convolution_backward.default] = Rule(needs=_convolution_backward, in_turn=True)
    found[aten.native_layer_norm_backward.default] = Rule(needs=_norm_backward)
    if hasattr(aten, "_safe_softmax"):
        found[aten._safe_softmax.default] = Rule(needs=_safe_softmax)
    attention = {
        "_scaled_dot_product_flash_attention_backward": _fused_attention_backward,
        "_scaled_dot_product_cudnn_attention_backward": _fused_attention_backward,
        "_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
    }
    for name, needs in attention.items():
        if hasattr(aten, name):
            found[getattr(aten, name).default] = Rule(needs=needs)
    return found


RULES = _rules()
"""By operation."""
