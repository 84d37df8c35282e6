"""Windows of consecutive frames: video, LiDAR sweeps, and all data whose neighbouring samples share most frames.

In:  frames (files, or anything that can be indexed), and lengths of sequences. Out: a sample per window, and a key for
     each frame of a window, so that a cache can keep frames instead of windows.
Runs in: trainer and worker.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from penstock.data.shared.shared_list import SharedList
from penstock.data.tar.decoders import decoder_of
from penstock.errors import ConfigError, DataError


class WindowDataset(Dataset[Any]):
    """Each sample is a window: ``length`` consecutive frames of a sequence. A window begins every ``stride`` frames.

    ``frames``: paths of files, or anything that can be indexed and has a length.
    ``load``: turns a path or an item into a frame; by default files are decoded by their extension, and items are
    used unchanged.
    ``sequences``: the length of each sequence, in frames. By default the files of one folder are a sequence, and
    frames that are not files form a single sequence.
    ``transform``: turns the list of frames into a sample; by default tensors and arrays are stacked.

    With a cache (``DataLoader(dataset, cache="50GB")``, or the attribute ``cache``) each frame is loaded once for all
    windows that contain it. The cache holds frames as they are before ``transform``, so random changes belong in
    ``transform``. Processes that start after a file was rewritten treat the file as a new frame.
    """

    splittable = True

    def __init__(
        self,
        frames: Any,
        length: int,
        stride: int = 1,
        *,
        load: Callable[[Any], Any] | None = None,
        sequences: Sequence[int] | None = None,
        transform: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        try:
            length, stride = operator.index(length), operator.index(stride)
        except TypeError:
            raise ConfigError(f"length={length!r} and stride={stride!r} must be whole numbers of frames") from None
        if length < 1 or stride < 1:
            raise ConfigError(f"length={length} and stride={stride} must be at least 1")
        if isinstance(frames, (str, bytes, os.PathLike)):
            raise ConfigError(f"frames={frames!r} is one path; give the list of files, such as sorted(glob(...))")
        if not hasattr(frames, "__getitem__") or not hasattr(frames, "__len__"):
            raise ConfigError(f"frames cannot be indexed: {type(frames).__name__} has no __getitem__ or no __len__")
        self.frames = frames
        self.length = length
        self.stride = stride
        self.transform = transform
        self._are_files = _names_files(frames)
        self._load = load or (_decoded if self._are_files else None)
        self._in_use = _InUse()
        lengths = self._sequence_lengths(sequences)
        self._first_frames = np.concatenate(([0], np.cumsum(lengths)))
        self.sequences = np.concatenate(([0], np.cumsum(np.maximum(0, (lengths - length) // stride + 1))))
        """The index of the first window of each sequence; the last entry is the count of all windows."""

    @property
    def cache(self) -> Any:
        """The cache for frames, or None."""
        return self._in_use.cache

    @cache.setter
    def cache(self, cache: Any) -> None:
        self._in_use.cache = cache

    def __len__(self) -> int:
        return int(self.sequences[-1])

    def __getitem__(self, index: int) -> Any:
        numbers = self._frames_of(index)
        if self.cache is None:
            frames = [self._frame(number) for number in numbers]
        else:
            frames = [
                self.cache.get_or_load(self._key(number), lambda number=number: self._frame(number))
                for number in numbers
            ]
        return _stacked(frames) if self.transform is None else self.transform(frames)

    def keys(self, index: int) -> list[Any]:
        """The cache keys of the frames of a window."""
        return [self._key(number) for number in self._frames_of(index)]

    def made_of(self) -> tuple[Any, ...]:
        """What the samples depend on, for the fingerprint by which a cache finds samples of earlier runs."""
        return self.frames, self.length, self.stride, self._load, self._first_frames, self.transform

    # -- inside -------------------------------------------------------------------------------

    def _frames_of(self, index: int) -> range:
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        sequence = int(np.searchsorted(self.sequences, at, "right")) - 1
        first = int(self._first_frames[sequence]) + (at - int(self.sequences[sequence])) * self.stride
        return range(first, first + self.length)

    def _frame(self, number: int) -> Any:
        item = self.frames[number]
        return item if self._load is None else self._load(item)

    def _key(self, number: int) -> Any:
        if self._in_use.mark is None:
            from penstock.cache.fingerprint import fingerprint_of

            self._in_use.mark = fingerprint_of(self._load if self._are_files else (self.frames, self._load))[:16]
        if not self._are_files:
            return (self._in_use.mark, number)
        path = os.fspath(self.frames[number])
        return (self._in_use.mark, path, *self._in_use.stamp(number, path, len(self.frames)))

    def _sequence_lengths(self, given: Sequence[int] | None) -> np.ndarray:
        count = len(self.frames)
        if given is None:
            folders = (Path(frame).parent for frame in self.frames) if self._are_files else ()
            return np.array([sum(1 for _ in same) for _, same in groupby(folders)] or [count], np.int64)
        lengths = np.asarray(given, np.int64)
        if lengths.ndim != 1 or (lengths < 0).any() or lengths.sum() != count:
            raise ConfigError(f"sequences={given!r:.80} must be lengths that add up to the {count} frames")
        return lengths


class _InUse:
    """State that a dataset collects while it is used. If this state consisted of attributes of the dataset, it would
    change the fingerprint, and a subclass would count as another dataset after its first sample."""

    def __init__(self) -> None:
        self.cache: Any = None
        self.mark: str | None = None
        """Distinguishes these frames from those of other datasets in the same cache."""
        self._stamps: np.ndarray | None = None

    def stamp(self, number: int, path: str, count: int) -> tuple[int, ...]:
        """Size and modification time of a file, looked up once; empty if there is no such file on this machine."""
        if self._stamps is None:
            # Two numbers for each frame, 0 if the file was not looked up yet. The kernel allocates their pages on first
            # write.
            self._stamps = np.zeros((count, 2), np.int64)
        known = self._stamps[number]
        if not known[0]:
            try:
                about = Path(path).stat()
                # The size is written last, so that a thread that sees the size sees the time too.
                known[1], known[0] = about.st_mtime_ns, about.st_size + 1
            except OSError:
                known[0] = -1
        return () if known[0] < 0 else (int(known[0]) - 1, int(known[1]))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_stamps": None}


def _names_files(frames: Any) -> bool:
    # In objects of other types, the first item may take long to load.
    is_list = isinstance(frames, (list, tuple, SharedList, np.ndarray))
    return is_list and len(frames) > 0 and isinstance(frames[0], (str, os.PathLike))


def _decoded(path: str | os.PathLike[str]) -> Any:
    """The content of a file, decoded by its extension."""
    file = Path(path)
    decoder = decoder_of(file.suffix[1:].lower(), {})
    try:
        data = file.read_bytes()
        return data if decoder is None else decoder(data)
    except ConfigError:
        raise
    except Exception as problem:
        raise DataError(f"{file} cannot be read: {problem}") from problem


def _stacked(frames: list[Any]) -> Any:
    first = frames[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(frames)
    return np.stack(frames) if isinstance(first, (np.ndarray, np.generic)) else frames
