"""Batches on their way to a device, copied ahead of need: how many at a time, and when their slots are free again.

In:  host batches, in order.
Out: the same batches on the device, for the stream that asks.
Runs in: trainer: the training thread; ``let_go`` also in the engine's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from penstock.device.fence import Mark

MOST_AHEAD = 2
"""Batches of device memory that may be ahead of the user."""
_MOST_COPYING = 3
"""Copies queued at a time: enough to keep the link busy; more would only keep slots from being filled again."""
_MOST_STEPS = 4
"""How many batches the training loop may be ahead of the device. Memory of a batch that was used on another stream than
it was copied on is free only when the device is past that use, so a loop that never waits would fill the device."""


class Lane(Protocol):
    """What copies to a device; see ``lane.CudaLane``."""

    def copy(self, host: Any, /) -> tuple[Any, Mark]: ...
    def user_mark(self) -> Mark: ...
    def hand_over(self, data: Any, copied: Any, /) -> Any: ...
    def wait(self) -> None: ...


class Parcel:
    """One batch under way."""

    def __init__(self, data: Any, host: Any, copied: Mark, arrived: Callable[[], None]) -> None:
        self.data = data
        self.host = host
        """What it was copied from: kept until the copy is done, and with it the slot."""
        self.copied = copied
        self.arrived = arrived


class Courier:
    """Copies batches over one lane."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._lock = threading.Lock()
        self._copying: deque[Parcel] = deque()
        """Whose copy was not done when last looked."""
        self._steps: deque[Mark] = deque()
        """Ends of what the user queued from one batch to the next."""

    def send(self, host: Any, arrived: Callable[[], None]) -> Parcel:
        """Start copying a batch; ``arrived`` is called, by any thread, once it was copied and let go of."""
        while len(under_way := self.let_go()) >= _MOST_COPYING:
            under_way[0].copied.wait()
        data, copied = self._lane.copy(host)
        parcel = Parcel(data, host, copied, arrived)
        with self._lock:
            self._copying.append(parcel)
        return parcel

    def hand_out(self, parcel: Parcel) -> Any:
        """The batch, for use on the current stream."""
        self._steps.append(self._lane.user_mark())
        if len(self._steps) > _MOST_STEPS:
            self._steps.popleft().wait()
        data, parcel.data = parcel.data, None
        return self._lane.hand_over(data, parcel.copied)

    def let_go(self) -> list[Parcel]:
        """Let go of what was copied from, as far as the copies are done. Gives the parcels that are still under way."""
        done = []
        with self._lock:
            while self._copying and self._copying[0].copied.passed():
                done.append(self._copying.popleft())
            under_way = list(self._copying)
        # Not under the lock: the last reference to a batch may run anybody's code.
        for parcel in done:
            parcel.host = None
            parcel.arrived()
        return under_way

    def close(self) -> None:
        """Wait for copies under way: what they read is about to go."""
        self._lane.wait()
        self.let_go()
        self._steps.clear()
