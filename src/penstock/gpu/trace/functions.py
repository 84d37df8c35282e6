"""Torch's functions as they behave on CUDA tensors, while the tensors are meta tensors.

In:  every call of a torch function from Python.
Out: the call CUDA would have made of it: its devices, its casts, its fused kernels.
Runs in: the tracing thread.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from penstock.gpu.card import Card
from penstock.gpu.trace import attention, fused, recurrent
from penstock.gpu.trace.casting import POLICIES, Casts

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class CudaFunctions(TorchFunctionMode):
    """The function mode. Autocast's cache lives here."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self.card = card
        self.casts = Casts()
        self._open: set[Any] = set()
        self._unlocked: dict[Any, Any] = {}
        self._rules = {
            F.scaled_dot_product_attention: self._attend,
            **fused.RULES,
            **recurrent.RULES,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": on_meta(kwargs["device"])}
        if func is torch.Tensor.to:
            args = tuple(on_meta(arg) if isinstance(arg, (str, torch.device)) else arg for arg in args)
        elif func is torch.Tensor.cuda:
            return args[0].to("meta")
        elif func is torch.Tensor.pin_memory and args[0].device.type == "meta":
            return args[0]
        if torch.is_autocast_enabled("cuda"):
            policy = POLICIES.get(func)
            if policy is not None:
                args, kwargs = self.casts.apply(policy, func, args, kwargs)
        rule = self._rules.get(func)
        if rule is not None:
            return rule(func, args, kwargs)
        if isinstance(func, FunctionType) and func not in self._open:
            return self._inside(func, args, kwargs)
        return func(*args, **kwargs)

    def _inside(self, func: FunctionType, args: Any, kwargs: Any) -> Any:
        """Run a function written in Python so that what it calls comes through here as well.

        torch switches a mode off while the mode handles a call. Switched on again, the function would hand itself
        over once more and never get to its own body: it runs with its question "is anybody watching?" answered no.
        """
        unlocked = self._unlocked.get(func)
        if unlocked is None:
            unlocked = self._unlocked[func] = _unlock(func)
        if unlocked is func:
            return func(*args, **kwargs)
        self._open.add(func)
        try:
            with self:
                return unlocked(*args, **kwargs)
        finally:
            self._open.discard(func)

    def _attend(self, func: Any, args: Any, kwargs: Any) -> Any:
        return attention.attend(self.card, *args, **kwargs)


def on_meta(device: Any) -> Any:
    """A CUDA device's stand-in; other devices as they are."""
    if device is None or isinstance(device, (int, torch.Tensor)):
        return device
    kind = device.split(":")[0] if isinstance(device, str) else getattr(device, "type", None)
    return torch.device("meta") if kind == "cuda" else device


def _unlock(func: FunctionType) -> FunctionType:
    if not any(name in _CHECKS for name in func.__code__.co_names):
        return func
    world = {**func.__globals__, **dict.fromkeys(_CHECKS, _nobody)}
    twin = FunctionType(func.__code__, world, func.__name__, func.__defaults__, func.__closure__)
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin


def _nobody(*_: Any) -> bool:
    return False
