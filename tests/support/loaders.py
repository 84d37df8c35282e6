"""The loaders under test, and torch's own beside them.

Runs in: test processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from support.torch_oracle import TORCH

MakeLoader = Callable[..., Any]


def penstock_loader(*args: Any, **kwargs: Any) -> Any:
    import penstock

    return penstock.DataLoader(*args, **kwargs)


MAKERS: dict[str, MakeLoader] = {
    "torch": TORCH,
    "batch": functools.partial(penstock_loader, seeding="batch"),
    "worker": functools.partial(penstock_loader, seeding="worker"),
}
