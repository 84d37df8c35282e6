"""The argument ``device=`` of a DataLoader.

In:  the value that the user passed.
Out: a torch.device that exists on this machine; otherwise ConfigError is raised.
Runs in: trainer.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import ConfigError


def parse_device(device: Any) -> torch.device | None:
    if device is None:
        return None
    try:
        # A number means a GPU, even where torch would choose another accelerator.
        parsed = torch.device("cuda", device) if type(device) is int else torch.device(device)
    except (RuntimeError, TypeError) as problem:
        raise ConfigError(
            f'device={device!r} is not a device: {problem}; write "cuda", "cuda:1" or a torch.device'
        ) from None
    if parsed.type == "cuda":
        count = torch.cuda.device_count()
        if (parsed.index or 0) >= count:
            why = f"torch finds {count} CUDA devices here; leave device= out, or use another device"
            if torch.version.cuda is None and torch.version.hip is None:
                why = "this torch was built without CUDA; install a torch with CUDA, or leave device= out"
            raise ConfigError(f"device={device!r}: {why}")
    elif parsed.type in ("mps", "xpu") and not getattr(torch, parsed.type).is_available():
        raise ConfigError(
            f"device={device!r}: torch finds no such device here; leave device= out, or use another device"
        )
    return parsed
