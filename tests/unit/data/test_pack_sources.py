"""What `pack` makes of a path: one kind of source, or an error that says what lies there."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from penstock.data import ArrowDataset, ParquetDataset, TarDataset
from penstock.data.pack.packing import pack
from penstock.data.pack.tables import ParquetRows, ParquetTables
from penstock.data.pack.workers import TaskRanges
from penstock.errors import ConfigError, DataError
from support.datasets.packed import Images, is_same

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))


def names_in(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        return archive.getnames()


def write_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())


# -- folders --------------------------------------------------------------------------------------


def test_a_folder_of_files_and_a_table_is_refused_with_both_counted(tmp_path: Path) -> None:
    write_files(tmp_path / "in", "1.jpg", "2.jpg", "sub/3.jpg")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "in/meta.parquet")
    with pytest.raises(ConfigError) as refused:
        pack(tmp_path / "in", tmp_path / "out", workers=1)
    told = str(refused.value).replace(str(tmp_path), "")
    assert told == (
        "/in holds 1 Parquet file, such as meta.parquet; and 3 files that may be parts of samples, such as 1.jpg: "
        "which of them is the dataset? Name the Parquet file (/in/meta.parquet), or a glob ('/in/*.parquet'), or give "
        "a folder without it"
    )
    assert pack(tmp_path / "in/meta.parquet", tmp_path / "out", workers=1).samples == 1
    write_tar(tmp_path / "in/a.tar", {"1.txt": b"x"})
    with pytest.raises(ConfigError, match=r"1 Parquet file, .*1 tar shard, .*3 files that may be"):
        pack(tmp_path / "in", tmp_path / "more", workers=1)


def test_files_that_describe_tables_are_left_out_by_name(tmp_path: Path) -> None:
    write_files(tmp_path / "in", "README.md", "_SUCCESS", ".git/config", "_old/x.parquet", "dataset_info.json")
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "in/a.parquet")
    (tmp_path / "in/link").symlink_to(tmp_path)
    done = pack(tmp_path / "in", tmp_path / "out", workers=1)
    assert done.samples == 2
    assert done.skipped == [".git/", "README.md", "_SUCCESS", "_old/x.parquet", "dataset_info.json", "link/"]


def test_folders_that_are_not_looked_into_are_named(tmp_path: Path) -> None:
    write_files(tmp_path / "elsewhere", "9.jpg")
    write_files(tmp_path / "in", "a/1.jpg", "a/.cache/2.jpg", ".hidden/3.jpg", "README")
    (tmp_path / "in/a/link").symlink_to(tmp_path / "elsewhere")
    done = pack(tmp_path / "in", tmp_path / "out", to="tar", workers=1)
    assert done.samples == 1 and done.skipped == [".hidden/", "README", "a/.cache/", "a/link/"]
    (tmp_path / "in/a/1.jpg").unlink()
    with pytest.raises(DataError, match=r"nothing to pack; left out: \.hidden/, a/\.cache/, a/link/"):
        pack(tmp_path / "in", tmp_path / "none", workers=1)


def test_arrow_files_are_read_as_samples(tmp_path: Path) -> None:
    pack(Images(20), tmp_path / "arrow", workers=1, shard_bytes="100KB")
    for source in (tmp_path / "arrow", f"{tmp_path}/arrow/*.arrow"):
        out = tmp_path / f"out {len(str(source))}"
        assert pack(source, out, to="tar", workers=1).samples == 20
        found = TarDataset(out)
        assert all(is_same(found[place], Images(20)[place]) for place in range(20))


# -- tar ------------------------------------------------------------------------------------------


def test_names_of_members_stay_as_they_are(tmp_path: Path) -> None:
    names = ["Dir/A.JPG", "Dir/A.Seg.PNG", "b.jpg", f"{'long/' * 30}C.Txt"]
    write_tar(tmp_path / "in/1.tar", {name: name.encode() for name in names})
    write_tar(tmp_path / "in/2.tar", {"d.JSON": b"{}"})
    pack(tmp_path / "in", tmp_path / "out", to="tar", workers=1)
    assert names_in(tmp_path / "out/00000.tar") == [*names, "d.JSON"]
    before, after = (TarDataset(tmp_path / name, decode=False) for name in ("in", "out"))
    assert [after[place] for place in range(4)] == [before[place] for place in range(4)]


def test_adjacent_samples_with_one_key_are_refused_and_their_shards_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "in/1.tar", {"a.txt": b"1", "same.txt": b"2"})
    write_tar(tmp_path / "in/2.tar", {"same.jpg": b"3", "b.txt": b"4"})
    with pytest.raises(
        DataError, match=r"1\.tar ends and .*2\.tar begins with a sample whose key is 'same': in one new shard"
    ):
        pack(tmp_path / "in", tmp_path / "out", to="tar", workers=1)
    assert not list((tmp_path / "out").glob("*.tar"))
    assert pack(tmp_path / "in", tmp_path / "arrow", workers=1).samples == 4
    pack(tmp_path / "in", tmp_path / "apart", to="tar", shard_bytes=1, workers=1)
    assert len(TarDataset(tmp_path / "apart")) == 4


def test_names_with_braces_are_all_the_shards_they_stand_for(tmp_path: Path) -> None:
    for number in range(3):
        write_tar(tmp_path / f"s-{number:03d}.tar", {f"{number}.txt": b"x"})
        pq.write_table(pa.table({"x": [number]}), tmp_path / f"{number}.parquet")
    assert pack(f"{tmp_path}/s-{{000..001}}.tar", tmp_path / "tar", to="tar", workers=1).samples == 2
    assert pack(f"{tmp_path}/{{0,2}}.parquet", tmp_path / "parquet", workers=1).samples == 2
    with pytest.raises(DataError, match=r"there is no .*s-003\.tar"):
        pack(f"{tmp_path}/s-{{000..003}}.tar", tmp_path / "more", workers=1)
    with pytest.raises(ConfigError, match="names parquet and tar; pack them one by one"):
        pack(f"{tmp_path}/{{0.parquet,s-000.tar}}", tmp_path / "both", workers=1)


def test_the_error_for_a_damaged_shard_suggests_only_what_pack_offers(tmp_path: Path) -> None:
    write_tar(tmp_path / "in/1.tar", {"a.txt": b"1" * 2000})
    whole = (tmp_path / "in/1.tar").read_bytes()
    for data, told in ((whole[:1000], "write this shard again, or pack without it"), (b"\x1f\x8b" * 9, "gzip -dc")):
        (tmp_path / "in/1.tar").write_bytes(data)
        with pytest.raises(DataError, match=told) as refused:
            pack(tmp_path / "in", tmp_path / "out", to="tar", workers=1)
        assert "on_error" not in str(refused.value) and "penstock pack" not in str(refused.value)


# -- Parquet --------------------------------------------------------------------------------------


def counted(tables: ParquetTables) -> list[int]:
    """The row groups that are begun from here on."""
    begun: list[int] = []
    read_pieces = tables.files.read_pieces

    def read(group: int, rows: int) -> Any:
        begun.append(group)
        return read_pieces(group, rows)

    tables.files.read_pieces = read  # type: ignore[method-assign]
    return begun


def test_a_row_group_that_is_cut_into_many_shards_is_decoded_once(tmp_path: Path) -> None:
    table = pa.table({"n": range(30_000), "text": [f"row {n}" for n in range(30_000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20_000)
    tables = ParquetTables([str(tmp_path / "a.parquet")])
    begun = counted(tables)
    read = [n for first in range(0, 30_000, 700) for piece in tables.batches(first, min(first + 700, 30_000))
            for n in piece["n"].to_pylist()]  # fmt: skip
    assert read == list(range(30_000)) and begun == [0, 1]
    assert [row["n"] for row in map(ParquetRows(tables).__getitem__, [5, 6, 19_999, 20_000])] == [5, 6, 19_999, 20_000]
    assert begun == [0, 1, 0, 1]


def test_rows_of_a_group_too_large_to_be_held_become_the_same_samples(tmp_path: Path) -> None:
    table = pa.table({"n": range(50), "data": [bytes([n]) * 1_000_000 for n in range(50)], "list": [[1, 2]] * 50})
    pq.write_table(table, tmp_path / "a.parquet")
    pack(tmp_path / "a.parquet", tmp_path / "out", to="tar", shard_bytes="10MB", workers=2)
    found, rows = TarDataset(tmp_path / "out"), ParquetDataset(tmp_path / "a.parquet", keep="1GB")
    assert len(found.shards) > 3 and all(is_same(found[place], rows[place]) for place in range(50))


def test_each_worker_gets_neighbours_and_nothing_is_left_or_given_twice() -> None:
    quick_and_slow = TaskRanges(list(range(10)), ["quick", "slow"])
    assert [quick_and_slow.next_for("slow")] == [5]
    given = [quick_and_slow.next_for("quick") for _ in range(9)]
    assert given[:5] == [0, 1, 2, 3, 4] and given[5:7] == [8, 9]
    assert sorted(task for task in given if task is not None) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert quick_and_slow.next_for("quick") is None and quick_and_slow.next_for("slow") is None


def test_packed_samples_read_back_unchanged_for_any_division_among_workers(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": range(5000)}), tmp_path / "a.parquet", row_group_size=1500)
    for workers in (1, 3):
        pack(tmp_path / "a.parquet", tmp_path / str(workers), shard_bytes="2KB", workers=workers)
    one, three = (ArrowDataset(tmp_path / name) for name in ("1", "3"))
    assert [row["n"] for row in map(three.__getitem__, range(5000))] == list(range(5000)) and len(one) == 5000
