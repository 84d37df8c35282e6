"""Joins the indexes of all shards into one catalog, in memory that workers share.

In:  the locations of the shards and their indexes.
Out: for each sample its shard, its key, and the place, size and suffix of its members.
Runs in: built in the trainer; read in trainer and worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.data.shared.shared_bytes import SharedBytes
from penstock.data.tar.index import NAMES, ShardIndex

_MOST_SUFFIXES_KEPT = 1 << 16


class TarSample(NamedTuple):
    """Where one sample is."""

    shard: int
    key: str
    suffixes: list[str]
    offsets: list[int]
    sizes: list[int]


class TarCatalog:
    """The samples of all shards, numbered consecutively in the order of the shards."""

    def __init__(self, locations: Sequence[str], indexes: Sequence[ShardIndex]) -> None:
        self.locations = list(locations)
        self.versions = [index.version for index in indexes]
        self.blocks = _sums([len(index) for index in indexes])
        self.block_bytes = np.array([index.size_bytes for index in indexes], np.int64)
        self._members = sum(len(index.offsets) for index in indexes)
        vocabulary: dict[str, int] = {}
        for index in indexes:
            for suffix in index.suffixes:
                vocabulary.setdefault(suffix, len(vocabulary))
        names = [suffix.encode(*NAMES) for suffix in vocabulary]
        self._suffix_count = len(names)
        self._shared = SharedBytes.of(_pieces(indexes, vocabulary, names))
        self._open()

    def __len__(self) -> int:
        return int(self.blocks[-1])

    def made_of(self) -> tuple[Any, ...]:
        """What the samples depend on."""
        return self.locations, self.versions

    def find(self, number: int) -> TarSample:
        first, last = self._firsts.item(number), self._firsts.item(number + 1)
        key_start, key_end = self._key_ends.item(number), self._key_ends.item(number + 1)
        return TarSample(
            shard=int(self.blocks.searchsorted(number, "right")) - 1,
            key=str(self._keys[key_start:key_end], *NAMES),
            suffixes=[self._suffix(one) for one in self._suffix_numbers[first:last].tolist()],
            offsets=self._offsets[first:last].tolist(),
            sizes=self._sizes[first:last].tolist(),
        )

    def _suffix(self, number: int) -> str:
        text = self._suffixes.get(number)
        if text is None:
            if len(self._suffixes) >= _MOST_SUFFIXES_KEPT:
                # If every member of an archive had a different suffix, this dict would grow in every worker.
                self._suffixes.clear()
            start, end = self._suffix_ends.item(number), self._suffix_ends.item(number + 1)
            text = self._suffixes[number] = str(self._suffix_names[start:end], *NAMES)
        return text

    def _open(self) -> None:
        """Create the views of the shared bytes, in the order of ``_pieces``."""
        samples, members, suffixes = len(self), self._members, self._suffix_count
        at = 0

        def take(dtype: str, count: int) -> np.ndarray:
            nonlocal at
            view = self._shared.array(dtype, at, count)
            at += view.nbytes
            return view

        self._firsts, self._key_ends = take("<i8", samples + 1), take("<i8", samples + 1)
        self._offsets, self._sizes = take("<i8", members), take("<i8", members)
        self._suffix_ends = take("<i8", suffixes + 1)
        self._suffix_numbers = take("<u4", members)
        rest = self._shared.view()[at:]
        name_bytes = self._suffix_ends.item(suffixes)
        self._suffix_names, self._keys = rest[:name_bytes], rest[name_bytes:]
        self._suffixes: dict[int, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        kept = ("locations", "versions", "blocks", "block_bytes", "_members", "_suffix_count", "_shared")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


def _pieces(indexes: Sequence[ShardIndex], vocabulary: dict[str, int], names: list[bytes]) -> Iterator[Any]:
    """The bytes of the catalog. Arrays of eight-byte numbers come first, so that all arrays are aligned."""
    for part in ("firsts", "key_ends"):
        base = 0
        yield np.zeros(1, "<i8")
        for index in indexes:
            ends = getattr(index, part)
            yield ends[1:] + base
            base += int(ends[-1])
    for index in indexes:
        yield index.offsets
    for index in indexes:
        yield index.sizes
    yield _sums([len(name) for name in names])
    for index in indexes:
        renumbered = np.array([vocabulary[suffix] for suffix in index.suffixes], "<u4")
        yield renumbered[index.suffix_numbers]
    yield b"".join(names)
    for index in indexes:
        yield index.keys


def _sums(counts: list[int]) -> np.ndarray:
    return np.concatenate([np.zeros(1, "<i8"), np.cumsum(np.array(counts, "<i8"))])
