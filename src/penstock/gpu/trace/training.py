"""A few training steps without memory: model, batch, optimizer and step put together, and traced.

In:  functions that make a model and a batch; optimizer, precision, checkpointing, accumulation, perhaps a step.
Out: a ``Trace`` of as many steps as asked for.
Runs in: the tracing thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from penstock.errors import ConfigError, PenstockError
from penstock.gpu import checkpoints
from penstock.gpu.card import Card
from penstock.gpu.optimizers import MakeOptimizer, maker_of
from penstock.gpu.trace.disguise import as_on_cuda
from penstock.gpu.trace.functions import CudaFunctions
from penstock.gpu.trace.recorder import NeedsValues, Recorder
from penstock.gpu.trace.trace import GRADIENTS, OPTIMIZER_STATE, Trace

MakeModel = Callable[[], torch.nn.Module]
MakeBatch = Callable[[int], Any]
Step = Callable[[torch.nn.Module, Any, torch.optim.Optimizer], Any]

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-true", "fp16-true")
"""float32; autocast with float32 weights (float16 with a scaler); weights and everything else in that type."""
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What autocast computes in."""
_FILLS = {
    getattr(torch.Tensor, name)
    for name in (
        "normal_",
        "uniform_",
        "zero_",
        "fill_",
        "random_",
        "trunc_normal_",
        "erfinv_",
        "clamp_",
        "exponential_",
    )
    if hasattr(torch.Tensor, name)
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and how."""

    make_model: MakeModel
    make_batch: MakeBatch
    """Called with a batch size."""
    optimizer: str | MakeOptimizer = "adamw"
    precision: str = "fp32"
    checkpointing: bool = False
    accumulation: int = 1
    """Batches whose gradients are summed before the optimizer steps."""
    step: Step | None = None
    """A training step of the user's own; the ones above but make_model, make_batch and optimizer are then its own."""

    @property
    def kind_of_weights(self) -> torch.dtype | None:
        """What model and batch are cast to; None: they stay as they are."""
        return TYPES[self.precision.removesuffix("-true")] if self.precision.endswith("-true") else None

    def checked(self) -> Training:
        """``ConfigError`` for what cannot be meant."""
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision={self.precision!r} is not known; write one of {', '.join(PRECISIONS)}")
        if not callable(self.make_model) or isinstance(self.make_model, torch.nn.Module):
            raise ConfigError(
                "make_model must be a function that builds the model, such as lambda: Net(); a model that exists "
                "already has its memory"
            )
        if not callable(self.make_batch):
            raise ConfigError("make_batch must be a function of the batch size, such as lambda n: torch.zeros(n, 3)")
        if self.accumulation < 1:
            raise ConfigError(f"accumulation={self.accumulation} must be 1 or more")
        maker_of(self.optimizer)
        return self

    def trace(self, sizes: Sequence[int], card: Card) -> tuple[Trace, tuple[str, ...]]:
        """Steps with batches of these sizes, one after the other, of one model; and what was taken for granted.

        The first two must work. A later one that does not is left out: the model may not take every batch size.
        """
        functions = CudaFunctions(card)
        recorder = Recorder(card)
        with as_on_cuda(functions.casts):
            model = self._model(functions)
            optimizer = self._optimizer(model)
            scaler = _Scale() if self.precision == "fp16" and self.step is None else None
            with _explained("the training step"), functions, recorder, _named(model, recorder):
                recorder.model_moves_in(model)
                if optimizer is not None:
                    optimizer.register_step_pre_hook(recorder.optimizer_begins)
                    optimizer.register_step_post_hook(recorder.optimizer_ends)
                batch = None
                for number, size in enumerate(sizes):
                    recorder.trace.begin_step(size)
                    try:
                        batch = self._batch(size, recorder)
                        self._step(model, batch, optimizer, scaler, recorder)
                    except Exception:
                        if number < 2:
                            raise
                        recorder.trace.steps.pop()
                        break
                    recorder.trace.end_step()
                    _name_kinds(recorder, model, optimizer)
            # What dies with the model is no part of a step.
            trace, recorder.trace = recorder.trace, Trace()
        return trace, tuple(recorder.assumptions)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _model(self, functions: CudaFunctions) -> torch.nn.Module:
        with _explained("make_model()"), functions, torch.device("meta"), _Unfilled():
            model = self.make_model()
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"make_model() returned {type(model).__name__}, not a torch.nn.Module")
        model = model.to(device="meta", dtype=self.kind_of_weights)
        model.train()
        if self.checkpointing:
            checkpoints.switch_on(model)
        return model

    def _optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer | None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            return None
        with _explained("the optimizer"):
            return maker_of(self.optimizer)(trained)

    def _batch(self, size: int, recorder: Recorder) -> Any:
        with _explained(f"make_batch({size})"), recorder.away():
            try:
                with torch.device("meta"):
                    batch = self.make_batch(size)
            except (NotImplementedError, RuntimeError):
                batch = self.make_batch(size)  # it works with values, and a batch fits in host memory
            batch = tree_map(lambda part: _moved(part, self.kind_of_weights), batch)
        tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise ConfigError(f"make_batch({size}) returned {type(batch).__name__} without a tensor in it")
        recorder.batch_moves_in(tensors)
        return batch

    def _step(
        self,
        model: torch.nn.Module,
        batch: Any,
        optimizer: torch.optim.Optimizer | None,
        scaler: _Scale | None,
        recorder: Recorder,
    ) -> None:
        if self.step is not None:
            assert optimizer is not None
            self.step(model, batch, optimizer)
            return
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        for _ in range(self.accumulation):
            self._backward(self._loss(model, batch), scaler)
        if optimizer is not None:
            with recorder.optimizing():
                if scaler is not None:
                    scaler.unscale(model)
                optimizer.step()

    def _loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        kind = TYPES.get(self.precision)
        autocast = torch.autocast("cuda", kind) if kind is not None else contextlib.nullcontext()
        with autocast:
            return loss_of(call(model, batch))

    def _backward(self, loss: torch.Tensor, scaler: _Scale | None) -> None:
        if scaler is not None:
            loss = loss * scaler.scale
        if self.accumulation > 1:
            loss = loss / self.accumulation
        if loss.requires_grad:
            loss.backward()


def call(model: torch.nn.Module, batch: Any) -> Any:
    """The model's output: a mapping is passed as keyword arguments, a tuple or list as positional ones."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def loss_of(output: Any) -> torch.Tensor:
    """``.loss`` of an output, its entry "loss", or the output itself, averaged if it has several values."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if loss is None:
        loss = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"the model returned {type(output).__name__} without a loss; return a tensor or something with .loss, "
            f"or pass step="
        )
    return loss if loss.numel() == 1 else loss.float().mean()


class _Scale:
    """What ``torch.amp.GradScaler`` allocates: a scale, and two numbers to look for infinities."""

    def __init__(self) -> None:
        self.scale = torch.zeros((), device="meta")

    @torch.no_grad()
    def unscale(self, model: torch.nn.Module) -> None:
        found = torch.zeros((1,), device="meta")
        inverse = self.scale.double().reciprocal().float()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        torch.ops.aten._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)


class _Unfilled(TorchFunctionMode):
    """Filling weights that have no memory takes time and changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FILLS and args[0].device.type == "meta":
            return args[0]
        if getattr(func, "__module__", None) == "torch.nn.init":
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                return tensor
        return func(*args, **kwargs)


def _moved(part: Any, kind: torch.dtype | None) -> Any:
    if not isinstance(part, torch.Tensor):
        return part
    if part.device.type not in ("cpu", "cuda", "meta"):
        raise ConfigError(
            f"make_batch returned a tensor on {part.device}: estimates are for CUDA cards; make it on the CPU, it is "
            f"moved from there"
        )
    return part.to("meta", kind if part.is_floating_point() else None)


def _name_kinds(recorder: Recorder, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    recorder.rename((p.grad for p in model.parameters() if p.grad is not None), GRADIENTS)
    if optimizer is not None:
        leaves = tree_flatten([dict(state) for state in optimizer.state.values()])[0]
        recorder.rename((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), OPTIMIZER_STATE)


@contextlib.contextmanager
def _named(model: torch.nn.Module, recorder: Recorder) -> Iterator[None]:
    """Tell the recorder which module runs."""
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
    """One clear error for whatever goes wrong inside the user's code."""
    try:
        yield
    except PenstockError:
        raise
    except NeedsValues as error:
        raise ConfigError(
            f"{what} cannot be traced: it asks for a tensor's values, and here tensors have none ({error}). Give the "
            f"model what it looks for as a Python number, or pass step= without that part; where a GPU is present, "
            f"measure instead"
        ) from error
    except Exception as error:
        text = str(error).strip().splitlines()
        first = f"{type(error).__name__}: {text[0] if text else 'no message'}"
        if "meta" in str(error):
            first += (
                " (tensors are traced on torch's meta device: they have shapes and no values, so operations that need "
                "values, and kernels of one's own without a meta form, cannot be followed)"
            )
        raise ConfigError(f"{what} failed: {first}") from error
