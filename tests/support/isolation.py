"""A test has folders of its own, and a session ends with nothing left that its tests made.

In:  the environment and the temporary folder of this process.
Out: own folders, a known state of the random generators, and a list of processes, segments and files left behind.
Runs in: test processes.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing.util
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""A shell inside a training has these, and the loader shards by them."""

_OF_A_TERMINAL = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES")

_OF_PENSTOCK = ("PENSTOCK_HOME", "PENSTOCK_DASH_TOKEN")

_LIVES_AS_LONG_AS_PYTHON = ("resource_tracker", "forkserver", "resource-tracker")
"""multiprocessing starts these once and ends them with the process."""

_MADE_BY_OTHERS = ("pymp-", "pytest-of-", "torchinductor_")
"""Names in the temporary folder that multiprocessing, pytest and torch remove themselves or keep on purpose."""

_GONE_WITHIN_S = 10.0


class Isolation:
    """The folders of one pytest process, and what was there before its first test."""

    def __init__(self) -> None:
        # Short, because sockets live below it; open, because some tests run programs as another user.
        self.folder = Path(tempfile.mkdtemp(prefix="pt-", dir="/tmp" if Path("/tmp").is_dir() else None))
        self.folder.chmod(0o755)
        self._count = itertools.count(1)
        self._temporary = self.folder / "tmp"
        self._temporary.mkdir()
        self._segments = _segments()
        # Made now, in the system's folder: multiprocessing removes it at exit, when this folder is gone.
        multiprocessing.util.get_temp_dir()
        for name in (*_OF_A_LAUNCHER, *_OF_A_TERMINAL, *_OF_PENSTOCK):
            os.environ.pop(name, None)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.gettempdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._temporary)
        # For fixtures that several tests share. Tests see folders of their own in place of these.
        os.environ.update(self._folders("shared"))
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            # A shell starts background jobs so, and every child inherits it: Ctrl-C would reach none of them.
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @contextlib.contextmanager
    def one_test(self) -> Iterator[None]:
        """Own folders for records, caches and settings, and generators in a state that no other test decides."""
        name = str(next(self._count))
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in self._folders(name).items():
                patch.setenv(variable, value)
            _seed()
            yield
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def left(self) -> list[str]:
        """What the tests of this process left behind, after a last chance to end."""
        found: list[str] = []
        ends_s = time.monotonic() + _GONE_WITHIN_S
        while True:
            gc.collect()
            found = _processes()
            found += [f"segment /dev/shm/{name}" for name in sorted(_segments() - self._segments)]
            found += [f"segment {name} is open" for name in _open_segments()]
            found += [
                f"file {entry}"
                for entry in sorted(self._temporary.iterdir())
                if not entry.name.startswith(_MADE_BY_OTHERS)
            ]
            if not found or time.monotonic() > ends_s:
                return found
            time.sleep(0.1)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _folders(self, name: str) -> dict[str, str]:
        made = {
            "PENSTOCK_HOME": "home",
            "XDG_CACHE_HOME": "cache",
            "XDG_CONFIG_HOME": "config",
            "XDG_RUNTIME_DIR": "run",
            "XDG_STATE_HOME": "state",
        }
        for folder in made.values():
            (self.folder / name / folder).mkdir(parents=True, mode=0o700)
        return {variable: str(self.folder / name / folder) for variable, folder in made.items()}


def _seed() -> None:
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def _processes() -> list[str]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline())
            if process.status() == psutil.STATUS_ZOMBIE:
                found.append(f"process {process.pid} has ended and was not reaped")
            elif not any(name in words for name in _LIVES_AS_LONG_AS_PYTHON):
                found.append(f"process {process.pid}: {words[:120]}")
    return found


def _segments() -> set[str]:
    """Names in /dev/shm that this process could have made; other programs use the folder at the same time."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return set()
    return {entry.name for entry in folder.iterdir() if entry.name.startswith((f"torch_{os.getpid()}_", "penstock"))}


def _open_segments() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir() if Path("/proc/self/fd").is_dir() else ():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("/memfd:penstock"):
                found.append(target)
    return found
