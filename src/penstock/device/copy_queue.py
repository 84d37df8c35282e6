"""Copies of batches to a device, started before the user needs them.

In:  host batches, in order.
Out: the same batches on the device, for the current stream; the segments of the batches that are copied.
Runs in: trainer: the training thread; ``release_copied`` also in the engine's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from penstock.device.fence import QueueMark

MOST_AHEAD = 2
"""The number of batches that may be on the device before the user asks for them."""
_MOST_COPYING = 3
"""The number of copies queued at a time: enough to keep the link busy. More copies would only keep segments from being
refilled."""
_MOST_STEPS = 4
"""The number of batches by which the training loop may be ahead of the device. The allocator reuses memory that was
copied on one stream and used on another only after the device has finished that use, so a loop that never waits would
fill the device's memory."""


class CopyStream(Protocol):
    """Copies batches to one device; see ``copy_stream.CudaCopyStream``."""

    def copy(self, host: Any, /) -> tuple[Any, QueueMark]: ...
    def user_mark(self) -> QueueMark: ...
    def hand_over(self, data: Any, copied: Any, /) -> Any: ...
    def wait(self) -> None: ...


class BatchCopy:
    """The copy of one batch."""

    def __init__(self, data: Any, host: Any, copied: QueueMark, arrived: Callable[[], None]) -> None:
        self.data = data
        self.host = host
        """The source, kept until the copy is done so that its segment is not refilled."""
        self.copied = copied
        self.arrived = arrived


class CopyQueue:
    """Copies batches over one stream."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._copying: deque[BatchCopy] = deque()
        """Copies that were not done at the last check."""
        self._steps: deque[QueueMark] = deque()
        """For each batch handed out, a mark behind the work that the user had queued before."""

    def send(self, host: Any, arrived: Callable[[], None]) -> BatchCopy:
        """Start copying a batch. ``arrived`` is called from any thread, once the source is copied and released."""
        while len(unfinished := self.release_copied()) >= _MOST_COPYING:
            unfinished[0].copied.wait()
        data, copied = self._stream.copy(host)
        copy = BatchCopy(data, host, copied, arrived)
        with self._lock:
            self._copying.append(copy)
        return copy

    def hand_out(self, copy: BatchCopy) -> Any:
        """The batch, for use on the current stream."""
        self._steps.append(self._stream.user_mark())
        if len(self._steps) > _MOST_STEPS:
            self._steps.popleft().wait()
        data, copy.data = copy.data, None
        return self._stream.hand_over(data, copy.copied)

    def release_copied(self) -> list[BatchCopy]:
        """Release the sources of finished copies; returns the unfinished ones."""
        done = []
        with self._lock:
            while self._copying and self._copying[0].copied.passed():
                done.append(self._copying.popleft())
            unfinished = list(self._copying)
        # This is done outside the lock: dropping the last reference to a batch may run the user's code.
        for copy in done:
            copy.host = None
            copy.arrived()
        return unfinished

    def close(self) -> None:
        """Wait for all copies, because the memory that they read is about to be unmapped."""
        self._stream.wait()
        self.release_copied()
        self._steps.clear()
