"""The description of a training: its model, batch, optimizer, precision, checkpointing, and one step.

In:  functions that make a model and a batch, and the settings of the training.
Out: ``TrainingSetup``, which makes the model, the batch and the optimizer on a device and runs a step.
Runs in: trainer, command line. The same steps run on meta tensors (``trace``) and on a GPU (``real_steps``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from penstock.errors import ConfigError
from penstock.gpu.optimizers import MakeOptimizer, maker_of

MakeModel = Callable[[], torch.nn.Module]
MakeBatch = Callable[[int], Any]
StepFunction = Callable[[torch.nn.Module, Any, torch.optim.Optimizer], Any]

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-true", "fp16-true")
"""The accepted precisions. fp32 is float32; bf16 and fp16 are autocast with float32 weights (fp16 with a scaler); with
bf16-true and fp16-true the weights and everything else have this type."""
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision -> the type in which autocast computes."""


class Scaler(Protocol):
    """The part of ``torch.amp.GradScaler`` that a step calls."""

    def scale(self, outputs: torch.Tensor, /) -> torch.Tensor: ...

    def step(self, optimizer: torch.optim.Optimizer, /) -> Any: ...

    def update(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """The model, batch, optimizer and settings of a training."""

    make_model: MakeModel
    make_batch: MakeBatch
    """A function that is called with a batch size and returns a batch."""
    optimizer: str | MakeOptimizer = "adamw"
    precision: str = "fp32"
    checkpointing: bool = False
    accumulation: int = 1
    """The number of batches whose gradients are summed before a step of the optimizer."""
    step: StepFunction | None = None
    """The user's own training step, which then has to handle precision and accumulation itself."""

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The type to which the model and the batch are cast; None if both keep their types."""
        return _TYPES[self.precision.removesuffix("-true")] if self.precision.endswith("-true") else None

    @property
    def needs_scaler(self) -> bool:
        return self.precision == "fp16" and self.step is None

    def checked(self) -> TrainingSetup:
        """This setup itself. Raises ConfigError for a setting that cannot work."""
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision={self.precision!r} is not known; write one of {', '.join(PRECISIONS)}")
        if not callable(self.make_model) or isinstance(self.make_model, torch.nn.Module):
            raise ConfigError(
                "make_model must be a function that builds the model, such as lambda: Net(), because a model that "
                "already exists has already taken its memory"
            )
        if not callable(self.make_batch):
            raise ConfigError("make_batch must be a function of the batch size, such as lambda n: torch.zeros(n, 3)")
        if self.accumulation < 1:
            raise ConfigError(f"accumulation={self.accumulation} must be 1 or more")
        maker_of(self.optimizer)
        return self

    def model(self, device: str) -> torch.nn.Module:
        """A new model on ``device``, ready to train."""
        model = self.make_model()
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"make_model() returned {type(model).__name__}, not a torch.nn.Module")
        model = model.to(device=device, dtype=self.weight_dtype).train()
        if self.checkpointing:
            _switch_on_checkpointing(model)
        return model

    def optimizer_of(self, model: torch.nn.Module) -> torch.optim.Optimizer | None:
        """An optimizer for the parameters that are trained; None if no parameter is trained."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return maker_of(self.optimizer)(trained) if trained else None

    def moved(self, batch: Any, device: str) -> Any:
        """The batch, moved to ``device`` and cast to the type of the weights."""

        def move(part: Any) -> Any:
            if not isinstance(part, torch.Tensor):
                return part
            if part.device.type not in ("cpu", "cuda", "meta"):
                raise ConfigError(
                    f"make_batch returned a tensor on {part.device}, but estimates are for CUDA devices; make the "
                    f"batch on the CPU: penstock moves it"
                )
            return part.to(device, self.weight_dtype if part.is_floating_point() else None)

        return tree_map(move, batch)

    def run_step(
        self,
        model: torch.nn.Module,
        batch: Any,
        optimizer: torch.optim.Optimizer | None,
        scaler: Scaler | None,
        device: str,
    ) -> None:
        """Run the forward and backward passes, and then one step of the optimizer."""
        if self.step is not None:
            assert optimizer is not None
            self.step(model, batch, optimizer)
            return
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        dtype = _TYPES.get(self.precision)
        for _ in range(self.accumulation):
            with torch.autocast(device, dtype) if dtype is not None else contextlib.nullcontext():
                loss = loss_of(call(model, batch))
            if scaler is not None:
                loss = scaler.scale(loss)
            if self.accumulation > 1:
                loss = loss / self.accumulation
            if loss.requires_grad:
                loss.backward()
            del loss
        if optimizer is None:
            return
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def call(model: torch.nn.Module, batch: Any) -> Any:
    """The output of the model. A mapping is passed as keyword arguments, a tuple or a list as positional arguments."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def loss_of(output: Any) -> torch.Tensor:
    """The loss: ``.loss`` of an output, the output's entry "loss", or the output itself. Several values are
    averaged."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if loss is None:
        loss = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"the model returned {type(output).__name__} without a loss; return a tensor or an object with .loss, "
            f"or pass step="
        )
    return loss if loss.numel() == 1 else loss.float().mean()


def _switch_on_checkpointing(model: torch.nn.Module) -> None:
    """Switch on checkpointing with the model's own switch (transformers, diffusers), or around each repeated block of a
    model without a switch."""
    for name in ("gradient_checkpointing_enable", "enable_gradient_checkpointing"):
        own = getattr(model, name, None)
        if callable(own):
            own()
            return
    blocks = _repeated_blocks(model)
    if not blocks:
        raise ConfigError(
            f"checkpointing=True: {type(model).__name__} has no switch for checkpointing, and no list of blocks of one "
            f"class; call torch.utils.checkpoint inside the model that make_model returns"
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The members of every list of two or more modules of one class. Lists inside these members are ignored."""
    found: list[torch.nn.Module] = []
    inside: set[torch.nn.Module] = set()
    for module in model.modules():
        if module in inside or not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        members = list(module)
        if len(members) > 1 and len({type(member) for member in members}) == 1 and any(members[0].children()):
            found += members
            for member in members:
                inside.update(member.modules())
    return found
