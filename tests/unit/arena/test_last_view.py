"""What is to be done when an object goes: once, in any thread, and never in the way of an interpreter that leaves."""

from __future__ import annotations

import subprocess
import sys
import threading

from penstock.arena.last_view import when_gone

# The main thread leaves while others map and let go: each way that registers with the interpreter's exit fails aloud
# in most of a few hundred tries.
LEAVING = """
import atexit, os, sys, threading, time
from penstock.arena.mapping import map_shared

fd = os.memfd_create("leaving")
os.ftruncate(fd, 4096)

def churn():
    kept = []
    while True:
        kept.append(map_shared(fd, 4096))
        if len(kept) > 500:
            kept.clear()

sys.setswitchinterval(1e-6)
kept = [map_shared(fd, 4096) for _ in range(3000)]
for _ in range(3):
    threading.Thread(target=churn, daemon=True).start()
time.sleep(0.2)
"""


class Thing:
    pass


def test_the_call_is_made_once_with_the_last_reference() -> None:
    calls: list[int] = []
    thing = Thing()
    when_gone(thing, calls.append, 1)
    again = thing
    del thing
    assert calls == []
    del again
    assert calls == [1]


def test_two_calls_for_one_object_are_both_made() -> None:
    calls: list[int] = []
    thing = Thing()
    when_gone(thing, calls.append, 1)
    when_gone(thing, calls.append, 2)
    del thing
    assert sorted(calls) == [1, 2]


def test_many_threads_lose_no_call() -> None:
    calls: list[int] = []

    def churn(first: int) -> None:
        for number in range(first, first + 5000):
            when_gone(Thing(), calls.append, number)

    threads = [threading.Thread(target=churn, args=(first,)) for first in range(0, 20000, 5000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(calls) == list(range(20000))


def test_an_interpreter_exits_silently_while_threads_map_and_release() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
