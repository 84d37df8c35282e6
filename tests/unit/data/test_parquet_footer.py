"""Lean Parquet footers: smaller, read the same, and never worse than what was there."""

from __future__ import annotations

import datetime
import decimal
import inspect
import io
import random
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.data import ParquetDataset
from penstock.data.parquet import row_groups as parquet_files
from penstock.data.parquet.footer import cuts_of, lean_metadata, of_one_group, reads_alike

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = 60
WRITTEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "page index": {"write_page_index": True},
    "no dictionary": {"use_dictionary": False, "compression": "zstd"},
    "no statistics": {"write_statistics": False},
    "data pages 2": {"data_page_version": "2.0", "version": "1.0"},
    "no schema of pyarrow": {"store_schema": False},
    "sorted": {"sorting_columns": [pq.SortingColumn(0)]},
    "Bloom filters": {"bloom_filter_options": {"text": {"ndv": 10, "fpp": 0.05}}},
    "checksums": {"write_page_checksum": True},
}


def table() -> Any:
    numbers = range(ROWS)
    moment = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "text": [f"a text that goes on for a while, number {n} " * 4 for n in numbers],
            "kind": pa.array([f"kind {n % 3}" for n in numbers]).dictionary_encode(),
            "maybe": [None if n % 3 else n / 2 for n in numbers],
            "nothing": pa.nulls(ROWS, pa.int32()),
            "truth": [n % 2 == 0 for n in numbers],
            "vector": pa.array([[n, n + 0.5][: n % 3] for n in numbers], pa.list_(pa.float32())),
            "nested": [{"a": n, "b": [{"c": f"x{n}"}] * (n % 3)} for n in numbers],
            "pairs": pa.array([[("k", n)] for n in numbers], pa.map_(pa.string(), pa.int32())),
            "raw": [bytes([n]) * 100 for n in numbers],
            "money": pa.array([decimal.Decimal(n) / 4 for n in numbers], pa.decimal128(20, 2)),
            "moment": [moment + datetime.timedelta(hours=n) for n in numbers],
            "small": pa.array([n % 100 for n in numbers], pa.uint8()),
        },
        metadata={"of the file": "kept"},
    )


def file_of(rows: Any, **options: Any) -> bytes:
    if "bloom_filter_options" in options and "bloom_filter_options" not in inspect.signature(pq.write_table).parameters:
        pytest.skip("this pyarrow writes no Bloom filters")
    out = io.BytesIO()
    pq.write_table(rows, out, row_group_size=7, **options)
    return out.getvalue()


def metadata_of(file: bytes) -> bytes:
    (length,) = struct.unpack("<I", file[-8:-4])
    return file[-8 - length : -8]


def with_metadata(file: bytes, metadata: bytes) -> bytes:
    return file[: -8 - len(metadata_of(file))] + metadata + struct.pack("<I", len(metadata)) + b"PAR1"


@pytest.mark.parametrize("how", WRITTEN)
def test_rows_are_read_the_same_by_a_lean_footer(how: str) -> None:
    file = file_of(table(), **WRITTEN[how])
    lean = lean_metadata(metadata_of(file))
    assert len(lean) < len(metadata_of(file))
    before = pq.ParquetFile(io.BytesIO(file))
    after = pq.ParquetFile(io.BytesIO(with_metadata(file, lean)))
    assert reads_alike(before.metadata, after.metadata)
    assert after.schema_arrow.equals(before.schema_arrow, check_metadata=True)
    assert after.metadata.created_by == before.metadata.created_by
    for group in range(before.num_row_groups):
        assert after.read_row_group(group).equals(before.read_row_group(group))
        assert after.metadata.row_group(group).sorting_columns == before.metadata.row_group(group).sorting_columns
        for leaf in range(before.metadata.num_columns):
            chunk = after.metadata.row_group(group).column(leaf)
            assert not chunk.is_stats_set and not chunk.has_column_index and not chunk.has_offset_index
    wanted = ["kind", "nested"]
    assert after.read(wanted).equals(before.read(wanted))
    assert lean_metadata(lean) is lean, "a second time there is nothing to leave out"


def test_a_group_is_read_by_a_footer_that_knows_no_other() -> None:
    file = file_of(table())
    lean = lean_metadata(metadata_of(file))
    cuts = cuts_of(lean)
    before = pq.ParquetFile(io.BytesIO(file))
    assert len(cuts) == before.num_row_groups + 2
    for group in range(before.num_row_groups):
        alone = of_one_group(memoryview(lean), cuts[0], cuts[group + 1], cuts[group + 2], cuts[-1])
        after = pq.ParquetFile(io.BytesIO(with_metadata(file, alone)))
        assert after.num_row_groups == 1
        assert after.schema_arrow.equals(before.schema_arrow, check_metadata=True)
        assert after.read_row_group(0).equals(before.read_row_group(group))


def test_row_groups_listed_twice_or_signed_are_not_cut() -> None:
    groups = b"\x49\x1c\x00"
    assert cuts_of(groups + b"\x00") == [1, 2, 3]
    for doubtful in (groups + b"\x09\x08\x1c\x00\x00", groups + b"\x4c\x00\x00", groups, groups + b"\x00\x00"):
        assert cuts_of(doubtful) == []


@pytest.mark.parametrize("mode", ["mapped", "ultra", "memory"])
def test_datasets_share_footers_without_statistics(tmp_path: Path, mode: str) -> None:
    rows = pa.table({"text": [f"{n} " * 40 for n in range(700)]})
    file = file_of(rows, write_page_index=True)
    (tmp_path / "a.parquet").write_bytes(file)
    dataset = ParquetDataset(tmp_path, mode=mode)
    assert len(dataset._files._footers) < len(metadata_of(file)) / 2
    assert dataset._files._footer(99)[0].num_row_groups == 1, "what is parsed for a read does not grow with the file"
    assert dataset.__getitems__(range(700)) == rows.to_pylist()


def test_small_footers_are_left_alone(tmp_path: Path) -> None:
    rows = pa.table({"text": ["one", "two"]})
    (tmp_path / "a.parquet").write_bytes(file_of(rows))
    dataset = ParquetDataset(tmp_path)
    assert len(dataset._files._footers) == len(metadata_of(file_of(rows))) + 8
    assert dataset[1] == {"text": "two"}


def test_footers_that_would_read_otherwise_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other = file_of(table()), file_of(table().slice(0, 50), compression="none")
    (tmp_path / "a.parquet").write_bytes(file)
    for wrong in (lean_metadata(metadata_of(other)), metadata_of(file)[:-200], b""):
        monkeypatch.setattr(parquet_files, "lean_metadata", lambda _, wrong=wrong: wrong)
        dataset = ParquetDataset(tmp_path / "a.parquet", columns=["id"])
        assert len(dataset._files._footers) == len(metadata_of(file)) + 8
        assert [row["id"] for row in dataset.__getitems__(range(ROWS))] == list(range(ROWS))


# Written by hand: a file's field 4, row groups: one, whose field 1 is: one column chunk.
BEFORE_CHUNK, AFTER_CHUNK = b"\x49\x1c\x19\x1c", b"\x00\x00\x00"


def chunk(fields: bytes) -> bytes:
    return BEFORE_CHUNK + fields + AFTER_CHUNK


@pytest.mark.parametrize(
    ("fields", "lean"),
    [
        # 2, then 4 to 7 left out, then 8: its step grows from 1 to 6.
        (b"\x26\x02\x26\x02\x15\x02\x16\x02\x15\x02\x18\x01x", b"\x26\x02\x68\x01x"),
        # 3 is a struct whose 1 and 11 stay, and 12 to 15 go: 16 steps to 27 do not fit in four bits.
        (b"\x3c\x15\x02\xa6\x02\x1c\x00\x19\x0c\x16\x02\x15\x02\xc5\x02\x00", b"\x3c\x15\x02\xa6\x02\x05\x36\x02\x00"),
        # 6, a truth in its header, goes; 70 has the long form already and keeps it.
        (b"\x26\x02\x41\x05\x8c\x01\x02", b"\x26\x02\x05\x8c\x01\x02"),
        # Sets and maps, an empty one too, and lists of truths and numbers in fields nobody knows.
        (b"\x46\x02\x6a\x21\x01\x02\x1b\x00\x1b\x01\x85\x01x\x02\x19\x27" + bytes(16), None),
    ],
    ids=["step grows", "step too large", "long form", "containers"],
)
def test_headers_after_a_field_left_out_count_from_the_one_before(fields: bytes, lean: bytes | None) -> None:
    expected = b"\xaa\x21\x01\x02" + fields[6:] if lean is None else lean
    assert lean_metadata(chunk(fields)) == chunk(expected)


@pytest.mark.parametrize(
    "hostile",
    [
        b"",
        b"\x00\x00",
        b"\x49\xfc\xff\xff\xff\xff\x0f",
        b"\x49\xfc" + b"\xff" * 40,
        b"\x1c" * 100_000,
        b"\x19" * 100_000,
        b"\x19\xf1\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x1b\xff\xff\xff\xff\x7f\x11",
        b"\x18\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x00",
        b"\x1d" + bytes(20),
        b"\x45\x02\x00",
        b"\x49\x15\x02\x00",
        # Signed, with an encryption algorithm.
        chunk(b"\x46\x02")[:-1] + b"\x4c\x00\x00",
    ],
)
def test_what_is_not_understood_stays_as_it_is(hostile: bytes) -> None:
    begun = time.monotonic()
    assert lean_metadata(hostile) is hostile
    assert time.monotonic() - begun < 5


def test_damaged_footers_neither_raise_nor_grow_nor_hang() -> None:
    rows = table().slice(0, 14)
    whole = metadata_of(file_of(rows, write_page_index=True))
    choose = random.Random(7)
    begun, changed = time.monotonic(), 0
    for _ in range(600):
        damaged = bytearray(whole[: choose.randrange(len(whole))] if choose.random() < 0.2 else whole)
        for _ in range(choose.choice((1, 1, 2, 20))):
            if damaged:
                damaged[choose.randrange(len(damaged))] = choose.randrange(256)
        given = bytes(damaged)
        lean = lean_metadata(given)
        assert lean is given or len(lean) < len(given)
        assert all(0 < cut <= len(given) for cut in cuts_of(given))
        changed += lean is not given
    assert 0 < changed < 600, "some are understood, some are not"
    assert time.monotonic() - begun < 60
