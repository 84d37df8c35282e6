"""What a worker of `penstock pack` does: reads a few samples, or writes one shard.

In:  a source, a folder, the number of samples in a shard; numbers of shards.
Out: a ``Probe``; records of shards; progress.
Runs in: pack's workers; created in the command line.
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
_REPORTED_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a few samples show about all samples."""

    layout: Layout
    """Columns that the probed samples fit into."""
    form: str
    """The form of the first sample, for tar shards."""
    sample_bytes: float
    """Average size of a packed sample."""
    is_random: bool
    """Whether reading a sample drew random numbers."""


def shard_name(shard: int, shards: int, to: str) -> str:
    digits = max(5, len(str(shards - 1)))
    return f"{shard:0{digits}d}.{to}"


@dataclass(frozen=True, kw_only=True)
class PackJob:
    """Everything that a worker needs to write any shard."""

    source: PackSource
    folder: Path
    to: str
    samples_per_shard: int
    form: str = ""
    """The form of tar shards of values. All shards have the same form, because otherwise they could not be read as one
    dataset."""
    layout: Layout | None = None
    """The columns found so far, for Arrow files of values."""

    @property
    def shards(self) -> int:
        return -(-self.source.count // self.samples_per_shard)

    def name(self, shard: int) -> str:
        return shard_name(shard, self.shards, self.to)

    def range_of(self, shard: int) -> range:
        first = shard * self.samples_per_shard
        return range(first, min(first + self.samples_per_shard, self.source.count))

    def probe(self, report: ProgressReporter) -> Probe:
        """Read a few samples, spread evenly over the source. A worker does this, because files that the dataset opened
        in the parent would be shared by forked workers."""
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
            raise DataError(f"{path} differs from what was written: {fault}; check the disk, then run this again")
        return record

    def sample(self, place: int) -> Any:
        seed(place)
        return self.source.samples[place]


def seed(place: int) -> None:
    """Seed the generators, so that random samples depend neither on the worker that reads them nor on the order of
    reads."""
    random.seed(place)
    np.random.seed(place & 0xFFFFFFFF)
    torch.default_generator.manual_seed(place)


def _generator_marks() -> tuple[Any, ...]:
    """The state of the global generators, as values that can be compared."""
    of_python, of_numpy, of_torch = get_generators()
    return of_python, of_numpy[1].tobytes(), of_numpy[2:], of_torch.numpy().tobytes()


class ProgressReporter:
    """Sends the parent the progress of a shard, several times a second."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.place: int | None = None
        self._sent_s = 0.0

    def along(self, batches: Iterator[Any], places: range) -> Iterator[Any]:
        """The same batches; reports progress with each."""
        done = 0
        self.at(places.start, done)
        for batch in batches:
            yield batch
            done += batch.num_rows
            self.at(places.start + done, done)

    def at(self, place: int, done: int) -> None:
        """Called before the sample at ``place`` is read, when ``done`` samples of the shard are written."""
        self.place = place
        now_s = time.monotonic()
        if now_s - self._sent_s >= _REPORTED_EVERY_S:
            self._sent_s = now_s
            self._pipe.send(("at", done))
