"""The command line: `penstock COMMAND`, the same as `python -m penstock COMMAND`.

In:  the process's arguments.
Out: pages for people, JSON for programs, an exit status: 0 done, 1 found a problem or failed, 2 wrong usage.
Runs in: command line. Starts without torch.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import NoReturn

__all__ = ["main"]

_NEEDED = ("click", "rich")


def main() -> NoReturn:
    """Run the program on ``sys.argv`` and exit with its status."""
    try:
        # A core install lacks click and rich, and a traceback would not name the extra to install.
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            sys.stderr.write(
                f"penstock: the command line needs {' and '.join(missing)}, not installed here; "
                'run: pip install "penstock[cli]"\n'
            )
            sys.exit(1)
        from penstock.cli.app import run

        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(130)
