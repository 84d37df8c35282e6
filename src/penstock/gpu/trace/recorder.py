"""Records the memory that each operation of a training on meta tensors would allocate on the GPU.

In:  every operation below autograd; all tensors are without memory.
Out: a ``Trace``.
Runs in: the tracing thread.

A storage counts as allocated when an operation first returns a tensor with this storage. It counts as freed when Python
frees the storage object, because the training's own code holds and drops storages as on the GPU. ``scratch`` gives the
memory that CUDA's kernels allocate inside an operation.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.gpu.card import Card
from penstock.gpu.trace.scratch import RULES, OperationRule, Scratch
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
"""The types of weights that torch's recurrent layers put into one block."""
_DATA_DEPENDENT = {torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default}
_USUAL = {
    **dict.fromkeys((torch.ops.aten.all.default, torch.ops.aten.all.dim), True),
    **dict.fromkeys((torch.ops.aten.any.default, torch.ops.aten.any.dim), False),
}
"""The assumed answers when models ask whether a mask is set everywhere (yes) or whether any value is infinite (no);
both are right for an unpadded batch of finite values."""


class NeedsValues(Exception):
    """The model asked for the values of a tensor, but meta tensors have no values."""


class _LiveStorage(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage, with the key of the storage and the id of its allocation."""

    __slots__ = ("key", "number")
    key: int
    number: int


class TraceRecorder(TorchDispatchMode):
    """The dispatch mode that records allocations."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self.trace = Trace()
        self.card = card
        self.module = ""
        """The path of the module whose forward method is running."""
        self.assumptions: dict[str, None] = {}
        """The answers that were assumed when the model asked for values, in order."""
        self._live: dict[int, _LiveStorage] = {}
        self._answers: dict[int, bool] = {}
        self.is_paused = False
        """Whether recording is paused, because the operations that run now are not part of the training."""
        self._is_optimizing = False
        self._kept: set[str] = set()
        self._sole_owner_counts = _sole_owner_counts()
        self._kind: str | None = None

    # -- operations ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_paused:
            return func(*args, **kwargs) if kwargs else func(*args)
        if func is _ADD and self._adds_in_place(args, kwargs):
            return _ADD_IN_PLACE(*args)
        if func is _READ and args[0].device.type == "meta":
            return self._assumed(args[0])
        if func in _DATA_DEPENDENT and args[0].device.type == "meta":
            raise NeedsValues(_user_line(func))
        rule = RULES.get(func)
        if rule is not None and any(isinstance(arg, torch.Tensor) and arg.device.type == "meta" for arg in args):
            return self._with_scratch(rule, func, args, kwargs or {})
        out = func(*args, **kwargs) if kwargs else func(*args)
        self._record_all(out, func)
        if func in _USUAL and out.device.type == "meta":
            self._answers[out.untyped_storage()._cdata] = _USUAL[func]
        return out

    def _assumed(self, tensor: torch.Tensor) -> bool:
        answer = self._answers.get(tensor.untyped_storage()._cdata)
        if answer is None:
            raise NeedsValues(_user_line(_READ))
        self.assumptions[f"{'all' if answer else 'none'} of the values set: {_user_line(_READ)}"] = None
        return answer

    def _with_scratch(self, rule: OperationRule, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that takes memory of its own while it runs."""
        out = func(*args, **kwargs)
        self._record_all(out, func)
        if rule.uses_blas:
            # cuBLAS takes a workspace at the first product of each thread, and autograd has a thread of its own.
            self._keep(self.card.blas_workspace_bytes, f"cublas {BACKWARD if self.phase == BACKWARD else FORWARD}")
        taken = []
        for scratch in rule.scratches(args, out, self.card) if rule.scratches else ():
            taken.append(self._allocate_scratch(scratch, func))
            if rule.one_after_another:
                self.trace.free(taken.pop())
        for number in taken:
            self.trace.free(number)
        return out

    def _allocate_scratch(self, scratch: Scratch, func: Any) -> int:
        number = self._allocate(scratch.size_bytes, WORKSPACES if scratch.is_guess else TEMPORARIES, func)
        if scratch.is_guess:
            self.trace.uncertain.add(number)
        if scratch.reduction is not None:
            self.trace.reductions[number] = scratch.reduction
        return number

    @contextmanager
    def taking(self, scratch: Scratch, maker: str) -> Iterator[None]:
        """A context in which a library takes memory until the context ends."""
        number = self._allocate_scratch(scratch, maker)
        try:
            yield
        finally:
            self.trace.free(number)

    def keep_dropout_state(self) -> None:
        """Record the state of cuDNN's random numbers, which has one stream for every thread that can run."""
        self._keep(self.card.multiprocessors * self.card.threads_per_multiprocessor * 24, "cudnn dropout")

    def _keep(self, size_bytes: int, maker: str) -> None:
        """Record memory that a library takes at its first call and never frees."""
        if maker not in self._kept:
            self._kept.add(maker)
            self.trace.kept_by_libraries.add(self._allocate(size_bytes, WORKSPACES, maker))

    def _adds_in_place(self, args: Any, kwargs: Any) -> bool:
        """Whether autograd, without this mode, would add the second gradient of a tensor into the first."""
        if kwargs or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled() or len(args) != 2:
            return False
        mine, other = args
        return (
            isinstance(other, torch.Tensor)
            and mine.device.type == "meta"
            and _reference_counts(mine) == self._sole_owner_counts
            and mine.shape == other.shape
            and mine.dtype == other.dtype
            and _is_dense(mine)
        )

    # -- storages --------------------------------------------------------------------------------------------------

    def _record_all(self, out: Any, func: Any) -> None:
        if isinstance(out, torch.Tensor):
            self._record(out, func)
        elif isinstance(out, (tuple, list)):
            for part in out:
                self._record_all(part, func)

    def _record(self, tensor: torch.Tensor, func: Any) -> None:
        if tensor.device.type != "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size = storage.nbytes()
        if size:
            live = _LiveStorage(storage, self._freed)
            live.key, live.number = key, self._allocate(size, self._kind or self._likely_kind(), func)
            self._live[key] = live

    def _freed(self, live: weakref.ref) -> None:  # type: ignore[type-arg]
        assert isinstance(live, _LiveStorage)
        self._live.pop(live.key, None)
        self._answers.pop(live.key, None)
        self.trace.free(live.number)

    def _allocate(self, size_bytes: int, kind: str, func: Any) -> int:
        maker = func if isinstance(func, str) else func._schema.name
        return self.trace.allocate(size_bytes, kind, self.phase, maker, self.module)

    def _likely_kind(self) -> str:
        """The kind that an allocation has until the trace shows which allocations outlive their phase. Allocations of a
        recomputed forward pass count as activations."""
        if self.phase == FORWARD or (self.phase == BACKWARD and torch.is_grad_enabled()):
            return ACTIVATIONS
        return TEMPORARIES

    # -- calls from the training -----------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        if self._kind is not None:
            return SETUP
        if self._is_optimizing:
            return OPTIMIZER
        return BACKWARD if torch._C._current_graph_task_id() != -1 else FORWARD

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context for operations that are not part of the training."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    @contextmanager
    def _as(self, kind: str) -> Iterator[None]:
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def move_model(self, model: torch.nn.Module) -> None:
        """Record the parameters and buffers, in the order in which ``model.to(device)`` moves them."""
        with self._as(PARAMETERS):
            for child in model.children():
                self.move_model(child)
            for tensor in [*model._parameters.values(), *model._buffers.values()]:
                if tensor is not None:
                    self._record(tensor, "to")
            if isinstance(model, torch.nn.RNNBase):
                self._flatten(list(model.parameters(recurse=False)))

    def _flatten(self, weights: list[torch.Tensor]) -> None:
        """Record the block into which a recurrent layer on the GPU copies its weights for cuDNN."""
        keys = {weight.untyped_storage()._cdata for weight in weights}
        if len(keys) < len(weights) or not all(weight.dtype in _FLATTENED for weight in weights):
            return
        storages = [self._live[key] for key in keys if key in self._live]
        before = {live.number for live in storages}
        number = self._allocate(sum(weight.nbytes for weight in weights), PARAMETERS, "flatten")
        for live in storages:
            live.number = number
        # The block of another layer stays as long as that layer has a weight in this block.
        for unused in before - {live.number for live in self._live.values()}:
            self.trace.free(unused)

    def move_batch(self, tensors: list[torch.Tensor]) -> None:
        with self._as(INPUTS):
            for tensor in tensors:
                self._record(tensor, "to")

    def optimizer_begins(self, *_: Any) -> None:
        self._is_optimizing = True

    def optimizer_ends(self, *_: Any) -> None:
        self._is_optimizing = False

    def rename(self, tensors: Iterator[torch.Tensor], kind: str) -> None:
        """Change the kind of the allocations of these tensors."""
        for tensor in tensors:
            live = self._live.get(tensor.untyped_storage()._cdata) if tensor.device.type == "meta" else None
            if live is not None:
                self.trace.kinds[live.number] = kind


# -- sole owners ---------------------------------------------------------------------------------------------------
# When two gradients of one tensor meet, autograd adds the second to the first in place if autograd holds the only
# reference to the first. While a dispatch mode is active, autograd does not add in place, and every sum would count as
# a new allocation. The number of references inside a mode differs between versions of torch, so the number is measured.


def _reference_counts(tensor: torch.Tensor) -> tuple[int, int]:
    """The number of references to the tensor, and the number of references to its storage."""
    count = getattr(tensor, "_use_count", None)
    storage = tensor.untyped_storage()
    return (count() if count is not None else 0, torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]


class _OwnerProbe(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ADD and torch._C._current_graph_task_id() != -1:
            self.counts.append(_reference_counts(args[0]))
        return func(*args, **(kwargs or {}))


@cache
def _sole_owner_counts() -> tuple[int, int] | None:
    """The reference counts of a gradient that only autograd holds; None if torch does not show these counts."""
    probe = _OwnerProbe()
    tensor = torch.empty(8, device="meta", requires_grad=True)
    with probe:
        shared = tensor * 2
        (torch.sin(shared) + torch.cos(shared)).backward(torch.empty(8, device="meta"))
    return probe.counts[0] if len(probe.counts) == 1 and probe.counts[0][0] else None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no gaps and no overlaps in memory, whatever the order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _user_line(func: Any) -> str:
    """The line of the user's code that asked for a value."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and "/penstock/gpu/" not in frame.filename:
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return str(func)
