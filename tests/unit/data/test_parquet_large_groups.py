"""Row groups larger than ``keep``: decoded once for all processes, in a file that no process can leave behind."""

from __future__ import annotations

import errno
import gc
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.data import ParquetDataset
from penstock.data.parquet import decoded_groups_file, rows_file
from penstock.data.parquet.row_groups import ParquetFiles

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = 20_000


def numbers(folder: Path, rows: int = ROWS, group: int = ROWS) -> Path:
    path = folder / "a.parquet"
    table = pa.table({"n": pa.array(range(rows), pa.int64())})
    pq.write_table(table, path, row_group_size=group, use_dictionary=False, compression="none")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files are made."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(rows_file, "temporary_folder", lambda: tmp_path / "temporary")
    return tmp_path / "temporary"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The groups that this process has begun to read from the Parquet file."""
    groups: list[int] = []
    read = ParquetFiles.read_pieces

    def counted(self: ParquetFiles, group: int, *more: Any, **named: Any) -> Any:
        groups.append(group)
        return read(self, group, *more, **named)

    monkeypatch.setattr(ParquetFiles, "read_pieces", counted)
    return groups


def limit(monkeypatch: pytest.MonkeyPatch, bytes_: int) -> None:
    """Let the file take so much disk besides its table."""
    monkeypatch.setattr(rows_file.RowsFile, "limit_bytes", lambda self: bytes_ + 4096)


def links(folder: Path) -> list[str]:
    return [str(path.readlink()) for path in folder.rglob("*") if path.is_symlink()]


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


@pytest.mark.parametrize("keep", ["1kB", "40kB"])
@pytest.mark.parametrize("mode", ["mapped", "ultra"])
def test_a_large_group_is_decoded_once_for_all_datasets_of_the_same_rows(
    tmp_path: Path, folder: Path, decoded: list[int], mode: str, keep: str
) -> None:
    dataset = ParquetDataset(numbers(tmp_path), keep=keep, mode=mode)
    asked = np.random.default_rng(0).permutation(ROWS)[:50].tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [row["n"] for row in dataset.__getitems__(asked)] == asked
        assert [dataset[place]["n"] for place in asked] == asked
    assert decoded == [0]
    other = ParquetDataset(tmp_path / "a.parquet", keep=keep, mode=mode)
    assert other[77]["n"] == 77 and decoded == [0]
    del dataset
    gc.collect()
    assert other[78]["n"] == 78 and decoded == [0]
    del other
    gc.collect()
    assert not list(folder.iterdir())


def test_nothing_is_left_of_a_program_that_was_killed_but_a_link_that_the_next_one_removes(
    tmp_path: Path, folder: Path
) -> None:
    numbers(tmp_path)
    pid = os.fork()
    if not pid:
        dataset = ParquetDataset(tmp_path / "a.parquet", keep="1kB")
        dataset[0]
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (link,) = links(folder)
    assert link.startswith(f"/proc/{pid}/fd/") and not os.path.exists(link) and not files(folder)  # noqa: PTH110
    numbers(tmp_path, 30_000)
    dataset = ParquetDataset(tmp_path / "a.parquet", keep="1kB")
    assert dataset[29_999]["n"] == 29_999
    assert [place.split("/")[2] for place in links(folder)] == [str(os.getpid())]


def test_a_worker_killed_while_it_decodes_does_not_block_the_others(tmp_path: Path, folder: Path) -> None:
    dataset = ParquetDataset(numbers(tmp_path), keep="1kB")
    store = dataset._groups._decoded  # type: ignore[union-attr]
    pid = os.fork()
    if not pid:

        def killed() -> Iterator[memoryview]:
            yield memoryview(bytes(50_000))
            os.kill(os.getpid(), signal.SIGKILL)

        store.store(0, killed())
    os.waitpid(pid, 0)
    assert store._file is not None and store._file.taken_bytes() > 50_000
    assert dataset[19_999]["n"] == 19_999
    assert store._file.taken_bytes() < 200_000, "what the killed process has written is given back"


@pytest.mark.parametrize(
    ("context", "makes"),
    [("fork", [torch.utils.data.DataLoader, penstock.DataLoader]), ("spawn", [penstock.DataLoader])],
)
def test_workers_of_every_kind_read_the_file_of_their_trainer(
    tmp_path: Path, folder: Path, context: str, makes: list[Any], decoded: list[int]
) -> None:
    dataset = ParquetDataset(numbers(tmp_path, 2000), keep="1kB")
    # Without its link, workers have only what the dataset carries.
    for link in folder.rglob("*"):
        if link.is_symlink():
            link.unlink()
    for make in makes:
        loader = make(dataset, batch_size=500, num_workers=len(makes), multiprocessing_context=context)
        assert torch.equal(torch.cat([batch["n"] for batch in loader]), torch.arange(2000))
    assert dataset[5]["n"] == 5 and not decoded, "the trainer reads what its workers have decoded"
    assert not files(folder)


def test_threads_read_groups_while_others_evict_them(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    limit(monkeypatch, 120_000)
    dataset = ParquetDataset(numbers(tmp_path, group=4000), keep="1kB")
    monkeypatch.setattr(dataset._groups._decoded, "why_not", lambda group: None)  # type: ignore[union-attr]
    orders = [np.random.default_rng(n).permutation(ROWS)[:60].tolist() for n in range(4)]

    def read(order: list[int]) -> list[int]:
        return [dataset[place]["n"] for place in order]

    with ThreadPoolExecutor(4) as threads, warnings.catch_warnings():
        # A thread whose group does not fit, because the others hold all there is room for, reads it piece by piece.
        warnings.simplefilter("ignore")
        assert list(threads.map(read, orders)) == orders


def test_the_file_stays_within_its_limit_and_a_group_that_is_read_again_soon_replaces_an_older_one(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[int]
) -> None:
    limit(monkeypatch, 130_000)
    dataset = ParquetDataset(numbers(tmp_path, group=2000), keep="1kB")
    store = dataset._groups._decoded  # type: ignore[union-attr]
    for first in range(0, ROWS, 500):
        assert [row["n"] for row in dataset.__getitems__(range(first, first + 500))] == list(range(first, first + 500))
        assert store._file is not None and store._file.taken_bytes() <= 134_096
    # Four reads of each group: the first ones fit, and of the others the first read is from pieces.
    assert all(decoded.count(group) <= 2 for group in range(10)) and decoded.count(9) == 2


def test_a_process_maps_no_more_of_the_file_than_twice_keep(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = ParquetDataset(numbers(tmp_path, group=2000), keep="10kB")
    pages, forgotten = [0], []
    monkeypatch.setattr(decoded_groups_file, "file_pages_bytes", lambda: pages[0])
    monkeypatch.setattr(decoded_groups_file, "forget_pages", lambda view: forgotten.append(pages[0]))
    for row in range(0, ROWS, 50):
        assert dataset[row]["n"] == row
        pages[0] += 400
    assert len(dataset._groups._decoded._mapped) == 10  # type: ignore[union-attr]
    # It looks every 16 rows.
    rounds = sorted(set(forgotten))
    assert rounds[0] > 20_000 and all(20_000 < after - before <= 30_000 for before, after in pairwise(rounds))


def test_random_rows_of_more_groups_than_there_is_room_for_evict_next_to_nothing_and_warn_once(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 130_000)
    dataset = ParquetDataset(numbers(tmp_path, group=500), keep="1kB")
    writes: list[int] = []
    store = decoded_groups_file.DecodedGroups.store
    monkeypatch.setattr(
        decoded_groups_file.DecodedGroups,
        "store",
        lambda self, group, parts: writes.append(group) or store(self, group, parts),
    )
    with pytest.warns(RuntimeWarning, match="BlockShuffleSampler") as said:
        for batch in np.random.default_rng(0).permutation(ROWS)[:1920].reshape(60, 32).tolist():
            assert [row["n"] for row in dataset.__getitems__(batch)] == batch
    assert len(said) == 1
    assert len(writes) < 100, "of about 900 reads of groups that are not there"


@pytest.mark.parametrize("many", [False, True])
def test_without_room_for_the_file_groups_are_read_piece_by_piece_with_one_warning(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    limit(monkeypatch, 20_000)
    dataset = ParquetDataset(numbers(tmp_path), keep="1kB")
    with pytest.warns(RuntimeWarning, match="row group 0 of .*keep=.*TMPDIR") as said:
        if many:
            assert [row["n"] for row in dataset.__getitems__([5, 19_999])] == [5, 19_999]
        assert dataset[19_999]["n"] == 19_999 and dataset[0]["n"] == 0
    assert len(said) == 1 and said[0].filename == __file__


def test_a_disk_that_fills_up_is_one_warning_of_all_workers(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = ParquetDataset(numbers(tmp_path), keep="1kB")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rows_file.RowsFile, "write", full)
    loader = torch.utils.data.DataLoader(dataset, batch_size=1000, num_workers=2, multiprocessing_context="fork")
    with (tmp_path / "said").open("ab", buffering=0) as said:
        monkeypatch.setattr(warnings, "warn", lambda text, *_, **more: said.write(f"{text}\n".encode()))
        for _ in range(2):
            assert torch.equal(torch.cat([batch["n"] for batch in loader]), torch.arange(ROWS))
    assert (tmp_path / "said").read_text().count("No space left on device") == 1


def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_file, "temporary_folder", lambda: Path("/nowhere"))


def no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(place: str) -> Any:
        raise FileNotFoundError(place)

    monkeypatch.setattr(rows_file, "_opened", missing)


@pytest.mark.parametrize("spoil", [nowhere, no_proc])
def test_a_machine_without_a_place_for_the_file_is_one_warning_of_the_trainer(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], None]
) -> None:
    spoil(monkeypatch)
    with pytest.warns(RuntimeWarning, match="no temporary file can be created"):
        dataset = ParquetDataset(numbers(tmp_path), keep="1kB")
    loader = torch.utils.data.DataLoader(dataset, batch_size=5000, num_workers=2, multiprocessing_context="fork")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(torch.cat([batch["n"] for batch in loader]), torch.arange(ROWS))


@pytest.mark.parametrize("spoil", [lambda link: link.chmod(0o777), lambda link: (link / ("0" * 32)).mkdir()])
def test_a_folder_of_links_that_others_can_write_to_is_not_used(
    tmp_path: Path, folder: Path, spoil: Callable[[Path], None]
) -> None:
    of_links = folder / f"penstock-rows-{os.getuid()}"
    of_links.mkdir(mode=0o700)
    spoil(of_links)
    dataset = ParquetDataset(numbers(tmp_path), keep="1kB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dataset[3]["n"] == 3
    assert not links(folder)


def test_a_link_to_another_file_is_replaced(tmp_path: Path, folder: Path, decoded: list[int]) -> None:
    dataset = ParquetDataset(numbers(tmp_path), keep="1kB")
    (link,) = (path for path in folder.rglob("*") if path.is_symlink())
    del dataset
    gc.collect()
    link.parent.mkdir(mode=0o700)
    with (tmp_path / "another").open("w+b") as another:
        another.truncate(rows_file._SPAN_BYTES)
        link.symlink_to(f"/proc/{os.getpid()}/fd/{another.fileno()}")
        dataset = ParquetDataset(tmp_path / "a.parquet", keep="1kB")
        assert dataset[4]["n"] == 4 and decoded == [0]
        assert links(folder) != [f"/proc/{os.getpid()}/fd/{another.fileno()}"]
