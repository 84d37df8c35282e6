"""The arena: which segments exist, what uses each segment, and whether another segment fits the budget.

In:  needs in bytes; segments that come back from the user and from failed batches.
Out: segments to fill. The bytes in use never exceed the limit, unless the caller says that the batch is due.
Runs in: trainer, under the dispatcher's lock; ``Lease`` ends from any thread.

A segment is *in use* from ``take`` until ``release``: it is being filled, ready, or lent to the user. Free segments
keep their pages for the next batch; they are closed as soon as another segment needs their bytes. If the user still
holds a lent segment when the next batch needs the segment's bytes, the segment is *handed over*: it leaves the arena
unchanged. This takes as much memory as a private copy, but nothing is copied.

A batch that is lent while the process forks is left to the child: its segment is neither filled again nor emptied. The
child may be a worker of another loader, whose dataset may hold the batch. The rule does not apply to the arena's own
workers: they write into the segments, and replacing a crashed worker must not take memory beyond the limit.

A lent segment that is page-locked for a device comes back *fenced*: the user may have queued copies from it that the
device has not made yet, so the segment is neither refilled nor unmapped before the device has made these copies.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from penstock.arena import forks
from penstock.arena.segment import HAS_MEMFD, Segment, create_segment
from penstock.arena.segment_sizes import RECENT_NEEDS, capacity_for, is_too_large, may_reuse

_MOST_LENT = 16
_COPY_BELOW_BYTES = 1 << 20


class Locks(Protocol):
    """Page-locking for a device."""

    def unlock(self, segment: Segment) -> None: ...


class Barrier(Protocol):
    """Holds a lease that has ended until the device has finished all work that was queued when the lease ended."""

    def put(self, thing: Lease, /) -> None: ...
    def advance(self) -> list[Lease]: ...
    def drain(self) -> list[Lease]: ...
    def __len__(self) -> int: ...


class Lease:
    """The loan of one batch to the user. The lease ends when the last tensor over the token is gone."""

    __slots__ = ("_ref", "ended", "fenced", "handed_over", "inherited", "passing", "pid", "segment", "used_bytes")

    def __init__(self, segment: Segment, used_bytes: int, token: np.ndarray, ended: Callable[[Lease], None]) -> None:
        self.segment = segment
        self.used_bytes = used_bytes
        self.handed_over = False
        self.fenced = False
        """Whether the device may still read the segment when the lease ends."""
        self.passing = False
        """Whether the batch is being copied to a device: the user does not hold it, and the lease ends by itself."""
        self.inherited = False
        """Whether a child was forked during the lease; the child may use the batch for longer than this process
        does."""
        self.pid = os.getpid()
        self.ended = ended
        self._ref = weakref.ref(token, self._token_gone)

    def stop_passing(self) -> None:
        """Note that the device has its copy. If the batch is still held, the user holds it and may copy it again."""
        if self.passing and self._ref() is not None:
            self.fenced, self.passing = True, False

    def _token_gone(self, _: object) -> None:
        # A forked child inherits the token; the end of the child's copy does not mean the end of the trainer's.
        if os.getpid() == self.pid:
            self.ended(self)


_handed_over_locked: set[Lease] = set()
"""The leases of page-locked batches that were handed over to the user. They are kept here so that the pages are
unlocked even after the arena is gone."""


class Arena:
    """All segments of one pipeline. The arena is not thread-safe: the dispatcher calls it under the engine's lock."""

    def __init__(
        self,
        *,
        limit_bytes: int,
        headroom_bytes: Callable[[], int],
        closed: Callable[[Segment], None],
        woken: Callable[[], None],
        keep_free: int,
        use_memfd: bool = HAS_MEMFD,
        locks: Locks | None = None,
        fence: Barrier | None = None,
        starter: object | None = None,
    ) -> None:
        """``headroom_bytes`` returns the memory that the machine has left. ``closed`` is called with every segment that
        workers must unmap; ``woken`` is called when a lease ends, from any thread. ``locks`` and ``fence`` are for
        segments that a device reads. ``starter`` starts the workers that fill the segments."""
        self.limit_bytes = limit_bytes
        self.keep_free = keep_free
        self._headroom_bytes = headroom_bytes
        self._closed = closed
        self._woken = woken
        self._use_memfd = use_memfd
        self._locks = locks
        self._fence = fence
        self._starter = starter
        self._is_closed = False
        self._in_use: dict[int, Segment] = {}
        self._free: list[Segment] = []
        self._needs: deque[int] = deque(maxlen=RECENT_NEEDS)
        self._leases: dict[int, Lease] = {}
        self._returned: deque[Lease] = deque()
        self._next_number = 0
        self.refusal: OSError | None = None
        """The system's error if it refused the latest segment although memory is left; often the process may open no
        more files."""
        self.in_use_bytes = 0
        self._most_in_use_bytes = 0
        self.free_bytes = 0
        self.peak_bytes = 0
        self.handed_over_bytes = 0
        """Bytes of all batches handed over to the user so far."""
        forks.keep_noted(self)

    def segment(self, number: int) -> Segment:
        """The segment in use that has this number."""
        return self._in_use[number]

    def headroom_bytes(self) -> int:
        """The memory that the machine or container has left, minus the memory of segments whose pages do not exist
        yet."""
        return self._headroom_bytes() - sum(s.capacity_bytes for s in self._in_use.values() if not s.filled)

    # -- admission -------------------------------------------------------------

    def fits(self, need_bytes: int, *, promised_bytes: int = 0) -> bool:
        """Whether another ``need_bytes`` fit the limit, together with ``promised_bytes`` that are reserved already."""
        return self.in_use_bytes + promised_bytes + capacity_for(need_bytes) <= self.limit_bytes

    def set_limit(self, limit_bytes: int) -> None:
        """Change the limit now. Free segments beyond the limit are closed; segments in use stay."""
        if limit_bytes < self.limit_bytes:
            self._close_free_beyond(limit_bytes - self.in_use_bytes)
        self.limit_bytes = limit_bytes

    def take(self, need_bytes: int) -> Segment | None:
        """A segment of at least ``need_bytes``, or None if the machine has no memory left for the segment.

        The caller checks the budget (``fits``); free segments are closed as far as the limit requires.
        """
        capacity = capacity_for(need_bytes)
        self._needs.append(capacity)
        self.refusal = None
        segment = self._reusable(capacity)
        if segment is None:
            self._close_free_beyond(self.limit_bytes - self.in_use_bytes - capacity)
            # Reserving beyond a container's limit is a SIGKILL, not an error, so check the headroom before touching any
            # page.
            if self.headroom_bytes() < capacity:
                self._close_free_beyond(0)
                if self.headroom_bytes() < capacity:
                    return None
            segment = self._created(capacity)
            if segment is None:
                return None
        self._in_use[segment.number] = segment
        self.in_use_bytes += segment.capacity_bytes
        self._most_in_use_bytes = max(self._most_in_use_bytes, self.in_use_bytes)
        self._close_free_beyond(self._worth_keeping_bytes())
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes + self.free_bytes)
        return segment

    def _created(self, capacity: int) -> Segment | None:
        """A new segment, or None if the system refuses it even after the free segments are closed; ``refusal`` says
        why."""
        number = self._next_number
        self._next_number += 1
        try:
            return create_segment(number, capacity, use_memfd=self._use_memfd)
        except OSError:
            self._close_free_beyond(0)
        try:
            return create_segment(number, capacity, use_memfd=self._use_memfd)
        except OSError as refusal:
            self.refusal = refusal.with_traceback(None)
            return None

    def release(self, segment: Segment) -> None:
        """Stop using the segment: keep it for the next batch, or close it."""
        segment.filled = True
        self._in_use.pop(segment.number)
        self.in_use_bytes -= segment.capacity_bytes
        self._free.append(segment)
        self.free_bytes += segment.capacity_bytes
        self._close_free_beyond(self._worth_keeping_bytes())
        while len(self._free) > self.keep_free:
            self._close(min(self._free, key=lambda s: s.capacity_bytes))

    def close_free(self) -> None:
        """Close every free segment, because the loader is idle and other programs may need the memory."""
        self._close_free_beyond(0)

    # -- leases ----------------------------------------------------------------

    def lend(self, segment: Segment, used_bytes: int) -> np.ndarray:
        """Bytes of a ready segment for the user to keep. The lease ends with the array's last reference.

        If the user holds very many batches, small batches are copied and large batches are handed over, because each
        lent segment keeps a descriptor open.
        """
        segment.filled = True
        if self.lent_count >= _MOST_LENT and used_bytes < _COPY_BELOW_BYTES:
            copy = segment.array()[:used_bytes].copy()
            self.handed_over_bytes += used_bytes
            self.release(segment)
            return copy
        while self.lent_count >= _MOST_LENT:
            self.hand_over_oldest()
        token = segment.array()
        self._leases[segment.number] = Lease(segment, used_bytes, token, self._lease_ended)
        return token

    def collect_returned(self) -> bool:
        """Release the segments of batches that the user dropped since the last call; True if a segment became free."""
        is_any_free = False
        while self._returned:
            lease = self._returned.popleft()
            self._leases.pop(lease.segment.number, None)
            if lease.fenced:
                assert self._fence is not None
                self._fence.put(lease)
            elif not lease.handed_over:
                self._take_back(lease)
                is_any_free = True
        return is_any_free

    def fence(self, segment: Segment) -> None:
        """Keep the segment in use until the device has finished with the tensors: the user received tensors that a
        device can read."""
        if (lease := self._leases.get(segment.number)) is not None:
            lease.fenced = True

    def pass_through(self, segment: Segment) -> Lease | None:
        """Note that the user receives a copy on a device: the segment comes back by itself and is never handed over."""
        lease = self._leases.get(segment.number)
        if lease is not None:
            lease.passing = True
        return lease

    def pass_fence(self) -> None:
        """Release the segments that the device has finished with. Only the training thread may call this, because it
        marks the device's queues."""
        if self._fence is not None:
            for lease in self._fence.advance():
                self._release_fenced(lease)

    @property
    def is_returning(self) -> bool:
        """Whether memory will come back even if the user drops nothing."""
        return bool(self._fence) or any(lease.passing for lease in self._leases.values())

    @property
    def has_returned(self) -> bool:
        return bool(self._returned)

    def hand_over_oldest(self) -> bool:
        """Hand over the segment that has been lent for the longest time; its bytes then no longer count against the
        budget. False if nothing is lent."""
        self.collect_returned()
        lease = next((lease for lease in self._leases.values() if not lease.passing), None)
        if lease is None:
            return False
        del self._leases[lease.segment.number]
        lease.handed_over = True
        self.handed_over_bytes += lease.used_bytes
        segment = lease.segment
        self._in_use.pop(segment.number)
        self.in_use_bytes -= segment.capacity_bytes
        if lease.fenced:
            _handed_over_locked.add(lease)
            self._closed(segment)
            segment.close_descriptor()
        else:
            segment.trim(lease.used_bytes)
            self._retire(segment)
        return True

    @property
    def lent_bytes(self) -> int:
        return sum(lease.segment.capacity_bytes for lease in self._leases.values())

    @property
    def lent_count(self) -> int:
        """The number of segments that the user holds."""
        return len([lease for lease in self._leases.values() if not lease.passing])

    def close(self) -> None:
        """Release everything; batches that the user still holds stay valid until they are dropped."""
        self._is_closed = True
        self.collect_returned()
        if self._fence is not None:
            for lease in self._fence.drain():
                self._release_fenced(lease)
        for lease in self._leases.values():
            lease.handed_over = True
            if lease.fenced:
                _handed_over_locked.add(lease)
                self.in_use_bytes -= self._in_use.pop(lease.segment.number).capacity_bytes
                lease.segment.close_descriptor()
        self._leases.clear()
        self.close_free()
        for segment in list(self._in_use.values()):
            self._in_use.pop(segment.number)
            self.in_use_bytes -= segment.capacity_bytes
            self._retire(segment)

    # -- inside ----------------------------------------------------------------

    def _lease_ended(self, lease: Lease) -> None:
        if self._is_closed and lease.fenced:
            self._end_late(lease)
            return
        # Runs in any thread, even inside the garbage collector while the lock is held: do nothing but append.
        self._returned.append(lease)
        self._woken()

    def _end_late(self, lease: Lease) -> None:
        """End the lease of a page-locked batch that the user held for longer than the arena existed."""
        assert self._fence is not None
        self._fence.put(lease)
        for late in self._fence.drain():
            self._release_fenced(late)

    def _release_fenced(self, lease: Lease) -> None:
        if lease.handed_over:
            _handed_over_locked.discard(lease)
            self._unlock(lease.segment)
            lease.segment.close()
        else:
            self._take_back(lease)

    def _take_back(self, lease: Lease) -> None:
        if not lease.inherited:
            self.release(lease.segment)
            return
        # The segment's pages exist for as long as the child maps them.
        self._in_use.pop(lease.segment.number)
        self.in_use_bytes -= lease.segment.capacity_bytes
        self._retire(lease.segment)

    def note_fork(self, starter: object | None) -> None:
        """Note that a forked child inherits every lent batch; the child is a worker of ``starter``, unless that is
        None. Any thread may call this, without the lock."""
        if starter is not None and starter is self._starter:
            return
        for lease in list(self._leases.values()):
            lease.inherited = True

    def _unlock(self, segment: Segment) -> None:
        if self._locks is not None:
            self._locks.unlock(segment)

    def _reusable(self, capacity: int) -> Segment | None:
        # Among segments of equal size take the latest, whose bytes may still be in a processor's cache.
        fitting = [s for s in reversed(self._free) if may_reuse(s.capacity_bytes, capacity)]
        if not fitting:
            return None
        segment = min(fitting, key=lambda s: s.capacity_bytes)
        # A segment larger than the need must not exceed a budget that a segment of the right size would keep.
        if segment.capacity_bytes > capacity and self.in_use_bytes + segment.capacity_bytes > self.limit_bytes:
            return None
        self._free.remove(segment)
        self.free_bytes -= segment.capacity_bytes
        return segment

    def _worth_keeping_bytes(self) -> int:
        """How many bytes of free segments are kept: at most the largest number that was ever in use at one time.
        Otherwise batches of uneven sizes would fill the budget with segments that fit none of the next batches."""
        return min(self.limit_bytes, self._most_in_use_bytes) - self.in_use_bytes

    def _close_free_beyond(self, keep_bytes: int) -> None:
        while self._free and self.free_bytes > keep_bytes:
            self._close(self._least_useful())

    def _least_useful(self) -> Segment:
        """A free segment that is too large for the recent needs; otherwise the smallest one, because creating a large
        segment again takes longer."""
        largest = max(self._free, key=lambda s: s.capacity_bytes)
        if is_too_large(largest.capacity_bytes, max(self._needs)):
            return largest
        return min(self._free, key=lambda s: s.capacity_bytes)

    def _close(self, segment: Segment) -> None:
        self._free.remove(segment)
        self.free_bytes -= segment.capacity_bytes
        # Unlock first: a device may read page-locked pages at any time.
        self._unlock(segment)
        # A worker that is busy with a long sample unmaps the segment late, so release the segment's pages now.
        segment.empty()
        self._retire(segment)

    def _retire(self, segment: Segment) -> None:
        self._unlock(segment)
        self._closed(segment)
        segment.unlink()
        segment.close()
