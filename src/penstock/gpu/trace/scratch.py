"""Memory that CUDA's kernels allocate for themselves while an operation runs.

In:  the arguments and results of an operation, the card.
Out: ``Scratch``: bytes that are freed when the operation ends.
Runs in: the tracing thread.

The rules for torch's own kernels follow the source code of these kernels. A heuristic inside cuDNN chooses the size of
cuDNN's workspaces, so these sizes are guesses here, and estimates have a range.
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
"""The most indices for which the gradient of an embedding needs no sorting."""


@dataclass(frozen=True)
class Scratch:
    """Memory that is taken during one operation."""

    size_bytes: int
    is_guess: bool = False
    reduction: Reduction | None = None
    """The sum that needs this memory, if any; it gives the size of the memory for other batch sizes."""


Scratches = Callable[[Any, Any, Card], Iterator[Scratch]]
"""A function with three arguments: the arguments of the operation, the result of the operation, the card."""


@dataclass(frozen=True, kw_only=True)
class OperationRule:
    """The memory that an operation takes in addition to its results."""

    scratches: Scratches | None = None
    one_after_another: bool = False
    """Whether each piece of memory is freed before the next is allocated; if not, all exist at the same time."""
    uses_blas: bool = False
    """Whether cuBLAS computes the operation."""


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _rounded(count: int, to: int) -> int:
    return -(-count // to) * to


def _embedding_backward(args: Any, out: Any, card: Card) -> Iterator[Scratch]:
    """Memory for sorting the indices, and then a partial sum for every run of equal indices."""
    grad, indices, rows = args[:3]
    count, width = indices.numel(), grad.shape[-1]
    if not grad.is_contiguous():
        yield Scratch(_bytes(grad))
    # Few indices need no sorting. The memory is then recorded with 0 bytes, so that steps of all batch sizes have the
    # same events.
    index_bytes = indices.element_size() if count > _SORT_FREE_INDICES else 0
    segments = min(count, rows)
    partial = count // _ROWS_PER_THREAD + segments
    for places in (count, count, count, segments, segments, partial):
        yield Scratch(places * index_bytes)  # sorted indices, their old places, starts of the runs, ...
    yield Scratch(partial * width * 4 if index_bytes else 0)


def _flash_attention_backward(args: Any, out: Any, card: Card) -> Iterator[Scratch]:
    """Row sums, and the gradient of the query in float32. If heads share keys and values, there is also a gradient of
    the keys and values for each head."""
    query, key = args[1:3]
    batch, heads, length, width = query.shape
    rows = _rounded(length, 128)
    wide = _rounded(width, 32 if width <= 128 else 64)
    yield Scratch(batch * heads * rows * 4)
    yield Scratch(batch * heads * rows * wide * 4)
    if key.shape[1] != heads:
        for _ in range(2):
            yield Scratch(batch * key.shape[2] * heads * width * query.element_size())


def _cudnn_attention_backward(args: Any, out: Any, card: Card) -> Iterator[Scratch]:
    """The same memory as for flash attention, but in one allocation."""
    yield Scratch(sum(need.size_bytes for need in _flash_attention_backward(args, out, card)) + 256)


def _efficient_attention_backward(args: Any, out: Any, card: Card) -> Iterator[Scratch]:
    """Row sums, for which float32 needs a product as large as the output. Half precision needs float32 gradients."""
    query, key, value = args[1:4]
    batch, heads, length, _ = query.shape
    yield Scratch(batch * heads * length * value.shape[-1] * 4 if query.element_size() == 4 else 0)
    yield Scratch(batch * heads * length * 4)
    if query.element_size() < 4 and value.shape[-1] > 128:
        yield Scratch((query.numel() + key.numel() + value.numel()) * 4)


def _convolution(args: Any, out: Any, card: Card) -> Iterator[Scratch]:
    """cuDNN's kernels for tensor cores need channels last, and copy an input or weight that is stored differently."""
    given, weight = args[:2]
    if _is_copied(given, weight):
        yield Scratch(_bytes(given) + _bytes(weight), is_guess=True)


def _convolution_backward(args: Any, out: Any, card: Card) -> Iterator[Scratch]:
    """The gradient of the input, then the gradient of the weight. Both operands are copied for each gradient."""
    grad, given, weight = args[:3]
    if _is_copied(given, weight):
        for part in out[:2]:
            if part is not None:
                yield Scratch(_bytes(given) + _bytes(weight) + _bytes(grad), is_guess=True)


def _is_copied(given: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether operands are copied. With a kernel of one pixel they are not, because it is a matrix product in any
    layout."""
    return (
        given.dim() == 4
        and any(size > 1 for size in weight.shape[2:])
        and not given.is_contiguous(memory_format=torch.channels_last)
    )


def _safe_softmax(args: Any, out: Any, card: Card) -> Iterator[Scratch]:
    """Memory in which the kernel marks rows that are masked completely."""
    yield Scratch(out.numel())
    yield Scratch(out.numel() // max(1, out.shape[args[1]]))


def _norm_backward(args: Any, out: Any, card: Card) -> Iterator[Scratch]:
    """Partial sums of the gradient of the weight and of the gradient of the bias."""
    width = math.prod(args[2])
    for _ in range(2):
        yield Scratch(128 * width * 4)


def _sum(args: Any, out: Any, card: Card) -> Iterator[Scratch]:
    """Partial sums, and a copy in the type of the result if the kernel cannot read the type of the input."""
    given, kind = args[0], out.dtype
    is_readable = given.dtype == kind or (given.dtype in _HALF and kind == torch.float32)
    yield Scratch(0 if is_readable else given.numel() * out.element_size())
    dims = args[1] if len(args) > 1 else None
    summed = given if is_readable else torch.empty_strided(given.shape, given.stride(), dtype=kind, device="meta")
    needed = reduction(summed, dims, card.multiprocessors, card.threads_per_multiprocessor)
    yield Scratch(needed.scratch_bytes, reduction=needed)


def _rules() -> dict[Any, OperationRule]:
    aten = torch.ops.aten
    products = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default)
    found: dict[Any, OperationRule] = dict.fromkeys(products, OperationRule(uses_blas=True))
    found[aten.embedding_dense_backward.default] = OperationRule(scratches=_embedding_backward)
    found[aten.convolution.default] = OperationRule(scratches=_convolution)
    found[aten.convolution_backward.default] = OperationRule(scratches=_convolution_backward, one_after_another=True)
    for name in (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim):
        found[name] = OperationRule(scratches=_sum)
    found[aten.native_layer_norm_backward.default] = OperationRule(scratches=_norm_backward)
    if hasattr(aten, "_safe_softmax"):
        found[aten._safe_softmax.default] = OperationRule(scratches=_safe_softmax)
    attention = {
        "_scaled_dot_product_flash_attention_backward": _flash_attention_backward,
        "_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
        "_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
    }
    for name, scratches in attention.items():
        if hasattr(aten, name):
            found[getattr(aten, name).default] = OperationRule(scratches=scratches)
    return found


RULES = _rules()
"""Operation -> the rule for its memory."""
