"""Copies batches to the device before the user asks for them.

In:  ready batches of the engine.
Out: the next batch, on the device. The error of a batch is raised in the batch's turn.
Runs in: trainer, in the training thread.
"""

from __future__ import annotations

import functools
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penstock.device.copy_queue import MOST_AHEAD, BatchCopy, CopyQueue
from penstock.device.copy_stream import CudaCopyStream, plain_bytes, stays_on_host
from penstock.device.cuda import ignoring_captures
from penstock.loader.engine.batch import Batch
from penstock.loader.engine.engine import Engine
from penstock.loader.sources.inline_source import DrawnBatch, InlineSource


@dataclass
class Sent:
    """A batch that was taken from the engine and sent to the device."""

    batch: Batch | DrawnBatch
    device_bytes: int = 0
    copy: BatchCopy | None = None
    host: Any = None
    """The batch in host memory, if it could not be sent ahead; it is sent again in its turn."""
    error: Exception | None = None
    """The exception of the batch's sampler, dataset or collate function."""


class AheadOnDevice:
    """Takes batches from an engine and sends them to the device, a few batches ahead of the user."""

    def __init__(self, engine: Engine | InlineSource, device: torch.device) -> None:
        self._copy_queue = CopyQueue(CudaCopyStream(device))
        self._sent: deque[Sent] = deque()
        self.follow(engine)

    def follow(self, engine: Engine | InlineSource) -> None:
        """Take batches from ``engine`` from now on."""
        self._engine: Any = engine
        # This is no method of the object, because a method would keep device memory until the next garbage collection.
        engine.watch_device(functools.partial(_poll, self._copy_queue))

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def device_bytes(self) -> int:
        return sum(sent.device_bytes for sent in self._sent)

    def next(self, wait: Callable[[], Batch | DrawnBatch]) -> Sent:
        """The next batch to hand out; ``wait`` waits for a batch if no batch was sent ahead."""
        if not self._sent:
            self._sent.append(self._send_ahead(wait()))
        first = self._sent.popleft()
        while len(self._sent) < MOST_AHEAD and (found := self._engine.try_next()) is not None:
            self._sent.append(self._send_ahead(found))
        self._engine.wake()
        return first

    def hand_out(self, sent: Sent) -> Any:
        """The batch on the device. Raises the batch's error, if there is one; the next batch is not affected."""
        if sent.error is not None:
            error, sent.error = sent.error, None
            try:
                raise error
            finally:
                # The error's traceback refers to this frame, and so to the error: only the garbage collector frees such
                # a cycle.
                del error
        return self._copy_queue.hand_out(sent.copy or self._send_now(sent))

    def restart(self) -> None:
        """Drop the batches that were sent ahead, because another epoch begins."""
        for sent in self._sent:
            if sent.copy is None:
                sent.batch.stop_passing()
        self._sent.clear()

    def close(self) -> None:
        self._copy_queue.close()
        self.restart()

    def _send_ahead(self, found: Batch | DrawnBatch) -> Sent:
        try:
            host = self._engine.deliver(found, stays_on_host=stays_on_host)
        except Exception as error:
            return Sent(found, error=error)
        try:
            return Sent(found, plain_bytes(host), self._send(found, host))
        except Exception as full:
            # Usually the device's memory is full now. The traceback's frames would keep the data alive.
            traceback.clear_frames(full.__traceback__)
            return Sent(found, host=host)

    def _send_now(self, sent: Sent) -> BatchCopy:
        host, sent.host = sent.host, None
        try:
            return self._send(sent.batch, host)
        except Exception:
            # Parts of the batch may be on their way to the device nevertheless.
            sent.batch.stop_passing()
            raise

    def _send(self, found: Batch | DrawnBatch, host: Any) -> BatchCopy:
        return self._copy_queue.send(host, found.stop_passing)


def _poll(copy_queue: CopyQueue) -> bool:
    """Release memory that the device has copied. Any thread may call this, even while another thread captures a CUDA
    graph."""
    with ignoring_captures():
        return bool(copy_queue.release_copied())
