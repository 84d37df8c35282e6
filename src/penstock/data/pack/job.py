"""What a worker of `penstock pack` does: looks at a few samples, or writes one shard.

In:  a source, a folder, how many samples a shard has; numbers of shards.
Out: a ``Probe``; records of shards; how far it is.
Runs in: pack's workers; made in the command line.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.data.arrow.columns import Layout
from penstock.data.pack.shard_writers import (
    ShardRecord,
    arrow_bytes,
    find_fault,
    tar_bytes,
    write_arrow,
    write_raw_tar,
    write_tables,
    write_tar,
)
from penstock.data.pack.sources import PackSource
from penstock.data.sample_forms import to_members
from penstock.errors import DataError
from penstock.workers.rng import get_generators

_PROBED = 16
_TOLD_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a few samples tell of all."""

    layout: Layout
    """Columns they fit."""
    form: str
    """Of tar shards: the first sample's, and most others'."""
    sample_bytes: float
    """On average, as they are packed."""
    is_random: bool
    """Reading one drew random numbers."""


def shard_name(shard: int, shards: int, to: str) -> str:
    digits = max(5, len(str(shards - 1)))
    return f"{shard:0{digits}d}.{to}"


@dataclass(frozen=True, kw_only=True)
class PackJob:
    """All that a worker needs to know to write any shard."""

    source: PackSource
    folder: Path
    to: str
    samples_per_shard: int
    form: str = ""
    """Of tar shards of values; all have the same one, or they could not be read as one dataset."""
    layout: Layout | None = None
    """Of Arrow files of values: what is known of all samples."""

    @property
    def shards(self) -> int:
        return -(-self.source.count // self.samples_per_shard)

    def name(self, shard: int) -> str:
        return shard_name(shard, self.shards, self.to)

    def range_of(self, shard: int) -> range:
        first = shard * self.samples_per_shard
        return range(first, min(first + self.samples_per_shard, self.source.count))

    def probe(self, report: ProgressReporter) -> Probe:
        """At a few samples, evenly spread. In a worker: a dataset must not open its files in the parent, where workers
        that are forked would share them."""
        layout, form, sizes, is_random = Layout(), "", [], False
        count = self.source.count
        for place in np.unique(np.linspace(0, count - 1, min(_PROBED, count)).astype(np.int64)).tolist():
            report.at(place, 0)
            sample = self.sample(place)
            after = _generator_marks()
            seed(place)
            is_random = is_random or after != _generator_marks()
            layout.learn(sample)
            form = form or to_members(sample)[0]
            sizes.append(tar_bytes(sample) if self.to == "tar" else arrow_bytes(sample))
        return Probe(layout=layout, form=form, sample_bytes=sum(sizes) / len(sizes), is_random=is_random)

    def write(self, shard: int, report: ProgressReporter) -> ShardRecord:
        path, places = self.folder / self.name(shard), self.range_of(shard)
        tables = self.source.tables

        def samples() -> Iterator[Any]:
            for place in places:
                report.at(place, place - places.start)
                yield self.sample(place)

        if tables is not None:
            record = write_tables(path, tables.schema, report.along(tables.batches(places.start, places.stop), places))
        elif self.to == "arrow":
            record = write_arrow(path, samples, self.layout or Layout())
        elif self.source.is_raw:
            record = write_raw_tar(path, samples())
        else:
            keyed = ((f"{place:09d}", sample) for place, sample in zip(places, samples(), strict=True))
            record = write_tar(path, keyed, self.form)
        fault = find_fault(path, record)
        if fault is None and record.samples != len(places):
            fault = f"it has {record.samples} samples, not {len(places)}"
        if fault is not None:
            raise DataError(f"{path} is not what was written: {fault}; look at the disk, then run this again")
        return record

    def sample(self, place: int) -> Any:
        seed(place)
        return self.source.samples[place]


def seed(place: int) -> None:
    """Samples that are made at random are the same ones whoever makes them, in whatever order."""
    random.seed(place)
    np.random.seed(place & 0xFFFFFFFF)
    torch.default_generator.manual_seed(place)


def _generator_marks() -> tuple[Any, ...]:
    """The state of the global generators, as something that can be compared."""
    of_python, of_numpy, of_torch = get_generators()
    return of_python, of_numpy[1].tobytes(), of_numpy[2:], of_torch.numpy().tobytes()


class ProgressReporter:
    """Tells the parent how far a shard is, now and then."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.place: int | None = None
        self._told_s = 0.0

    def along(self, batches: Iterator[Any], places: range) -> Iterator[Any]:
        """Tells of every batch that is taken."""
        done = 0
        self.at(places.start, done)
        for batch in batches:
            yield batch
            done += batch.num_rows
            self.at(places.start + done, done)

    def at(self, place: int, done: int) -> None:
        """About to read a sample, when so many of the shard's are written."""
        self.place = place
        now_s = time.monotonic()
        if now_s - self._told_s >= _TOLD_EVERY_S:
            self._told_s = now_s
            self._pipe.send(("at", done))
