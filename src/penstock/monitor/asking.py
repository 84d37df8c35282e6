"""Talking to a running process through its control socket.

In:  a run, a message.
Out: its answer.
Runs in: command line, web page.

One JSON object a line, each way:

    {"do": "state"}                                                   -> {"ok": true, "state": {...}}
    {"do": "set", "loader": null, "workers": 8, "depth": 3, "memory": "6GB"} -> {"ok": true, "now": {...}}
    anything wrong                                                    -> {"ok": false, "why": "..."}

``loader`` is a name or a number; null: the only one. ``who`` may say on whose behalf, for the journal: terminal, page.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any, Protocol

from penstock.errors import PenstockError

LONGEST_ANSWER_BYTES = 8 << 20


class _Run(Protocol):
    id: str

    @property
    def facts(self) -> dict[str, Any]: ...


def ask(run: _Run, message: dict[str, Any], *, timeout_s: float = 5.0) -> dict[str, Any]:
    """Send one message and wait for the answer. Raises PenstockError where nobody answers."""
    path = run.facts.get("socket")
    if not isinstance(path, str) or not hasattr(socket, "AF_UNIX"):
        raise PenstockError(f"{run.id} has no socket to be reached through; the run's journal may say why")
    deadline_s = time.monotonic() + timeout_s
    received = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(timeout_s)
            line.connect(path)
            line.sendall(json.dumps(message).encode() + b"\n")
            while not received.endswith(b"\n"):
                line.settimeout(max(0.01, deadline_s - time.monotonic()))
                piece = line.recv(1 << 16)
                if not piece:
                    raise PenstockError(f"{run.id} hung up without an answer; is it ending?")
                received += piece
                if len(received) > LONGEST_ANSWER_BYTES:
                    raise PenstockError(f"{run.id} answers with more than {LONGEST_ANSWER_BYTES:,} bytes")
        answer = json.loads(received)
    except TimeoutError:
        raise PenstockError(f"{run.id} did not answer within {timeout_s:g} s; is its process stopped?") from None
    except OSError as problem:
        raise PenstockError(f"{run.id} cannot be reached through {path}: {problem.strerror}; it has ended?") from None
    except ValueError:
        raise PenstockError(f"{run.id} answered with what is no JSON") from None
    return answer if isinstance(answer, dict) else {"ok": False, "why": "an answer that is no object"}
