"""Damaged and hostile archives: a DataError or fewer samples, never a crash, never another sample's bytes."""

from __future__ import annotations

import io
import itertools
import tarfile
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data.tar.dataset import TarDataset
from penstock.data.tar.index import from_bytes, index_of, to_bytes
from penstock.data.tar.members import walk
from penstock.errors import DataError

PROFILE = settings(max_examples=250)
SAMPLES = {
    f"dir/{number:02d}": {"txt": f"text of {number} ".encode() * number, "cls": b"%d" % number} for number in range(8)
}
LONG = "long" * 40


def _archive(kind: int) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind) as archive:
        for key, members in SAMPLES.items():
            for suffix, data in members.items():
                info = tarfile.TarInfo(f"{LONG}/{key}.{suffix}")
                info.size, info.mtime = len(data), 1.5 if kind == tarfile.PAX_FORMAT else 1
                archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


ARCHIVES = [_archive(tarfile.GNU_FORMAT), _archive(tarfile.PAX_FORMAT)]


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """A header whose checksum holds, and nothing else need."""
    name = draw(st.sampled_from([b"a.txt", b"/x.txt", b"../x.txt", b"", b"dir/03.txt", b"\xff\xfe.cls", b"a" * 100]))
    size = draw(
        st.one_of(
            st.integers(0, 1 << 36).map(lambda number: b"%011o\0" % (number % (1 << 33))),
            st.integers(0, 5000).map(lambda number: b"%011o\0" % number),
            st.binary(min_size=12, max_size=12),
            st.integers(0, 1 << 94).map(lambda number: (number | 1 << 95).to_bytes(12, "big")),
        )
    )
    kind = draw(st.sampled_from([b"0", b"\0", b"1", b"2", b"5", b"7", b"g", b"x", b"L", b"K", b"S", b"V", b"\xff"]))
    rest = draw(st.one_of(st.just(b"ustar\x0000"), st.just(b"ustar  \0"), st.binary(max_size=255)))
    block = (name.ljust(100, b"\0") + bytes(24) + size + bytes(12) + b" " * 8 + kind + bytes(100) + rest).ljust(
        512, b"\0"
    )[:512]
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


@st.composite
def records(draw: st.DrawFn) -> bytes:
    """A block that pretends to be pax records."""
    return draw(
        st.sampled_from(
            [b"12 path=../x\n", b"9 size=1\n", b"99999999999999999 path=x\n", b"-1 a=b\n", b"0 \n", b" ", b"5 a=b"]
        )
    ).ljust(512, b"\0")


def _apply(data: bytes, change: tuple[str, int, bytes]) -> bytes:
    kind, place, value = change
    at = place % (len(data) + 1)
    if kind == "cut":
        return data[:at]
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ (value[0] or 1)]) + data[at + 1 :] if at < len(data) else data
    block = at // 512 * 512
    if kind == "replace":
        return data[:block] + value + data[block + len(value) :]
    if kind == "drop":
        return data[:block] + data[block + 512 :]
    return data[:block] + value + data[block:]


places = st.integers(0, 1 << 20)
blocks = st.one_of(headers(), records(), st.just(bytes(512)), st.binary(min_size=512, max_size=512))
changes = st.one_of(
    st.tuples(st.just("cut"), places, st.just(b"")),
    st.tuples(st.just("flip"), places, st.binary(min_size=1, max_size=1)),
    st.tuples(st.just("drop"), places, st.just(b"")),
    st.tuples(st.sampled_from(["insert", "replace"]), places, blocks),
)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@PROFILE
@given(st.sampled_from(ARCHIVES), st.lists(changes, min_size=1, max_size=4))
def test_a_damaged_archive_is_an_error_or_has_fewer_samples(
    folder: Path, archive: bytes, damage: list[tuple[str, int, bytes]]
) -> None:
    for change in damage:
        archive = _apply(archive, change)
    path = folder / f"{next(_numbers)}.tar"
    path.write_bytes(archive)
    tracemalloc.start()
    try:
        faults: list[DataError] = []
        dataset = TarDataset(path, decode=False, on_error=lambda fault: not faults.append(fault))
        samples = [dataset[number] for number in range(len(dataset))]
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        if faults:
            with pytest.raises(DataError):
                TarDataset(path, decode=False)
    finally:
        tracemalloc.stop()
        path.unlink()
        Path(f"{path}.penstock-index").unlink()
    data_changed = any(kind in ("flip", "replace", "drop", "insert") for kind, _, _ in damage)
    for sample in samples:
        key = sample.pop("__key__").removeprefix(f"{LONG}/")
        for data in sample.values():
            assert data in archive
        if not data_changed:
            assert sample == SAMPLES[key]


@PROFILE
@given(st.sampled_from(ARCHIVES), st.integers(0, 1 << 20), headers())
def test_a_hostile_header_changes_no_other_sample(folder: Path, archive: bytes, place: int, block: bytes) -> None:
    path = folder / f"{next(_numbers)}.tar"
    path.write_bytes(_apply(archive, ("insert", place, block)))
    try:
        dataset = TarDataset(path, decode=False, on_error="skip")
        samples = [dataset[number] for number in range(len(dataset))]
    finally:
        path.unlink()
        Path(f"{path}.penstock-index").unlink()
    strangers = 0
    for sample in samples:
        key = sample.pop("__key__").removeprefix(f"{LONG}/")
        strangers += sample != SAMPLES.get(key)
    # The header stands before one member, or takes the place of its data: it can have to do with two samples.
    assert strangers <= 2


@PROFILE
@given(st.sampled_from(ARCHIVES), st.integers(0, 1 << 20), st.binary(min_size=1, max_size=16), st.booleans())
def test_a_damaged_index_is_never_used(archive: bytes, place: int, value: bytes, is_cut: bool) -> None:
    size_bytes = len(archive)
    index = index_of(
        walk(lambda offset, length: archive[offset : offset + length], size_bytes), version="1", size_bytes=size_bytes
    )
    whole = to_bytes(index)
    again = from_bytes(whole, version="1", size_bytes=size_bytes)
    assert again is not None and to_bytes(again) == whole
    at = place % len(whole)
    damaged = whole[:at] if is_cut else whole[:at] + value + whole[at + len(value) :]
    if damaged != whole:
        assert from_bytes(damaged, version="1", size_bytes=size_bytes) is None
    assert from_bytes(whole, version="2", size_bytes=size_bytes) is None


@pytest.mark.parametrize(
    "forged",
    [
        {"offsets": (3, 1 << 62)},
        {"offsets": (3, -512)},
        {"offsets": (3, 0)},
        {"sizes": (3, -1)},
        {"sizes": (3, 1 << 62)},
        {"sizes": (15, 1 << 20)},
        {"firsts": (3, 1 << 40)},
        {"firsts": (3, -1)},
        {"firsts": (8, 17)},
        {"key_ends": (3, 1 << 40)},
        {"suffix_numbers": (3, 2)},
    ],
    ids=str,
)
def test_an_inconsistent_index_is_not_used_even_with_a_valid_digest(
    forged: dict[str, tuple[int, int]],
) -> None:
    archive = ARCHIVES[0]
    index = index_of(
        walk(lambda at, length: archive[at : at + length], len(archive)), version="1", size_bytes=len(archive)
    )
    assert len(index) == 8
    for name, (place, value) in forged.items():
        numbers = getattr(index, name).copy()
        numbers[place] = value
        index = replace(index, **{name: numbers})
    assert from_bytes(to_bytes(index), version="1", size_bytes=len(archive)) is None
