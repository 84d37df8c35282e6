"""Functions that CUDA runs as one kernel, but other devices run as several.

In:  a function and its arguments, on meta tensors.
Out: the result of the operation that runs on CUDA.
Runs in: the tracing thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_nn: Any = torch._C._nn  # type: ignore[attr-defined]


def dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """Dropout runs as one kernel, which keeps a mask of one byte per value."""
    given, p, train = _bound(args, kwargs, ("input", "p", "train"))
    if train and 0 < p < 1 and given.numel():
        return torch.native_dropout(given, p, True)[0]
    return func(*args, **kwargs)


def softmax(func: Any, args: Any, kwargs: Any) -> Any:
    """A softmax from float16 to float32 runs as one kernel; other types are converted first."""
    given = args[0] if args else kwargs["input"]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    into = kwargs.get("dtype", args[2] if len(args) > 2 else None)
    if given.dtype == torch.float16 and into == torch.float32 and isinstance(dim, int):
        inner: Any = torch.ops.aten._log_softmax if "log" in func.__name__ else torch.ops.aten._softmax
        return inner(given, dim, True)
    return func(*args, **kwargs)


def linear(func: Any, args: Any, kwargs: Any) -> Any:
    """If the input is not contiguous, torch adds the bias in place, but not while a dispatch mode is active."""
    given, weight, bias = _bound(args, kwargs, ("input", "weight", "bias"))
    if bias is None or given.dim() < 3 or given.is_contiguous():
        return func(*args, **kwargs)
    return torch.matmul(given, weight.t()).add_(bias)


def cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    """Under autocast the logarithms stay in the lower precision, and the loss reads a float32 copy of them."""
    given, target, weight, reduction, ignore, smoothing = _bound(
        args, kwargs, ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    )
    low = given.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled("cuda")
    if not low or smoothing or target.is_floating_point():
        return func(*args, **kwargs)
    logarithms = torch.log_softmax(given, 0 if given.dim() == 1 else 1, dtype=given.dtype)
    weight = weight if weight is None else weight.float()
    return _nn.nll_loss_nd(logarithms.float(), target, weight, reduction, ignore)


class _RmsNorm(torch.autograd.Function):
    """RMS norm as one kernel, which keeps its input and one float32 per row."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor | None, width: int) -> torch.Tensor:
        rows = torch.empty((given.numel() // width,), dtype=torch.float32, device=given.device)
        ctx.save_for_backward(given, weight, rows)
        return torch.empty_like(given)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        given, weight, _ = ctx.saved_tensors
        return torch.empty_like(given), None if weight is None else torch.empty_like(weight), None


def rms_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """RMS norm is fused since torch 2.8 if the weight and the input have the same type."""
    given, shape, weight = _bound(args, kwargs, ("input", "normalized_shape", "weight"))
    if not hasattr(torch.ops.aten, "_fused_rms_norm") or (weight is not None and weight.dtype != given.dtype):
        return func(*args, **kwargs)
    return _RmsNorm.apply(given.contiguous(), weight, math.prod(shape))


def _bound(args: Any, kwargs: Any, names: tuple[str, ...]) -> list[Any]:
    return [args[place] if place < len(args) else kwargs.get(name) for place, name in enumerate(names)]


_HOMES: tuple[Any, ...] = (torch, torch.Tensor, torch._VF)


def _all(name: str, rule: Callable[[Any, Any, Any], Any]) -> dict[Any, Callable[[Any, Any, Any], Any]]:
    return {function: rule for home in _HOMES if (function := getattr(home, name, None)) is not None}


RULES = {
    _nn.linear: linear,
    _nn.cross_entropy_loss: cross_entropy,
    **_all("dropout", dropout),
    **_all("softmax", softmax),
    **_all("log_softmax", softmax),
    **_all("rms_norm", rms_norm),
}
"""Function -> the function that replaces it."""
