"""One worker's line to the trainer: whole messages both ways, descriptors alongside, death seen as end of file.

In:  messages (any picklable object), optionally with a file descriptor.
Out: the same on the other side, in order.
Runs in: trainer (never blocks: what the socket does not take waits in an outbox) and worker (blocks).

A channel belongs to two processes and no more. Children forked for any reason close the trainer's ends they
inherit, or a dead worker's half-written message would never end.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import weakref
from collections import deque
from typing import Any

from penstock.arena.codec import decode_inline, encode_inline
from penstock.workers.fork_hygiene import keep_from_children

_HEADER = struct.Struct("<I?")
_READ_BYTES = 64 << 10
# Not every platform has these; where they are missing, workers are threads and use no channel.
_FDS_SPACE = socket.CMSG_SPACE(64 * 4) if hasattr(socket, "CMSG_SPACE") else 0
_DONTWAIT = getattr(socket, "MSG_DONTWAIT", 0)
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """A message stream over one socket, for either side."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._inbox = bytearray()
        self._read = bytearray()
        """What the worker's side reads into, once it does."""
        self._outbox: deque[tuple[memoryview, list[int]]] = deque()
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    # -- trainer: never blocks ----------------------------------------------------

    def post(self, message: object, *, fd: int | None = None) -> None:
        """Queue a message; ``flush`` sends it. Raises nothing if the worker is dead: reading tells."""
        data = _framed(message, fd is not None)
        # A duplicate outlives the owner's descriptor, which may be closed while this waits its turn.
        self._outbox.append((memoryview(data), [] if fd is None else [os.dup(fd)]))

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        while self._outbox:
            self._join_small()
            data, fds = self._outbox[0]
            try:
                if fds:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                    sent = self._sock.sendmsg([data], [rights], _DONTWAIT)
                    os.close(fds.pop())
                else:
                    sent = self._sock.send(data, _DONTWAIT)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._drop_outbox()
                return
            if sent == len(data):
                self._outbox.popleft()
            else:
                self._outbox[0] = (data[sent:], fds)

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox)

    def read_available(self) -> list[Any]:
        """Every whole message that has arrived. Raises ChannelClosed once the other side is gone."""
        closed = False
        while True:
            try:
                data = self._sock.recv(_READ_BYTES, _DONTWAIT)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                closed = True
                break
            if not data:
                closed = True
                break
            self._inbox += data
            if len(data) < _READ_BYTES:
                break
        messages = []
        while (frame := self._next_frame()) is not None:
            messages.append(decode_inline(frame[0]))
        # What a dying worker managed to say still counts; its death is told on the next call.
        if closed and not messages:
            raise ChannelClosed
        return messages

    # -- worker: blocks -------------------------------------------------------------

    def send(self, *messages: object) -> None:
        """Send messages in one go. Raises what pickle raises, before anything is sent, if one cannot travel."""
        self._sock.sendall(b"".join([_framed(message, False) for message in messages]))

    def receive(self, *, wait: bool) -> list[tuple[Any, int | None]]:
        """Messages that have arrived, each with the descriptor that came with it; one at least, if ``wait``."""
        self._read = self._read or bytearray(_READ_BYTES)
        received = []
        while not received:
            try:
                # socket.recv_fds would do, if it did not ignore its flags.
                count, ancillary, _, _ = self._sock.recvmsg_into(
                    [self._read], _FDS_SPACE, _CLOEXEC if wait else _CLOEXEC | _DONTWAIT
                )
            except BlockingIOError:
                break
            for _, _, rights in ancillary:
                self._fds.extend(array.array("i", rights[: len(rights) // 4 * 4]))
            if not count:
                raise ChannelClosed
            self._inbox += memoryview(self._read)[:count]
            while (frame := self._next_frame()) is not None:
                body, with_fd = frame
                received.append((decode_inline(body), self._fds.popleft() if with_fd else None))
        return received

    def close(self) -> None:
        self._drop_outbox()
        self._sock.close()

    # -- inside ---------------------------------------------------------------------

    def _next_frame(self) -> tuple[bytes, bool] | None:
        if len(self._inbox) < _HEADER.size:
            return None
        length, with_fd = _HEADER.unpack_from(self._inbox)
        end = _HEADER.size + length
        if len(self._inbox) < end:
            return None
        body = bytes(self._inbox[_HEADER.size : end])
        del self._inbox[:end]
        return body, with_fd

    def _join_small(self) -> None:
        """Make one send of several messages without descriptors: each wakes the worker."""
        if len(self._outbox) < 2 or self._outbox[0][1] or self._outbox[1][1]:
            return
        joined = [self._outbox.popleft()[0]]
        while self._outbox and not self._outbox[0][1]:
            joined.append(self._outbox.popleft()[0])
        self._outbox.appendleft((memoryview(b"".join(joined)), []))

    def _drop_outbox(self) -> None:
        for _, fds in self._outbox:
            for fd in fds:
                os.close(fd)
        self._outbox.clear()


def _framed(message: object, with_fd: bool) -> bytes:
    body = encode_inline(message)
    return b"".join((_HEADER.pack(len(body), with_fd), body))


# -- pairs ------------------------------------------------------------------------------

_worker_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def channel_pair() -> tuple[Channel, socket.socket]:
    """The trainer's channel and the socket to give to the worker."""
    ours, theirs = socket.socketpair()
    keep_from_children(ours)
    _worker_ends.add(theirs)
    return Channel(ours), theirs


def close_other_ends(own: socket.socket) -> None:
    """In a worker: close the ends of workers that were being started when this one was forked."""
    for sock in list(_worker_ends):
        if sock is not own:
            sock.close()
