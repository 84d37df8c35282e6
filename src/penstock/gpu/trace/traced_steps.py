"""Runs a few training steps on meta tensors, which have shapes but no memory, and records every allocation.

In:  a ``TrainingSetup``, the batch size of each step, a card.
Out: a ``Trace``, and the answers that were assumed when the model asked for values.
Runs in: the tracing thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from penstock.errors import ConfigError, PenstockError
from penstock.gpu.card import Card
from penstock.gpu.trace.functions import CudaFunctions, as_on_cuda
from penstock.gpu.trace.recorder import NeedsValues, TraceRecorder
from penstock.gpu.trace.trace import GRADIENTS, OPTIMIZER_STATE, Trace
from penstock.gpu.training import TrainingSetup


def trace_steps(setup: TrainingSetup, sizes: Sequence[int], card: Card) -> tuple[Trace, tuple[str, ...]]:
    """Run one model's steps with batches of these sizes, in order. Returns the trace and the assumed answers.

    The first two steps must work. If a later step fails, tracing ends, because the model may not accept every batch
    size.
    """
    functions = CudaFunctions(card)
    recorder = TraceRecorder(card)
    with as_on_cuda(functions.casts):
        with _explained("make_model()"), functions, torch.device("meta"):
            model = setup.model("meta")
        with _explained("the optimizer"):
            optimizer = setup.optimizer_of(model)
        scaler = _MetaScaler(model, recorder) if setup.needs_scaler else None
        with _explained("the training step"), functions, recorder, _module_names(model, recorder):
            recorder.move_model(model)
            if optimizer is not None:
                optimizer.register_step_pre_hook(recorder.optimizer_begins)
                optimizer.register_step_post_hook(recorder.optimizer_ends)
            batch = None
            for number, size in enumerate(sizes):
                recorder.trace.begin_step(size)
                try:
                    batch = _batch(setup, size, recorder)
                    setup.run_step(model, batch, optimizer, scaler, "meta")
                except Exception:
                    if number < 2:
                        raise
                    recorder.trace.steps.pop()
                    break
                recorder.trace.end_step()
                _name_kinds(recorder, model, optimizer)
        # Allocations that are freed together with the model are not part of a step.
        trace, recorder.trace = recorder.trace, Trace()
    return trace, tuple(recorder.assumptions)


def _batch(setup: TrainingSetup, size: int, recorder: TraceRecorder) -> Any:
    with _explained(f"make_batch({size})"), recorder.paused():
        try:
            with torch.device("meta"):
                batch = setup.make_batch(size)
        except (NotImplementedError, RuntimeError):
            batch = setup.make_batch(size)  # the batch needs values, and one batch fits into host memory
        batch = setup.moved(batch, "meta")
    tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise ConfigError(f"make_batch({size}) returned {type(batch).__name__} without a tensor in it")
    recorder.move_batch(tensors)
    return batch


class _MetaScaler:
    """Allocates the same memory as ``torch.amp.GradScaler``: a scale, and two numbers for the search for infinite
    values."""

    def __init__(self, model: torch.nn.Module, recorder: TraceRecorder) -> None:
        self._model, self._recorder = model, recorder
        self._scale = torch.zeros((), device="meta")

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self._scale

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self._recorder.optimizer_begins()
        with torch.no_grad():
            found = torch.zeros((1,), device="meta")
            inverse = self._scale.double().reciprocal().float()
            grads = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
            torch.ops.aten._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)
            del found, inverse, grads
        self._recorder.optimizer_ends()
        optimizer.step()

    def update(self) -> None:
        """Change the scale in place, which allocates nothing."""


def _name_kinds(recorder: TraceRecorder, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    recorder.rename((p.grad for p in model.parameters() if p.grad is not None), GRADIENTS)
    if optimizer is not None:
        leaves = tree_flatten([dict(state) for state in optimizer.state.values()])[0]
        recorder.rename((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), OPTIMIZER_STATE)


@contextlib.contextmanager
def _module_names(model: torch.nn.Module, recorder: TraceRecorder) -> Iterator[None]:
    """A context in which ``recorder.module`` is the path of the module whose forward method is running."""
    names = {module: name for name, module in model.named_modules()}
    above: list[str] = []

    def enter(module: torch.nn.Module, *_: Any) -> None:
        above.append(recorder.module)
        recorder.module = names.get(module, recorder.module)

    def leave(*_: Any) -> None:
        recorder.module = above.pop() if above else ""

    handles = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """A context that turns any error of the user's code into one clear ConfigError."""
    try:
        yield
    except PenstockError:
        raise
    except NeedsValues as error:
        raise ConfigError(
            f"{what} cannot be traced: it asks for a tensor's values, but traced tensors have no values ({error}). "
            f"Give the model this value as a Python number, or pass a step= without this part; if there is a GPU, "
            f"measure instead"
        ) from error
    except Exception as error:
        text = str(error).strip().splitlines()
        first = f"{type(error).__name__}: {text[0] if text else 'no message'}"
        if "meta" in str(error):
            first += (
                " (traced tensors are on torch's meta device: they have shapes but no values. Operations that need "
                "values cannot be traced; nor can custom kernels without an implementation for the meta device)"
            )
        raise ConfigError(f"{what} failed: {first}") from error
