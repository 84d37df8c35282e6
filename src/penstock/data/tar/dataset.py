"""Reads samples of tar shards in WebDataset's layout, by number.

In:  shards on this machine or in any store that fsspec supports.
Out: a dict per sample, whose members are decoded by their extensions.
Runs in: made in the trainer; read in trainer and worker.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from torch.utils.data import Dataset

from penstock.data.pack.manifest import check_whole
from penstock.data.shared.shared_bytes import NamelessFile
from penstock.data.sources import locate
from penstock.data.tar.brace_names import expand_braces
from penstock.data.tar.catalog import TarCatalog, TarSample
from penstock.data.tar.decoders import Decoder, checked_decoders, decoder_of
from penstock.data.tar.index import KEY, ShardIndex
from penstock.data.tar.index_builder import index_shards
from penstock.data.tar.local_copies import ShardCopies
from penstock.data.tar.members import BLOCK_BYTES, Fault
from penstock.data.tar.open_shards import OpenShards
from penstock.environment import user_cache_folder
from penstock.errors import ConfigError, DataError
from penstock.units import MIB, parse_bytes

_SMALL_BYTES = 32 << 10
"""A sample of up to this size is read in one call. The members of a larger sample are read one by one, which saves a
copy."""
_MOST_BAD_IN_A_ROW = 100
"""After this many bad samples in a row, the error is raised in spite of ``on_error``."""

Policy = str | Callable[[DataError], bool]


class TarDataset(Dataset):
    """Map-style samples of tar shards: ``{"__key__": "dir/name", "jpg": ..., "cls": ...}``.

    ``shards``: a path, a glob, a folder, an fsspec URL, a name with braces (``shards-{000..009}.tar``), or a list of
    these. As in ``webdataset``, adjacent members whose file names are equal up to the first dot form one sample; the
    rest of a name, in lower case, is the member's key in the sample.

    The first use walks each shard and writes an index of it: to ``index_dir`` if given, otherwise beside the shard
    (``<shard>.penstock-index``), or below ``$XDG_CACHE_HOME/penstock`` if the shard's folder cannot be written to. A
    shard that has changed is indexed again.
    ``progress``: whether to print progress to stderr; by default, only if stderr is a terminal.

    ``decode``: whether to decode members. The last extension decides on the type of the value: text (txt, text,
    transcript), JSON (json, jsn), int (cls, cls2, index, inx, id), arrays (npy, npz), images (jpg, jpeg, png, webp,
    ppm, pgm, bmp: uint8 arrays of height, width, RGB; 16-bit grey images: uint16 arrays of height, width), audio (wav,
    flac, ogg, mp3: float32 array and rate), tensors (pt, pth, ``weights_only``). Other members stay bytes; with
    ``decode=False`` all members stay bytes. ``decoders``: a mapping from extensions to functions of bytes, which add to
    these decoders or replace them. Shards that ``penstock pack`` made from a dataset yield the samples of that dataset.

    ``on_error``: "raise" raises every error. "skip" leaves out damaged and unsafe parts of archives together with their
    samples, and replaces a sample that cannot be decoded by the next sample that can. A function receives the
    ``DataError`` and returns true to skip. Errors of disks and networks are always raised, so the sequence of samples
    does not depend on them.

    Remote shards are read from local copies below ``$XDG_CACHE_HOME/penstock``, which take at most ``copies`` bytes
    together.
    """

    splittable = True

    def __init__(
        self,
        shards: str | os.PathLike[str] | Sequence[Any],
        transform: Callable[[Any], Any] | None = None,
        *,
        decode: bool = True,
        decoders: Mapping[str, Decoder] | None = None,
        on_error: Policy = "raise",
        index_dir: str | os.PathLike[str] | None = None,
        copies: str | int = "10GB",
        progress: bool | None = None,
    ) -> None:
        if on_error not in ("raise", "skip") and not callable(on_error):
            raise ConfigError(f'on_error={on_error!r} is not valid; give "raise", "skip" or a function of the error')
        self._transform, self._decode, self._on_error = transform, decode, on_error
        self._decoders = checked_decoders(decoders)
        self._left_out: Counter[str] = Counter()
        self._undecoded = None if on_error == "raise" else SkippedSamples()
        check_whole(shards)
        locations = locate(_named(shards), suffixes=(".tar",))
        local = ShardCopies(user_cache_folder("shards"), parse_bytes(copies, name="copies"))
        kept_in = None if index_dir is None else Path(index_dir)
        indexes = index_shards(locations, index_dir=kept_in, copies=local, progress=progress)
        for location, index in zip(locations, indexes, strict=True):
            for fault in index.faults:
                self._judge(_fault_error(location, fault))
                self._left_out[fault.reason] += 1
        self.form = _common_form(locations, indexes)
        """How to rebuild the samples that ``penstock pack`` took apart; None for shards of other programs."""
        self._catalog = TarCatalog(locations, indexes)
        self._open = OpenShards(locations, self._catalog.versions, local)

    @property
    def skipped(self) -> Counter[str]:
        """How many parts were left out, by reason: the faults of archives, and "decode" for samples that this process
        or a worker could not decode. Each sample counts once, however often it is read."""
        undecoded = 0 if self._undecoded is None else len(self._undecoded)
        return self._left_out + Counter({"decode": undecoded})

    @property
    def shards(self) -> list[str]:
        """Locations of the shards, in the order of their samples."""
        return list(self._catalog.locations)

    @property
    def blocks(self) -> np.ndarray:
        """The index of the first sample of each shard; the last entry is the count of all samples."""
        return self._catalog.blocks

    @property
    def block_bytes(self) -> np.ndarray:
        """The size of each shard."""
        return self._catalog.block_bytes

    def __len__(self) -> int:
        return len(self._catalog)

    def __getitem__(self, index: SupportsIndex) -> Any:
        return self._sample(self._number(index))

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[Any]:
        numbers = [self._number(index) for index in indices]
        samples: list[Any] = [None] * len(numbers)
        # Samples are read in file order and returned in the order of ``indices``.
        for place in sorted(range(len(numbers)), key=numbers.__getitem__):
            samples[place] = self._sample(numbers[place])
        return samples

    def made_of(self) -> tuple[Any, ...]:
        """What the samples depend on, for the fingerprint by which a cache finds samples of earlier runs."""
        return self._catalog, self._transform, self._decode, self._decoders, self._on_error

    def _number(self, index: SupportsIndex) -> int:
        try:
            number = index.__index__()
        except AttributeError:
            raise TypeError(f"a sample number must be an integer, not {type(index).__name__}") from None
        count = len(self._catalog)
        if not -count <= number < count:
            raise IndexError(f"sample {number} of {count}")
        return number % count

    def _sample(self, number: int) -> Any:
        found, tries = self._catalog.find(number), 0
        raw = self._raw(found)
        while True:
            try:
                sample = self._decoded(found, raw)
                break
            except DataError as error:
                self._judge(error)
                assert self._undecoded is not None
                self._undecoded.mark((number + tries) % len(self))
                tries += 1
                if tries >= min(_MOST_BAD_IN_A_ROW, len(self)):
                    raise DataError(
                        f"{tries} samples from number {number} on cannot be decoded; the last: {error}"
                    ) from error
            found = self._catalog.find((number + tries) % len(self))
            raw = self._raw(found)
        return sample if self._transform is None else self._transform(sample)

    def _raw(self, found: TarSample) -> list[bytes]:
        source = self._open.get(found.shard)
        first, last = found.offsets[0], found.offsets[-1] + found.sizes[-1]
        if len(found.offsets) > 1 and last - first <= _SMALL_BYTES:
            data = source.read(first, last - first)
            pieces = [data[at - first : at - first + size] for at, size in zip(found.offsets, found.sizes, strict=True)]
        else:
            pieces = [source.read(at, size) for at, size in zip(found.offsets, found.sizes, strict=True)]
        for piece, size, at in zip(pieces, found.sizes, found.offsets, strict=True):
            if len(piece) != size:
                text = (
                    f"{self._catalog.locations[found.shard]}: only {len(piece)} of {size} bytes could be read at {at}"
                )
                raise DataError(f"{text}; the shard was cut short after it was indexed; make the dataset again")
        return pieces

    def _decoded(self, found: TarSample, raw: list[bytes]) -> Any:
        sample: dict[str, Any] = {KEY: found.key}
        if not self._decode or self.form is not None:
            sample.update(zip(found.suffixes, raw, strict=True))
            if not self._decode or self.form is None:
                return sample
            from penstock.data.sample_forms import restore

            try:
                return restore(self.form, sample)
            except DataError as error:
                raise DataError(f"{self._catalog.locations[found.shard]}: {error}") from error
        for suffix, data, offset in zip(found.suffixes, raw, found.offsets, strict=True):
            decoder = decoder_of(suffix, self._decoders)
            try:
                sample[suffix] = data if decoder is None else decoder(data)
            except ConfigError:
                raise
            except Exception as problem:
                where = f"{self._catalog.locations[found.shard]}: member {found.key}.{suffix}"
                text = f"{where} ({len(data)} bytes at {offset}) cannot be decoded: {problem or type(problem).__name__}"
                raise DataError(text) from problem
        return sample

    def _judge(self, error: DataError) -> None:
        """Raise the error unless ``on_error`` says to skip it."""
        policy = self._on_error
        if policy != "skip" and not (callable(policy) and policy(error)):
            raise error


class SkippedSamples(NamelessFile):
    """Marks of the samples that were skipped, from all processes that read the dataset.

    Each sample has a byte. If it had only a bit, two processes that mark neighbouring samples could undo each other's
    mark. The file takes memory only where samples are marked. It is read by position, because reading a mapping would
    allocate each page that is read.
    """

    def mark(self, number: int) -> None:
        os.pwrite(self._fd, b"\1", number)

    def __len__(self) -> int:
        total = at = 0
        while piece := os.pread(self._fd, MIB, at):
            total += piece.count(1)
            at += len(piece)
        return total


def _named(shards: Any) -> Any:
    """Names with braces expanded, unless a file has that very name."""
    if isinstance(shards, (str, os.PathLike)):
        name = os.fspath(shards)
        return name if "{" not in name or Path(name).exists() else expand_braces(name)
    return [_named(one) for one in shards]


def _fault_error(location: str, fault: Fault) -> DataError:
    name = fault.name[-200:].decode("utf-8", "replace")
    member = f"member {name!r} at byte {fault.offset}" if name else f"at byte {fault.offset}"
    after = "; nothing after it can be read" if fault.is_end and fault.offset >= BLOCK_BYTES else ""
    return DataError(f'{location}: {member}: {fault.text}{after} (on_error="skip" leaves out what is damaged)')


def _common_form(locations: Sequence[str], indexes: Sequence[ShardIndex]) -> str | None:
    # A shard that is damaged before its first sample may have lost its form as well.
    forms = [
        (location, index.form)
        for location, index in zip(locations, indexes, strict=True)
        if len(index) or not any(fault.is_end for fault in index.faults)
    ]
    for location, form in forms:
        if form != forms[0][1]:
            raise DataError(
                f"{forms[0][0]} and {location} were packed from different kinds of samples; "
                "read them as separate datasets"
            )
    return forms[0][1] if forms else None
