"""Reads small files of the kernel as a whole, and parses them without raising errors.

In:  a path under /proc or in a cgroup, which may be absent, forbidden, or in another format.
Out: text, one number, or a table of counters; None if the file does not have it.
Runs in: trainer, worker, command line.
"""

from __future__ import annotations

import os

PAGE_BYTES: int = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096

_CHUNK_BYTES = 1 << 16
_LONGEST_COUNT = 20  # digits of 2**64 - 1


def read_text(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> str | None:
    """The whole file; None if the file cannot be opened or read.

    It uses plain descriptors, because ``open()`` in text mode takes three times as long per file.
    """
    try:
        return read_or_raise(path, dir_fd=dir_fd)
    except OSError:
        return None


def read_or_raise(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> str:
    """The whole file. Raises OSError, for callers that must distinguish a missing file from a forbidden file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        # The kernel may return a long table in pieces, even with a large buffer.
        pieces: list[bytes] = []
        while piece := os.read(fd, _CHUNK_BYTES):
            pieces.append(piece)
    finally:
        os.close(fd)
    return b"".join(pieces).decode("utf-8", "surrogateescape")


def read_count(path: str | os.PathLike[str]) -> int | None:
    """The number in a file; None for "max", for -1 (cgroup v1's way to write "max"), and for any other text."""
    text = read_text(path)
    return None if text is None else parse_count(text)


def parse_count(text: str) -> int | None:
    digits = text.strip()
    if digits.isascii() and digits.isdigit() and len(digits) <= _LONGEST_COUNT:
        return int(digits)
    return None


def parse_counters(text: str) -> dict[str, int]:
    """Key -> number, from lines of "key value" or "Key:  value kB" (converted to bytes); other lines are ignored."""
    counters: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) < 2 or (value := parse_count(words[1])) is None:
            continue
        scale = 1024 if len(words) > 2 and words[2] == "kB" else 1
        counters[words[0].removesuffix(":")] = value * scale
    return counters


def find_counter(text: str, key: str) -> int | None:
    """One counter of ``parse_counters``, without parsing the other counters. ``key`` includes the character that
    follows it in the file: ":" or a space."""
    start = 0 if text.startswith(key) else text.find("\n" + key) + 1
    if start == 0 and not text.startswith(key):
        return None
    end = text.find("\n", start)
    return parse_counters(text[start : end if end >= 0 else None]).get(key.rstrip(": "))
