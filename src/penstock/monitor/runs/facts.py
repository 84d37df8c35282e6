"""The facts of a run, recorded once at its start: machine, program, command line.

In:  this process and its machine.
Out: facts, as in ``runs.format.FACTS``. Never the environment, which contains secrets.
Runs in: trainer.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from penstock import meter
from penstock._version import __version__
from penstock.environment import launcher_ranks
from penstock.monitor.runs.format import LONGEST_NAME
from penstock.monitor.runs.liveness import boot_id

_SECRET_OPTION = re.compile(
    r"(?i)^-{0,2}[\w.-]*(key$|token(?!iz)|secret|passw|pwd|auth(?!or)|credential|cookie|bearer)[\w.-]*$"
)
_SECRET_TEXT = re.compile(
    r"(?i)(?<![A-Za-z0-9])(hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[bp]-|AKIA|ASIA|AIza|ya29\.|eyJ)[A-Za-z0-9_\-.]{8,}"
)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "***"
_LONGEST_WORD = 1000
_MOST_WORDS = 200


def run_facts(name: str | None, started_s: float) -> dict[str, Any]:
    """All facts except those of the loaders."""
    limits = meter.limits()
    return {
        "name": run_name(name),
        "started_s": started_s,
        "pid": os.getpid(),
        "process_started_s": _process_started_s(),
        "host": socket.gethostname(),
        "boot_id": boot_id(),
        "user": os.getuid() if hasattr(os, "getuid") else None,
        "command": without_secrets(sys.orig_argv),
        "folder": _folder(),
        "python": {"python": platform.python_version(), "torch": _version("torch"), "penstock": __version__},
        "machine": {**asdict(limits), "platform": platform.platform(), "processor": platform.machine()},
        "rank": launcher_ranks() or None,
    }


def run_name(name: str | None) -> str:
    """The user's name for the run, or the name of the script."""
    text = Path(sys.argv[0] or "python").name if name is None else str(name)
    # Lone surrogates, from a broken argument, cannot be stored.
    return text.encode("utf-8", "replace").decode()[:LONGEST_NAME] or "python"


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line without secrets: values of options whose names mean a secret, and words that look like a secret,
    are hidden."""
    shown: list[str] = []
    hides_next = False
    for word in words[:_MOST_WORDS]:
        option, equals, value = word.partition("=")
        if hides_next and not word.startswith("-"):
            shown.append(_HIDDEN)
            hides_next = False
            continue
        is_secret = bool(_SECRET_OPTION.match(option))
        hides_next = is_secret and not equals and option.startswith("-")
        if is_secret and equals and value:
            shown.append(f"{option}={_HIDDEN}")
        else:
            shown.append(_SECRET_TEXT.sub(_HIDDEN, _USER_IN_URL.sub(_HIDDEN, word))[:_LONGEST_WORD])
    return [word.encode("utf-8", "replace").decode() for word in shown]


def _process_started_s() -> float:
    import psutil

    try:
        return psutil.Process().create_time()
    except psutil.Error:
        return time.time()


def _folder() -> str | None:
    try:
        return str(Path.cwd()).encode("utf-8", "replace").decode()
    except OSError:
        return None  # the folder was removed


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
