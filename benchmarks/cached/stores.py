"""Stores for tensors. Each returns a value in memory that belongs to the caller.

In:  a folder, the total size of the values.
Out: get, put, overwrite.
Runs in: the child.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

ROOM = 1.25
"""Every store may use this many times the size of the values."""
PAGE_BYTES = 4096
"""penstock's cache stores values in whole pages."""


class Store(Protocol):
    def put(self, key: int, value: torch.Tensor) -> None: ...
    def get(self, key: int) -> torch.Tensor: ...


class Dict:
    """A dictionary of this process only: a hit is one ``Tensor.clone()``."""

    def __init__(self, folder: Path, total_bytes: int) -> None:
        self._values: dict[int, torch.Tensor] = {}

    def put(self, key: int, value: torch.Tensor) -> None:
        self._values[key] = value.clone()

    def get(self, key: int) -> torch.Tensor:
        return self._values[key].clone()


class Penstock:
    """Memory shared by all processes of the node."""

    def __init__(self, folder: Path, total_bytes: int) -> None:
        import penstock

        self._cache = penstock.Cache(int(ROOM * total_bytes) + (1 << 20), "lru")

    def put(self, key: int, value: torch.Tensor) -> None:
        assert self._cache.put(key, value)

    def get(self, key: int) -> torch.Tensor:
        return self._cache.get(key)


class PenstockDisk:
    """The store on disk only: fillers occupy the small store in memory."""

    def __init__(self, folder: Path, total_bytes: int) -> None:
        import penstock

        self._cache = penstock.Cache("1MiB", "static", disk=folder, disk_limit=int(ROOM * total_bytes) + (1 << 20))
        for filler in range(300):
            self._cache.put(f"filler {filler}", torch.zeros(512))

    def put(self, key: int, value: torch.Tensor) -> None:
        assert self._cache.put(key, value)

    def get(self, key: int) -> torch.Tensor:
        return self._cache.get(key)


class Lmdb:
    """LMDB as it is usually used for tensors: raw bytes, no syncing, one transaction per value."""

    def __init__(self, folder: Path, total_bytes: int) -> None:
        import lmdb  # pyright: ignore[reportMissingImports]

        self._env = lmdb.open(str(folder), map_size=2 * int(ROOM * total_bytes) + (1 << 26), sync=False, metasync=False)

    def put(self, key: int, value: torch.Tensor) -> None:
        with self._env.begin(write=True) as transaction:
            transaction.put(key.to_bytes(8, "little"), value.numpy().data)

    def get(self, key: int) -> torch.Tensor:
        with self._env.begin(buffers=True) as transaction:
            found: Any = transaction.get(key.to_bytes(8, "little"))
            return torch.from_numpy(np.frombuffer(found, np.uint8).copy())


class Diskcache:
    """diskcache with its defaults, which pickles tensors."""

    def __init__(self, folder: Path, total_bytes: int) -> None:
        import diskcache  # pyright: ignore[reportMissingImports]

        self._cache: Any = diskcache.Cache(str(folder), size_limit=int(ROOM * total_bytes) + (1 << 26))

    def put(self, key: int, value: torch.Tensor) -> None:
        self._cache.set(key, value)

    def get(self, key: int) -> torch.Tensor:
        return self._cache.get(key)


STORES = {
    "dict": Dict,
    "penstock": Penstock,
    "penstock disk": PenstockDisk,
    "LMDB": Lmdb,
    "diskcache": Diskcache,
}
