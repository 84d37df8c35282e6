"""Named points of a worker's life, and faults that strike there.

In:  a point's name, a trigger, and what is to happen (by default kill -9 of the worker by itself).
Out: workers that suffer it, whatever their start method.
Runs in: test process (patches) and workers (suffer).

A point is where it says to the instruction: ``mid-message`` has half of the bytes of a frame in the socket,
``mid-write`` half of the rows in the segment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import penstock.arena.codec as codec
import penstock.arena.layout as layout
import penstock.workers.channel as channel
import penstock.workers.child.indexed_samples as indexed_samples
import penstock.workers.child.mailbox as mailbox
import penstock.workers.child.main as child
import penstock.workers.child.views as views
import penstock.workers.child.worker as worker
import penstock.workers.protocol as messages

from .triggers import Trigger


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong at one point."""

    point: str
    trigger: Trigger
    how: str = "kill"
    """kill, stop (SIGSTOP, until somebody continues it), hang up (close the line and live on), exit (status 3)."""
    trainer_pid: int


def suffer(fault: Fault, sock: socket.socket | None = None) -> None:
    """What happens to the worker that has come to the point."""
    if os.getpid() == fault.trainer_pid:
        return
    if fault.how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    elif fault.how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.how == "exit":
        os._exit(3)
    elif fault.how == "hang up":
        assert sock is not None, "only points that have the line at hand can hang up"
        sock.shutdown(socket.SHUT_RDWR)
        time.sleep(60)
    else:
        raise AssertionError(fault.how)


Patch = tuple[Any, str, Callable[..., Any]]


def _mid_message(fault: Fault) -> Patch:
    real = channel.Channel.send

    def send(self: channel.Channel, *said: object) -> None:
        if not any(isinstance(m, messages.Started) for m in said) and fault.trigger.fires():
            data = b"".join(channel._framed(message, False) for message in said)
            self._sock.sendall(data[: len(data) // 2])
            suffer(fault, self._sock)
        real(self, *said)

    return channel.Channel, "send", send


def _before_started(fault: Fault) -> Patch:
    real = channel.Channel.send

    def send(self: channel.Channel, *said: object) -> None:
        if any(isinstance(m, messages.Started) for m in said) and fault.trigger.fires():
            suffer(fault, self._sock)
        real(self, *said)

    return channel.Channel, "send", send


def _before_report(fault: Fault) -> Patch:
    real = channel.Channel.send

    def send(self: channel.Channel, *said: object) -> None:
        if any(isinstance(m, messages.Done) for m in said) and fault.trigger.fires():
            suffer(fault, self._sock)
        real(self, *said)

    return channel.Channel, "send", send


def _asking(fault: Fault) -> Patch:
    real = channel.Channel.send

    def send(self: channel.Channel, *said: object) -> None:
        real(self, *said)
        # Asked, and gone before the answer.
        if any(isinstance(m, messages.Need) for m in said) and fault.trigger.fires():
            suffer(fault, self._sock)

    return channel.Channel, "send", send


def _at_birth(fault: Fault) -> Patch:
    real = child._reduce_footprint

    def settle() -> None:
        if fault.trigger.fires():
            suffer(fault)
        real()

    return child, "_reduce_footprint", settle


def _on_stop(fault: Fault) -> Patch:
    real = worker.WorkerLoop._serve

    def serve(self: worker.WorkerLoop, *args: Any) -> None:
        try:
            real(self, *args)
        except mailbox.StopReceived:
            if fault.trigger.fires():
                suffer(fault)
            raise

    return worker.WorkerLoop, "_serve", serve


def _mid_rows(fault: Fault) -> Patch:
    real = layout.RowWriter.write

    def write(self: layout.RowWriter, first_row: int, flat: Any, texts: Any) -> None:
        if fault.trigger.fires():
            if len(flat) > 1:
                real(self, first_row, flat[: len(flat) // 2], texts)
            else:
                _half_a_row(self, first_row, flat[0])
            suffer(fault)
        real(self, first_row, flat, texts)

    return layout.RowWriter, "write", write


def _half_a_row(writer: layout.RowWriter, row: int, values: Any) -> None:
    for array, value in zip(writer._arrays, values, strict=True):
        if array is not None and array[row].size > 1:
            flat = array[row].reshape(-1)
            flat[: flat.size // 2] = value.numpy().reshape(-1)[: flat.size // 2]


def _mid_object(fault: Fault) -> Patch:
    real = codec.Encoded.write

    def write(self: codec.Encoded, target: Any) -> None:
        if fault.trigger.fires():
            target[: self.total_bytes // 2] = 0xEE
            suffer(fault)
        real(self, target)

    return codec.Encoded, "write", write


def _mapping(fault: Fault) -> Patch:
    real = views.attach_segment

    def attach(*args: Any, **more: Any) -> Any:
        segment = real(*args, **more)
        if fault.trigger.fires():
            suffer(fault)
        return segment

    return views, "attach_segment", attach


def _collating(fault: Fault) -> Patch:
    real = worker.seed_collate

    def seed(number: int) -> None:
        # Called with all samples of the batch at hand, right before the user's collate function.
        if os.getpid() != fault.trainer_pid and fault.trigger.fires():
            suffer(fault)
        real(number)

    return worker, "seed_collate", seed


def _in_a_sample(fault: Fault) -> Patch:
    real = indexed_samples.seed_stretch

    def seed(number: int, stretch: int) -> None:
        if os.getpid() != fault.trainer_pid and fault.trigger.fires():
            suffer(fault)
        real(number, stretch)

    return indexed_samples, "seed_stretch", seed


POINTS: dict[str, Callable[[Fault], Patch]] = {
    "at birth": _at_birth,
    "before started": _before_started,
    "mapping memory": _mapping,
    "in a sample": _in_a_sample,
    "asking for room": _asking,
    "mid-write of rows": _mid_rows,
    "mid-write of an object": _mid_object,
    "collating": _collating,
    "before its report": _before_report,
    "mid-message": _mid_message,
    "on stop": _on_stop,
}
"""Every point, in the order a worker comes to it."""


@contextlib.contextmanager
def injected(*faults: Fault) -> Iterator[None]:
    """Workers forked inside suffer these faults. For other start methods wrap the dataset in ``Faulty`` as well."""
    with contextlib.ExitStack() as undo:
        for fault in faults:
            undo.enter_context(mock.patch.object(*POINTS[fault.point](fault)))
        yield


class Faulty:
    """A dataset that brings faults into the workers that unpickle it."""

    def __init__(self, dataset: Any, *faults: Fault) -> None:
        self.dataset, self.faults = dataset, faults

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for fault in self.faults:
            setattr(*POINTS[fault.point](fault))
