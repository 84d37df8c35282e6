"""Files by name and by place, on this machine and through fsspec."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from penstock import ConfigError, DataError
from penstock.data import sources
from penstock.data.sources import is_remote, locate, open_source

SUFFIXES = (".bin", ".dat")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "data"
    (made / "inner" / "more").mkdir(parents=True)
    for name in ("b.bin", "a.bin", "C.BIN", "inner/d.dat", "inner/more/e.bin", "notes.txt", ".hidden.bin", "_part.bin"):
        (made / name).write_bytes(name.encode())
    return made


def names(found: list[str], folder: Path) -> list[str]:
    return [str(Path(location).relative_to(folder)) for location in found]


def test_a_folder_is_its_data_files_at_any_depth_in_order(folder: Path) -> None:
    found = names(locate(folder, suffixes=SUFFIXES), folder)
    assert sorted(found) == ["C.BIN", "a.bin", "b.bin", "inner/d.dat", "inner/more/e.bin"]
    assert found == names(locate(str(folder), suffixes=SUFFIXES), folder)
    assert found == names(locate(f"file://{folder}", suffixes=SUFFIXES), folder)


def test_a_glob_is_what_it_matches_in_order(folder: Path) -> None:
    assert names(locate(f"{folder}/*.bin", suffixes=SUFFIXES), folder) == ["_part.bin", "a.bin", "b.bin"]
    assert names(locate(f"{folder}/**/*.dat", suffixes=SUFFIXES), folder) == ["inner/d.dat"]
    assert names(locate(f"{folder}/[ab].bin", suffixes=SUFFIXES), folder) == ["a.bin", "b.bin"]


def test_a_path_that_exists_is_not_read_as_a_pattern(folder: Path) -> None:
    odd = folder / "[odd] *.txt"
    odd.write_bytes(b"x")
    assert locate(odd, suffixes=SUFFIXES) == [str(odd)]
    assert locate(folder / "notes.txt", suffixes=SUFFIXES) == [str(folder / "notes.txt")]


def test_a_list_keeps_its_order(folder: Path) -> None:
    wanted = [folder / "b.bin", f"{folder}/a.*", folder / "inner"]
    assert names(locate(wanted, suffixes=SUFFIXES), folder) == ["b.bin", "a.bin", "inner/d.dat", "inner/more/e.bin"]


def test_what_names_no_file_is_an_error_that_says_what_was_asked(folder: Path) -> None:
    for absent in (folder / "absent.bin", f"{folder}/*.absent", [folder / "a.bin", folder / "absent.bin"]):
        with pytest.raises(DataError, match="absent"):
            locate(absent, suffixes=SUFFIXES)
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty.*\.bin or \.dat"):
        locate(folder / "empty", suffixes=SUFFIXES)
    wrong: Any
    for wrong in ([], 5, None):
        with pytest.raises(ConfigError, match="names no file"):
            locate(wrong, suffixes=SUFFIXES)


def test_urls_are_remote_and_paths_are_not() -> None:
    assert is_remote("s3://bucket/x")
    assert is_remote("https://host/x")
    assert not is_remote("/a/b")
    assert not is_remote("C:/x")
    assert not is_remote("file:///a/b")


@pytest.mark.parametrize("scheme", ["", "file://", "local://"])
def test_bytes_come_by_place_and_are_fewer_only_at_the_end(scheme: str, tmp_path: Path) -> None:
    if scheme == "local://":
        pytest.importorskip("fsspec")
    body = os.urandom(10_000)
    (tmp_path / "x.bin").write_bytes(body)
    source = open_source(f"{scheme}{tmp_path}/x.bin")
    assert source.size_bytes == 10_000
    assert source.read(0, 10_000) == body
    assert source.read(123, 456) == body[123:579]
    assert source.read(9_990, 100) == body[9_990:]
    assert source.read(10_000, 10) == source.read(20_000, 10) == source.read(5, 0) == b""
    assert source.version == open_source(f"{scheme}{tmp_path}/x.bin").version
    source.close()
    source.close()


@pytest.mark.parametrize("scheme", ["", "local://"])
def test_a_changed_file_has_another_version(scheme: str, tmp_path: Path) -> None:
    if scheme:
        pytest.importorskip("fsspec")
    file = tmp_path / "x.bin"
    file.write_bytes(b"old")
    before = open_source(f"{scheme}{file}").version
    file.write_bytes(b"new")
    os.utime(file, ns=(1, 1))
    assert open_source(f"{scheme}{file}").version != before


@pytest.mark.parametrize("scheme", ["", "local://"])
def test_an_absent_file_is_an_error_that_names_it(scheme: str, tmp_path: Path) -> None:
    if scheme:
        pytest.importorskip("fsspec")
    with pytest.raises(DataError, match=r"absent\.bin"):
        open_source(f"{scheme}{tmp_path}/absent.bin")


def test_an_unknown_fsspec_scheme_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(ConfigError, match="nosuchscheme"):
        open_source("nosuchscheme://x/y")


def test_threads_may_read_one_source(tmp_path: Path) -> None:
    body = os.urandom(100_000)
    (tmp_path / "x.bin").write_bytes(body)
    source = open_source(str(tmp_path / "x.bin"))
    wrong: list[int] = []

    def read(start: int) -> None:
        places = range(start, 99_000, 997)
        wrong.extend(place for place in places if source.read(place, 500) != body[place : place + 500])

    threads = [threading.Thread(target=read, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    source.close()
    assert wrong == []


def failing_store(kind: type[Exception], times: int) -> type:
    """A file system of fsspec whose reads fail so often before they work."""
    from fsspec.implementations.local import LocalFileSystem

    class Failing(LocalFileSystem):
        protocol = "failing"
        cachable = False
        left: ClassVar[int] = times

        def cat_file(self, path: str, start: Any = None, end: Any = None, **more: Any) -> Any:
            if Failing.left > 0:
                Failing.left -= 1
                raise kind("the store is away")
            return super().cat_file(path, start, end, **more)

    return Failing


@pytest.mark.parametrize("kind", [ConnectionError, TimeoutError, OSError, RuntimeError])
def test_a_read_that_fails_is_tried_again(
    kind: type[Exception], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.register_implementation("failing", failing_store(kind, 2), clobber=True)
    (tmp_path / "x.bin").write_bytes(b"0123456789")
    source = open_source(f"failing://{tmp_path}/x.bin")
    assert source.read(2, 5) == b"23456"
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "x.bin" in caplog.text


def test_a_read_that_keeps_failing_raises_the_last_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setattr(sources, "_GIVE_UP_AFTER_S", 0.5)
    fsspec.register_implementation("failing", failing_store(ConnectionError, 1000), clobber=True)
    (tmp_path / "x.bin").write_bytes(b"0123456789")
    source = open_source(f"failing://{tmp_path}/x.bin")
    with pytest.raises(DataError, match=r"x\.bin.*the store is away"):
        source.read(2, 5)


def test_errors_that_a_retry_cannot_fix_raise_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.register_implementation("failing", failing_store(PermissionError, 1), clobber=True)
    (tmp_path / "x.bin").write_bytes(b"0123456789")
    with pytest.raises(DataError, match=r"x\.bin.*Permission"):
        open_source(f"failing://{tmp_path}/x.bin").read(2, 5)
    assert caplog.records == []


def test_a_folder_yields_its_files_without_folders_and_hidden_names(tmp_path: Path) -> None:
    for name in ("b.parquet", "a.parquet", "sub/c.PARQUET", "t.parquet/part-0.parquet", "x.txt",
                 "_temporary/d.parquet", ".trash/e.parquet", "_f.parquet", "sub/.g.parquet"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = [str(Path(location).relative_to(tmp_path)) for location in locate(tmp_path, suffixes=(".parquet",))]
    assert found == ["a.parquet", "b.parquet", "sub/c.PARQUET", "t.parquet/part-0.parquet"]


def test_a_platform_without_pread_reads_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(range(200)))
    monkeypatch.delattr(os, "pread")
    source = open_source(str(path))
    assert source.read(100, 20) == bytes(range(100, 120)) and source.read(190, 50) == bytes(range(190, 200))
    source.close()
