"""Archives that lie, and what is left of them."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.data.tar.dataset import TarDataset
from penstock.errors import DataError
from support.tar_archives import END, header, member, padded, pax, write

GOOD = member(b"good.txt", b"good")
AFTER = member(b"later.txt", b"later")


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


def broken_checksum(block: bytes) -> bytes:
    return bytes([block[0] ^ 1]) + block[1:]


PASSED_BY: dict[str, tuple[bytes, str]] = {
    "absolute": (member(b"/etc/bad.txt", b"bad"), "unsafe name"),
    "upwards": (member(b"a/../../bad.txt", b"bad"), "unsafe name"),
    "pax upwards": (pax({b"path": b"../bad.txt"}) + member(b"ok.txt", b"bad"), "unsafe name"),
    "symbolic link": (header(b"bad.txt", 0, kind=b"2"), "link or device"),
    "hard link with a size": (header(b"bad.txt", 1 << 30, kind=b"1"), "link or device"),
    "device": (header(b"bad.txt", kind=b"3"), "link or device"),
    "pipe": (header(b"bad.txt", kind=b"6"), "link or device"),
    "unknown type": (member(b"bad.txt", b"bad", kind=b"Z"), "unknown type"),
    "gnu sparse": (member(b"bad.txt", b"bad", kind=b"S"), "sparse"),
    "pax sparse": (pax({b"GNU.sparse.realsize": b"9" * 18}) + member(b"bad.txt", b"bad"), "sparse"),
    "twice": (member(b"bad.txt", b"1") + member(b"bad.TXT", b"2"), "duplicate"),
    "a key of ours": (member(b"bad.__KEY__", b"1"), "duplicate"),
}
# Large ones are made by their tests: every process that is forked in between would copy them.
HIDES_THE_REST: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    "checksum": (broken_checksum(GOOD), "damaged header"),
    "beyond the file": (header(b"bad.txt", 1 << 32), "truncated"),
    "negative": (header(b"bad.txt", b"-0000000001\0"), "impossible size"),
    "negative base 256": (header(b"bad.txt", b"\xff" * 12), "impossible size"),
    "overflowing base 256": (header(b"bad.txt", b"\x80" + b"\xff" * 11), "truncated"),
    "no octal": (header(b"bad.txt", b"99999999999\0"), "impossible size"),
    "python number": (header(b"bad.txt", b"0o7_7\0"), "impossible size"),
    "pax size": (pax({b"size": b"9" * 18}) + member(b"bad.txt", b"bad"), "truncated"),
    "pax negative size": (pax({b"size": b"-5"}) + member(b"bad.txt", b"bad"), "damaged header"),
    "pax endless size": (pax({b"size": b"9" * 5000}) + member(b"bad.txt", b"bad"), "damaged header"),
    "pax nonsense": (member(b"x", b"99999 path=a\n", kind=b"x") + member(b"bad.txt"), "damaged header"),
    "pax of a gigabyte": (header(b"x", 1 << 30, kind=b"x"), "truncated"),
    "large pax": (lambda: member(b"x", bytes(2 << 20), kind=b"x") + member(b"bad.txt"), "oversized header"),
    "large global pax": (lambda: member(b"x", bytes(2 << 20), kind=b"g") + member(b"bad.txt"), "oversized header"),
    "endless chain": (lambda: pax({b"comment": b"x"}) * 5000 + member(b"bad.txt"), "damaged header"),
    "chain of long names": (lambda: member(b"x", b"y", kind=b"L") * 5000 + member(b"bad.txt"), "damaged header"),
    "name of nothing": (member(b"x", b"y", kind=b"L") + END, "damaged header"),
}


def made(part: bytes | Callable[[], bytes]) -> bytes:
    return part() if callable(part) else part


def texts(dataset: TarDataset) -> list[Any]:
    return [dataset[number]["txt"] for number in range(len(dataset))]


@pytest.mark.parametrize("name", [*PASSED_BY, *HIDES_THE_REST])
def test_a_hostile_part_is_an_error_or_left_out(tmp_path: Path, name: str) -> None:
    part, reason = {**PASSED_BY, **HIDES_THE_REST}[name]
    path = write(tmp_path / "a.tar", GOOD, made(part), AFTER)
    for _ in ("built", "kept"):
        with pytest.raises(DataError, match=r"a\.tar: .*at byte \d+"):
            TarDataset(path)
        dataset = TarDataset(path, on_error="skip")
        # What follows is lost where nothing says how far to go; a nameless fault takes the sample before it along.
        is_named = reason in ("truncated", "impossible size") and "gigabyte" not in name
        kept = ["good", "later"] if name in PASSED_BY else ["good"] if is_named else []
        assert texts(dataset) == kept
        assert dataset.skipped == {reason: 1}


def test_the_sample_a_bad_member_belongs_to_is_left_out_whole(tmp_path: Path) -> None:
    sample = member(b"s.cls", b"1") + header(b"s.jpg", kind=b"2") + member(b"s.txt", b"half a sample")
    dataset = TarDataset(write(tmp_path / "a.tar", GOOD, sample, AFTER), on_error="skip")
    assert texts(dataset) == ["good", "later"]


def test_a_function_decides(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", GOOD, header(b"bad.txt", kind=b"2"), AFTER, END[:512], end=b"")
    seen: list[str] = []
    dataset = TarDataset(path, on_error=lambda error: not seen.append(str(error)))
    assert texts(dataset) == ["good", "later"] and "symbolic link" in seen[0] and "'bad.txt' at byte 1024" in seen[0]
    with pytest.raises(DataError, match="symbolic link"):
        TarDataset(path, on_error=lambda error: False)


@pytest.mark.parametrize("cut", [0, 100, 512, 1000, 1024, 1300, 2047])
def test_a_truncated_archive_gives_whole_samples_only(tmp_path: Path, cut: int) -> None:
    whole = GOOD + AFTER
    path = tmp_path / "a.tar"
    path.write_bytes(whole[:cut])
    with pytest.raises(DataError, match=r"no tar header|the end mark is missing|the file is empty|its header says"):
        TarDataset(path)
    dataset = TarDataset(path, on_error="skip")
    # The last sample may have had more members.
    assert texts(dataset) == (["good"] if cut > 1500 else [])


def test_the_error_for_other_files_says_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(gzip.compress(GOOD + END))
    with pytest.raises(DataError, match=r"gzip.*penstock pack"):
        TarDataset(path)
    path.write_bytes(b"not an archive" * 1000)
    with pytest.raises(DataError, match="no tar header"):
        TarDataset(path)
    assert len(TarDataset(path, on_error="skip")) == 0


def test_archives_without_samples_have_none(tmp_path: Path) -> None:
    for number, parts in enumerate([b"", bytes(100_000), member(b"no-dot", b"x"), member(b"folder/", kind=b"5")]):
        dataset = TarDataset(write(tmp_path / f"{number}.tar", parts))
        assert len(dataset) == 0 and dataset.blocks.tolist() == [0, 0]
        with pytest.raises(IndexError):
            dataset[0]
    mixed = TarDataset([tmp_path / "0.tar", write(tmp_path / "full.tar", GOOD), tmp_path / "1.tar"])
    assert texts(mixed) == ["good"] and mixed.blocks.tolist() == [0, 0, 1, 1]


def test_false_sizes_allocate_no_memory(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{at}.tar", made(part)) for at, (part, _) in enumerate(HIDES_THE_REST.values())]
    tracemalloc.start()
    try:
        for path in paths:
            TarDataset(path, on_error="skip", index_dir=tmp_path / "indexes")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_sample_that_cannot_be_decoded_is_replaced_by_the_next_and_counted(tmp_path: Path) -> None:
    parts = [member(b"%d.json" % number, b"[]" if number in (2, 5) else b"{") for number in range(6)]
    path = write(tmp_path / "a.tar", *parts)
    with pytest.raises(DataError, match=r"a\.tar: member 0\.json \(1 bytes at 512\) cannot be decoded"):
        TarDataset(path)[0]
    dataset = TarDataset(path, on_error="skip")
    assert [dataset[number]["__key__"] for number in range(6)] == ["2", "2", "2", "5", "5", "5"]
    assert dataset.skipped == {"decode": 4}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_bad_samples_count_once_however_many_workers_and_epochs_met_them(tmp_path: Path, method: str) -> None:
    bad = (2, 3, 11, 29)
    parts = [member(b"%02d.json" % number, b"{" if number in bad else b"[1]") for number in range(30)]
    dataset = TarDataset(write(tmp_path / "a.tar", *parts), on_error="skip")
    # Each epoch has workers of its own; a spawned one takes a second to import torch.
    workers = 2 if method == "fork" else 1
    loader = penstock.DataLoader(
        dataset, batch_size=3, num_workers=workers, shuffle=True, multiprocessing_context=method
    )
    for _ in range(2):
        assert sum(len(batch["__key__"]) for batch in loader) == 30
    loader.close()
    assert dataset.skipped == {"decode": 4}
    dataset[2]
    assert dataset.skipped == {"decode": 4}
    assert pickle.loads(pickle.dumps(dataset)).skipped == {"decode": 4}


def test_nothing_but_bad_samples_is_an_error_after_all(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", *(member(b"%d.json" % number, b"{") for number in range(200)))
    with pytest.raises(DataError, match="100 samples from number 3 on"):
        TarDataset(path, on_error="skip")[3]


def test_sparse_members_with_extended_maps_are_skipped(tmp_path: Path) -> None:
    block = bytearray(header(b"bad.txt", 3, kind=b"S"))
    block[482] = 1
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    more, last = bytearray(512), bytes(512)
    more[504] = 1
    path = write(tmp_path / "a.tar", GOOD, bytes(block), bytes(more), last, padded(b"bad"), AFTER)
    assert texts(TarDataset(path, on_error="skip")) == ["good", "later"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", [b"x", b"g"])
@pytest.mark.parametrize("data", [b"path=" + b"a" * 40 + b"\n", b"-5 path=a\n", b"0 path=a\n", b" 9 a=b\n"])
def test_a_pax_record_without_a_length_ends_the_walk(tmp_path: Path, kind: bytes, data: bytes) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, len(data)
    path = tmp_path / "evil.tar"
    path.write_bytes(header.tobuf() + data + bytes(-len(data) % 512) + bytes(1024))
    assert len(TarDataset(path, on_error="skip")) == 0


@pytest.mark.parametrize("kind", ["pipe", "endless device", "folder", "sparse file"])
def test_whatever_lies_where_an_index_should_is_passed_over(tmp_path: Path, kind: str) -> None:
    shard = write(tmp_path / "t.tar", GOOD + END)
    index = tmp_path / "t.tar.penstock-index"
    if kind == "pipe":
        os.mkfifo(index)
    elif kind == "endless device":
        index.symlink_to("/dev/zero")
    elif kind == "folder":
        index.mkdir()
    else:
        with index.open("wb") as file:
            file.truncate(1 << 40)
    assert TarDataset(shard)[0]["txt"] == "good"


def test_an_index_is_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep me")
    shard = write(tmp_path / "t.tar", GOOD + END)
    (tmp_path / ".t.tar.penstock-index.part").symlink_to(tmp_path / "precious")
    assert TarDataset(shard)[0]["txt"] == "good"
    assert (tmp_path / "precious").read_text() == "keep me"


@pytest.mark.parametrize("form", ["legacy", "zip"])
def test_a_small_pt_file_that_unfolds_to_gigabytes_is_refused_before_memory_is_taken(tmp_path: Path, form: str) -> None:
    import torch

    class Bomb:
        def __reduce__(self) -> Any:
            return bytearray, (1 << 40,)

    stream = io.BytesIO()
    torch.save([Bomb()], stream, _use_new_zipfile_serialization=form == "zip")
    shard = write(tmp_path / "t.tar", member(b"a.pt", stream.getvalue()) + END)
    with pytest.raises(DataError, match="a bytearray"):
        TarDataset(shard)[0]
    for good in ({"bytearray": torch.arange(3)}, torch.zeros(2)):
        stream = io.BytesIO()
        torch.save(good, stream, _use_new_zipfile_serialization=form == "zip")
        found = TarDataset(write(tmp_path / "g.tar", member(b"a.pt", stream.getvalue()) + END))[0]["pt"]
        assert str(found) == str(good)
