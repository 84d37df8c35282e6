"""Batches on their way to a CUDA device: copied on a stream of their own, ahead of need.

In:  host batches, in order.
Out: the same batches on the device; what uses them on the current stream waits for their copy and nothing else.
Runs in: trainer, in the training thread.

Plain tensors are copied ahead. Everything else that can move (sparse and nested tensors, batch types with a ``to`` of
their own) does so when it is handed out, on the stream of whoever asked: only its own code knows which tensors it
holds, and memory of one stream must not be used on another without the allocator being told.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from penstock.device.tree import leaves, map_leaves

MOST_AHEAD = 2
"""Batches of device memory that may be ahead of the user."""


class Parcel:
    """One batch under way."""

    def __init__(self, data: Any, host: Any, copied: torch.cuda.Event) -> None:
        self.data = data
        """Plain tensors are on the device, the rest is as it came."""
        self.host = host
        """What it was copied from: kept until the copy is done, and with it the slot."""
        self.copied = copied
        self.device_bytes = sum(leaf.nbytes for leaf in leaves(data) if is_plain(leaf))


class Courier:
    """Copies batches to one device."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(device)
        self._leaving: deque[Parcel] = deque()
        """Handed out, and perhaps still being copied."""

    def send(self, host: Any) -> Parcel:
        """Start copying a batch."""
        with torch.cuda.stream(self._stream):
            data = map_leaves(self._ahead, host)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return Parcel(data, host, copied)

    def hand_out(self, parcel: Parcel) -> Any:
        """The batch, for use on the current stream."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(parcel.copied)
        data = map_leaves(lambda leaf: self._for_use(leaf, stream), parcel.data)
        if not moves_ahead(parcel.data):
            # Copies made just now end later than the one recorded.
            parcel.copied = torch.cuda.Event()
            parcel.copied.record(stream)
        parcel.data = None
        self._leaving.append(parcel)
        self.tidy()
        return data

    def tidy(self) -> None:
        """Let go of what was copied from, as far as the copies are done."""
        while self._leaving and self._leaving[0].copied.query():
            self._leaving.popleft()

    def close(self) -> None:
        """Wait for copies under way: what they read is about to go."""
        self._stream.synchronize()
        for parcel in self._leaving:
            parcel.copied.synchronize()
        self._leaving.clear()

    def _ahead(self, leaf: Any) -> Any:
        return leaf.to(self.device, non_blocking=True) if is_plain(leaf) else leaf

    def _for_use(self, leaf: Any, stream: torch.cuda.Stream) -> Any:
        if is_plain(leaf):
            leaf.record_stream(stream)
            return leaf
        return _moved(leaf, self.device)


def move(data: Any, device: torch.device) -> Any:
    """A batch on another device, as a training loop would put it there."""
    return map_leaves(lambda leaf: _moved(leaf, device), data)


def _moved(leaf: Any, device: torch.device) -> Any:
    """Anything that knows how to move, moved; the rest as it is."""
    if isinstance(leaf, torch.Tensor):
        return leaf.to(device, non_blocking=True)
    move = getattr(leaf, "to", None)
    if not callable(move):
        return leaf
    try:
        return move(device, non_blocking=True)
    except TypeError:
        return move(device)


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is nothing but a dense tensor: its memory is all there is to it."""
    return type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_nested


def moves_ahead(data: Any) -> bool:
    """Whether nothing in the batch but plain tensors could hold on to memory of the arena."""
    return all(is_plain(leaf) or isinstance(leaf, (str, bytes, int, float, bool, type(None))) for leaf in leaves(data))
