"""Fills a disk cache before training with latents, embeddings or other samples that are expensive to compute.

In:  a dataset whose samples are expensive; a cache with a disk store.
Out: every sample on disk; a line that shows the progress.
Runs in: trainer (and workers, with ``num_workers=``).
"""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any, TextIO

from torch.utils.data import Dataset

from penstock.cache.cache import Cache
from penstock.cache.cached_dataset import CachedDataset
from penstock.errors import ConfigError
from penstock.loader.dataloader import DataLoader
from penstock.units import format_bytes

_MOST_IN_VAIN = 32
"""After this many samples in a row that could not be kept, the remaining samples are not tried."""
_SHOWN_EVERY_S = 0.5
_SHOWN_EVERY_SHARE = 0.1
"""If a line cannot be overwritten, a new line is shown after every such share of the samples."""


@dataclass(frozen=True, kw_only=True)
class Precomputed:
    """The result of ``precompute``."""

    computed: int
    """The number of samples that were computed in this call and kept."""
    found: int
    """The number of samples that were on disk already."""
    not_kept: int
    """The number of samples that had no room, cannot be kept on disk, or were not tried."""
    dataset: CachedDataset
    """The dataset to train on, which reads the computed samples."""


def precompute(
    dataset: Any,
    cache: Cache,
    *,
    num_workers: int = 0,
    progress: bool | None = None,
    fingerprint: str | None = None,
) -> Precomputed:
    """Compute every sample that is not in the disk cache yet, and keep it in the cache.

    After an interruption, the next call continues where the interrupted call stopped. ``num_workers``: with 0, samples
    are computed in this process, which suits an encoder on a GPU. ``progress``: whether to show a line on stderr; by
    default only on a terminal.
    """
    if cache.disk is None:
        raise ConfigError('precompute() keeps samples on disk; give the cache a folder: Cache(..., disk="path")')
    if isinstance(dataset, CachedDataset) and dataset.cache is not cache:
        raise ConfigError("this dataset is wrapped by a cache other than the one to fill; pass the cache that wraps it")
    cached = dataset if isinstance(dataset, CachedDataset) else cache.wrap(dataset, fingerprint=fingerprint)
    total = len(cached)
    with _ProgressLine(total, wanted=progress) as line:
        missing = [index for index in range(total) if not cached.is_on_disk(index)]
        kept = in_vain = 0
        found = total - len(missing)
        line.show(found)
        with DataLoader(_Missing(cached, missing), batch_size=None, num_workers=num_workers) as loader:
            for number, is_kept in enumerate(loader, 1):
                kept += is_kept
                in_vain = 0 if is_kept else in_vain + 1
                line.show(found + number)
                if in_vain >= _MOST_IN_VAIN:
                    break
    if kept < len(missing):
        stats = cache.stats()
        warnings.warn(
            f"precompute() kept {found + kept} of {total} samples"
            + (
                f" and stopped after {in_vain} samples in a row that could not be kept"
                if in_vain >= _MOST_IN_VAIN
                else ""
            )
            + f"; the disk store holds {format_bytes(stats.disk_bytes)} of {format_bytes(stats.disk_limit_bytes)}. "
            "Raise disk_limit if the store is full. Only detached CPU tensors, arrays, texts and numbers can be kept",
            RuntimeWarning,
            stacklevel=2,
        )
    return Precomputed(computed=kept, found=found, not_kept=len(missing) - kept, dataset=cached)


class _Missing(Dataset):
    """Computes missing samples and returns only whether each sample was kept: the samples themselves do not travel."""

    def __init__(self, cached: CachedDataset, missing: list[int]) -> None:
        self._cached = cached
        self._missing = missing

    def __len__(self) -> int:
        return len(self._missing)

    def __getitem__(self, place: int) -> bool:
        return self._cached.keep_on_disk(self._missing[place])


class _ProgressLine:
    """A line that shows the samples done, the rate and the time left."""

    def __init__(self, total: int, *, wanted: bool | None, out: TextIO | None = None) -> None:
        self._total = total
        self._out = out or sys.stderr
        self._overwrites = self._out.isatty()
        self._wanted = self._overwrites if wanted is None else wanted
        self._began_s: float | None = None
        self._began_at = 0
        self._shown_s, self._shown_at = 0.0, 0

    def __enter__(self) -> _ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._wanted and self._overwrites:
            self._out.write("\n")

    def show(self, done: int) -> None:
        if not self._wanted:
            return
        now_s = time.monotonic()
        if self._began_s is None:
            self._began_s, self._began_at = now_s, done
        elif done < self._total and not self._is_due(done, now_s):
            return
        self._shown_s, self._shown_at = now_s, done
        rate = (done - self._began_at) / max(1e-9, now_s - self._began_s)
        left = f", {(self._total - done) / rate:.0f} s left" if rate and done < self._total else ""
        share = done / self._total if self._total else 1.0
        text = f"precompute: {done} of {self._total} ({share:.0%}), {rate:.1f} samples/s{left}"
        self._out.write(f"\r{text:<78}" if self._overwrites else f"{text}\n")
        self._out.flush()

    def _is_due(self, done: int, now_s: float) -> bool:
        if self._overwrites:
            return now_s - self._shown_s >= _SHOWN_EVERY_S
        return done - self._shown_at >= _SHOWN_EVERY_SHARE * self._total
