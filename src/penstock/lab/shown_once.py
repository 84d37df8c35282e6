"""Warnings of the user's code, each shown once by all processes of a measurement together.

In:  warnings, in this process and in those that are forked from it: a probe, and the workers of every short run.
Out: the first of each text.
Runs in: trainer, probe, workers.
"""

from __future__ import annotations

import mmap
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_TEXTS = 1 << 15
_shown = mmap.mmap(-1, _TEXTS)
"""A byte for each text, by its checksum. Forked processes share it."""


@contextmanager
def shown_once() -> Iterator[None]:
    """Inside, a warning that any of these processes has shown is not shown again."""
    with warnings.catch_warnings():
        show: Any = warnings.showwarning

        def show_first(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any, **named: Any
        ) -> None:
            text = zlib.crc32(f"{category.__name__} {filename} {lineno} {message}".encode()) % _TEXTS
            if not _shown[text]:
                _shown[text] = 1
                show(message, category, filename, lineno, *more, **named)

        warnings.showwarning = show_first
        yield
