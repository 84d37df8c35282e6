"""Bad lines between trainer and workers: slow, narrow.

In:  nothing.
Out: sockets that take a few bytes at a time.
Runs in: test process; inherited by forked workers. (Closed lines are ``how="hang up"`` at any point that talks.)
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import penstock.workers.channel as channel
import penstock.workers.process_worker as process_worker


@contextlib.contextmanager
def narrow() -> Iterator[None]:
    """Both directions hold the least the kernel allows, about two kilobytes: what the trainer posts has to wait."""
    real = process_worker.channel_pair

    def pair() -> tuple[channel.Channel, socket.socket]:
        ours, theirs = real()
        for sock in (ours._sock, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        return ours, theirs

    with mock.patch.object(process_worker, "channel_pair", pair):
        yield


@contextlib.contextmanager
def slow(piece_bytes: int = 7, pause_s: float = 0.0002) -> Iterator[None]:
    """Workers say everything in small pieces, with pauses in between."""

    def send(self: channel.Channel, *said: Any) -> None:
        data = b"".join(channel._framed(message, False) for message in said)
        pieces = max(piece_bytes, len(data) // 50)
        for start in range(0, len(data), pieces):
            self._sock.sendall(data[start : start + pieces])
            time.sleep(pause_s)

    with mock.patch.object(channel.Channel, "send", send):
        yield
