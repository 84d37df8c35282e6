"""A tier on disk: it survives the run.

In:  values, from any process of the node that has the tier open.
Out: private copies of values that are exactly what was written; anything else is a miss.
Runs in: trainer and worker.

The same table, locks and rows as in memory, in two sparse files. Every value is preceded by a record of its key, its
length and its checksum, so that whatever a crash left in the files, an entry either leads to its value or to none.
The table is mapped, in room that was reserved. Values are read and written by calls, each as a whole: a full disk, a
failing one or a shortened file is an error and not a signal, and no page of the file counts as a process's memory.
"""

from __future__ import annotations

import os
import struct

import numpy as np

from penstock.cache.store import disk_files
from penstock.cache.store.checksum import CHECKSUM_BYTES, checksum
from penstock.cache.store.region import ENTRY_BYTES, Packed, Place, Region, write_pieces

_RECORD = struct.Struct(f"<8s16sQ{CHECKSUM_BYTES}s")
_RECORD_MAGIC = b"penstock"


class Disk(Region):
    record_bytes = 64

    def join(self) -> None:
        disk_files.join(self.lock_fd)

    def read(self, digest: bytes, offset: int, used_bytes: int) -> np.ndarray | None:
        record = os.pread(self.data_fd, _RECORD.size, offset)
        if len(record) < _RECORD.size:
            return None
        magic, key, length, check = _RECORD.unpack(record)
        # Before any memory is taken: an index that was damaged may say anything.
        if magic != _RECORD_MAGIC or key != digest or length != used_bytes - self.record_bytes:
            return None
        value = np.empty(length, np.uint8)
        rest, offset = value.data, offset + self.record_bytes
        while rest:
            count = os.preadv(self.data_fd, [rest], offset)
            if not count:
                return None
            rest, offset = rest[count:], offset + count
        return value if check == checksum(value) else None

    def write(self, digest: bytes, place: Place, packed: Packed) -> None:
        record = np.zeros(self.record_bytes + packed.total_bytes, np.uint8)
        value = record[self.record_bytes :]
        packed.write(value)
        _RECORD.pack_into(record.data, 0, _RECORD_MAGIC, digest, len(value), checksum(value))
        write_pieces(self.data_fd, [record.data], place.offset)

    def reserve_table(self, where: int) -> None:
        os.posix_fallocate(self.meta_fd, where & ~63, ENTRY_BYTES << (where & 63))
