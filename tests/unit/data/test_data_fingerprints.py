"""What tells the samples of one dataset from those of another, for caches that outlive a run."""

from __future__ import annotations

import pickle
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset

from penstock.cache.fingerprint import fingerprint_of
from penstock.data import ArrowDataset, LowMemDataset, ParquetDataset, SharedList, TarDataset, WindowDataset

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def parquet(path: Path, text: str) -> Path:
    pq.write_table(pa.table({"prompt": [text] * 4, "response": ["y"] * 4}), path)
    return path


def arrow(path: Path, text: str) -> Path:
    table = pa.table({"a": [text] * 4})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    return path


def tar(path: Path, text: str) -> Path:
    with tarfile.open(path, "w") as archive:
        for number in range(4):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = len(text)
            archive.addfile(member, BytesIO(text.encode()))
    return path


class Labelled(Dataset):
    """A user's own, over one of ours."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class OwnRows(ParquetDataset):
    def __getitem__(self, index: int) -> Any:
        return len(super().__getitem__(index))


class OwnSamples(ArrowDataset):
    """Nothing of its own but its name."""


class OwnShards(TarDataset):
    """The same."""


class OwnPairs(LowMemDataset):
    """The same."""


KINDS = {
    "parquet": (parquet, ".parquet", ParquetDataset),
    "low-mem": (parquet, ".parquet", LowMemDataset),
    "own": (parquet, ".parquet", OwnRows),
    "arrow": (arrow, ".arrow", ArrowDataset),
    "tar": (tar, ".tar", TarDataset),
    "own pairs": (parquet, ".parquet", OwnPairs),
    "own samples": (arrow, ".arrow", OwnSamples),
    "own shards": (tar, ".tar", OwnShards),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_other_files_are_other_samples_and_use_changes_nothing(tmp_path: Path, kind: str) -> None:
    write, suffix, make = KINDS[kind]
    one, other = write(tmp_path / f"one{suffix}", "x"), write(tmp_path / f"other{suffix}", "y")
    dataset = make(one)
    known = fingerprint_of(dataset)
    for index in range(4):
        dataset[index]
    assert fingerprint_of(dataset) == known == fingerprint_of(make(one))
    assert fingerprint_of(pickle.loads(pickle.dumps(dataset))) == known
    assert fingerprint_of(make(other)) != known
    assert (
        len({fingerprint_of(each) for each in (Labelled(make(one)), Labelled(make(other)), Subset(make(one), [1]))})
        == 3
    )
    one.unlink()
    write(one, "zz")
    assert fingerprint_of(make(one)) != known


def test_transforms_and_columns_count(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", "x")
    made = [
        ParquetDataset(path), ParquetDataset(path, ["prompt"]), ParquetDataset(path, transform=len),
        LowMemDataset(path), LowMemDataset(path, max_seq_len=3),
    ]  # fmt: skip
    assert len({fingerprint_of(dataset) for dataset in made}) == len(made)
    assert fingerprint_of(ParquetDataset(path, mode="ultra")) == fingerprint_of(ParquetDataset(path))


def test_lists_and_windows_count_by_what_is_in_them() -> None:
    lists = [SharedList(["a", "b"]), SharedList(["a", "c"]), SharedList(["a", "b"])[:1], SharedList([1, 2])]
    assert len({fingerprint_of(Labelled(one)) for one in lists}) == 4
    assert fingerprint_of(Labelled(lists[0])) == fingerprint_of(Labelled(SharedList(["a", "b"])))
    windows = [WindowDataset(torch.arange(n), length) for n, length in ((5, 2), (6, 3), (5, 3))]
    assert len({fingerprint_of(one) for one in windows}) == 3
    windows[0].keys(0)
    assert fingerprint_of(windows[0]) == fingerprint_of(WindowDataset(torch.arange(5), 2))
