"""Where the samples of one shard are: adjacent members whose names are equal up to the first dot form one sample.

In:  the members and faults of a shard (``members.walk``).
Out: a ``ShardIndex``, which has keys, suffixes, offsets and sizes as arrays, and what was left out; ``to_bytes`` writes
     it, and ``from_bytes`` reads and checks it.
Runs in: trainer, command line.

The bytes of an index are a magic number, a digest of all bytes that follow, the length of a JSON text, this text, and
the arrays that the text describes. The bytes contain no code, and ``from_bytes`` rejects an index that is damaged,
inconsistent or of another version of the shard.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from penstock.data.tar.members import BLOCK_BYTES, Fault, Form, TarMember

KEY = "__key__"
NAMES = ("utf-8", "surrogateescape")
"""The encoding of names, which may be any bytes in archives."""

_MAGIC = b"penstock tar index 1\n"
_DIGEST_BYTES = 16
_LENGTH = struct.Struct("<Q")
_PARTS = re.compile(rb"((?:.*/)?[^.]+)\.([^/]*)", re.DOTALL)
_META = re.compile(rb"__[^/]*__(/|$)")


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """The samples of one shard."""

    version: str
    """The version of the shard, as ``Source.version``."""
    size_bytes: int
    form: str | None
    faults: list[Fault]
    suffixes: list[str]
    keys: bytes
    """All keys, one after another."""
    key_ends: np.ndarray
    """0, followed by the place in ``keys`` where each sample's key ends."""
    firsts: np.ndarray
    """For each sample, the index of its first member; the last entry is the count of all members."""
    offsets: np.ndarray
    """Where the data of each member begin."""
    sizes: np.ndarray
    """Bytes of each member."""
    suffix_numbers: np.ndarray
    """For each member an index into ``suffixes``."""

    def __len__(self) -> int:
        return len(self.firsts) - 1


def index_of(found: Iterable[TarMember | Fault | Form], *, version: str, size_bytes: int) -> ShardIndex:
    """Group members into samples. A sample with a fault is left out as a whole."""
    form: str | None = None
    faults: list[Fault] = []
    numbers: dict[bytes, int] = {}
    suffixes: dict[str, int] = {}
    keys, key_ends, firsts = bytearray(), array("q", [0]), array("q", [0])
    offsets, sizes, suffix_numbers = array("q"), array("q"), array("I")
    key: bytes | None = None
    is_good, taken = True, set[int]()

    def finish(is_whole: bool) -> None:
        nonlocal key
        if key is not None:
            if is_whole and is_good:
                keys.extend(key)
                key_ends.append(len(keys))
                firsts.append(len(offsets))
            else:
                del offsets[firsts[-1] :], sizes[firsts[-1] :], suffix_numbers[firsts[-1] :]
        key = None

    for one in found:
        if isinstance(one, Form):
            if form not in (None, one.text):
                faults.append(Fault("two forms", 0, b"", "the archive has more than one PENSTOCK.form", False))
            form = one.text
            continue
        if isinstance(one, Fault):
            faults.append(one)
            if one.is_end and not one.name:
                # Members after this fault may have belonged to the sample before the fault.
                finish(is_whole=False)
        parts = None if _META.match(one.name) else _PARTS.fullmatch(one.name)
        if parts is None:
            continue
        its_key, raw_suffix = parts.groups()
        if its_key != key:
            finish(is_whole=True)
            key, is_good = its_key, True
            taken.clear()
        if isinstance(one, Fault):
            is_good = False
            continue
        number = numbers.get(raw_suffix)
        if number is None:
            suffix = raw_suffix.decode(*NAMES).lower()
            number = numbers[raw_suffix] = suffixes.setdefault(suffix, len(suffixes))
        if number in taken or number == suffixes.get(KEY):
            text = "its sample already has a member of this name"
            faults.append(Fault("duplicate", one.offset - BLOCK_BYTES, one.name, text, False))
            is_good = False
            continue
        taken.add(number)
        offsets.append(one.offset)
        sizes.append(one.size_bytes)
        suffix_numbers.append(number)
    finish(is_whole=True)
    return ShardIndex(
        version=version,
        size_bytes=size_bytes,
        form=form,
        faults=faults,
        suffixes=list(suffixes),
        keys=bytes(keys),
        key_ends=np.array(key_ends, "<i8"),
        firsts=np.array(firsts, "<i8"),
        offsets=np.array(offsets, "<i8"),
        sizes=np.array(sizes, "<i8"),
        suffix_numbers=np.array(suffix_numbers, "<u4"),
    )


def to_bytes(index: ShardIndex) -> bytes:
    head = {
        "version": index.version,
        "size_bytes": index.size_bytes,
        "form": index.form,
        "faults": [[f.reason, f.offset, f.name.decode("latin-1"), f.text, f.is_end] for f in index.faults],
        "suffixes": [suffix.encode(*NAMES).decode("latin-1") for suffix in index.suffixes],
        "samples": len(index),
        "members": len(index.offsets),
        "key_bytes": len(index.keys),
    }
    text = json.dumps(head).encode()
    arrays = (index.key_ends, index.firsts, index.offsets, index.sizes, index.suffix_numbers)
    body = b"".join([_LENGTH.pack(len(text)), text, *(array.tobytes() for array in arrays), index.keys])
    return _MAGIC + _digest(body) + body


def from_bytes(data: bytes, *, version: str, size_bytes: int) -> ShardIndex | None:
    """The index from its bytes; None if they are damaged or belong to another version of the shard."""
    start = len(_MAGIC) + _DIGEST_BYTES
    if not data.startswith(_MAGIC) or data[len(_MAGIC) : start] != _digest(memoryview(data)[start:]):
        return None
    try:
        (length,) = _LENGTH.unpack_from(data, start)
        at = start + _LENGTH.size
        head = json.loads(data[at : at + length])
        at += length
        samples, members, key_bytes = head["samples"], head["members"], head["key_bytes"]
        arrays: list[np.ndarray] = []
        for count in (samples + 1, samples + 1, members, members):
            arrays.append(np.frombuffer(data, "<i8", count, at))
            at += arrays[-1].nbytes
        arrays.append(np.frombuffer(data, "<u4", members, at))
        at += arrays[-1].nbytes
        index = ShardIndex(
            version=head["version"],
            size_bytes=head["size_bytes"],
            form=head["form"],
            faults=[Fault(str(r), int(o), n.encode("latin-1"), str(t), bool(e)) for r, o, n, t, e in head["faults"]],
            suffixes=[suffix.encode("latin-1").decode(*NAMES) for suffix in head["suffixes"]],
            keys=data[at:],
            key_ends=arrays[0],
            firsts=arrays[1],
            offsets=arrays[2],
            sizes=arrays[3],
            suffix_numbers=arrays[4],
        )
        if (index.version, index.size_bytes) != (version, size_bytes) or len(index.keys) != key_bytes:
            return None
        return index if _fits_together(index) else None
    except (ValueError, TypeError, LookupError, AttributeError, struct.error, RecursionError, OverflowError):
        return None


def _fits_together(index: ShardIndex) -> bool:
    """Whether all offsets lie inside the shard and in order, and all numbers refer to existing entries."""
    members = len(index.offsets)
    ends = index.offsets + index.sizes
    return bool(
        isinstance(index.form, (str, type(None)))
        and _climbs(index.key_ends, 0, len(index.keys))
        and _climbs(index.firsts, 0, members)
        and (not len(index) or (np.diff(index.firsts) > 0).all())
        and (index.sizes >= 0).all()
        and (index.offsets >= BLOCK_BYTES).all()
        and (index.offsets <= index.size_bytes).all()
        and (index.sizes <= index.size_bytes - index.offsets).all()
        and (index.offsets[1:] - ends[:-1] >= BLOCK_BYTES).all()
        and (index.suffix_numbers < len(index.suffixes)).all()
    )


def _climbs(places: np.ndarray, start: int, end: int) -> bool:
    return bool(places[0] == start and places[-1] == end and (np.diff(places) >= 0).all())


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
