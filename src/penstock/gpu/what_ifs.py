"""What other choices would save: checkpointing, precision, optimizer, accumulation.

In:  a training, a batch size.
Out: ``WhatIf``: one choice changed, bytes saved, what it costs in time as far as that is known.
Runs in: trainer, command line. With or without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from penstock.environment import ENVIRONMENT
from penstock.errors import ConfigError
from penstock.gpu.allocator.alloc_conf import AllocatorSettings
from penstock.gpu.card import Card, card
from penstock.gpu.estimates import Estimate, Profile, check_batch_sizes
from penstock.gpu.optimizers import MakeOptimizer
from penstock.gpu.trace.training import MakeBatch, MakeModel, Step, Training


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """One choice changed, all others as they are."""

    name: str
    """What is changed, such as "checkpointing" or "precision=bf16"."""
    estimate: Estimate
    """With the change."""
    saved_bytes: int
    """Reserved bytes less than without; negative: more."""
    time_cost: str
    """What it does to the time of a step, in words."""


@dataclass(frozen=True, kw_only=True)
class _Change:
    name: str
    apply: Callable[[Training], Training]
    time_cost: str
    divide: int = 1
    """What the batch size is divided by."""


_PRECISION_COST = {
    "bf16": "usually faster: matrix products run on tensor cores at half the bytes",
    "fp16": "usually faster, as bf16; a scaler guards against underflow",
    "fp32": "usually slower: twice the bytes in every product",
}
_OPTIMIZER_COST = {
    "sgd": "less time in the optimizer; converges differently",
    "sgd-momentum": "less time in the optimizer; converges differently",
    "adamw": "as Adam everywhere",
    "adamw-8bit": "about the same; needs a library with 8-bit kernels, such as bitsandbytes",
}


def what_if(
    make_model: MakeModel,
    make_batch: MakeBatch,
    batch_size: int = 8,
    optimizer: str | MakeOptimizer = "adamw",
    precision: str = "fp32",
    checkpointing: bool = False,
    *,
    accumulation: int = 1,
    step: Step | None = None,
    capability: tuple[int, int] | None = None,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> list[WhatIf]:
    """Every choice that differs from the one made, largest saving first. Arguments as for ``estimate``.

    A change the model does not allow (no blocks to checkpoint, a precision it fails in) is left out.
    """
    check_batch_sizes([batch_size])
    training = Training(
        make_model=make_model,
        make_batch=make_batch,
        optimizer=optimizer,
        precision=precision,
        checkpointing=checkpointing,
        accumulation=accumulation,
        step=step,
    )
    return what_if_of(
        training, batch_size, card(capability, environment=environment), AllocatorSettings.from_environment(environment)
    )


def what_if_of(training: Training, batch_size: int, device: Card, settings: AllocatorSettings) -> list[WhatIf]:
    """The same for a training put together already."""
    now = Profile(training, device, settings, batch_sizes=[batch_size]).at(batch_size)
    found = []
    for change in _changes(training, batch_size):
        size = batch_size // change.divide
        try:
            then = Profile(change.apply(training), device, settings, batch_sizes=[size]).at(size)
        except ConfigError:
            continue
        found.append(
            WhatIf(
                name=change.name,
                estimate=then,
                saved_bytes=now.reserved_bytes - then.reserved_bytes,
                time_cost=change.time_cost,
            )
        )
    return sorted(found, key=lambda one: -one.saved_bytes)


def _changes(training: Training, batch_size: int) -> list[_Change]:
    changes = []
    if not training.checkpointing:
        cost = "about a third more: every block's forward pass is computed twice"
        changes.append(_Change(name="checkpointing", apply=lambda t: replace(t, checkpointing=True), time_cost=cost))
    if training.step is None:
        for name, cost in _PRECISION_COST.items():
            if name != training.precision:
                changes.append(
                    _Change(name=f"precision={name}", apply=lambda t, to=name: replace(t, precision=to), time_cost=cost)
                )
        for parts in (2, 4):
            if batch_size % parts == 0:
                changes.append(
                    _Change(
                        name=f"accumulation={training.accumulation * parts} of {batch_size // parts}",
                        apply=lambda t, by=parts: replace(t, accumulation=t.accumulation * by),
                        time_cost="little: the same samples in smaller pieces, slower where these leave the GPU idle",
                        divide=parts,
                    )
                )
    for name, cost in _OPTIMIZER_COST.items():
        if name != training.optimizer:
            changes.append(
                _Change(name=f"optimizer={name}", apply=lambda t, to=name: replace(t, optimizer=to), time_cost=cost)
            )
    return changes
