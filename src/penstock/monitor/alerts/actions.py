"""Commands and webhooks of alerts, each in its own thread with a time limit, so that nothing waits for them.

In:  an action, the facts of an alert.
Out: the result in words, passed to a function.
Runs in: trainer, command line. Does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from penstock._version import __version__
from penstock.environment import ENVIRONMENT
from penstock.monitor.alerts.rules import Command, Webhook

_MOST_AT_ONCE = 4
"""The most actions in progress: a webhook's server that does not answer must not accumulate threads."""
_GENTLY_S = 1.0
"""Time between asking a command to end and killing it."""
_LONGEST_ANSWER_BYTES = 1 << 10
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has only SIGTERM
_VARIABLES = {
    "PENSTOCK_ALERT": "alert",
    "PENSTOCK_ALERT_TEXT": "text",
    "PENSTOCK_ALERT_VALUE": "value",
    "PENSTOCK_ALERT_THRESHOLD": "threshold",
    "PENSTOCK_RUN": "run",
    "PENSTOCK_PID": "pid",
}


class ActionRunner:
    """Performs actions. ``report`` gets the result of each, from the action's thread; commands write to ``output``."""

    def __init__(self, report: Callable[[str], None], *, output: int = subprocess.DEVNULL) -> None:
        self._report = report
        self._output = output
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._commands: list[subprocess.Popen[bytes]] = []
        self._is_closed = False

    def perform(self, action: Command | Webhook, facts: Mapping[str, Any]) -> None:
        """Start an action and return at once."""
        self._threads = [each for each in self._threads if each.is_alive()]
        if len(self._threads) >= _MOST_AT_ONCE:
            self._report(f"{action}: not started, {_MOST_AT_ONCE} earlier actions are still running")
            return
        thread = threading.Thread(
            target=self._perform, args=(action, dict(facts)), name="penstock-alert-action", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as problem:  # there is too little memory for a thread
            self._report(f"{action}: not started, {problem}")
            return
        self._threads.append(thread)

    def close(self, within_s: float = 2.0) -> None:
        """Wait for actions in progress, then end the commands that still run. May be called twice."""
        deadline_s = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        with self._lock:
            self._is_closed = True
            left = list(self._commands)
        for process in left:
            _kill(process, signal.SIGTERM)
        deadline_s = time.monotonic() + _GENTLY_S / 2
        for process in left:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.01, deadline_s - time.monotonic()))
                continue
            _kill(process, _KILL)

    # -- inside -----------------------------------------------------------------------------

    def _perform(self, action: Command | Webhook, facts: dict[str, Any]) -> None:
        try:
            result = self._run(action, facts) if isinstance(action, Command) else _post(action, facts)
        except Exception as problem:
            # Any failure of an action is reported and affects nothing else.
            # The text of an error may quote a webhook's address, whose path is often the password.
            told = "" if isinstance(action, Webhook) else f": {problem}"
            result = f"failed: {type(problem).__name__}{told}"
        with contextlib.suppress(Exception):
            self._report(f"{action}: {result}")

    def _run(self, action: Command, facts: dict[str, Any]) -> str:
        own = {name: str(facts[fact]) for name, fact in _VARIABLES.items() if facts.get(fact) is not None}
        with self._lock:
            if self._is_closed:
                return "not started, the training is over"
            # The command gets a process group of its own, so that it can be killed with its children and does not
            # receive Ctrl-C. It inherits no file of the training, so that it does not hold open a pipe that the
            # training writes to.
            process = subprocess.Popen(
                action.command, shell=isinstance(action.command, str), env={**ENVIRONMENT, **own},
                stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output, close_fds=True,
                start_new_session=True,
            )  # fmt: skip
            self._commands.append(process)
        try:
            status = process.wait(action.within_s)
        except subprocess.TimeoutExpired:
            _kill(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GENTLY_S)
            _kill(process, _KILL)
            process.wait()
            return f"killed after {action.within_s:g} s, its time limit"
        finally:
            with self._lock:
                self._commands.remove(process)
        return "done" if status == 0 else f"failed with status {status}"


def _kill(process: subprocess.Popen[bytes], number: int) -> None:
    """Kill the command and its children."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, number)
        else:
            process.kill()


def _post(action: Webhook, facts: dict[str, Any]) -> str:
    # Importing http, ssl and email takes 0.1 s, so they are imported only where a webhook is used.
    from base64 import b64encode
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.parse import unquote, urlsplit
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    from penstock.monitor.alerts.deadline import Deadline

    class NoRedirects(HTTPRedirectHandler):
        def redirect_request(self, *_: Any, **__: Any) -> None:
            # A redirected request would be a GET without the facts, to an address that the user did not give.
            return None

    headers = {"Content-Type": "application/json", "User-Agent": f"penstock/{__version__}"}
    parts = urlsplit(action.url)
    user, at, host = parts.netloc.rpartition("@")
    if at:
        # urllib would read the user, the password and the host together as the name of the host.
        headers["Authorization"] = f"Basic {b64encode(unquote(user).encode()).decode()}"
    body = json.dumps(facts, default=str).encode()
    request = Request(parts._replace(netloc=host).geturl(), data=body, headers=headers, method="POST")
    with Deadline(action.within_s) as deadline:
        try:
            with build_opener(NoRedirects(), *deadline.handlers).open(request, timeout=action.within_s) as answer:
                answer.read(_LONGEST_ANSWER_BYTES)
                status = f"answered {answer.status}"
        except HTTPError as refused:
            refused.close()
            status = f"failed: answered {refused.code}"
        except (URLError, OSError, HTTPException) as problem:
            if deadline.is_over or isinstance(getattr(problem, "reason", problem), TimeoutError):
                return f"failed: timed out, no complete answer within {action.within_s:g} s"
            reason = getattr(problem, "reason", problem)
            return f"failed: {getattr(reason, 'strerror', None) or type(reason).__name__}"
    return f"failed: timed out, no complete answer within {action.within_s:g} s" if deadline.is_over else status
