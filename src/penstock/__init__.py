"""penstock feeds PyTorch training at full speed inside a memory budget.

Public names load on first use, so that the command line starts without torch.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from penstock._version import __version__
from penstock.errors import BudgetError, CacheError, ConfigError, DataError, PenstockError, WorkerError

if TYPE_CHECKING:
    from penstock import data, gpu, integrations, monitor, settings
    from penstock.cache.cache import Cache, LRUCache
    from penstock.cache.stats import CacheStats
    from penstock.lab.planning import plan
    from penstock.loader.dataloader import DataLoader
    from penstock.loader.precompute import precompute
    from penstock.loader.stats import LoaderStats
    from penstock.meter import limits, memory
    from penstock.monitor.monitor import Monitor
    from penstock.planner.plans import PlanTable
    from penstock.row_memory import empty, empty_like

_LAZY = {
    "Cache": "penstock.cache.cache",
    "CacheStats": "penstock.cache.stats",
    "DataLoader": "penstock.loader.dataloader",
    "LRUCache": "penstock.cache.cache",
    "LoaderStats": "penstock.loader.stats",
    "Monitor": "penstock.monitor.monitor",
    "PlanTable": "penstock.planner.plans",
    "empty": "penstock.row_memory",
    "empty_like": "penstock.row_memory",
    "limits": "penstock.meter",
    "memory": "penstock.meter",
    "plan": "penstock.lab.planning",
    "precompute": "penstock.loader.precompute",
}
"""Public name -> the file that defines it."""

_ROOMS = ("data", "gpu", "integrations", "monitor", "settings")
"""Packages inside penstock that have public names of their own."""

__all__ = [
    "BudgetError",
    "Cache",
    "CacheError",
    "CacheStats",
    "ConfigError",
    "DataError",
    "DataLoader",
    "LRUCache",
    "LoaderStats",
    "Monitor",
    "PenstockError",
    "PlanTable",
    "WorkerError",
    "__version__",
    "data",
    "empty",
    "empty_like",
    "gpu",
    "integrations",
    "limits",
    "memory",
    "monitor",
    "plan",
    "precompute",
    "settings",
]

# Without a handler of its own, the warnings of a library go to stderr until the user configures logging.
logging.getLogger("penstock").addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return importlib.import_module(f"penstock.{name}")
    room = _LAZY.get(name)
    if room is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(importlib.import_module(room), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
