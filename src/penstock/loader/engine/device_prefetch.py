"""Batches on the device before the user asks for them.

In:  ready batches of the engine.
Out: the next batch, on the device; what is wrong with one is raised in its turn.
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


@dataclass
class Sent:
    """A batch that was taken out of the engine."""

    batch: Batch
    device_bytes: int = 0
    copy: BatchCopy | None = None
    host: Any = None
    """The batch as it came, if it could not be sent ahead: it is tried again in its turn."""
    error: Exception | None = None
    """What its sampler, dataset or collate function raised."""


class AheadOnDevice:
    """Takes batches out of an engine and sends them to the device, a few ahead of the user."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine = engine
        self._copy_queue = CopyQueue(CudaCopyStream(device))
        self._sent: deque[Sent] = deque()
        # Not a method of this object: device memory must go with the iterator, not with the next garbage collection.
        engine.poll = functools.partial(_poll, self._copy_queue)

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def device_bytes(self) -> int:
        return sum(sent.device_bytes for sent in self._sent)

    def next(self, wait: Callable[[], Batch]) -> Sent:
        """The next batch, to be handed out; ``wait`` gives one when none is ahead."""
        if not self._sent:
            self._sent.append(self._send_ahead(wait()))
        first = self._sent.popleft()
        while len(self._sent) < MOST_AHEAD and (found := self._engine.try_next()) is not None:
            self._sent.append(self._send_ahead(found))
        self._engine.wake()
        return first

    def hand_out(self, sent: Sent) -> Any:
        """The batch on the device. Raises what went wrong with it; the next is not affected."""
        if sent.error is not None:
            error, sent.error = sent.error, None
            try:
                raise error
            finally:
                # Its traceback has this frame, and so itself: a circle only the garbage collector would open.
                del error
        return self._copy_queue.hand_out(sent.copy or self._send_now(sent))

    def restart(self) -> None:
        """Forget what was sent ahead: another epoch begins."""
        for sent in self._sent:
            if sent.copy is None:
                sent.batch.stop_passing()
        self._sent.clear()

    def close(self) -> None:
        self._copy_queue.close()
        self.restart()

    def _send_ahead(self, found: Batch) -> Sent:
        try:
            host = self._engine.deliver(found, stays_on_host=stays_on_host)
        except Exception as error:
            return Sent(found, error=error)
        try:
            return Sent(found, plain_bytes(host), self._send(found, host))
        except Exception as full:
            # Usually a device that is full now; frames of the traceback hold what they were given.
            traceback.clear_frames(full.__traceback__)
            return Sent(found, host=host)

    def _send_now(self, sent: Sent) -> BatchCopy:
        host, sent.host = sent.host, None
        try:
            return self._send(sent.batch, host)
        except Exception:
            # Some of it may be on its way all the same.
            sent.batch.stop_passing()
            raise

    def _send(self, found: Batch, host: Any) -> BatchCopy:
        return self._copy_queue.send(host, found.stop_passing)


def _poll(copy_queue: CopyQueue) -> bool:
    """Any thread, also while another captures a graph."""
    with ignoring_captures():
        return bool(copy_queue.release_copied())
