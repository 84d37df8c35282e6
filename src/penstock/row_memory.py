"""Memory for a sample's tensors: the batch's own row, where a worker is about to write one.

In:  a shape and a dtype.
Out: a tensor, not filled.
Runs in: both; only a worker process has rows to lend (``workers/child/loans.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Lender = Callable[[tuple[int, ...], torch.dtype], torch.Tensor | None]

_lender: Lender | None = None


def empty(shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor for a part of a sample, not filled: the memory of the batch itself where possible.

    Call it inside ``__getitem__`` (or a transform, or a wrapped dataset) and write the sample into it, for example with
    ``file.readinto(tensor.numpy())``; return the tensor or its ``numpy()``. In a worker process that knows the layout
    of the batch, a large part that lies in its place already is not copied. Anywhere else, and for every other shape
    and dtype, the tensor has ordinary memory, and the sample is copied as usual: the batches are the same.

    A tensor that is kept beyond its sample stays valid: it gets memory of its own.
    """
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    lent = None if _lender is None else _lender(size, dtype)
    return torch.empty(size, dtype=dtype, device="cpu") if lent is None else lent


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """``empty`` with the shape and dtype of ``tensor``; contiguous, and on the CPU."""
    return empty(tensor.shape, tensor.dtype)


def lend_from(lender: Lender | None) -> None:
    """Have ``empty`` ask ``lender`` first; it returns None where it has no memory to lend."""
    global _lender
    _lender = lender
