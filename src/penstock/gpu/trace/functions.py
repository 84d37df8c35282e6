"""Makes torch treat meta tensors as CUDA tensors while a training is traced.

In:  every call of a torch function from Python.
Out: the result of the call as CUDA would run it, with CUDA's casts and fused kernels.
Runs in: the tracing thread. ``as_on_cuda`` restores torch at the end.

Three parts of torch find the device that they run on without looking at a function's arguments:

- ``torch.autocast("cuda")`` disables itself without a GPU, and models that use a tensor's device get "meta".
- Checkpointing reads from its inputs which device's autocast it has to restore for the second forward pass.
- Optimizers handle many tensors at once only on CUDA, and the temporary tensors of this form are the peak of a step.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
import torch.amp.autocast_mode
import torch.nn.functional as F
import torch.utils._foreach_utils
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from penstock.gpu.card import Card
from penstock.gpu.trace import attention, fused, recurrent
from penstock.gpu.trace.casting import POLICIES, Casts

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_optimizer = importlib.import_module("torch.optim.optimizer")  # torch.optim hides the name
_Autocast = torch.amp.autocast_mode.autocast


class CudaFunctions(TorchFunctionMode):
    """The function mode that sees every call of a torch function. It owns autocast's cache."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self.card = card
        self.casts = Casts()
        self._open: set[Any] = set()
        self._unchecked: dict[Any, Any] = {}
        self._rules = {
            F.scaled_dot_product_attention: self._attend,
            **fused.RULES,
            **recurrent.RULES,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _on_meta(kwargs["device"])}
        if func is torch.Tensor.to:
            args = tuple(_on_meta(arg) if isinstance(arg, (str, torch.device)) else arg for arg in args)
        elif func is torch.Tensor.cuda:
            return args[0].to("meta")
        elif func is torch.Tensor.pin_memory and args[0].device.type == "meta":
            return args[0]
        if torch.is_autocast_enabled("cuda"):
            policy = POLICIES.get(func)
            if policy is not None:
                args, kwargs = self.casts.apply(policy, args, kwargs)
        rule = self._rules.get(func)
        if rule is not None:
            return rule(func, args, kwargs)
        if isinstance(func, FunctionType) and func not in self._open:
            return self._call_body(func, args, kwargs)
        return func(*args, **kwargs)

    def _call_body(self, func: FunctionType, args: Any, kwargs: Any) -> Any:
        """Run a function that is written in Python so that the functions that it calls come through this mode too.

        torch switches a mode off while the mode handles a call. If the mode were simply switched on again, the function
        would pass itself to the mode a second time and never reach its own body. A copy of the function therefore runs,
        in which the check for modes returns False.
        """
        unchecked = self._unchecked.get(func)
        if unchecked is None:
            unchecked = self._unchecked[func] = _without_checks(func)
        if unchecked is func:
            return func(*args, **kwargs)
        self._open.add(func)
        try:
            with self:
                return unchecked(*args, **kwargs)
        finally:
            self._open.discard(func)

    def _attend(self, func: Any, args: Any, kwargs: Any) -> Any:
        return attention.attend(self.card, *args, **kwargs)


@contextmanager
def as_on_cuda(casts: Casts) -> Iterator[None]:
    """A context in which autocast, checkpointing and optimizers treat meta tensors as CUDA tensors."""
    with ExitStack() as stack:
        for target, name, value in (
            (_Autocast, "__init__", _autocast_init),
            (_Autocast, "__exit__", _autocast_exit(casts)),
            (torch.amp.autocast_mode, "is_autocast_available", _is_autocast_available),
            (torch.amp, "is_autocast_available", _is_autocast_available),
            (torch.utils.checkpoint, "_infer_device_type", lambda *_: "cuda"),
            (torch.utils._foreach_utils, "_get_foreach_kernels_supported_devices", _devices),
            (torch.utils._foreach_utils, "_get_fused_kernels_supported_devices", _devices),
            (_optimizer, "_get_foreach_kernels_supported_devices", _devices),
            (_optimizer, "_get_fused_kernels_supported_devices", _devices),
        ):
            if hasattr(target, name):
                stack.enter_context(patch.object(target, name, value))
        yield


def _on_meta(device: Any) -> Any:
    """The meta device in place of a CUDA device; other devices are returned unchanged."""
    if device is None or isinstance(device, (int, torch.Tensor)):
        return device
    kind = device.split(":")[0] if isinstance(device, str) else getattr(device, "type", None)
    return torch.device("meta") if kind == "cuda" else device


def _without_checks(func: FunctionType) -> FunctionType:
    if not any(name in _CHECKS for name in func.__code__.co_names):
        return func
    names = {**func.__globals__, **dict.fromkeys(_CHECKS, lambda *_: False)}
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _devices() -> list[str]:
    return ["meta", "cuda"]


_real_is_available = torch.amp.autocast_mode.is_autocast_available
_real_init = _Autocast.__init__
_real_exit = _Autocast.__exit__


def _is_autocast_available(device_type: str) -> bool:
    return device_type in ("cuda", "meta") or _real_is_available(device_type)


def _autocast_init(
    self: Any,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    device_type = "cuda" if device_type == "meta" else device_type
    if device_type != "cuda":
        return _real_init(self, device_type, dtype, enabled, cache_enabled)
    _real_init(self, device_type, dtype, False, cache_enabled)
    self._enabled = enabled
    return None


def _autocast_exit(casts: Casts) -> Any:
    def leave(self: Any, *error: Any) -> Any:
        result = _real_exit(self, *error)
        torch.autocast_increment_nesting()
        if torch.autocast_decrement_nesting() == 0:
            casts.clear()
        return result

    return leave
