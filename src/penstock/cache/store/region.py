"""What one tier of a cache shares: what lies where, the same in every process that has it open.

In:  two files, in memory or on disk, and a lock file.
Out: the header's words, the rows of threads, the table of entries and the bytes of values.
Runs in: trainer and worker.

*meta* holds the header, a row per thread that uses the cache, and the table; *data* the values. Both are far larger
than what they hold: pages exist where something was written, and go when it is removed. Whoever changes the header or
the table holds the writer's lock and marks the header as being changed; a mark found by the next holder means that
the last one died at it (``repair``).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock.arena import mapping
from penstock.cache.store.locks import RangeLock
from penstock.errors import CacheError

PAGE_BYTES = mmap.PAGESIZE
MAGIC = 0x334B4354534E4550
"""The layout below; another layout, another number."""

META_BYTES = 1 << 34
HEADER_BYTES = 4096
_HEADER_WORDS = HEADER_BYTES // 8
ROWS = 1024
ROW_WORDS = 8
ENTRY_WORDS = 8
ENTRY_BYTES = 8 * ENTRY_WORDS
FIRST_SLOTS_LOG2 = 10
_ROWS_AT = HEADER_BYTES
TABLES_AT = _ROWS_AT + 8 * ROWS * ROW_WORDS

# Words of the header.
H_MAGIC, H_LIMIT, H_TABLE, H_CHANGING, H_ITEMS, H_VALUE_BYTES, H_CURSOR, H_GAP_END = range(8)
H_EVICTIONS, H_HITS, H_MISSES, H_PASSED, H_USED_SLOTS, H_VIRTUAL, H_CORRUPT, H_POLICY = range(8, 16)
H_TAGS, H_READY, H_AUTO, H_CLAIMS = range(16, 20)

H_PLACES = 64
"""From here on, one word per loader: which plan it is at, and how far; see ``plans``."""
MOST_PLANS = 256

H_GROUPS = 320
"""From here on, the groups of values that somebody has asked for since the tier was opened."""
MOST_GROUPS = 128

# Words of a thread's row.
R_READING, R_HITS, R_MISSES, R_PASSED, R_WRITING, R_CORRUPT = range(6)

# Bytes of the lock file.
L_WRITER, L_ROWS, L_PLANS, L_KEYS = 0, 1 << 20, 1 << 21, 1 << 32

_WRITER_WITHIN_S = 5.0


class Packed(Protocol):
    """A value ready to be written."""

    total_bytes: int

    def write(self, target: np.ndarray) -> None: ...


class Place(NamedTuple):
    """Where a value is to lie."""

    offset: int
    has_pages: bool
    """Whether another value lay there, whose memory is still there."""


class Region:
    """One process's view of what a tier shares; see ``Memory`` and ``Disk``."""

    record_bytes = 0
    """What lies before a value in its extent."""

    def __init__(self, meta_fd: int, data_fd: int, lock_fd: int) -> None:
        """Takes over the descriptors of files that ``write_header`` was called on."""
        self.meta_fd, self.data_fd, self.lock_fd = meta_fd, data_fd, lock_fd
        self._meta_buffer = mapping.map_shared(meta_fd, META_BYTES)
        self.meta = memoryview(self._meta_buffer).cast("B")
        self.words = self.meta.cast("Q")
        """The same, to be written word by word: each is there or not."""
        words = np.frombuffer(self.meta, np.uint64, TABLES_AT // 8)
        self.header = words[:_HEADER_WORDS]
        if int(self.header[H_MAGIC]) != MAGIC:
            raise CacheError(
                "this cache was made by another version of penstock; end its processes, or use another name"
            )
        self.rows = words[_HEADER_WORDS:].reshape(ROWS, ROW_WORDS)
        self._data = mapping.map_shared(data_fd, int(self.header[H_VIRTUAL]))
        self.values = np.frombuffer(self._data, np.uint8)
        self.repair: Callable[[], None] = lambda: None
        """Makes the table and the header agree again after a process died while changing them."""
        self._writer = RangeLock(lock_fd, L_WRITER)
        self._table: tuple[int, np.ndarray] = (0, words[:0])

    def join(self) -> None:
        """A process that has it open by having been forked uses it for the first time."""

    # -- values -------------------------------------------------------------------------------

    def read(self, digest: bytes, offset: int, used_bytes: int) -> np.ndarray | None:
        """A private copy of a value; None if what lies there is not that key's."""
        raise NotImplementedError

    def write(self, digest: bytes, place: Place, packed: Packed) -> None:
        """Put a value into its extent. Raises OSError."""
        raise NotImplementedError

    def reserve_table(self, where: int) -> None:
        """Make sure a table can be written at that place. Raises OSError."""

    def drop_values(self, start: int, end: int) -> None:
        """Give pages back to the system at once, whoever has them mapped."""
        if end > start:
            assert start >= 0 and end <= len(self.values), "not this tier's to give back"
            mapping.remove(self._data, start, end)

    # -- the table --------------------------------------------------------------------------

    def table(self) -> np.ndarray:
        """The entries, as rows of words. Another array once the table has grown."""
        where = int(self.header[H_TABLE])
        if self._table[0] != where:
            self._table = where, self.table_at(where)
        return self._table[1]

    def table_at(self, where: int) -> np.ndarray:
        slots = 1 << (where & 63)
        return np.frombuffer(self.meta, np.uint64, ENTRY_WORDS * slots, where & ~63).reshape(slots, ENTRY_WORDS)

    @property
    def index_bytes(self) -> int:
        """What header, rows and table take."""
        return TABLES_AT + (ENTRY_BYTES << (int(self.header[H_TABLE]) & 63))

    # -- changing -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self) -> Iterator[np.ndarray]:
        """Hold the writer's lock; gives the header. Raises TooLong if a living process does not let go."""
        with self._writer.held(_WRITER_WITHIN_S):
            header = self.header
            if header[H_CHANGING]:
                self.repair()
            header[H_CHANGING] = 1
            yield header
            # Not after an exception: what it left half done is for the next holder to repair.
            header[H_CHANGING] = 0

    def drop_table(self, where: int) -> None:
        """Give back the pages of a table nobody is directed to any more."""
        start = -(-(where & ~63) // PAGE_BYTES) * PAGE_BYTES
        end = ((where & ~63) + (ENTRY_BYTES << (where & 63))) // PAGE_BYTES * PAGE_BYTES
        if end > start:
            mapping.remove(self._meta_buffer, start, end)

    def close(self) -> None:
        """Let go of this process's view. Values read from it are copies and stay."""
        # What refers back to here would keep the memory until the garbage collector finds the circle.
        self.repair = lambda: None
        for fd in (self.meta_fd, self.data_fd, self.lock_fd):
            if fd >= 0:
                os.close(fd)


_PIECES_A_CALL = 512


def write_pieces(fd: int, pieces: list[Any], offset: int) -> None:
    """One piece after the other, from ``offset`` on. Raises OSError."""
    rest = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    while rest:
        written = os.pwritev(fd, rest[:_PIECES_A_CALL], offset)
        offset += written
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]


def write_header(meta_fd: int, *, limit_bytes: int, virtual_bytes: int, policy: int) -> None:
    header = np.zeros(_HEADER_WORDS, np.uint64)
    header[H_MAGIC], header[H_LIMIT], header[H_VIRTUAL] = MAGIC, limit_bytes, virtual_bytes
    header[H_TABLE], header[H_POLICY] = TABLES_AT | FIRST_SLOTS_LOG2, policy
    os.pwrite(meta_fd, header.tobytes(), 0)
