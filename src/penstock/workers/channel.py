"""One worker's channel to the trainer. It carries whole messages in both directions, with descriptors; a crash appears
as end of file.

In:  messages (any picklable object), optionally with a file descriptor.
Out: the same messages and descriptors on the other side, in order.
Runs in: trainer (never blocks: messages that the socket does not accept wait in an outbox) and worker (blocks).

A channel belongs to exactly two processes. Every forked child closes the trainer's ends of channels that it inherits.
Otherwise the trainer would wait for ever for the rest of a message of which a crashed worker wrote only a half.
"""

from __future__ import annotations

import array
import contextlib
import errno
import marshal
import os
import socket
import struct
import weakref
from collections import deque
from typing import Any

from penstock.arena.codec import decode_inline, encode_inline
from penstock.workers.fork_hygiene import keep_from_children
from penstock.workers.protocol import Done, Fetch, Outcome

_HEADER = struct.Struct("<I?B")
"""The length of the body, whether a descriptor comes with the body, and the body's form."""
_READ_BYTES = 64 << 10
_OUT_OF_SOMETHING = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS}
# Not every platform has these constants; where they are missing, workers are threads and use no channel.
_FDS_SPACE = socket.CMSG_SPACE(64 * 4) if hasattr(socket, "CMSG_SPACE") else 0
_DONTWAIT = getattr(socket, "MSG_DONTWAIT", 0)
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_PICKLED, _FETCH, _DONE = range(3)
"""The forms of a message's body."""
_PLAIN = {int, str}


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """A message stream over one socket, for either side."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._inbox = bytearray()
        self._read = bytearray()
        """The buffer into which the worker's side reads; empty until the first read."""
        self._outbox: deque[tuple[memoryview, list[int]]] = deque()
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    # -- trainer: never blocks ----------------------------------------------------

    def post(self, message: object, *, fd: int | None = None) -> None:
        """Queue a message; ``flush`` sends it. If the worker has crashed, this call raises nothing, but the next read
        raises."""
        data = _framed(message, fd is not None)
        if fd is None:
            self._outbox.append((memoryview(data), []))
            return
        # The message is sent at once if possible. The owner may close its descriptor before a queued message is sent,
        # so a queued message needs a duplicate, and the process may be out of descriptors.
        self.flush()
        sent = 0 if self._outbox else self._send(memoryview(data), [fd])
        if sent < len(data):
            self._outbox.append((memoryview(data)[sent:], [] if sent else [os.dup(fd)]))

    def flush(self) -> None:
        """Send as many queued messages as the socket accepts."""
        while self._outbox:
            self._join_small()
            data, fds = self._outbox[0]
            sent = self._send(data, fds)
            if not sent:
                return
            while fds:
                os.close(fds.pop())
            if sent == len(data):
                self._outbox.popleft()
            else:
                self._outbox[0] = (data[sent:], fds)

    def _send(self, data: memoryview, fds: list[int]) -> int:
        """Returns the number of bytes that the socket accepted; all bytes count as accepted if the other end is
        closed."""
        try:
            if not fds:
                return self._sock.send(data, _DONTWAIT)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
            return self._sock.sendmsg([data], [rights], _DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as problem:
            if problem.errno in _OUT_OF_SOMETHING:
                raise
            return len(data)

    def end_reading(self) -> None:
        """Stop reading: a worker that is in the middle of a report stops sending it. Posted messages still arrive,
        followed by the end of the stream if some of them could not be sent."""
        self.flush()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR if self._outbox else socket.SHUT_RD)

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
            messages.append(frame[0])
        # Messages that a worker sent before its crash are still returned; the next call reports the crash.
        if closed and not messages:
            raise ChannelClosed
        return messages

    # -- worker: blocks -------------------------------------------------------------

    def send(self, *messages: object) -> None:
        """Send messages in one go. If a message cannot be pickled, pickle's exception is raised before anything is
        sent."""
        self._sock.sendall(b"".join([_framed(message, False) for message in messages]))

    def receive(self, *, wait: bool) -> list[tuple[Any, int | None]]:
        """The messages that have arrived, each with the descriptor that came with it; at least one message if
        ``wait``."""
        self._read = self._read or bytearray(_READ_BYTES)
        received = []
        while not received:
            try:
                # socket.recv_fds is not used because it ignores its flags.
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
                message, with_fd = frame
                received.append((message, self._fds.popleft() if with_fd else None))
        return received

    def close(self) -> None:
        self._drop_outbox()
        self._sock.close()

    # -- inside ---------------------------------------------------------------------

    def _next_frame(self) -> tuple[Any, bool] | None:
        if len(self._inbox) < _HEADER.size:
            return None
        length, with_fd, form = _HEADER.unpack_from(self._inbox)
        end = _HEADER.size + length
        if len(self._inbox) < end:
            return None
        body = bytes(self._inbox[_HEADER.size : end])
        del self._inbox[:end]
        return unpack(form, body), with_fd

    def _join_small(self) -> None:
        """Combine several messages without descriptors, because every send wakes the worker."""
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
    form, body = pack(message)
    return _HEADER.pack(len(body), with_fd, form) + body


# -- messages as bytes --------------------------------------------------------------------
# marshal takes half of pickle's time, but it accepts plain types of Python only. An index may be a number of numpy,
# which marshal would turn into bytes without an error; so each message is checked first.


def pack(message: object) -> tuple[int, bytes]:
    """The form of a message's body, and the body. Raises pickle's own exceptions for objects that cannot travel."""
    if type(message) is Fetch:
        if message.text_room is None and _are_plain(message.indices):
            return _FETCH, marshal.dumps(tuple(message))
    elif type(message) is Done and message.error is None and message.memo is None:
        outcome = message.outcome
        if outcome.text_span is None:
            # Texts are exactly str or bytes, because a template checks the exact type.
            return _DONE, marshal.dumps((message.task, tuple(outcome), *message[2:]))
    return _PICKLED, encode_inline(message)


def unpack(form: int, body: bytes) -> Any:
    """Rebuild a message from its form and body."""
    if form == _FETCH:
        return Fetch._make(marshal.loads(body))
    if form == _DONE:
        task, outcome, *rest = marshal.loads(body)
        return Done(task, Outcome._make(outcome), *rest)
    return decode_inline(body)


def _are_plain(indices: object) -> bool:
    return type(indices) is int or (type(indices) is list and _PLAIN.issuperset(map(type, indices)))


# -- pairs ------------------------------------------------------------------------------

_worker_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def channel_pair() -> tuple[Channel, socket.socket]:
    """The trainer's channel and the socket to give to the worker."""
    ours, theirs = socket.socketpair()
    keep_from_children(ours)
    _worker_ends.add(theirs)
    return Channel(ours), theirs


def close_other_ends(own: socket.socket) -> None:
    """Close the channel ends of other workers that were being started when this worker was forked; called in a
    worker."""
    for sock in list(_worker_ends):
        if sock is not own:
            sock.close()
