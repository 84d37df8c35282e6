"""TarDataset beside webdataset's own reader, in every kind of worker, and its index through changes and damage."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tarfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

import penstock
from penstock.data.pack.packing import pack
from penstock.data.tar import index_builder as tar_indexing
from penstock.data.tar import open_shards
from penstock.data.tar.dataset import TarDataset
from penstock.errors import ConfigError, DataError
from support.datasets.packed import Samples
from support.tar_archives import header, member, padded, pax, write, write_texts


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


def make_shards(folder: Path, shards: int = 3, samples: int = 20) -> list[str]:
    names = []
    for shard in range(shards):
        texts = [f"d/{shard}-{number:03d}.{end}" for number in range(samples) for end in ("txt", "id.txt")]
        names.append(write_texts(folder / f"part-{shard:03d}.tar", texts))
    return names


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name not in ("__url__", "__local_path__")}


def test_shards_that_webdataset_wrote_read_as_webdataset_reads_them(tmp_path: Path) -> None:
    wds, image = pytest.importorskip("webdataset"), pytest.importorskip("PIL.Image")
    chance = np.random.default_rng(0)
    pattern = str(tmp_path / "shard-%03d.tar")
    with wds.ShardWriter(pattern, maxcount=7, verbose=0) as out:
        for number in range(20):
            picture = chance.integers(0, 256, (9, 8, 3), dtype=np.uint8)
            out.write(
                {
                    "__key__": f"deep.er/{number:04d}" if number % 2 else "x" * 150 + f"/{number}",
                    "txt": f"text {number} ü",
                    "json": {"number": number, "list": [1, 2.5, None]},
                    "cls": number % 5,
                    "npy": chance.normal(size=(3, number)).astype(np.float32),
                    "npz": {"a": np.arange(number), "b": np.ones((2, 2), np.float16)},
                    "left.PNG": image.fromarray(picture),
                    "bin": chance.bytes(number),
                    "unknown": b"",
                }
            )
    shards = str(tmp_path / "shard-{000..002}.tar")
    raw = [plain(one) for one in wds.WebDataset(shards, shardshuffle=False)]
    decoded = [plain(one) for one in wds.WebDataset(shards, shardshuffle=False).decode("rgb8")]
    ours_raw, ours = TarDataset(shards, decode=False), TarDataset(shards)
    assert len(ours) == len(raw) == 20
    for number in range(20):
        assert list(ours_raw[number].items()) == list(raw[number].items())
        assert list(ours[number]) == list(decoded[number])
        for name, value in decoded[number].items():
            if name == "npz":
                assert list(ours[number][name]) == list(value)
                assert all(np.array_equal(ours[number][name][key], value[key]) for key in value)
            elif isinstance(value, np.ndarray):
                assert ours[number][name].dtype == value.dtype and ours[number][name].flags.writeable
                assert np.array_equal(ours[number][name], value)
            else:
                assert (type(ours[number][name]), ours[number][name]) == (type(value), value)
    assert ours.blocks.tolist() == [0, 7, 14, 20]
    assert ours.block_bytes.tolist() == [(tmp_path / f"shard-00{shard}.tar").stat().st_size for shard in range(3)]


ODD_NAMES = [
    *("a.txt", "a.b.txt", "A.TXT", "no-dot", "d/.hidden", "d/x.y/.h", "x.y/z.txt", "./q.txt", ".top", "__meta__"),
    *("__meta__/a.txt", "__a__.txt", "q.txt", "q.cls", "r.", "é/ü.txt", "ü" * 120 + ".txt", "b//c.txt"),
]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_odd_names_are_grouped_as_webdataset_groups_them(tmp_path: Path, kind: int) -> None:
    wds = pytest.importorskip("webdataset")
    names = [name for name in ODD_NAMES if kind != tarfile.USTAR_FORMAT or len(name.encode()) < 100]
    path = write_texts(tmp_path / "odd.tar", names, kind=kind)
    theirs = [plain(one) for one in wds.WebDataset(path, shardshuffle=False)]
    ours = TarDataset(path, decode=False)
    assert [ours[number] for number in range(len(ours))] == theirs


def test_long_names_of_every_format_are_complete(tmp_path: Path) -> None:
    long = b"n" * 90 + b".txt"
    path = write(
        tmp_path / "a.tar",
        member(long, b"1", prefix=b"p" * 140),
        member(b"gnu.txt", b"2", prefix=b"not a prefix", magic=b"ustar  \0"),
        member(b"././@LongLink", b"g/" + long + b"\0", kind=b"L"),
        member(b"cut short", b"3"),
        pax({b"path": b"pax/" + long, b"comment": b"x"}),
        member(b"cut short", b"4"),
        pax({b"size": b"5"}),
        header(b"size.txt", 0) + padded(b"55555"),
        header(b"base256.txt", b"\x80" + (6).to_bytes(11, "big")) + padded(b"666666"),
        member(b"old.txt", b"7", kind=b"\0", magic=bytes(8)),
        member(b"contiguous.txt", b"8", kind=b"7"),
        pax({b"comment": b"of all"}, kind=b"g"),
        member(b"folder/", kind=b"5"),
        member(b"last.txt", b"9"),
    )
    dataset = TarDataset(path)
    keys = ["p" * 140 + "/" + "n" * 90, "gnu", "g/" + "n" * 90, "pax/" + "n" * 90]
    assert [dataset[number]["__key__"] for number in range(4)] == keys
    assert [dataset[number]["txt"] for number in range(len(dataset))] == [
        "1", "2", "3", "4", "55555", "666666", "7", "8", "9"
    ]  # fmt: skip


def test_numbers_lists_and_their_limits(tmp_path: Path) -> None:
    dataset = TarDataset(make_shards(tmp_path), transform=lambda sample: sample["__key__"])
    everything = [dataset[number] for number in range(len(dataset))]
    assert len(dataset) == 60 and dataset[-1] == everything[-1] and dataset[np.int64(3)] == everything[3]
    asked = [59, 0, 20, 0, -1, 39]
    assert dataset.__getitems__(asked) == [everything[number] for number in asked]
    for wrong in (60, -61):
        with pytest.raises(IndexError):
            dataset[wrong]
    with pytest.raises(TypeError):
        dataset["3"]  # pyright: ignore[reportArgumentType]


def test_shards_are_named_by_folder_glob_braces_and_list(tmp_path: Path) -> None:
    names = make_shards(tmp_path)
    write_texts(tmp_path / "odd{0..9}.tar", ["a.txt"])
    assert TarDataset(str(tmp_path / "part-*.tar")).shards == names
    assert TarDataset(str(tmp_path / "part-{000..002}.tar")).shards == names
    assert TarDataset(tmp_path / "part-00{2,0}.tar").shards == [names[2], names[0]]
    assert TarDataset([names[1], tmp_path / "part-{002..000..2}.tar"]).shards == [names[1], names[2], names[0]]
    assert len(TarDataset(tmp_path).shards) == 4
    assert len(TarDataset(tmp_path / "odd{0..9}.tar")) == 1
    for missing in ("part-{000..004}.tar", "none-*.tar", "none.tar"):
        with pytest.raises(DataError):
            TarDataset(tmp_path / missing)
    with pytest.raises(ConfigError, match="mistyped"):
        TarDataset("{0..99999999}.tar")
    with pytest.raises(ConfigError):
        TarDataset([])
    with pytest.raises(ConfigError):
        TarDataset(names, on_error="ignore")


@pytest.mark.parametrize("loader", [torch.utils.data.DataLoader, penstock.DataLoader])
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_read_what_the_trainer_reads(tmp_path: Path, loader: Any, start: str) -> None:
    dataset = TarDataset(make_shards(tmp_path))
    expected = [dataset[number]["txt"] for number in range(60)]
    workers = 2 if start == "fork" else 1
    batches = loader(dataset, batch_size=8, num_workers=workers, multiprocessing_context=start, shuffle=False)
    try:
        assert [text for batch in batches for text in batch["txt"]] == expected
    finally:
        if loader is penstock.DataLoader:
            batches.close()


def test_ranks_read_each_sample_once(tmp_path: Path) -> None:
    dataset = TarDataset(make_shards(tmp_path))
    keys: list[str] = []
    for rank in range(3):
        sampler = DistributedSampler(dataset, num_replicas=3, rank=rank, shuffle=True, seed=5)
        for batch in torch.utils.data.DataLoader(dataset, batch_size=7, sampler=sampler):
            keys += batch["__key__"]
    assert sorted(keys) == sorted(dataset[number]["__key__"] for number in range(60))


def test_threads_share_a_dataset_with_more_shards_than_it_keeps_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_shards, "_MOST_OPEN", 2)
    dataset = TarDataset(make_shards(tmp_path, shards=6, samples=5))
    wrong: list[int] = []

    def read(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(0, 30, 400).tolist():
            key = f"d/{number // 5}-{number % 5:03d}"
            if dataset[number] != {"__key__": key, "txt": f"{key}.txt", "id.txt": f"{key}.id.txt"}:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shards = [name for name in map(_target, Path("/proc/self/fd").iterdir()) if name.startswith(str(tmp_path))]
    assert not wrong and 0 < len([name for name in shards if name.endswith(".tar")]) <= 2


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def test_a_worker_reads_the_index_without_a_copy_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path / "many.tar", *(member(b"%06d.txt" % number) for number in range(60_000)))
    dataset = TarDataset(path)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=_grow, args=(dataset, theirs))
    child.start()
    grown_bytes = ours.recv()
    child.join()
    # 50,000 samples are 2.1 MB of index.
    assert grown_bytes < 1_000_000


def _grow(dataset: TarDataset, answer: Any) -> None:
    # As penstock's own workers do: a collection would touch, and so copy, everything the parent has.
    gc.freeze()
    for number in range(10_000):
        dataset[number]
    # Looking takes memory too, the first time.
    before = [_own_bytes(), _own_bytes()][1]
    for number in range(10_000, 60_000):
        dataset[number]
    answer.send(_own_bytes() - before)


def _own_bytes() -> int:
    """Private memory, less nameless files: those are shared, even while nobody else looks."""
    total, is_shared = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split(" ", 1)[0].endswith(":"):
            is_shared = "/memfd:" in line
        elif line.startswith("Private_Dirty:") and not is_shared:
            total += int(line.split()[1]) * 1024
    return total


def test_a_pickled_dataset_reads_the_same(tmp_path: Path) -> None:
    dataset = TarDataset(make_shards(tmp_path))
    dataset[0]
    again = pickle.loads(pickle.dumps(dataset))
    assert [again[number] for number in range(60)] == [dataset[number] for number in range(60)]


def test_a_changed_shard_is_indexed_again_and_never_read_by_the_old_index(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.tar", ["a.txt", "b.txt"])
    old = TarDataset(path)
    Path(path).unlink()
    write_texts(tmp_path / "a.tar", ["longer-name-c.txt"])
    with pytest.raises(DataError, match="changed after it was indexed"):
        old[0]
    assert TarDataset(path)[0]["__key__"] == "longer-name-c"


def test_a_shard_cut_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.tar", [f"{number}.txt" for number in range(50)])
    dataset = TarDataset(path, on_error="skip")
    dataset[0]
    os.truncate(path, 2000)
    with pytest.raises(DataError, match="cut short"):
        dataset[40]


def index_file(path: str) -> Path:
    return Path(path + ".penstock-index")


def refuse_to_build(*_: object, **__: object) -> None:
    raise AssertionError("built anew")


def test_the_index_is_stored_in_the_folder_of_the_shard_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_texts(tmp_path / "a.tar", ["a.txt", "b.cls.TXT"])
    first = [TarDataset(path)[number] for number in range(2)]
    assert index_file(path).exists() and not list(tmp_path.glob(".*.part"))
    monkeypatch.setattr(tar_indexing, "build_index", refuse_to_build)
    assert [TarDataset(path)[number] for number in range(2)] == first
    index_file(path).unlink()
    with pytest.raises(AssertionError):
        TarDataset(path)


def killed_while_writing(path: Path, started: Any) -> None:
    def replace(self: Path, target: Path) -> Path:
        started.send(self.name)
        threading.Event().wait(60)
        return self

    Path.replace = replace  # type: ignore[method-assign]
    TarDataset(path)


def test_the_next_build_removes_what_a_killed_index_writer_left(tmp_path: Path) -> None:
    path = Path(write_texts(tmp_path / "a.tar", ["a.txt"]))
    ours, theirs = multiprocessing.Pipe(duplex=False)
    writer = multiprocessing.get_context("fork").Process(target=killed_while_writing, args=(path, theirs))
    writer.start()
    assert ours.poll(20)
    left = tmp_path / ours.recv()
    others = tmp_path / ".download.part"
    others.touch()
    TarDataset(write_texts(tmp_path / "b.tar", ["b.txt"]))
    assert left.exists(), "its writer lives"
    writer.kill()
    writer.join()
    assert left.exists()
    TarDataset(path)
    assert not left.exists() and others.exists() and index_file(str(path)).exists()


def test_if_the_folder_cannot_be_written_the_index_goes_to_the_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_texts(tmp_path / "a.tar", ["a.txt"])
    # A folder of the index's name cannot be replaced, not even by root.
    index_file(path).mkdir()
    TarDataset(path)
    assert len(list((tmp_path / "user-cache" / "penstock" / "tar-indexes").iterdir())) == 1
    TarDataset(path, index_dir=tmp_path / "own")
    assert len(list((tmp_path / "own").iterdir())) == 1
    monkeypatch.setattr(tar_indexing, "build_index", refuse_to_build)
    assert len(TarDataset(path)) == len(TarDataset(path, index_dir=tmp_path / "own")) == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "garbage", "pickle", "another's"])
def test_a_damaged_index_is_built_again(tmp_path: Path, damage: str) -> None:
    path = write_texts(tmp_path / "a.tar", [f"{number}.txt" for number in range(9)])
    other = write_texts(tmp_path / "b.tar", [f"other-{number}.txt" for number in range(9)])
    expected = [TarDataset(path)[number] for number in range(9)]
    TarDataset(other)
    whole = index_file(path).read_bytes()
    damaged = {
        "flip": [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 7)],
        "cut": [whole[:at] for at in range(0, len(whole), 11)],
        "empty": [b""],
        "garbage": [b"\xff" * 4096],
        "pickle": [pickle.dumps({"a": 1})],
        "another's": [index_file(other).read_bytes()],
    }[damage]
    for data in damaged:
        index_file(path).write_bytes(data)
        dataset = TarDataset(path)
        assert [dataset[number] for number in range(9)] == expected


def test_progress_is_printed_where_it_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_shards(tmp_path)
    TarDataset(tmp_path, progress=True)
    said = capsys.readouterr().err
    assert "3 of 3 shards (100%)" in said
    TarDataset(tmp_path)
    assert capsys.readouterr().err == ""


def test_packed_shards_say_their_form_and_must_agree(tmp_path: Path) -> None:
    forms = pytest.importorskip("penstock.data.sample_forms")
    form, members = forms.to_members((torch.arange(3), "text"))
    parts = [member(b"0." + name.encode(), data) for name, data in members]
    path = write(tmp_path / "a.tar", pax({b"PENSTOCK.form": form.encode()}, kind=b"g"), *parts)
    dataset = TarDataset(path)
    tensor, text = dataset[0]
    assert dataset.form == form and torch.equal(tensor, torch.arange(3)) and text == "text"
    assert TarDataset(path, decode=False)[0] == {"__key__": "0", **dict(members)}
    other = write_texts(tmp_path / "b.tar", ["a.txt"])
    assert TarDataset(other).form is None
    with pytest.raises(DataError, match="different kinds"):
        TarDataset([path, other])


@pytest.mark.parametrize("damaged", [0, 1])
@pytest.mark.parametrize("left", [b"", b"no archive" * 100])
def test_a_packed_shard_that_lost_everything_is_skipped_among_others(tmp_path: Path, damaged: int, left: bytes) -> None:
    pytest.importorskip("pyarrow")
    samples = [{"a": np.full(100, number)} for number in range(4)]
    pack(Samples(samples), tmp_path / "out", to="tar", shard_bytes=4000, workers=1)
    shards = sorted((tmp_path / "out").glob("*.tar"))
    assert len(shards) >= 2
    shards[damaged].write_bytes(left)
    with pytest.raises(DataError, match=shards[damaged].name):
        TarDataset(tmp_path / "out")
    dataset = TarDataset(tmp_path / "out", on_error="skip")
    assert 0 < len(dataset) < 4 and dataset[0]["a"].shape == (100,)


def test_the_index_of_a_shard_with_a_long_name_is_kept(tmp_path: Path) -> None:
    name = "\U0001f40b" * 62 + ".tar"
    location = write_texts(tmp_path / name, ["a.txt"])
    TarDataset(location, index_dir=tmp_path / "indexes")
    (kept,) = (tmp_path / "indexes").iterdir()
    assert kept.name.endswith(".penstock-index")
