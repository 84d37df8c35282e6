"""MODEL on the command line: the user's own model and its batches by name, or one of the examples.

In:  ``module:attribute``, ``file.py:attribute`` or an example's name; the options of the training.
Out: ``Model``: functions that make a model and a batch.
Runs in: command line.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from penstock.cli.target import load_function
from penstock.meter.gpu import gpus

_Command = TypeVar("_Command", bound=Callable[..., Any])
_CONVENTION = "make_batch"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, its batches and the choices of its training."""

    name: str
    make_model: Callable[[], Any]
    make_batch: Callable[[int], Any]
    optimizer: str
    precision: str
    checkpointing: bool

    @property
    def training(self) -> dict[str, Any]:
        """The training as arguments of ``penstock.gpu.estimate`` and of the functions that take the same arguments."""
        return {
            "make_model": self.make_model, "make_batch": self.make_batch, "optimizer": self.optimizer,
            "precision": self.precision, "checkpointing": self.checkpointing,
        }  # fmt: skip


def training_options(command: _Command) -> _Command:
    """The options of the training of MODEL."""
    for option in (
        click.option("--checkpointing", is_flag=True, help="Train MODEL with gradient checkpointing."),
        click.option("--precision", metavar="NAME",
                     help="fp32; bf16 or fp16 with autocast; bf16-true or fp16-true throughout.  [default: fp32]"),
        click.option("--optimizer", metavar="NAME", help="adamw, sgd, adamw-8bit and others.  [default: adamw]"),
        click.option("--batch", metavar="TARGET",
                     help="A function that makes a batch of n samples.  [default: make_batch of MODEL or its module]"),
    ):  # fmt: skip
        command = option(command)
    return command


def load_model(
    name: str, *, batch: str | None, optimizer: str | None, precision: str | None, checkpointing: bool
) -> Model:
    """The model called ``name``. Raises a click error for wrong usage, TargetError for an error in the user's code."""
    if ":" in name:
        make_model = _function(name, "MODEL")
        make_batch = _function(batch, "--batch") if batch is not None else _batch_of(name, make_model)
    else:
        from penstock.gpu.examples import EXAMPLES

        example = EXAMPLES.get(name)
        if example is None:
            raise click.BadParameter(
                f"{name!r} is not an example; the examples are {', '.join(EXAMPLES)}. Write your own model as "
                f"module:attribute or file.py:attribute, for example train.py:make_model",
                param_hint="MODEL",
            )
        if batch is not None:
            raise click.BadParameter(f"the example {name} has its own batches", param_hint="--batch")
        make_model, make_batch = example.make_model, example.make_batch
    return Model(
        name=name, make_model=make_model, make_batch=make_batch, optimizer=optimizer or "adamw",
        precision=precision or "fp32", checkpointing=checkpointing,
    )  # fmt: skip


def memory_here() -> int | None:
    """Memory of this machine's first GPU; None without a GPU."""
    return next((one.memory_total_bytes for one in gpus()), None)


def _function(target: str, where: str) -> Callable[..., Any]:
    try:
        return load_function(target)
    except click.BadParameter as wrong:
        message = wrong.message.replace("TARGET is", f"{where} is").replace("make_dataset", "make_model")
        raise click.BadParameter(message, param_hint=where) from None


def _batch_of(name: str, make_model: Any) -> Callable[[int], Any]:
    """The attribute ``make_batch`` of the function that makes the model, or else of the module of that function."""
    where, _, _ = name.rpartition(":")
    module = sys.modules.get(Path(where).stem if where.endswith(".py") else where) or importlib.import_module(where)
    found = getattr(make_model, _CONVENTION, None) or getattr(module, _CONVENTION, None)
    if found is None:
        raise click.UsageError(
            f"{name} has no batches: write a function {_CONVENTION}(n) in {where}, or name a function with --batch"
        )
    if not callable(found):
        raise click.UsageError(f"{_CONVENTION} of {name} is {type(found).__name__}, which cannot be called")
    return found
