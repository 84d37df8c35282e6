"""What of torch must take meta tensors for CUDA tensors while a training is traced.

In:  the function mode that keeps autocast's cache.
Out: a context in which ``torch.autocast("cuda")``, checkpointing and the optimizers behave as on a GPU.
Runs in: the tracing thread. Everything is put back at the end.

- Without a GPU ``torch.autocast("cuda")`` turns itself off; models that ask a tensor for its device name "meta".
- Checkpointing asks its inputs which device's autocast to restore when it computes them again.
- Optimizers take their many-tensors-at-once form on CUDA only, and that form's temporaries are the peak of a step.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.amp.autocast_mode
import torch.utils._foreach_utils
import torch.utils.checkpoint

from penstock.gpu.trace.casting import Casts

_optimizer = importlib.import_module("torch.optim.optimizer")  # torch.optim hides the name
_Autocast = torch.amp.autocast_mode.autocast


@contextmanager
def as_on_cuda(casts: Casts) -> Iterator[None]:
    """Everything above, for the time of the context."""
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


def _devices() -> list[str]:
    return ["meta", "cuda"]


_really_available = torch.amp.autocast_mode.is_autocast_available


def _is_autocast_available(device_type: str) -> bool:
    return device_type in ("cuda", "meta") or _really_available(device_type)


_real_init = _Autocast.__init__
_real_exit = _Autocast.__exit__


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
