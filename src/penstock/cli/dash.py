"""`penstock dash`: recorded and running trainings as a web page.

In:  the runs of this user's state folder; the address to listen on.
Out: one line with the address; a server until Ctrl-C.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import socket
import tempfile
import threading
import time
import webbrowser
from contextlib import ExitStack
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from penstock.cli.options import echo
from penstock.cli.signals import sigterm_as_exit
from penstock.environment import DASH_TOKEN_VARIABLE, dash_token
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.web.access import Access

_NEEDED = ("starlette", "uvicorn")
_BACKLOG = 128
_REDIRECT_S = 60.0
"""Time for a browser to read the file that redirects it to the page."""


@click.command(
    epilog="Exit status: 1 if the server cannot listen or RUN does not exist; 130 after Ctrl-C, 143 after SIGTERM."
)
@click.argument("run", required=False)
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Listen on this address.")
@click.option("--port", type=click.IntRange(0, 65535), metavar="N", default=8787, show_default=True,
              help="Listen on this port; 0 for any free port.")  # fmt: skip
@click.option("--open", "open_wanted", is_flag=True, help="Open the page in a browser.")
@click.option("--token-file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Read the token from this file; if it is empty or absent, write a new token to it.")  # fmt: skip
@click.option("--json", "json_wanted", is_flag=True, help="Print the address as one JSON object.")
@click.option("--grafana", "grafana_wanted", is_flag=True, help="Print a Grafana dashboard for /metrics and exit.")
def command(
    run: str | None,
    host: str,
    port: int,
    open_wanted: bool,
    token_file: Path | None,
    json_wanted: bool,
    grafana_wanted: bool,
) -> None:
    """Show trainings live in a web browser: memory by component, speed, waiting, GPUs, cache, events. Change settings
    of running loaders and compare runs. The page opens with RUN (an id or its beginning, a name, or "last").

    The printed address has a token after #. Changes need the token; reading needs it too if ADDRESS is not a loopback
    address. On loopback, other users of this machine can read the figures but change nothing. With PENSTOCK_DASH_TOKEN
    or --token-file the token stays the same at every start. In the last example, FILE holds "Authorization: Bearer
    TOKEN", because every user of the machine can read command lines.

    \b
    penstock dash
    penstock dash last --open
    penstock dash --grafana > penstock.json
    ssh -t -L 8787:127.0.0.1:8787 gpu-box penstock dash
    curl -H @FILE http://gpu-box:8787/metrics
    """
    if grafana_wanted:
        from penstock.monitor.export.prometheus import grafana_dashboard

        echo(grafana_dashboard())
        return
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise PenstockError(
            f'the web page needs {" and ".join(missing)}, which is not installed; run: pip install "penstock[dash]"'
        )
    from penstock.environment import state_folder
    from penstock.monitor.runs.reader import open_run
    from penstock.web.server import PageServer

    home, run_id = state_folder(), None
    if run is not None:
        with open_run(home, run) as found:
            run_id = found.id
    with ExitStack() as left, sigterm_as_exit():
        listener = left.enter_context(_listen(host, port))
        access = _access(host, listener, token_file)
        server = PageServer(listener=listener, home=home, access=access)
        port = listener.getsockname()[1]
        url = f"http://{_shown_host(host, access)}:{port}/#token={quote(access.token, safe='')}"
        url += "" if run_id is None else f"&run={quote(run_id, safe='')}"
        if not access.is_loopback:
            echo(
                f"penstock: other machines can reach {host}. Anyone with the token can read the figures of all runs "
                "and change their settings, and the connection is not encrypted; if you connect with ssh -L, 127.0.0.1 "
                "is enough",
                err=True,
            )
        if json_wanted:
            answer = {"url": url, "host": host, "port": port, "token": access.token, "run": run_id, "home": str(home)}
            echo(json.dumps(answer))
        else:
            echo(f"penstock dash: {url}  (stop with Ctrl-C)")
        if open_wanted:
            redirect = _redirect_to(url)
            left.callback(redirect.unlink, missing_ok=True)
            # A browser in the terminal returns only when it is closed, and needs the server until then.
            threading.Thread(target=_open_browser, args=(redirect,), name="browser", daemon=True).start()
        server.run()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = min(
            # If a name has addresses of both kinds, the IPv4 address is used.
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE),
            key=lambda found: found[0] != socket.AF_INET,
        )
    except (OSError, UnicodeError):
        raise PenstockError(
            f"--host {host!r} is not an address; use 127.0.0.1 to listen on this machine only"
        ) from None
    listener: socket.socket | None = None
    try:
        listener = socket.socket(family, kind)
        # Without SO_REUSEADDR, the port of a server that ended with open pages is taken for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as refused:
        if listener is not None:
            listener.close()
        raise PenstockError(_cannot_listen(host, port, refused)) from None
    return listener


def _cannot_listen(host: str, port: int, refused: OSError) -> str:
    if refused.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is in use, perhaps by another penstock dash; use "
            f"penstock dash --port {port + 1 if 0 < port < 65535 else 8787}, or --port 0 for any free port"
        )
    if refused.errno == errno.EADDRNOTAVAIL:
        return (
            f"{host} is not an address of this machine; use 127.0.0.1 if only this machine connects, 0.0.0.0 if "
            "other machines do too"
        )
    if refused.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} of {host} is not allowed for this user ({refused.strerror}); --port 0 takes any free port"
    return f"cannot listen on port {port} of {host}: {refused.strerror}; --port 0 takes any free port"


def _access(host: str, listener: socket.socket, token_file: Path | None) -> Access:
    from penstock.web.access import Access, new_token, token_problem

    chosen, source = dash_token(), DASH_TOKEN_VARIABLE
    if token_file is not None:
        chosen, source = _kept_token(token_file), str(token_file)
    access = Access.to(host, listener.getsockname()[0], chosen or new_token())
    problem = token_problem(access.token)
    if problem is not None:
        raise PenstockError(f"{source}: {problem}")
    return access


def _kept_token(path: Path) -> str:
    """The token in the file; a missing or empty file gets a new token that only this user can read."""
    from penstock.web.access import new_token

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+", encoding="ascii", errors="replace") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise PenstockError(
                    f"{path} can be read by other users, but its token is secret; run: chmod 600 {path}"
                )
            token = file.read(4096).strip()
            if not token:
                token = new_token()
                file.seek(0)
                file.write(token + "\n")
            return token
    except OSError as problem:
        raise PenstockError(f"--token-file {path} cannot be used: {problem.strerror}") from None


def _shown_host(host: str, access: Access) -> str:
    """The host as a browser needs it: 0.0.0.0 is not an address to connect to."""
    name = socket.gethostname() if access.takes_any_address else host
    return f"[{name}]" if ":" in name else name


def _redirect_to(url: str) -> Path:
    """A file that redirects to ``url``: the address has the token, and every user of the machine can read a browser's
    command line."""
    descriptor, name = tempfile.mkstemp(prefix="penstock-dash-", suffix=".html")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(url)}">\n')
    return Path(name)


def _open_browser(page: Path) -> None:
    try:
        is_open = webbrowser.open(page.as_uri())
    except (webbrowser.Error, OSError):
        is_open = False
    if not is_open:
        echo("penstock: no browser could be started here; open the address above", err=True)
    # The token must not stay in a file while the server runs.
    time.sleep(_REDIRECT_S)
    page.unlink(missing_ok=True)
