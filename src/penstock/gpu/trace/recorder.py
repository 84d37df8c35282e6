"""Records what a training on meta tensors would allocate on the GPU, operation by operation.

In:  every operation below autograd, on tensors without memory.
Out: a ``Trace``.
Runs in: the tracing thread.

A storage is allocated when the first tensor with it comes out of an operation, and freed when torch lets go of it: the
same code holds and drops it as on the GPU. What CUDA's kernels allocate inside an operation comes from ``scratch``.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.gpu.card import Card
from penstock.gpu.trace import scratch, sole_owner
from penstock.gpu.trace.trace import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    INPUTS,
    OPTIMIZER,
    PARAMETERS,
    SETUP,
    TEMPORARIES,
    WORKSPACES,
    Trace,
)

_ADD = torch.ops.aten.add.Tensor
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor
_READ = torch.ops.aten._local_scalar_dense.default
_FLATTENED = (torch.float16, torch.float32, torch.float64)
"""Types of weights that torch's recurrent layers put into one block."""
_LISTS = {torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default}
_USUAL = {
    **dict.fromkeys((torch.ops.aten.all.default, torch.ops.aten.all.dim), True),
    **dict.fromkeys((torch.ops.aten.any.default, torch.ops.aten.any.dim), False),
}
"""Models ask whether all of a mask is set, whether any value is infinite: in an unpadded, healthy batch, yes and no."""


class NeedsValues(Exception):
    """The model asked for a tensor's contents, and here tensors have none."""


class _Death(weakref.ref):  # type: ignore[type-arg]
    """Tells when a storage is gone, and which it was."""

    __slots__ = ("key", "number")
    key: int
    number: int


class Recorder(TorchDispatchMode):
    """The dispatch mode that watches."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self.trace = Trace()
        self.card = card
        self.module = ""
        """Path of the module whose forward runs."""
        self.assumptions: dict[str, None] = {}
        """What was taken for granted where the model asked for values, in the order in which it asked."""
        self._live: dict[int, _Death] = {}
        self._answers: dict[int, bool] = {}
        self._is_optimizing = self._is_away = False
        self._kept: set[str] = set()
        self._alone = sole_owner.alone()
        self._kind: str | None = None

    # -- what happens ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_away:
            return func(*args, **kwargs) if kwargs else func(*args)
        if func is _ADD and self._adds_in_place(args, kwargs):
            return _ADD_IN_PLACE(*args)
        if func is _READ and args[0].device.type == "meta":
            return self._read(args[0])
        if func in _LISTS and args[0].device.type == "meta":
            raise NeedsValues(_who_asked(func))
        rule = scratch.RULES.get(func)
        if rule is not None and self._is_on_card(args):
            return self._with_scratch(rule, func, args, kwargs or {})
        out = func(*args, **kwargs) if kwargs else func(*args)
        self._see_all(out, func)
        if func in _USUAL and out.device.type == "meta":
            self._answers[out.untyped_storage()._cdata] = _USUAL[func]
        return out

    def _read(self, tensor: torch.Tensor) -> bool:
        answer = self._answers.get(tensor.untyped_storage()._cdata)
        if answer is None:
            raise NeedsValues(_who_asked(_READ))
        self.assumptions[f"{'all' if answer else 'none'} of the values set: {_who_asked(_READ)}"] = None
        return answer

    def _with_scratch(self, rule: scratch.Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that takes memory of its own while it runs."""
        out = func(*args, **kwargs)
        self._see_all(out, func)
        if rule.uses_blas:
            self._need_blas()
        taken = []
        for need in rule.needs(scratch.Call(args, out, self.card)) if rule.needs else ():
            taken.append(self._scratch(need, func))
            if rule.in_turn:
                self.trace.free(taken.pop())
        for number in taken:
            self.trace.free(number)
        return out

    def _scratch(self, need: scratch.Need, func: Any) -> int:
        number = self._allocate(need.size_bytes, WORKSPACES if need.is_guess else TEMPORARIES, func)
        if need.is_guess:
            self.trace.uncertain.add(number)
        if need.reduction is not None:
            self.trace.reductions[number] = need.reduction
        return number

    @contextmanager
    def taking(self, need: scratch.Need, maker: str) -> Iterator[None]:
        """What a library takes while it runs."""
        number = self._scratch(need, maker)
        try:
            yield
        finally:
            self.trace.free(number)

    def _need_blas(self) -> None:
        """cuBLAS takes its workspace at the first product of each thread; autograd has a thread of its own."""
        self._keep(self.card.blas_workspace_bytes, f"cublas {BACKWARD if self.phase == BACKWARD else FORWARD}")

    def keep_dropout_state(self) -> None:
        """cuDNN's random numbers, one stream for every thread that may run."""
        self._keep(self.card.multiprocessors * self.card.threads_per_multiprocessor * 24, "cudnn dropout")

    def _keep(self, size_bytes: int, maker: str) -> None:
        """What a library takes at its first call, and keeps."""
        if maker not in self._kept:
            self._kept.add(maker)
            self.trace.staying.add(self._allocate(size_bytes, WORKSPACES, maker))

    def _adds_in_place(self, args: Any, kwargs: Any) -> bool:
        """Autograd summing two gradients where on the GPU, with no mode on, it would add into the first."""
        if kwargs or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled() or len(args) != 2:
            return False
        mine, other = args
        return (
            isinstance(other, torch.Tensor)
            and mine.device.type == "meta"
            and sole_owner.references(mine) == self._alone
            and mine.shape == other.shape
            and mine.dtype == other.dtype
            and _is_dense(mine)
        )

    # -- storages --------------------------------------------------------------------------------------------------

    @staticmethod
    def _is_on_card(args: Any) -> bool:
        return any(isinstance(arg, torch.Tensor) and arg.device.type == "meta" for arg in args)

    def _see_all(self, out: Any, func: Any) -> None:
        if isinstance(out, torch.Tensor):
            self._see(out, func)
        elif isinstance(out, (tuple, list)):
            for part in out:
                if isinstance(part, torch.Tensor):
                    self._see(part, func)
                elif isinstance(part, (tuple, list)):
                    self._see_all(part, func)

    def _see(self, tensor: torch.Tensor, func: Any) -> None:
        if tensor.device.type != "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size = storage.nbytes()
        if size:
            death = _Death(storage, self._died)
            death.key, death.number = key, self._allocate(size, self._kind or self._guess_kind(), func)
            self._live[key] = death

    def _died(self, death: weakref.ref) -> None:  # type: ignore[type-arg]
        assert isinstance(death, _Death)
        self._live.pop(death.key, None)
        self._answers.pop(death.key, None)
        self.trace.free(death.number)

    def _allocate(self, size_bytes: int, kind: str, func: Any) -> int:
        maker = func if isinstance(func, str) else func._schema.name
        return self.trace.allocate(size_bytes, kind, self.phase, maker, self.module)

    def _guess_kind(self) -> str:
        """Until it is known what outlives its phase: recomputed forwards count as activations."""
        if self.phase == FORWARD or (self.phase == BACKWARD and torch.is_grad_enabled()):
            return ACTIVATIONS
        return TEMPORARIES

    @property
    def is_away(self) -> bool:
        """Whether what happens now is no part of the training."""
        return self._is_away

    # -- what the training tells -----------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        if self._kind is not None:
            return SETUP
        if self._is_optimizing:
            return OPTIMIZER
        return BACKWARD if torch._C._current_graph_task_id() != -1 else FORWARD

    @contextmanager
    def _as(self, kind: str) -> Iterator[None]:
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def model_moves_in(self, model: torch.nn.Module) -> None:
        """Parameters and buffers, in the order in which ``model.to(device)`` moves them."""
        with self._as(PARAMETERS):
            for child in model.children():
                self.model_moves_in(child)
            for tensor in [*model._parameters.values(), *model._buffers.values()]:
                if tensor is not None:
                    self._see(tensor, "to")
            if isinstance(model, torch.nn.RNNBase):
                self._flatten(list(model.parameters(recurse=False)))

    def _flatten(self, weights: list[torch.Tensor]) -> None:
        """A recurrent layer copies its weights into one block for cuDNN, once they are on the GPU."""
        keys = {weight.untyped_storage()._cdata for weight in weights}
        if len(keys) < len(weights) or not all(weight.dtype in _FLATTENED for weight in weights):
            return
        deaths = [self._live[key] for key in keys if key in self._live]
        before = {death.number for death in deaths}
        number = self._allocate(sum(weight.nbytes for weight in weights), PARAMETERS, "flatten")
        for death in deaths:
            death.number = number
        # Another layer's block stays while that layer has a weight in it.
        for left in before - {death.number for death in self._live.values()}:
            self.trace.free(left)

    @contextmanager
    def away(self) -> Iterator[None]:
        """What is made meanwhile is no part of the training."""
        self._is_away = True
        try:
            yield
        finally:
            self._is_away = False

    def batch_moves_in(self, tensors: list[torch.Tensor]) -> None:
        with self._as(INPUTS):
            for tensor in tensors:
                self._see(tensor, "to")

    @contextmanager
    def optimizing(self) -> Iterator[None]:
        self._is_optimizing = True
        try:
            yield
        finally:
            self._is_optimizing = False

    def optimizer_begins(self, *_: Any) -> None:
        self._is_optimizing = True

    def optimizer_ends(self, *_: Any) -> None:
        self._is_optimizing = False

    def rename(self, tensors: Iterator[torch.Tensor], kind: str) -> None:
        """Say what these turned out to be."""
        for tensor in tensors:
            death = self._live.get(tensor.untyped_storage()._cdata) if tensor.device.type == "meta" else None
            if death is not None:
                self.trace.kinds[death.number] = kind


def _is_dense(tensor: torch.Tensor) -> bool:
    """No gaps and no overlaps, in whatever order its dimensions lie."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _who_asked(func: Any) -> str:
    """The line of the user's code, outside torch, that wanted a value."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and "/penstock/gpu/" not in frame.filename:
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return str(func)
