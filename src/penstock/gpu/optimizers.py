"""Optimizers by name.

In:  a name, or a function from parameters to an optimizer.
Out: a ``torch.optim.Optimizer`` over meta parameters.
Runs in: trainer, command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from penstock.errors import ConfigError

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], Optimizer]

_BLOCK = 256
_LEAST_QUANTIZED = 4096
"""The least number of values of a parameter with 8-bit state; smaller parameters have float32 state, as in
bitsandbytes."""


class EightBitState(Optimizer):
    """Allocates the state of an 8-bit Adam: one byte per value for each of the two moments, and one scale per 256
    values.

    This optimizer exists only to be traced and computes nothing. The real kernels work in place on one parameter at a
    time.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or self.state[parameter]:
                    continue
                count = parameter.numel()
                small = count < _LEAST_QUANTIZED
                for name in ("first", "second"):
                    kind = torch.float32 if small else torch.uint8
                    self.state[parameter][name] = torch.zeros_like(parameter, dtype=kind)
                    if not small:
                        scales = parameter.new_zeros(-(-count // _BLOCK), dtype=torch.float32)
                        self.state[parameter][f"{name}_scales"] = scales


_BY_NAME: dict[str, MakeOptimizer] = {
    "adam": lambda params: torch.optim.Adam(params, lr=1e-4),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-4),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
    "adamw-8bit": EightBitState,
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-4),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-3),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-3),
}

NAMES = tuple(_BY_NAME)
"""The names that ``optimizer=`` accepts."""


def maker_of(optimizer: str | MakeOptimizer) -> MakeOptimizer:
    """The function that makes the named optimizer. Raises ConfigError if the name is unknown."""
    if callable(optimizer):
        return optimizer
    found = _BY_NAME.get(optimizer.lower().replace("_", "-")) if isinstance(optimizer, str) else None
    if found is None:
        raise ConfigError(
            f"optimizer={optimizer!r} is not known; write one of {', '.join(NAMES)}, or a function that takes the "
            f"parameters and returns a torch optimizer"
        )
    return found
