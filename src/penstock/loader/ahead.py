"""Batches on the device before the user asks for them.

In:  ready batches of the engine.
Out: the next batch, on the device; what is wrong with one is raised in its turn.
Runs in: trainer, in the training thread.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penstock.device.courier import MOST_AHEAD, Courier, Parcel
from penstock.device.cuda import beside_captures
from penstock.device.lane import CudaLane, plain_bytes, stays_on_host
from penstock.loader.batch import Batch
from penstock.loader.engine import Engine


@dataclass(frozen=True)
class Sent:
    """A batch that was taken out of the engine."""

    batch: Batch
    parcel: Parcel | None
    error: Exception | None
    device_bytes: int


class AheadOnDevice:
    """Takes batches out of an engine and sends them to the device, a few ahead of the user."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine = engine
        self._courier = Courier(CudaLane(device))
        self._sent: deque[Sent] = deque()
        # Not a method of this object: device memory must go with the iterator, not with the next garbage collection.
        engine.poll = functools.partial(_poll, self._courier)

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def device_bytes(self) -> int:
        return sum(sent.device_bytes for sent in self._sent)

    def next(self, wait: Callable[[], Batch]) -> Sent:
        """The next batch, to be handed out; ``wait`` gives one when none is ahead."""
        if not self._sent:
            self._sent.append(self._send(wait()))
        first = self._sent.popleft()
        while len(self._sent) < MOST_AHEAD and (found := self._engine.try_next()) is not None:
            self._sent.append(self._send(found))
        return first

    def hand_out(self, sent: Sent) -> Any:
        if sent.error is not None:
            raise sent.error
        assert sent.parcel is not None
        return self._courier.hand_out(sent.parcel)

    def close(self) -> None:
        self._courier.close()
        self._sent.clear()

    def _send(self, found: Batch) -> Sent:
        try:
            host = self._engine.deliver(found, stays_on_host=stays_on_host)
            return Sent(found, self._courier.send(host), None, plain_bytes(host))
        except Exception as error:
            return Sent(found, None, error, 0)


def _poll(courier: Courier) -> bool:
    """Any thread, also while another captures a graph."""
    with beside_captures():
        return bool(courier.let_go())
