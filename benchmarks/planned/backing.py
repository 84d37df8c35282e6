"""Memory that the machine really has, before a run takes it.

In:  a number of bytes.
Out: nothing; the kernel's free pages are backed by memory for the next seconds.
Runs in: the harness, in a child of its own, between runs.

A virtual machine may hand free memory back to its host within seconds, and the host zeroes and maps every page again
when it is next touched: 10 µs a page instead of 3. What a run is charged for that depends on what ran before it.
"""

from __future__ import annotations

import subprocess
import sys

_TOUCH = """
import mmap, sys
mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
"""


def back(size_bytes: int) -> None:
    """Touch so many bytes, and let go of them."""
    subprocess.run([sys.executable, "-c", _TOUCH, str(max(1, size_bytes))], check=True)
