"""Damaged Parquet files: an error that names the file, or rows, and never the end of the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

FUZZ = """
import io, sys, warnings
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from penstock.data import ParquetDataset
from penstock.errors import DataError
warnings.simplefilter("ignore")
folder, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
chance = np.random.default_rng(seed)
table = pa.table({
    "id": range(300), "text": [f"text {n % 7}" for n in range(300)],
    "vector": [[float(n), 1.0] for n in range(300)], "nested": [{"a": [n], "b": None} for n in range(300)],
})
wholes = []
for compression in ("none", "snappy", "zstd"):
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=100, compression=compression)
    wholes.append(out.getvalue())
refused = read = 0
for number in range(count):
    data = bytearray(wholes[number % 3])
    kind = chance.integers(5)
    if kind == 0:
        del data[int(chance.integers(len(data))):]
    elif kind == 1:
        at = int(chance.integers(len(data)))
        data[at:at + 8] = chance.bytes(8)
    elif kind == 2:  # among the footer, where sizes and offsets are
        length = int.from_bytes(data[-8:-4], "little")
        for at in chance.integers(len(data) - 8 - length, len(data) - 8, 3):
            data[at] = int(chance.integers(256))
    elif kind == 3:
        data[-8:-4] = chance.bytes(4)
    else:
        for at in chance.integers(0, len(data), 20):
            data[at] ^= 1 << int(chance.integers(8))
    path = f"{folder}/{number}.parquet"
    open(path, "wb").write(data)
    print(number, flush=True)
    try:
        dataset = ParquetDataset(path, mode=["mapped", "ultra", "memory"][number % 3])
        if len(dataset) < 100_000:
            dataset.__getitems__(range(0, len(dataset), 7))
            if len(dataset):
                dataset[len(dataset) - 1]
        read += 1
    except DataError as error:
        assert path in str(error), error
        refused += 1
assert refused > count // 4 and refused + read == count, (refused, read)
print("done")
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_damaged_files_are_refused_or_read_but_never_crash(tmp_path: Path, seed: int) -> None:
    run = [sys.executable, "-c", FUZZ, str(tmp_path), str(seed), "300"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), (done.returncode, done.stdout[-20:], done.stderr)
