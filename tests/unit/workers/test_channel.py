"""Messages and descriptors over one socket."""

from __future__ import annotations

import os
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.workers.channel import Channel, ChannelClosed, channel_pair

pytestmark = pytest.mark.skipif(not hasattr(socket, "CMSG_SPACE"), reason="workers are threads here")


def pair() -> tuple[Channel, Channel]:
    ours, theirs = channel_pair()
    return ours, Channel(theirs)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def memory_file(text: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, text)
    return fd


def test_messages_arrive_whole_and_in_order() -> None:
    trainer, worker = pair()
    for number in range(100):
        trainer.post(("hello", number))
    trainer.flush()
    assert not trainer.has_unsent
    assert worker.receive(wait=True) == [(("hello", n), None) for n in range(100)]
    assert worker.receive(wait=False) == []
    for number in range(100):
        worker.send(("back", number))
    assert trainer.read_available() == [("back", n) for n in range(100)]
    assert trainer.read_available() == []
    trainer.close()
    worker.close()


def test_the_trainer_never_blocks_on_a_worker_that_does_not_read() -> None:
    trainer, worker = pair()
    trainer.post(bytes(8 << 20))
    trainer.post("after")
    trainer.flush()
    assert trainer.has_unsent
    got: list[Any] = []

    def read() -> None:
        while len(got) < 2:
            got.extend(worker.receive(wait=True))

    reader = threading.Thread(target=read)
    reader.start()
    while trainer.has_unsent:
        trainer.flush()
    reader.join()
    assert [len(got[0][0]), got[1][0]] == [8 << 20, "after"]
    trainer.close()
    worker.close()


def test_a_large_answer_that_arrives_in_pieces_is_read_once_it_is_whole() -> None:
    trainer, worker = pair()
    array = np.arange(1 << 20)
    sender = threading.Thread(target=worker.send, args=(array,))
    sender.start()
    got: list[Any] = []
    while not got:
        got = trainer.read_available()
    sender.join()
    assert np.array_equal(got[0], array)
    trainer.close()
    worker.close()


def test_a_message_cut_anywhere_is_put_together_again() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours), Channel(theirs)
    sender.post({"a": [1, 2, 3]})
    frame = bytes(sender._outbox[0][0])
    for cut in range(1, len(frame)):
        ours.sendall(frame[:cut])
        assert receiver.receive(wait=False) == []
        ours.sendall(frame[cut:])
        assert receiver.receive(wait=False) == [({"a": [1, 2, 3]}, None)]
    sender._outbox.clear()
    sender.close()
    receiver.close()


def test_descriptors_arrive_with_their_own_messages() -> None:
    trainer, worker = pair()
    before = descriptors()
    for number in range(200):
        if number % 3 == 0:
            fd = memory_file(b"%d" % number)
            trainer.post(number, fd=fd)
            os.close(fd)
        else:
            trainer.post(number)
    got = []
    while len(got) < 200:
        trainer.flush()
        for message, fd in worker.receive(wait=True):
            got.append(message)
            assert (fd is not None) == (message % 3 == 0)
            if fd is not None:
                assert os.pread(fd, 10, 0) == b"%d" % message
                assert not os.get_inheritable(fd)
                os.close(fd)
    assert got == list(range(200))
    assert descriptors() == before
    trainer.close()
    worker.close()


def test_a_descriptor_next_to_a_large_message_is_sent_once() -> None:
    trainer, worker = pair()
    fd = memory_file(b"large")
    trainer.post(bytes(4 << 20), fd=fd)
    trainer.post("next")
    os.close(fd)
    trainer.flush()
    assert trainer.has_unsent
    received: list[Any] = []

    def read() -> None:
        while len(received) < 2:
            received.extend(worker.receive(wait=True))

    reader = threading.Thread(target=read)
    reader.start()
    while trainer.has_unsent:
        trainer.flush()
    reader.join()
    (body, got), after = received
    assert len(body) == 4 << 20
    assert os.pread(got, 10, 0) == b"large"
    assert after == ("next", None)
    os.close(got)
    trainer.close()
    worker.close()


def test_closing_drops_descriptors_that_were_never_sent() -> None:
    before = descriptors()
    trainer, worker = pair()
    fd = memory_file(b"x")
    trainer.post("never sent", fd=fd)
    os.close(fd)
    trainer.close()
    worker.close()
    assert descriptors() == before


def test_messages_of_a_crashed_worker_are_read_before_its_crash_is_reported() -> None:
    trainer, worker = pair()
    worker.send("last words")
    worker.close()
    assert trainer.read_available() == ["last words"]
    with pytest.raises(ChannelClosed):
        trainer.read_available()
    trainer.close()


def test_half_a_message_from_a_crashed_worker_is_reported_as_its_crash() -> None:
    ours, theirs = channel_pair()
    theirs.sendall(struct.pack("<I?", 1000, False) + b"only this much")
    theirs.close()
    with pytest.raises(ChannelClosed):
        while True:
            assert ours.read_available() == []
    ours.close()


def test_a_worker_sees_that_the_trainer_is_gone() -> None:
    trainer, worker = pair()
    trainer.post("x")
    trainer.flush()
    trainer.close()
    assert worker.receive(wait=True) == [("x", None)]
    with pytest.raises(ChannelClosed):
        worker.receive(wait=True)
    worker.close()


def test_posting_to_a_dead_worker_raises_nothing_and_keeps_nothing() -> None:
    before = descriptors()
    trainer, worker = pair()
    worker.close()
    fd = memory_file(b"x")
    for _ in range(3):
        trainer.post(bytes(1 << 20), fd=fd)
        trainer.flush()
    os.close(fd)
    assert not trainer.has_unsent
    with pytest.raises(ChannelClosed):
        trainer.read_available()
    trainer.close()
    assert descriptors() == before


def test_tensors_inside_messages_open_no_descriptor() -> None:
    trainer, worker = pair()
    before = descriptors()
    worker.send([torch.ones(10), torch.zeros(3, 3).t()])
    (got,) = trainer.read_available()
    assert torch.equal(got[0], torch.ones(10))
    assert descriptors() == before
    trainer.close()
    worker.close()
