"""The memory that other settings would save: checkpointing, precision, optimizer, accumulation.

In:  a training, a batch size.
Out: ``WhatIf``: one changed setting, the saved bytes, and the cost in time as far as it is known.
Runs in: trainer, command line. With or without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.environment import ENVIRONMENT
from penstock.errors import ConfigError
from penstock.gpu.allocator.alloc_conf import AllocatorSettings
from penstock.gpu.card import Card, card
from penstock.gpu.estimates import Estimate, Estimator, check_batch_sizes
from penstock.gpu.optimizers import MakeOptimizer
from penstock.gpu.training import MakeBatch, MakeModel, StepFunction, TrainingSetup


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """One changed setting, while all others stay the same."""

    name: str
    """The name of the change, such as "checkpointing" or "precision=bf16"."""
    estimate: Estimate
    """The estimate with the change."""
    saved_bytes: int
    """The saved bytes: reserved bytes without the change minus reserved bytes with the change."""
    time_cost: str
    """The effect of the change on the time of a step, in words."""


_PRECISION_COST = {
    "bf16": "usually faster: matrix products run on tensor cores with half the bytes",
    "fp16": "usually faster, like bf16; a scaler guards against underflow",
    "fp32": "usually slower: twice the bytes in every product",
}
_OPTIMIZER_COST = {
    "sgd": "less time in the optimizer; the training converges differently",
    "sgd-momentum": "less time in the optimizer; the training converges differently",
    "adamw": "the usual time of AdamW",
    "adamw-8bit": "about as fast as AdamW; needs a library with 8-bit kernels, such as bitsandbytes",
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
    step: StepFunction | None = None,
    capability: tuple[int, int] | None = None,
    environment: Mapping[str, str] = ENVIRONMENT,
    on_progress: Callable[[str, float], None] = lambda what, done: None,
) -> list[WhatIf]:
    """Every single change of the training, with the largest saving first. The arguments about the training are those of
    ``estimate``; ``on_progress`` gets each change and the share of the work that is done.

    A change with which the model fails, such as an unsupported precision, is left out.
    """
    check_batch_sizes([batch_size])
    setup = TrainingSetup(
        make_model=make_model, make_batch=make_batch, optimizer=optimizer, precision=precision,
        checkpointing=checkpointing, accumulation=accumulation, step=step,
    )  # fmt: skip
    settings = AllocatorSettings.from_environment(environment)
    return what_if_of(setup, batch_size, card(capability, environment=environment), settings, on_progress)


def what_if_of(
    setup: TrainingSetup, batch_size: int, device: Card, settings: AllocatorSettings,
    on_progress: Callable[[str, float], None] = lambda what, done: None,
) -> list[WhatIf]:  # fmt: skip
    """Like ``what_if``, but for a ``TrainingSetup``."""
    now = Estimator(setup, device, settings, batch_sizes=[batch_size], finds_growth=False).at(batch_size)
    found = []
    changes = list(_changes(setup, batch_size))
    for number, (name, time_cost, parts, changed) in enumerate(changes):
        on_progress(name, (number + 1) / (len(changes) + 1))
        size = batch_size // parts
        try:
            changed_setup = replace(setup, **changed)
            then = Estimator(changed_setup, device, settings, batch_sizes=[size], finds_growth=False).at(size)
        except ConfigError:
            continue
        saved_bytes = now.reserved_bytes - then.reserved_bytes
        found.append(WhatIf(name=name, estimate=then, saved_bytes=saved_bytes, time_cost=time_cost))
    return sorted(found, key=lambda one: -one.saved_bytes)


def _changes(setup: TrainingSetup, batch_size: int) -> Iterator[tuple[str, str, int, dict[str, Any]]]:
    """For each change: its name, its cost in time, the divisor of the batch size, and the fields of the setup that
    change."""
    if not setup.checkpointing:
        cost = "about a third more time: the forward pass of every block is computed twice"
        yield "checkpointing", cost, 1, {"checkpointing": True}
    if setup.step is None:
        for precision, cost in _PRECISION_COST.items():
            if precision != setup.precision:
                yield f"precision={precision}", cost, 1, {"precision": precision}
        cost = "little: the same samples come in smaller batches, which is slower if small batches leave the GPU idle"
        for parts in (2, 4):
            if batch_size % parts == 0:
                steps = setup.accumulation * parts
                # From the second batch on, every batch takes the same memory.
                yield f"accumulation={steps} of {batch_size // parts}", cost, parts, {"accumulation": 2}
    for optimizer, cost in _OPTIMIZER_COST.items():
        if optimizer != setup.optimizer:
            yield f"optimizer={optimizer}", cost, 1, {"optimizer": optimizer}
