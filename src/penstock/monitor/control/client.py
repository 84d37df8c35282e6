"""Messages to a running training through its control socket.

In:  a run, a message.
Out: the training's answer.
Runs in: command line, web page.

Each message and each answer is one JSON object on one line:

    {"do": "state"}                                                   -> {"ok": true, "state": {...}}
    {"do": "set", "loader": null, "workers": 8, "depth": 3, "memory": "6GB"} -> {"ok": true, "now": {...}}
    anything wrong                                                    -> {"ok": false, "why": "..."}

``loader`` is a name or a number; null means the only loader of the run. ``who`` names the source for the journal:
terminal, page.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import PenstockError
from penstock.monitor.runs.home import LONGEST_SOCKET_PATH_BYTES

LONGEST_ANSWER_BYTES = 8 << 20


class ReachableRun(Protocol):
    id: str
    path: Path

    @property
    def facts(self) -> dict[str, Any]: ...


def own_socket(run: ReachableRun) -> Path | None:
    """The run's socket; None if it no longer has a socket. A path in the record counts only if it is named after the
    run and lies in a private folder: a record copied from elsewhere must not lead to another socket."""
    recorded = Path(run.facts.get("socket") or "")
    # The home as seen from here comes first, because it may be mounted elsewhere for the training.
    found = run.path.absolute().parent.parent / "sockets" / run.id
    if recorded == Path() or not hasattr(socket, "AF_UNIX"):
        return None
    if _is_socket(found):
        return found
    is_own = recorded.is_absolute() and recorded.name == run.id and _is_private(recorded.parent)
    return recorded if is_own and _is_socket(recorded) else None


def _is_private(folder: Path) -> bool:
    """Whether only this user can write to a folder: another user could have put a socket into a folder in /tmp."""
    try:
        found = folder.lstat()
    except (OSError, ValueError):
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _is_socket(path: Path) -> bool:
    try:
        return len(os.fsencode(path)) <= LONGEST_SOCKET_PATH_BYTES and stat.S_ISSOCK(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def ask(run: ReachableRun, message: dict[str, Any], *, timeout_s: float = 5.0) -> dict[str, Any]:
    """Send one message and wait for the answer. Raises PenstockError if no answer comes."""
    path = own_socket(run)
    if path is None:
        if run.facts.get("socket") is not None:
            raise PenstockError(
                f"{run.id} cannot be reached: its socket is gone or belongs to another user; has it ended?"
            )
        raise PenstockError(f"{run.id} cannot be reached: it has no socket; its journal may contain the reason")
    deadline_s = time.monotonic() + timeout_s
    received = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(timeout_s)
            line.connect(str(path))
            line.sendall(json.dumps(message).encode() + b"\n")
            while not received.endswith(b"\n"):
                line.settimeout(max(0.01, deadline_s - time.monotonic()))
                piece = line.recv(1 << 16)
                if not piece:
                    raise PenstockError(f"{run.id} closed the connection without an answer; is it ending?")
                received += piece
                if len(received) > LONGEST_ANSWER_BYTES:
                    raise PenstockError(f"{run.id} answers with more than {LONGEST_ANSWER_BYTES:,} bytes")
        answer = json.loads(received)
    except TimeoutError:
        raise PenstockError(f"{run.id} did not answer within {timeout_s:g} s; is its process stopped?") from None
    except OSError as problem:
        raise PenstockError(f"{run.id} cannot be reached through {path}: {problem.strerror}; has it ended?") from None
    except (ValueError, RecursionError):
        raise PenstockError(f"{run.id} sent an answer that is not JSON") from None
    return answer if isinstance(answer, dict) else {"ok": False, "why": "the answer is not an object"}
