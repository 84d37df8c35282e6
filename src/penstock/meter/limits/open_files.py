"""How many files this process may open, and how many it has open.

In:  /proc/self/limits and /proc/self/fd.
Out: ``OpenFiles``.
Runs in: trainer, command line.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.meter.kernel_files import parse_count, read_text
from penstock.meter.roots import Roots

_ROW = "Max open files"
_REAL = Roots()


@dataclass(frozen=True, kw_only=True)
class OpenFiles:
    """Limits and use. None: no limit, or not known."""

    soft: int | None
    """The limit in force (``ulimit -n``)."""
    hard: int | None
    """What the process may raise it to."""
    used: int | None
    """Descriptors in use."""


def read_open_files(roots: Roots) -> OpenFiles:
    soft, hard = parse_open_file_limits(read_text(roots.proc / "self" / "limits") or "")
    try:
        used = sum(1 for _ in (roots.proc / "self" / "fd").iterdir())
    except OSError:
        used = None
    return OpenFiles(soft=soft, hard=hard, used=used)


def spare_files(*, roots: Roots = _REAL) -> int | None:
    """How many more files this process may open; None where there is no limit, or none is known."""
    files = read_open_files(roots)
    return None if files.soft is None or files.used is None else max(0, files.soft - files.used)


def parse_open_file_limits(text: str) -> tuple[int | None, int | None]:
    """Soft and hard limit out of lines such as "Max open files     1024     1048576     files"."""
    for line in text.splitlines():
        words = line.removeprefix(_ROW).split()
        if line.startswith(_ROW) and len(words) >= 2:
            return parse_count(words[0]), parse_count(words[1])
    return None, None
