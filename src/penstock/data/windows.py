"""Windows of consecutive frames: video, LiDAR sweeps, anything where neighbouring samples share most of their data.

In:  frames (files, or anything that can be indexed), where sequences begin.
Out: a sample per window, and the name of each frame it is made of, so that a cache can keep frames instead of windows.
Runs in: trainer and worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from penstock.data.decoders import decoder_of
from penstock.data.shared_list import SharedList
from penstock.errors import ConfigError, DataError


class WindowDataset(Dataset[Any]):
    """``length`` frames in a row, from every ``stride``-th on, never across the end of a sequence.

    ``frames``: paths of files, or anything that can be indexed and has a length.
    ``load``: what makes a frame of a path, or of an item; by default files are decoded by their extension, and items
    taken as they are.
    ``sequences``: the length of each sequence, in frames. By default files of one folder are a sequence, and
    everything else is a single one.
    ``transform``: is given the list of frames; by default tensors and arrays are stacked.

    With a cache (``DataLoader(dataset, cache="50GB")``, or the attribute ``cache``) every frame is loaded once for all
    the windows it is in. Cached frames do not see ``transform``: what is random belongs there.
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
        if length < 1 or stride < 1:
            raise ConfigError(f"length={length} and stride={stride}: windows have at least one frame, and move by one")
        if isinstance(frames, (str, bytes, os.PathLike)):
            raise ConfigError(f"frames={frames!r} is one path; give the list of files, such as sorted(glob(...))")
        if not hasattr(frames, "__getitem__") or not hasattr(frames, "__len__"):
            raise ConfigError(f"frames cannot be indexed: {type(frames).__name__} has no __getitem__ or no __len__")
        self.frames = frames
        self.length = length
        self.stride = stride
        self.transform = transform
        self.cache: Any = None
        self._are_files = _names_files(frames)
        self._load = load or (_decoded if self._are_files else None)
        lengths = self._sequence_lengths(sequences)
        self._first_frames = np.concatenate(([0], np.cumsum(lengths)))
        self.sequences = np.concatenate(([0], np.cumsum(np.maximum(0, (lengths - length) // stride + 1))))
        """Number of each sequence's first window, and of all windows."""

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
        """What the frames of a window are called in the cache."""
        return [self._key(number) for number in self._frames_of(index)]

    def made_of(self) -> tuple[Any, ...]:
        """What samples depend on: told to caches that outlive a run."""
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
        return (self._mark, os.fspath(self.frames[number]) if self._are_files else number)

    @cached_property
    def _mark(self) -> str:
        """Tells these frames from those of other datasets in the same cache."""
        from penstock.cache.fingerprint import fingerprint_of

        return fingerprint_of(self._load if self._are_files else (self.frames, self._load))[:16]

    def _sequence_lengths(self, given: Sequence[int] | None) -> np.ndarray:
        count = len(self.frames)
        if given is None:
            folders = (Path(frame).parent for frame in self.frames) if self._are_files else ()
            return np.array([sum(1 for _ in same) for _, same in groupby(folders)] or [count], np.int64)
        lengths = np.asarray(given, np.int64)
        if lengths.ndim != 1 or (lengths < 0).any() or lengths.sum() != count:
            raise ConfigError(f"sequences are the lengths of all sequences: together {count} frames, not {given!r:.80}")
        return lengths


def _names_files(frames: Any) -> bool:
    # Anything else may take long to give its first item.
    is_list = isinstance(frames, (list, tuple, SharedList, np.ndarray))
    return is_list and len(frames) > 0 and isinstance(frames[0], (str, os.PathLike))


def _decoded(path: str | os.PathLike[str]) -> Any:
    """A file by its extension."""
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
