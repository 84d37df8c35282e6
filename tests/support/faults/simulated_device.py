"""A device made of memory: batches are copied by a thread, some time later, from the addresses they lay at.

With it ``device="cuda"`` runs where there is no GPU. What is asked of the loader is the same: a slot that is refilled
or unmapped before its copy was made shows as wrong bytes, a slot that never comes back as a hang.
"""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from typing import Any
from unittest import mock

import torch

import penstock.loader.device_prefetch as ahead
import penstock.loader.engine.engine as engine
import penstock.loader.iterator as pipeline_iterator
from penstock.device.copy_stream import is_plain
from penstock.device.page_locks import PageLocks
from penstock.device.tree import map_leaves

LONG_S = 30.0
UNTOUCHED = 77
"""What device memory holds before a copy arrives."""


class PaperMark:
    def __init__(self) -> None:
        self._reached = threading.Event()

    def passed(self) -> bool:
        return self._reached.is_set()

    def wait(self) -> None:
        assert self._reached.wait(LONG_S), "the paper device is stuck"

    def reach(self) -> None:
        self._reached.set()


class PaperDevice:
    """Copies take ``copy_s``; a training step takes the device ``step_s``."""

    def __init__(self, *, copy_s: float = 0.005, step_s: float = 0.0, seed: int = 0) -> None:
        self.copy_s, self.step_s = copy_s, step_s
        self.locked: dict[int, int] = {}
        self.copy_streams: list[PaperCopyStream] = []
        self.fails_at: set[int] = set()
        """Numbers of copies that fail, as they do on a device that is full."""
        self.copies = 0
        self.chance = random.Random(seed)

    def patches(self) -> list[Any]:
        return [
            mock.patch.object(ahead, "CudaCopyStream", lambda device: PaperCopyStream(self)),
            mock.patch.object(pipeline_iterator, "PageLocks", lambda: PageLocks(self._lock, self._unlock)),
            mock.patch.object(engine, "mark_all_work", self._mark_all_work),
            mock.patch.object(engine, "wait_for_all_work", lambda: self._mark_all_work().wait()),
            mock.patch.object(torch.cuda, "device_count", lambda: 1),
        ]

    def settle(self) -> None:
        """Wait for every copy that was handed out."""
        for copy_stream in self.copy_streams:
            copy_stream.handed_over.wait()

    def close(self) -> None:
        for copy_stream in self.copy_streams:
            copy_stream.close()

    def _lock(self, address: int, size_bytes: int) -> None:
        assert address not in self.locked, "locked twice"
        self.locked[address] = size_bytes

    def _unlock(self, address: int) -> None:
        del self.locked[address]

    def _mark_all_work(self) -> PaperMark:
        mark = PaperMark()
        last = [copy_stream.last for copy_stream in self.copy_streams]

        def reach() -> None:
            for each in last:
                each.wait()
            mark.reach()

        threading.Thread(target=reach, daemon=True).start()
        return mark


class PaperCopyStream:
    def __init__(self, device: PaperDevice) -> None:
        self._device = device
        self._jobs: queue.Queue[Any] = queue.Queue()
        self.last = self.handed_over = PaperMark()
        self.last.reach()
        device.copy_streams.append(self)
        self._thread = threading.Thread(target=_copy_later, args=(self._jobs,), daemon=True)
        self._thread.start()

    def copy(self, host: Any) -> tuple[Any, PaperMark]:
        device = self._device
        device.copies += 1
        if device.copies - 1 in device.fails_at:
            raise torch.cuda.OutOfMemoryError("the paper device is full")
        copies: list[tuple[torch.Tensor, int]] = []

        def begin(leaf: Any) -> Any:
            if not is_plain(leaf):
                return leaf
            there = torch.full_like(leaf, UNTOUCHED)
            copies.append((there, leaf.data_ptr()))
            return there

        data, mark = map_leaves(begin, host), PaperMark()
        self._jobs.put((device.chance.uniform(0, 2 * device.copy_s), copies, mark))
        self.last = mark
        return data, mark

    def user_mark(self) -> PaperMark:
        mark = PaperMark()
        if self._device.step_s:
            timer = threading.Timer(self._device.step_s, mark.reach)
            timer.daemon = True
            timer.start()
        else:
            mark.reach()
        return mark

    def hand_over(self, data: Any, copied: PaperMark) -> Any:
        self.handed_over = copied
        return data

    def wait(self) -> None:
        self.last.wait()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()


def _copy_later(jobs: queue.Queue[Any]) -> None:
    while (job := jobs.get()) is not None:
        delay_s, copies, mark = job
        time.sleep(delay_s)
        while copies:
            there, address = copies.pop()
            ctypes.memmove(there.data_ptr(), address, there.nbytes)
            del there
        mark.reach()
