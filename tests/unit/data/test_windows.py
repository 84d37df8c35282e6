"""Windows over frames: which frames, never across sequences, and each loaded once where there is a cache."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.cache.fingerprint import fingerprint_of
from penstock.data import SequenceSampler, WindowDataset
from penstock.errors import ConfigError, DataError


def test_windows_are_consecutive_frames_and_move_by_the_stride() -> None:
    dataset = WindowDataset(torch.arange(10), 4, stride=3)
    assert [window.tolist() for window in dataset] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert len(WindowDataset(torch.arange(9), 4, stride=3)) == 2
    assert dataset[-1].tolist() == [6, 7, 8, 9]
    for wrong in (3, -4):
        with pytest.raises(IndexError, match="of 3"):
            dataset[wrong]


def test_no_window_crosses_the_end_of_a_sequence() -> None:
    dataset = WindowDataset(list(range(12)), 3, sequences=[4, 2, 0, 6])
    assert [list(window) for window in dataset] == [
        [0, 1, 2], [1, 2, 3], [6, 7, 8], [7, 8, 9], [8, 9, 10], [9, 10, 11],
    ]  # fmt: skip
    assert dataset.sequences.tolist() == [0, 2, 2, 2, 6]
    assert sorted(SequenceSampler(dataset)) == list(range(6))
    assert len(WindowDataset([], 3)) == 0 and len(WindowDataset([1, 2], 3)) == 0


def test_wrong_arguments_are_refused_with_their_numbers() -> None:
    with pytest.raises(ConfigError, match="length=0"):
        WindowDataset([1], 0)
    with pytest.raises(ConfigError, match="length=-2"):
        WindowDataset([1], -2)
    with pytest.raises(ConfigError, match="stride=0"):
        WindowDataset([1], 1, 0)
    with pytest.raises(ConfigError, match=r"length=2\.5"):
        WindowDataset([1], 2.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="add up to the 3 frames"):
        WindowDataset([1, 2, 3], 1, sequences=[2])
    with pytest.raises(ConfigError, match="cannot be indexed"):
        WindowDataset(iter([1]), 1)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = []
    for sequence in ("drive-1", "drive-2"):
        (tmp_path / sequence).mkdir()
        for number in range(5):
            path = tmp_path / sequence / f"{number:04}.npy"
            np.save(path, np.full((2, 3), 10 * int(sequence[-1]) + number, np.float32))
            made.append(path)
    return made


def test_files_are_decoded_and_each_folder_is_a_sequence(files: list[Path]) -> None:
    dataset = WindowDataset(files, 3)
    assert len(dataset) == 6
    assert dataset[3].shape == (3, 2, 3) and dataset[3][:, 0, 0].tolist() == [20, 21, 22]
    files[0].write_bytes(b"no array")
    with pytest.raises(DataError, match=r"0000\.npy"):
        dataset[0]


def test_load_and_transform_are_the_users(files: list[Path]) -> None:
    dataset = WindowDataset(files, 2, load=lambda path: path.stem, transform="+".join)
    assert dataset[0] == "0000+0001"


class Counting:
    """Frames that note how often each is made."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> torch.Tensor:
        with (self.folder / f"{number}").open("a") as file:
            file.write("x")
        return torch.full((4,), number)


def loads(folder: Path) -> list[int]:
    return sorted(file.stat().st_size for file in folder.iterdir())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loaders_cache_keeps_frames_not_windows(tmp_path: Path, workers: int) -> None:
    dataset = WindowDataset(Counting(tmp_path, 40), 8)
    with penstock.Cache("4MB") as cache:
        loader = penstock.DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers, cache=cache)
        for _ in range(2):
            seen = torch.cat(list(loader))
            assert torch.equal(seen[:, :, 0], seen[:, :1, 0] + torch.arange(8))
        loader.close()
    assert loads(tmp_path) == [1] * 40


def test_keys_are_the_same_in_every_process_and_differ_between_datasets(files: list[Path], tmp_path: Path) -> None:
    dataset = WindowDataset(files, 3)
    assert dataset.keys(0) == pickle.loads(pickle.dumps(WindowDataset(files, 3))).keys(0)
    assert dataset.keys(0)[1:] == dataset.keys(1)[:2] and dataset.keys(0) != dataset.keys(3)
    assert WindowDataset(files[:6], 2).keys(0) == dataset.keys(0)[:2], "a file is the same frame in another dataset"
    assert WindowDataset(files, 3, load=np.load).keys(0) != dataset.keys(0), "loaded otherwise, it is another"
    numbers: list[Any] = [WindowDataset(torch.arange(n), 2).keys(0) for n in (5, 6)]
    assert numbers[0] != numbers[1]


def test_a_rewritten_file_is_a_new_frame(files: list[Path]) -> None:
    with penstock.Cache("4MB") as cache:
        dataset = WindowDataset(files, 2)
        dataset.cache = cache
        assert dataset[0][:, 0, 0].tolist() == [10, 11]
        before = dataset.keys(0)
        np.save(files[1], np.full((2, 3), 99, np.float32))
        assert dataset.keys(0) == before, "a process looks a file up once"
        later = pickle.loads(pickle.dumps(WindowDataset(files, 2)))
        later.cache = cache
        assert later.keys(0)[0] == before[0] and later.keys(0)[1] != before[1]
        assert later[0][:, 0, 0].tolist() == [10, 99]


def test_frames_that_are_not_local_files_have_keys_too() -> None:
    dataset = WindowDataset(["store://a", "store://b"], 2, load=len)
    assert [key[1:] for key in dataset.keys(0)] == [("store://a",), ("store://b",)]
    assert dataset[0] == [9, 9]


class OwnWindows(WindowDataset):
    """A user's own."""


def test_a_subclass_is_the_same_dataset_after_its_first_use(files: list[Path]) -> None:
    dataset = OwnWindows(files, 2)
    known = fingerprint_of(dataset)
    with penstock.Cache("4MB") as cache:
        dataset.cache = cache
        dataset[0]
        assert fingerprint_of(dataset) == known == fingerprint_of(OwnWindows(files, 2))
    assert fingerprint_of(OwnWindows(files, 3)) != known
