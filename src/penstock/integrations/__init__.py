"""The frameworks that penstock works with, one per file; each file imports without its framework.

Integrations load on first use.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.integrations import deepspeed

__all__ = ["deepspeed"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module 'penstock.integrations' has no attribute {name!r}")
    return importlib.import_module(f"penstock.integrations.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
