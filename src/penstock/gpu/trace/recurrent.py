"""LSTM, GRU and plain recurrent layers as cuDNN runs them.

In:  the arguments of ``torch.lstm``, ``torch.gru`` and the plain layers, on meta tensors.
Out: outputs of the right shapes, while autograd keeps cuDNN's reserve space.
Runs in: the tracing thread.

The size of the reserve space, which is kept for the backward pass, is known: in 72 shapes it equals the size in cuDNN
9.19 on an H200 to the byte. The size of the workspace is a guess: the median error over these shapes is 7%, but the
error is a half for layers that are much narrower than their input. Estimates therefore have a range.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from penstock.gpu.trace.recorder import TraceRecorder
from penstock.gpu.trace.scratch import Scratch

_KEPT = {"lstm": 6, "gru": 7, "rnn_tanh": 2, "rnn_relu": 2}
"""Kind -> the values that are kept for the backward pass, per unit of the hidden state and per layer; the last layer
keeps one value less than the others."""
_LONG = 512
"""The number of steps from which on cuDNN's workspace holds one value less per unit."""
_ALIGNED_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class _LayerSizes:
    """The sizes of one call of a recurrent layer."""

    kind: str
    layers: int
    directions: int
    dropout: float
    steps: int
    batch: int
    inputs: int
    units: int
    item_bytes: int
    weight_bytes: int
    is_training: bool

    @property
    def reserve_bytes(self) -> int:
        if not self.is_training:
            return 0
        places = self.steps * self.batch * self.units * self.directions
        bits = places * self.directions * (self.layers - 1) if self.dropout else 0
        return places * (_KEPT[self.kind] * self.layers - 1) * self.item_bytes + bits // 8 + _ALIGNED_BYTES

    @property
    def work_bytes(self) -> int:
        """The bytes of the workspace: the gates and inputs of every step, and the weights in cuDNN's order."""
        deeper = self.units * self.directions if self.layers > 1 else 0
        values = (3 if self.steps >= _LONG else 4) * self.units + 2 * max(self.inputs, deeper)
        return self.steps * self.batch * self.directions * values * self.item_bytes + 3 * self.weight_bytes // 2


def _recorder() -> TraceRecorder | None:
    """The active recorder; None while code runs that is not part of the training."""
    found = [
        mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, TraceRecorder) and not mode.is_paused
    ]
    return found[-1] if found else None


def _taking(need: Scratch, what: str) -> AbstractContextManager[None]:
    recorder = _recorder()
    return nullcontext() if recorder is None else recorder.taking(need, what)


def _working(shape: _LayerSizes) -> AbstractContextManager[None]:
    """A context in which cuDNN's workspace is recorded."""
    return _taking(Scratch(shape.work_bytes, is_guess=True), f"cudnn {shape.kind}")


def _copying(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """A context for the copy that cuDNN makes of a tensor with gaps, or with another dimension than steps first. A copy
    of 0 bytes is recorded too, so that steps of different batch sizes have the same events."""
    return _taking(Scratch(0 if tensor.is_contiguous() else tensor.nbytes), "cudnn copy")


class _Layers(torch.autograd.Function):
    """The forward pass returns the output, the last state and the last cell, and keeps the reserve space. The backward
    pass returns the gradients."""

    @staticmethod
    def forward(
        ctx: Any, shape: _LayerSizes, batch_first: bool, given: Any, hidden: Any, cell: Any, *weights: Any
    ) -> Any:
        with _copying(given.transpose(0, 1) if batch_first else given):
            # The output of a projected LSTM is narrower than its cell.
            output = given.new_empty(shape.steps, shape.batch, hidden.shape[-1] * shape.directions)
            last = torch.empty_like(hidden), None if cell is None else torch.empty_like(cell)
            with _working(shape):
                reserve = given.new_empty(shape.reserve_bytes, dtype=torch.uint8)
        ctx.save_for_backward(given, hidden, cell, output, reserve, *weights)
        ctx.shape, ctx.batch_first = shape, batch_first
        return output.transpose(0, 1) if batch_first else output, *last

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        given, hidden, cell, _, _, *weights = ctx.saved_tensors
        steps_first = given.transpose(0, 1) if ctx.batch_first else given
        grad = grads[0].transpose(0, 1) if ctx.batch_first else grads[0]
        with _copying(steps_first), _copying(grad):
            grad_given = given.new_empty(steps_first.shape)
            grad_hidden = torch.empty_like(hidden)
            grad_cell = None if cell is None else torch.empty_like(cell)
            with _working(ctx.shape):
                pass
        if ctx.batch_first:
            grad_given = grad_given.transpose(0, 1)
        if not any(ctx.needs_input_grad[5:]):
            return None, None, grad_given, grad_hidden, grad_cell, *[None] * len(weights)
        with _copying(steps_first):
            flat = given.new_empty(sum(weight.numel() for weight in weights))
            with _working(ctx.shape):
                pass
        parts = flat.split([weight.numel() for weight in weights])
        shaped = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
        return None, None, grad_given, grad_hidden, grad_cell, *shaped


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    kind = func.__name__
    if kwargs or not isinstance(args[3], bool):  # packed sequences have other arguments
        return func(*args, **kwargs)
    given, state, weights, _, layers, dropout, train, bidirectional, batch_first = args
    hidden, cell = state if kind == "lstm" else (state, None)
    if torch.is_autocast_enabled("cuda"):
        to = torch.get_autocast_dtype("cuda")
        given, hidden = given.to(to), hidden.to(to)
        cell = cell if cell is None else cell.to(to)
    if weights[0].dtype != given.dtype or given.dtype == torch.bfloat16:
        weights = _CastTogether.apply(given.dtype, *weights)
    shape = _LayerSizes(
        kind=kind,
        layers=layers,
        directions=2 if bidirectional else 1,
        dropout=dropout if train else 0.0,
        steps=given.shape[1] if batch_first else given.shape[0],
        batch=given.shape[0] if batch_first else given.shape[1],
        inputs=given.shape[2],
        units=(cell if cell is not None else hidden).shape[-1],
        item_bytes=given.element_size(),
        weight_bytes=sum(weight.numel() for weight in weights) * given.element_size(),
        is_training=train,
    )
    recorder = _recorder()
    if shape.dropout and recorder is not None:
        recorder.keep_dropout_state()
    output, hidden, cell = _Layers.apply(shape, batch_first, given, hidden, cell, *weights)
    return (output, hidden, cell) if kind == "lstm" else (output, hidden)


class _CastTogether(torch.autograd.Function):
    """Puts the weights into one block for cuDNN if the layer itself has not done so, which is the case after a cast and
    in bfloat16."""

    @staticmethod
    def forward(ctx: Any, kind: torch.dtype, *weights: torch.Tensor) -> Any:
        ctx.kind = weights[0].dtype
        counts = [weight.numel() for weight in weights]
        flat = weights[0].new_empty(sum(counts), dtype=kind)
        return tuple(part.view(weight.shape) for part, weight in zip(flat.split(counts), weights, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        return None, *(grad.to(ctx.kind) for grad in grads)


RULES = {getattr(torch._VF, kind): _run for kind in _KEPT}
"""Function -> the function that replaces it."""
