"""One reader reads all samples once.

In:  a reader's name, shards, whether to decode.
Out: samples per second, a checksum.
Runs in: the child.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from child import Harness

_META = ("__key__", "__url__", "__local_path__")


def main() -> None:
    harness = Harness()
    shards, reader, is_decoded = (harness.request[name] for name in ("shards", "reader", "decode"))
    began = time.perf_counter()
    samples = _webdataset(shards, is_decoded) if reader == "webdataset" else _penstock(shards, is_decoded, reader)
    ready_s = time.perf_counter() - began
    began = time.perf_counter()
    count = sum(1 for _ in samples)
    took_s = time.perf_counter() - began
    # Not timed: both readers must return the same bytes.
    raw = _webdataset(shards, False) if reader == "webdataset" else _penstock(shards, False, "penstock")
    harness.result(samples_per_s=count / took_s, samples=count, ready_s=ready_s, checksum=_checksum(raw))


def _webdataset(shards: str, is_decoded: bool) -> Any:
    from webdataset.compat import WebDataset

    dataset = WebDataset(shards, shardshuffle=False)
    return dataset.decode() if is_decoded else dataset


def _penstock(shards: str, is_decoded: bool, reader: str) -> Iterator[Any]:
    from penstock.data.tar.dataset import TarDataset

    dataset = TarDataset(shards, decode=is_decoded)
    order = list(range(len(dataset)))
    if reader == "penstock random":
        random.Random(0).shuffle(order)
    return (dataset[number] for number in order)


def _checksum(samples: Iterable[Any]) -> int:
    total = 0
    for sample in samples:
        for name, value in sample.items():
            if name not in _META:
                total = zlib.crc32(value, zlib.crc32(name.encode(), total))
    return total


if __name__ == "__main__":
    main()
