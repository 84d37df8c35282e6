"""What the fixture ``run_here`` is to the tests that ask for it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

RunHere = Callable[..., subprocess.CompletedProcess[str]]
"""Arguments of a command, then folder=, stdin=, columns= and variables of the environment -> how it ended."""
