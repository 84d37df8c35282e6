"""Samples of tar shards in WebDataset's layout, by number.

In:  shards on this machine or anywhere fsspec reaches.
Out: a dict per sample, its members decoded by extension.
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
from penstock.data.sources import locate
from penstock.data.tar.brace_names import expand_braces
from penstock.data.tar.catalog import TarCatalog, TarSample
from penstock.data.tar.decoders import Decoder, checked_decoders, decoder_of
from penstock.data.tar.index import KEY, ShardIndex
from penstock.data.tar.index_builder import index_shards
from penstock.data.tar.local_copies import ShardCopies
from penstock.data.tar.members import BLOCK_BYTES, Fault
from penstock.data.tar.open_shards import OpenShards
from penstock.data.tar.skipped_samples import SkippedSamples
from penstock.environment import user_cache_folder
from penstock.errors import ConfigError, DataError
from penstock.units import parse_bytes

_SMALL_BYTES = 32 << 10
"""A sample that spans no more is read at once; of a larger one, each member by itself, which saves a copy of it."""
_MOST_IN_VAIN = 100
"""So many bad samples in a row, and it is not a few bad samples."""

Policy = str | Callable[[DataError], bool]


class TarDataset(Dataset):
    """Map-style samples of tar shards: ``{"__key__": "dir/name", "jpg": ..., "cls": ...}``.

    ``shards``: a path, a glob, a folder, an fsspec URL, a name with braces (``shards-{000..009}.tar``), or a list of
    those. Members side by side whose names are equal up to the first dot of the last part are one sample, as in
    ``webdataset``; what follows the dot, in lower case, is the key in the sample.

    The shards are walked once; the index is kept beside each of them (``<shard>.penstock-index``), in ``index_dir``,
    or below ``$XDG_CACHE_HOME/penstock`` where the folder cannot be written, and made anew when a shard has changed.
    ``progress``: a line on stderr meanwhile; by default where that is a terminal.

    ``decode``: by the last extension, text (txt, text, transcript), JSON (json, jsn), int (cls, cls2, index, inx, id),
    arrays (npy, npz), images (jpg, jpeg, png, webp, ppm, pgm, bmp: uint8 arrays of height, width, RGB; grey ones of 16
    bits: uint16 arrays of height, width), audio (wav, flac, ogg, mp3: float32 array and rate), tensors (pt, pth,
    ``weights_only``); the rest stays bytes, and so does all with ``decode=False``. ``decoders``: extension to a
    function of bytes, beside or instead of these. Shards that ``penstock pack`` made of a dataset give that dataset's
    own samples.

    ``on_error``: "raise"; "skip" leaves damaged and unsafe parts of archives out, with the samples they belong to, and
    gives the next good sample for one that cannot be decoded; a function of the ``DataError`` decides, true to skip.
    Failing disks and networks are never skipped: the sequence of samples does not depend on them.

    Remote shards are read from local copies below ``$XDG_CACHE_HOME/penstock``, at most ``copies`` bytes of them.
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
            raise ConfigError(f'on_error={on_error!r} is neither "raise" nor "skip" nor a function of the error')
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
        """How ``penstock pack`` noted that samples are put together; None for shards others wrote."""
        self._catalog = TarCatalog(locations, indexes)
        self._open = OpenShards(locations, self._catalog.versions, local)

    @property
    def skipped(self) -> Counter[str]:
        """What was left out, by reason: faults of archives, and as "decode" the samples that this process or a worker
        found it cannot decode, each once however often it was asked for."""
        undecoded = 0 if self._undecoded is None else len(self._undecoded)
        return self._left_out + Counter({"decode": undecoded})

    @property
    def shards(self) -> list[str]:
        """Where the shards are, in the order of their samples."""
        return list(self._catalog.locations)

    @property
    def blocks(self) -> np.ndarray:
        """The number of each shard's first sample, and the number of samples."""
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
        # In the order of the shards' bytes, whatever order was asked for.
        for place in sorted(range(len(numbers)), key=numbers.__getitem__):
            samples[place] = self._sample(numbers[place])
        return samples

    def made_of(self) -> tuple[Any, ...]:
        """What samples depend on: told to caches that outlive a run."""
        return self._catalog, self._transform, self._decode, self._decoders, self._on_error

    def _number(self, index: SupportsIndex) -> int:
        try:
            number = index.__index__()
        except AttributeError:
            raise TypeError(f"a sample's number is an integer, not {type(index).__name__}") from None
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
                if tries >= min(_MOST_IN_VAIN, len(self)):
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
                text = f"{self._catalog.locations[found.shard]}: {len(piece)} of {size} bytes at {at}"
                raise DataError(f"{text}; the shard was cut short after it was indexed, make the dataset anew")
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
        """Raise it, unless it is to be skipped."""
        policy = self._on_error
        if policy != "skip" and not (callable(policy) and policy(error)):
            raise error


def _named(shards: Any) -> Any:
    """Names with braces written out; a file that is called so is meant itself."""
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
    # One that is damaged before its first sample may have lost its form as well.
    told = [
        (location, index.form)
        for location, index in zip(locations, indexes, strict=True)
        if len(index) or not any(fault.is_end for fault in index.faults)
    ]
    for location, form in told:
        if form != told[0][1]:
            raise DataError(f"{told[0][0]} and {location} were packed from different kinds of samples; read them apart")
    return told[0][1] if told else None
