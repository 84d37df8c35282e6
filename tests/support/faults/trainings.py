"""Whole trainings to be killed, interrupted or left: each a forked child of a process that has imported everything.

In:  a piece of code to run as a training.
Out: its exit status, what it printed, and whether anything of it is left.
Runs in: test process; the nursery is one process per test, its trainings its children.

Importing torch takes seconds; fifty trainings forked from one nursery take as long as one that is started. Every
process below carries a mark in its environment, so that those left behind are found wherever they went.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .processes import HANG_S, marked, until

_MAIN = """
import sys
import gc, json, os, random, signal, threading, time, traceback, warnings
import psutil, torch
import penstock
from penstock.loader.gauges import workers_now
from support.datasets.faulty import *
from support.faults.processes import kill, workers
warnings.simplefilter("ignore")
torch.set_num_threads(1)
code = None
if __name__ == "__main__":
    _ = penstock.DataLoader
    # Collections in a training, the one at its exit above all, would copy every page of the modules.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            for stream, name in ((0, os.devnull), (1, order["out"]), (2, order["err"])):
                fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
                os.dup2(fd, stream)
                os.close(fd)
            code = order["code"]
            break
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)
    if code is not None:
        exec(compile(code, "training", "exec"))
"""


@dataclass(frozen=True, kw_only=True)
class End:
    """How a training ended."""

    status: int
    out: str
    err: str
    left: list[str]
    """Command lines of its processes that still lived when the wait for their end was over."""


class Training:
    """One training that runs."""

    def __init__(self, nursery: Nursery, pid: int, out: Path, err: Path) -> None:
        self.pid = pid
        self._nursery, self._out, self._err = nursery, out, err

    def wait_for(self, text: str, within_s: float = HANG_S) -> None:
        """Until it has printed ``text``."""
        until(lambda: text in self._out.read_text(), within_s)

    def signal(self, number: int, *, group: bool = False) -> None:
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)

    def printed(self) -> str:
        return self._out.read_text()

    def end(self) -> End:
        """Wait for its end, then for the end of everything it started."""
        status = self._nursery.answer()["status"]
        with contextlib.suppress(AssertionError):
            until(lambda: not self.left())
        living = []
        for pid in self.left():
            with contextlib.suppress(OSError):
                living.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[-160:])
                os.kill(pid, signal.SIGKILL)
        return End(
            status=status,
            out=self._out.read_text(),
            err=self._err.read_text(),
            left=living,
        )

    def left(self) -> list[int]:
        """What lives of it and its children."""
        return [pid for pid in marked(self._nursery.mark) if pid != self._nursery.pid]


class Nursery:
    def __init__(self, folder: Path) -> None:
        self.mark = f"PENSTOCK_NURSERY={uuid.uuid4().hex}"
        self._folder, self._count = folder, 0
        # A script and not -c, since spawned workers import the main module again.
        script = folder / "nursery_main.py"
        script.write_text(_MAIN)
        name, value = self.mark.split("=")
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, name: value},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, code: str) -> Training:
        assert self._process.stdin is not None
        self._count += 1
        out, err = self._folder / f"out{self._count}", self._folder / f"err{self._count}"
        for path in (out, err):
            path.write_text("")
        self._process.stdin.write(json.dumps({"code": code, "out": str(out), "err": str(err)}) + "\n")
        self._process.stdin.flush()
        return Training(self, self.answer()["pid"], out, err)

    def run(self, code: str) -> End:
        return self.start(code).end()

    def answer(self) -> dict[str, int]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        for pid in marked(self.mark):
            if pid != self.pid:
                os.kill(pid, signal.SIGKILL)
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=60)


@contextlib.contextmanager
def nursery(folder: Path) -> Iterator[Nursery]:
    made = Nursery(folder)
    try:
        yield made
    finally:
        made.close()
