"""LSTM, GRU and plain recurrent layers through cuDNN.

In:  the arguments of ``torch.lstm`` and its like, on meta tensors.
Out: outputs of the right shapes; autograd keeps cuDNN's reserve space.
Runs in: the tracing thread.

cuDNN does not publish what it reserves. For every layer, direction, step and sample the kernels keep the gates (four
for an LSTM, three for a GRU, one else), the cell and the output; that is the model, and estimates carry a range for it.
"""

from __future__ import annotations

from typing import Any

import torch

_KEPT = {"lstm": 6, "gru": 5, "rnn_tanh": 2, "rnn_relu": 2}
"""Values kept for the backward pass, per unit of the hidden state."""
_WORKED = {"lstm": 4, "gru": 4, "rnn_tanh": 1, "rnn_relu": 1}
"""Values worked on at a time, per unit."""


class _Layers(torch.autograd.Function):
    """Forward: output, last state, last cell, reserve. Backward: a gradient for each input and weight."""

    @staticmethod
    def forward(
        ctx: Any, kind: str, settings: tuple[Any, ...], given: Any, hidden: Any, cell: Any, *weights: Any
    ) -> Any:
        layers, dropout, directions, batch_first = settings
        steps, batch = (given.shape[1], given.shape[0]) if batch_first else (given.shape[0], given.shape[1])
        # A projected LSTM hands on fewer values than its cell has.
        units, width = (cell if cell is not None else hidden).shape[-1], hidden.shape[-1] * directions
        values = steps * batch * directions * units
        output = given.new_empty(*given.shape[:2], width)
        work = given.new_empty(values * _WORKED[kind])
        reserve = given.new_empty(values * layers * _KEPT[kind])
        masks = given.new_empty(steps * batch * width * (layers - 1), dtype=torch.uint8) if dropout else None
        ctx.save_for_backward(given, hidden, cell, output, reserve, masks, *weights)
        del work
        ctx.work = values * _WORKED[kind]
        return output, torch.empty_like(hidden), None if cell is None else torch.empty_like(cell)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        given, hidden, cell, _, _, _, *weights = ctx.saved_tensors
        work = given.new_empty(ctx.work)
        grad_given, grad_hidden = torch.empty_like(given), torch.empty_like(hidden)
        grad_cell = None if cell is None else torch.empty_like(cell)
        flat = given.new_empty(sum(weight.numel() for weight in weights))
        del work
        parts = flat.split([weight.numel() for weight in weights])
        shaped = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
        return None, None, grad_given, grad_hidden, grad_cell, *shaped


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    kind = func.__name__
    if kwargs or not isinstance(args[-1], bool):  # packed sequences come in another form
        return func(*args, **kwargs)
    given, state, weights, _, layers, dropout, train, bidirectional, batch_first = args
    hidden, cell = state if kind == "lstm" else (state, None)
    if torch.is_autocast_enabled("cuda"):
        to = torch.get_autocast_dtype("cuda")
        given, hidden = given.to(to), hidden.to(to)
        cell = cell if cell is None else cell.to(to)
        flat = given.new_empty(sum(weight.numel() for weight in weights))
        del flat
        weights = [weight.to(to) for weight in weights]
    settings = (layers, dropout if train else 0.0, 2 if bidirectional else 1, batch_first)
    output, hidden, cell = _Layers.apply(kind, settings, given, hidden, cell, *weights)
    return (output, hidden, cell) if kind == "lstm" else (output, hidden)


RULES = {getattr(torch._VF, kind): _run for kind in _KEPT}
"""By function."""
