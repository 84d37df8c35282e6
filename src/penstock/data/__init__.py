"""Datasets that take little memory, and samplers that read them in a fast order.

Public names are imported on first use, so that a program imports only the libraries that its datasets need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.data.arrow.dataset import ArrowDataset
    from penstock.data.low_mem import LowMemDataset
    from penstock.data.parquet.dataset import ParquetDataset
    from penstock.data.samplers import BlockShuffleSampler, SequenceSampler
    from penstock.data.shared.shared_list import SharedList
    from penstock.data.tar.dataset import TarDataset
    from penstock.data.windows import WindowDataset

_LAZY = {
    "ArrowDataset": "arrow.dataset",
    "BlockShuffleSampler": "samplers",
    "LowMemDataset": "low_mem",
    "ParquetDataset": "parquet.dataset",
    "SequenceSampler": "samplers",
    "SharedList": "shared.shared_list",
    "TarDataset": "tar.dataset",
    "WindowDataset": "windows",
}
"""Public name -> the file that defines it."""

__all__ = [
    "ArrowDataset",
    "BlockShuffleSampler",
    "LowMemDataset",
    "ParquetDataset",
    "SequenceSampler",
    "SharedList",
    "TarDataset",
    "WindowDataset",
]


def __getattr__(name: str) -> object:
    file = _LAZY.get(name)
    if file is None:
        raise AttributeError(f"module 'penstock.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"penstock.data.{file}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
