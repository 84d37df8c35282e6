"""Labels from the first stage of a pipeline to the last.

In:  the labels that the first stage prepared, batch by batch.
Out: the same labels at the last stage.
Runs in: trainer, at both ends.

The labels travel from host memory to host memory. They do not wait for the engine's own messages, because the first
stage is ahead of the last by as many micro-batches as there are stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.cache.store.values import PackedValue, unpack
from penstock.errors import ConfigError

_MOST_UNDER_WAY = 4
"""The most batches whose labels are sent and not yet received."""


class StageLabels:
    def __init__(self, ends: tuple[int, int]) -> None:
        """Every process of the job must create its ``StageLabels`` at the same time; ``ends`` are the first and last
        rank of its pipeline."""
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "a pipeline of several stages needs torch.distributed: start it with deepspeed or torchrun"
            )
        pairs: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pairs, ends)
        self._first, self._last = ends
        # Every process must take part in creating every group.
        groups = {pair: dist.new_group(list(pair), backend="gloo") for pair in sorted(set(pairs))}
        self._group: Any = groups[ends]
        self._under_way: deque[tuple[list[Any], list[torch.Tensor]]] = deque()

    def send(self, epoch: int, batch: int, labels: Any) -> None:
        while len(self._under_way) >= _MOST_UNDER_WAY:
            works, _ = self._under_way.popleft()
            for work in works:
                work.wait()
        packed = PackedValue((epoch, batch, _on_host(labels)))
        payload = np.empty(packed.total_bytes, np.uint8)
        packed.write(payload)
        parts = [torch.tensor([len(payload)]), torch.from_numpy(payload)]
        self._under_way.append(([dist.isend(part, self._last, group=self._group) for part in parts], parts))

    def receive(self, epoch: int, batch: int) -> Any:
        """The labels of one batch; labels of other batches that were sent before are skipped."""
        while True:
            *place, labels = self._receive()
            if place == [epoch, batch]:
                return labels

    def _receive(self) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, self._first, group=self._group)
        payload = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(payload, self._first, group=self._group)
        return unpack(payload.numpy())


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return rebuilt(value, {key: _on_host(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return rebuilt(value, [_on_host(item) for item in value])
    return value


def rebuilt(like: Any, items: Any) -> Any:
    """A mapping, list or tuple with other items, of the same type if that type can be created from them."""
    kind = type(like)
    if kind in (dict, list):
        return items
    try:
        return kind(*items) if hasattr(like, "_fields") else kind(items)
    except TypeError:
        return items
