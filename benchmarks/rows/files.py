"""Parquet files of prompts and responses of a given size, and one as pyarrow writes it by default.

In:  a folder, bytes.
Out: files, made once and then reused.
Runs in: the harness.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

GROUP_ROWS = 4096
_WORDS = 8000
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8)


def make_file(folder: Path, size_bytes: int) -> Path:
    """Rows of two texts of 100 to 700 letters, without compression, so that the file has the given size."""
    path = folder / f"rows-{size_bytes}.parquet"
    if path.exists():
        return path
    chance = np.random.default_rng(size_bytes)
    unfinished = path.with_suffix(".unfinished")
    schema = pa.schema({"id": pa.int64(), "prompt": pa.string(), "response": pa.string(), "score": pa.float32()})
    written = rows = 0
    with pq.ParquetWriter(unfinished, schema, compression="none", use_dictionary=False) as writer:
        while written < size_bytes:
            texts = [_texts(chance) for _ in range(2)]
            numbers = np.arange(rows, rows + GROUP_ROWS)
            batch = pa.record_batch([numbers, *texts, chance.random(GROUP_ROWS, np.float32)], schema=schema)
            writer.write_batch(batch, row_group_size=GROUP_ROWS)
            rows += GROUP_ROWS
            written += batch.nbytes
    unfinished.rename(path)
    return path


def make_ordinary_file(folder: Path, rows: int) -> Path:
    """Rows of two texts of words, written by pyarrow with its defaults: one row group."""
    path = folder / f"ordinary-{rows}.parquet"
    if path.exists():
        return path
    chance = np.random.default_rng(rows)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(chance.choice(letters, length)) for length in chance.integers(2, 10, _WORDS)]
    # As in a language, a few words are frequent.
    shares = 1 / np.arange(1, _WORDS + 1)

    def texts(least: int, most: int) -> list[str]:
        lengths = chance.integers(least, most, rows)
        places = chance.choice(_WORDS, lengths.sum(), p=shares / shares.sum())
        return [" ".join(words[place] for place in some) for some in np.split(places, np.cumsum(lengths)[:-1])]

    unfinished = path.with_suffix(".unfinished")
    pq.write_table(pa.table({"prompt": texts(20, 120), "response": texts(30, 160)}), unfinished)
    unfinished.rename(path)
    return path


def _texts(chance: np.random.Generator) -> pa.Array:
    lengths = chance.integers(100, 700, GROUP_ROWS)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    letters = _LETTERS[chance.integers(0, len(_LETTERS), offsets[-1])]
    return pa.StringArray.from_buffers(GROUP_ROWS, pa.py_buffer(offsets), pa.py_buffer(letters.tobytes()))
