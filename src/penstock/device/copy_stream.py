"""A CUDA stream used only for copying batches to one device.

In:  host batches.
Out: the same batches on the device, and marks that pass when a copy is done, or when the user's work so far is done.
Runs in: trainer: the training thread; marks are queried from any thread.

Plain tensors are copied on this stream. Everything else with a ``to`` method (sparse and nested tensors, batch types)
is moved when it is handed over, on the user's stream. Only the object's own code sees which tensors it holds, and
memory of one stream may be used on another stream only after ``record_stream`` was called for each tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.device.tree import is_ordinary, leaves, map_leaves


class StreamMark:
    """A mark behind all work that is queued on one stream when the mark is made."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def passed(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class CudaCopyStream:
    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.device)

    def copy(self, host: Any) -> tuple[Any, StreamMark]:
        """Start copying. Returns the batch with its plain tensors on the device, and a mark that passes when these
        tensors are copied."""
        with torch.cuda.stream(self._stream):
            return map_leaves(self._copied, host), StreamMark(self._stream)

    def user_mark(self) -> StreamMark:
        """A mark behind all work that is queued on the current stream."""
        return StreamMark(torch.cuda.current_stream(self.device))

    def hand_over(self, data: Any, copied: StreamMark) -> Any:
        """The batch, for use on the current stream."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(copied.event)
        return map_leaves(lambda leaf: self._for_use(leaf, stream), data)

    def wait(self) -> None:
        """Wait for every copy."""
        self._stream.synchronize()

    def _copied(self, leaf: Any) -> Any:
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
    """The leaf on the other device if the leaf has a ``to`` method; otherwise the leaf itself."""
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
    """Whether a leaf is a dense tensor that consists of its memory, dtype and shape only."""
    # A copy of a tensor that requires gradients would keep the original tensor alive.
    return (
        type(leaf) is torch.Tensor
        and leaf.layout is torch.strided
        and not leaf.is_nested
        and not leaf.requires_grad
        and not leaf.__dict__
    )


def plain_bytes(data: Any) -> int:
    return sum(leaf.nbytes for leaf in leaves(data) if is_plain(leaf))


def stays_on_host(data: Any) -> bool:
    """Whether the batch contains an object, other than a plain tensor, that could keep arena memory alive."""
    return not is_ordinary(data) or not all(is_plain(leaf) or isinstance(leaf, _VALUES) for leaf in leaves(data))


_VALUES = (str, bytes, int, float, bool, type(None))
