"""`pack`: what was packed is read back as it was, whoever wrote it, however often it was stopped."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import random
import re
import signal
import time
import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.data import ArrowDataset, ParquetDataset, TarDataset
from penstock.data.pack.journal import Journal
from penstock.data.pack.packing import pack
from penstock.data.pack.shard_writers import ShardRecord
from penstock.data.pack.tables import ParquetTables
from penstock.drafts import open_draft
from penstock.errors import ConfigError, DataError, WorkerError
from support.datasets.packed import AtRandom, Images, OfChance, Samples, is_same

pa = pytest.importorskip("pyarrow")

READERS: dict[str, Any] = {"arrow": ArrowDataset, "tar": TarDataset}
both = pytest.mark.parametrize("to", ["arrow", "tar"])


def content(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if not path.name.endswith(".penstock-index")
    }


def packed(samples: list[Any], folder: Path, to: str) -> Any:
    pack(Samples(samples), folder, to=to, workers=1)
    return READERS[to](folder)


@both
def test_samples_come_back_as_they_were(tmp_path: Path, to: str) -> None:
    torch.manual_seed(0)
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
              torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
              torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]  # fmt: skip
    samples: list[Any] = [
        {str(dtype): torch.randint(0, 2, shape).to(dtype) for dtype in dtypes}
        for shape in ((2, 3), (), (0,), (3, 0, 2))
    ]
    samples += [
        (1, 2.5, None, True, "text", b"bytes", 1 + 2j),
        [np.float32(1.5), np.int64(3), np.bool_(True), np.arange(3, dtype=">i4"), np.array("2020-01-01", "M8[D]")],
        {"Image": 1, "image": 2, "a.b": 3, "a/b": 4, "": 5, "__key__": "six", "penstock-form.json": 7, "ü": 8},
        {"caption": ["a", {"b": [1, None, 2.0]}], "nested": {"t": (torch.ones(2), [b"x"])}},
        {1: "a", None: 2}, {}, (), [], None, 3, "", b"", float("nan"), -0.0, 1 << 100, "\ud800", "\ud83d\ude00",
        np.asfortranarray(np.arange(6.0).reshape(2, 3)), torch.arange(6).reshape(2, 3).T, np.array(["a", "bc"]),
        {"penstock.outline": 1}, list(range(300)), ("x", torch.zeros(3)), {"x": None}, {"x": 1}, {"y": 2, "x": 1},
    ]  # fmt: skip
    dataset = packed(samples, tmp_path, to)
    assert len(dataset) == len(samples)
    wrong = [(sample, dataset[place]) for place, sample in enumerate(samples) if not is_same(dataset[place], sample)]
    assert wrong == []


@both
def test_a_key_that_is_missing_is_not_none(tmp_path: Path, to: str) -> None:
    samples = [{"a": 1, "b": "x"}, {"a": None, "b": None}, {"b": "y"}, {"b": "z", "a": 4}] * 5
    dataset = packed(samples, tmp_path, to)
    assert [dataset[place] for place in range(20)] == samples
    assert list(dataset[3]) == ["b", "a"]


@both
def test_samples_of_a_kind_that_only_the_middle_of_a_shard_has_come_back_too(tmp_path: Path, to: str) -> None:
    samples: list[Any] = [{"x": torch.full((4,), float(place)), "y": place} for place in range(500)]
    samples[250] = {"x": torch.zeros(5), "y": "text"}
    samples[251] = ("another", 1)
    dataset = packed(samples, tmp_path, to)
    assert all(is_same(dataset[place], sample) for place, sample in enumerate(samples))


def test_columns_and_members_can_be_read_by_others(tmp_path: Path) -> None:
    pack(Images(10), tmp_path / "arrow", workers=1)
    with pa.memory_map(str(tmp_path / "arrow" / "00000.arrow")) as mapped:
        table = pa.ipc.open_file(mapped).read_all()
    assert table.column("label").to_pylist() == list(range(10)) and table.column("name")[3].as_py() == "image 3"
    assert table.schema.field("image").type == pa.list_(pa.uint8(), 3 * 64 * 64)
    webdataset = pytest.importorskip("webdataset")
    pack(Images(10), tmp_path / "tar", to="tar", workers=1)
    read = list(webdataset.WebDataset(str(tmp_path / "tar" / "00000.tar"), shardshuffle=False).decode())
    assert [each["json"]["label"] for each in read] == list(range(10))
    assert (read[3]["image.npy"] == Images(10)[3]["image"].numpy()).all()


@both
@pytest.mark.filterwarnings("ignore:AtRandom draws random numbers")
def test_the_result_is_the_same_for_any_number_of_workers(tmp_path: Path, to: str) -> None:
    for workers in (1, 3):
        packed = pack(AtRandom(60), tmp_path / str(workers), to=to, shard_bytes="1KB", workers=workers)
        assert packed.shards >= 3
    assert content(tmp_path / "1") == content(tmp_path / "3")
    whole = READERS[to](tmp_path / "1")
    assert [whole[place]["label"] for place in range(60)] == list(range(60))


def test_shards_are_about_as_large_as_was_asked(tmp_path: Path) -> None:
    pack(Images(100), tmp_path, shard_bytes="256KiB", workers=1)
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("*.arrow"))]
    assert len(sizes) == 5 and all(190 << 10 < size < 270 << 10 for size in sizes)
    manifest = json.loads((tmp_path / "penstock-pack.json").read_text())
    assert [shard["bytes"] for shard in manifest["shards"]] == sizes and manifest["samples"] == 100


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        (object(), "builtins.object"),
        ({"x": np.array([object()])}, "numpy.ndarray"),
        (namedtuple("Point", "x y")(1, 2), "Point"),
        ([torch.ones(1, requires_grad=True)], "requires_grad"),
        ({"x": {1, 2}}, "builtins.set"),
    ],
)
@both
def test_what_cannot_be_carried_is_refused_by_name(tmp_path: Path, to: str, sample: Any, told: str) -> None:
    samples = [1] * 100 + [sample] + [1] * 100
    with pytest.raises(DataError, match=f"sample 100 of dataset.*{told}"):
        packed(samples, tmp_path, to)
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob(f"*.{to}"))


def test_an_exception_of_the_dataset_names_the_sample_and_shows_its_lines(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"sample 7 of dataset [\s\S]*packed.py[\s\S]*KeyError"):
        pack(Samples({place: 1 for place in range(30) if place != 7} | {"x": 1}), tmp_path, workers=2)  # type: ignore[arg-type]


def test_a_dataset_that_cannot_be_pickled_is_packed_by_forked_workers(tmp_path: Path) -> None:
    source = Samples([1, 2, 3])
    source.cannot_travel = lambda: None  # type: ignore[attr-defined]
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        assert pack(source, tmp_path, workers=1).samples == 3
        assert pack(Images(3), tmp_path / "spawned", workers=1, shard_bytes="10KB").shards == 3
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_the_program_can_still_choose_how_processes_start(tmp_path: Path) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)
    try:
        pack(Images(3), tmp_path, workers=1)
        assert multiprocessing.get_start_method(allow_none=True) is None
    finally:
        multiprocessing.set_start_method(before, force=True)


@both
def test_long_doubles_come_back(tmp_path: Path, to: str) -> None:
    sample = {"x": np.arange(3, dtype=np.longdouble), "y": np.longdouble(1) / 3, "z": np.ones(2, np.clongdouble)}
    found = packed([sample] * 3, tmp_path, to)[1]
    assert all((found[name] == sample[name]).all() and found[name].dtype == sample[name].dtype for name in "xyz")


def test_a_dataset_that_holds_views_of_tensors_is_packed(tmp_path: Path) -> None:
    class Holding(Images):
        held: Any

    prints = set()
    for number in (1, 2):
        source = Holding(3)
        numbers = torch.tensor([number + 2j, 3])
        source.held = [numbers.conj(), numbers.conj().imag, numbers.real[:1]]
        pack(source, tmp_path / str(number), workers=1)
        prints.add(json.loads((tmp_path / str(number) / "penstock-pack.json").read_text())["fingerprint"])
    assert len(prints) == 2


@both
def test_folders_whose_names_are_not_valid_text_can_be_packed_into_and_read(tmp_path: Path, to: str) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    assert packed([1, "two", torch.ones(1 << 20)], folder, to)[1] == "two"
    assert len(READERS[to](folder)[2]) == 1 << 20


def test_samples_with_very_long_names_come_back_from_tar(tmp_path: Path) -> None:
    samples = [{f"{place}{'x' * 8000}": torch.full((2,), number) for place in range(200)} for number in range(3)]
    dataset = packed(samples, tmp_path, "tar")
    assert all(is_same(dataset[number], samples[number]) for number in range(3))


class NeedsTwo(DataError):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_exception_that_cannot_be_unpickled_is_reported(tmp_path: Path) -> None:
    class Failing(Images):
        def __getitem__(self, index: int) -> dict[str, Any]:
            raise NeedsTwo(1, 2)

    with pytest.raises(DataError, match=r"sample 0 of dataset .*1 and 2"):
        pack(Failing(3), tmp_path, workers=1)


# -- going on where it was ------------------------------------------------------------------------


def test_finished_shards_are_kept_and_damaged_ones_written_again(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"shard_bytes": "256KiB", "workers": 2}
    assert pack(Images(100), tmp_path, **arguments).kept == 0
    whole = content(tmp_path)
    assert pack(Images(100), tmp_path, **arguments).kept == 5
    shard = tmp_path / "00002.arrow"
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    (tmp_path / "00004.arrow").unlink()
    assert pack(Images(100), tmp_path, **arguments).kept == 3
    assert content(tmp_path) == whole


def pack_until(folder: Path, to: str, calls: int) -> None:
    """Packs, and is killed when its progress was told so many times."""
    told = 0

    def progress(done: int, total: int) -> None:
        nonlocal told
        told += 1
        if told == calls:
            os.kill(os.getpid(), signal.SIGKILL)

    pack(Images(200), folder, to=to, shard_bytes="100KB", workers=2, progress=progress)


@both
def test_packing_that_is_killed_at_any_moment_continues_to_the_same_bytes(tmp_path: Path, to: str) -> None:
    forking = multiprocessing.get_context("fork")
    chance = random.Random(1)
    for _ in range(8):
        killed = forking.Process(target=pack_until, args=(tmp_path / "killed", to, chance.randrange(3, 40)))
        killed.start()
        killed.join()
        assert killed.exitcode in (0, -signal.SIGKILL)
    arguments: dict[str, Any] = {"to": to, "shard_bytes": "100KB"}
    assert pack(Images(200), tmp_path / "killed", workers=2, **arguments).kept > 0
    pack(Images(200), tmp_path / "straight", workers=1, **arguments)
    assert content(tmp_path / "killed") == content(tmp_path / "straight")
    assert (
        not list((tmp_path / "killed").glob("*.partial")) and not (tmp_path / "killed/penstock-pack.journal").exists()
    )


def test_a_torn_line_of_the_journal_is_a_shard_that_was_not_finished(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"shard_bytes": "256KiB", "workers": 1}
    pack(Images(100), tmp_path, **arguments)
    whole = content(tmp_path)
    manifest = tmp_path / "penstock-pack.json"
    plan = json.loads(manifest.read_text())
    lines = [json.dumps({"shard": shard, **record}) for shard, record in enumerate(plan.pop("shards"))]
    manifest.unlink()
    (tmp_path / "penstock-pack.journal").write_text("\n".join([json.dumps(plan), *lines])[:-40])
    assert pack(Images(100), tmp_path, **arguments).kept == 4
    assert content(tmp_path) == whole


def test_a_crashed_worker_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    class Deadly(Images):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 77:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    before = set(multiprocessing.active_children())
    with pytest.raises(WorkerError, match=r"00001.arrow \(samples \d+ to \d+\) ended by signal 9"):
        pack(Deadly(100), tmp_path, shard_bytes="512KiB", workers=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000.arrow", "penstock-pack.journal"]
    assert not set(multiprocessing.active_children()) - before


def test_a_worker_that_crashes_before_its_own_child_is_reported(tmp_path: Path) -> None:
    note = tmp_path / "pid"

    class Deadly(Images):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 77:
                child = os.fork()
                if not child:
                    signal.pause()
                note.write_text(str(child))
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    def give_up(done: int, total: int) -> None:
        if time.monotonic() > until_s:
            raise TimeoutError

    until_s = time.monotonic() + 120
    try:
        with pytest.raises(WorkerError, match="ended by signal 9"):
            pack(Deadly(100), tmp_path / "out", shard_bytes="512KiB", workers=1, progress=give_up)
    finally:
        os.kill(int(note.read_text()), signal.SIGKILL)


def test_stopping_from_the_progress_function_ends_the_workers_and_packing_can_go_on(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())

    def stop(done: int, total: int) -> None:
        if done > 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(Images(300), tmp_path, shard_bytes="256KiB", workers=2, progress=stop)
    assert not set(multiprocessing.active_children()) - before and not list(tmp_path.glob("*.partial"))
    assert pack(Images(300), tmp_path, shard_bytes="256KiB", workers=2).kept > 0


def test_another_packing_into_the_same_folder_is_refused_unless_forced(tmp_path: Path) -> None:
    pack(Images(100), tmp_path, shard_bytes="256KiB", workers=1)
    others: list[tuple[Images, dict[str, Any], str]] = [
        (Images(100), {"shard_bytes": "128KiB"}, "shard_bytes was 262144 and is 131072"),
        (Images(90), {"shard_bytes": "256KiB"}, "samples was 100 and is 90"),
        (Images(100, 63), {"shard_bytes": "256KiB"}, "Images has changed since: its files, its code or what it was"),
        (Images(100), {"shard_bytes": "256KiB", "to": "tar"}, "format was 'arrow' and is 'tar'"),
    ]
    for source, arguments, told in others:
        with pytest.raises(ConfigError, match=told) as refused:
            pack(source, tmp_path, workers=1, **arguments)
        assert not re.search("[0-9a-f]{16}", str(refused.value).replace(str(tmp_path), ""))
    pack(Images(20), tmp_path, shard_bytes="256KiB", workers=1, force=True)
    assert len(ArrowDataset(tmp_path)) == 20


def test_unknown_shards_are_refused(tmp_path: Path) -> None:
    (tmp_path / "00007.arrow").write_bytes(b"old")
    for force in (False, True):
        with pytest.raises(ConfigError, match=r"holds 00007.arrow, which no manifest"):
            pack(Images(3), tmp_path, workers=1, force=force)
    (tmp_path / "00007.arrow").unlink()
    pack(Images(3), tmp_path, workers=1)
    (tmp_path / "README").write_text("beside shards that are known, anything else may be there")
    pack(Images(3), tmp_path, workers=1, force=True)
    assert len(ArrowDataset(tmp_path)) == 3 and (tmp_path / "README").exists()
    for name in ("mine.arrow", "00001.arrow"):
        (tmp_path / name).write_bytes(b"not ours to remove")
        for force in (False, True):
            with pytest.raises(ConfigError, match=name):
                pack(Images(3), tmp_path, workers=1, force=force)
        (tmp_path / name).unlink()
    assert len(ArrowDataset(tmp_path)) == 3


def test_unfinished_files_of_others_stay_whether_packing_is_refused_or_not(tmp_path: Path) -> None:
    names = ["video.mp4.partial", "00000.arrow.partial", "00000.arrow.7.partial", "mine.arrow"]
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / "00000.tar.1.partial").mkdir()
    with pytest.raises(ConfigError, match=r"mine\.arrow"):
        pack(Images(3), tmp_path, workers=1)
    assert all((tmp_path / name).read_text() == "mine" for name in names)
    for name in names:
        (tmp_path / name).unlink()
    (tmp_path / "00000.tar.1.partial").rmdir()
    pack(Images(3), tmp_path, workers=1)
    for name in names[:3]:
        (tmp_path / name).write_text("mine")
    (tmp_path / "00000.tar.1.partial").mkdir()
    pack(Images(3), tmp_path, workers=1)
    left = sorted(path.name for path in tmp_path.glob("*.partial"))
    assert left == ["00000.arrow.partial", "00000.tar.1.partial", "video.mp4.partial"]


def test_a_folder_with_other_files_is_refused_and_the_error_names_them(tmp_path: Path) -> None:
    for name in ("train.py", "notes.txt", "Makefile", "x.csv"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "src").mkdir()
    (tmp_path / ".hidden").write_text("by a desktop")
    for force in (False, True):
        with pytest.raises(ConfigError, match=r"is not empty: it holds Makefile, notes.txt, src/ and 2 more, which"):
            pack(Images(3), tmp_path, workers=1, force=force)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".hidden", "Makefile", "notes.txt", "src", "train.py", "x.csv"]


def test_shards_are_not_removed_while_they_are_the_source(tmp_path: Path) -> None:
    pack(Images(3), tmp_path / "tar", to="tar", workers=1)
    pack(Images(3), tmp_path / "arrow", workers=1)
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "parquet").mkdir()
    parquet.write_table(pa.table({"x": [1, 2]}), tmp_path / "parquet/x.parquet")
    (tmp_path / "link").mkdir()
    (tmp_path / "link/a.tar").symlink_to(tmp_path / "tar/00000.tar")
    tar, arrow = TarDataset(tmp_path / "tar"), ArrowDataset(tmp_path / "arrow")
    sources: list[tuple[Any, str]] = [
        (tar, "tar"),
        (arrow, "arrow"),
        (ParquetDataset(tmp_path / "parquet"), "parquet"),
        (torch.utils.data.Subset(tar, [0]), "tar"),
        (torch.utils.data.ConcatDataset([arrow, tar]), "tar"),
        (TarDataset(tmp_path / "link"), "link"),
        (TarDataset(tmp_path / "link"), "tar"),
        (f"{tmp_path}/t*/*.tar", "tar"),
    ]
    before = [content(tmp_path / name) for name in ("tar", "arrow", "parquet", "link")]
    for source, folder in sources:
        with pytest.raises(ConfigError, match="pack would read"):
            pack(source, tmp_path / folder, to="tar", workers=1, force=True)
    assert [content(tmp_path / name) for name in ("tar", "arrow", "parquet", "link")] == before


def test_the_error_for_a_full_disk_names_the_file(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_RDWR)
    try:
        with pytest.raises(DataError, match="/dev/full cannot be written: No space left"):
            Journal(Path("/dev/full"), full).note(0, ShardRecord(name="", samples=1, bytes=1, checksum=""))
    finally:
        os.close(full)
    (tmp_path / "penstock-pack.json.partial").mkdir()
    with pytest.raises((DataError, ConfigError), match=r"penstock-pack\.json"):
        pack(Images(3), tmp_path, workers=1)
    (tmp_path / "penstock-pack.json.partial").rmdir()
    pack(Images(3), tmp_path, workers=1)


@pytest.mark.parametrize("name", ["penstock-pack.json.partial", "penstock-pack.journal", "00000.tar.PID.partial"])
def test_packing_never_writes_through_a_link_that_another_user_left(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    shared = tmp_path / "shared"
    shared.mkdir()
    name = name.replace("PID", str(os.getpid()))
    (shared / name).symlink_to(precious)
    try:
        pack(Images(3), shared, to="tar", workers=1)
    except ConfigError as refused:
        assert name in str(refused) or str(shared) in str(refused)
    assert precious.read_text() == "keep me"


def test_a_draft_replaces_a_link_and_not_its_target(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep me")
    (tmp_path / "draft").symlink_to(tmp_path / "precious")
    with open_draft(tmp_path / "draft") as file:
        file.write(b"new")
    assert (tmp_path / "precious").read_text() == "keep me" and (tmp_path / "draft").read_bytes() == b"new"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_packing_goes_on_where_files_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    import fcntl

    def refuse(fd: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(RuntimeWarning, match="without locks"):
        pack(Images(3), tmp_path, workers=1)
    monkeypatch.undo()
    assert len(ArrowDataset(tmp_path)) == 3


@pytest.mark.parametrize("name", ["penstock-pack.json", "penstock-pack.journal"])
def test_a_manifest_nested_without_end_is_refused_or_begun_again(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[" * 200_000 + "\n")
    if name.endswith(".json"):
        with pytest.raises(ConfigError, match="not a manifest"):
            pack(Images(3), tmp_path, workers=1)
        with pytest.raises(DataError, match="not a manifest"):
            ArrowDataset(tmp_path)
    else:
        pack(Images(3), tmp_path, workers=1)
        assert len(ArrowDataset(tmp_path)) == 3


def test_two_programs_do_not_pack_into_one_folder_at_once(tmp_path: Path) -> None:
    asked = []

    def again(done: int, total: int) -> None:
        if not asked:
            asked.append(done)
            with pytest.raises(ConfigError, match="another program is packing into"):
                pack(Images(3), tmp_path, workers=1)

    pack(Images(3), tmp_path, workers=1, progress=again)
    assert asked


@both
def test_samples_of_other_sizes_each_time_can_be_gone_on_with(tmp_path: Path, to: str) -> None:
    def stop(done: int, total: int) -> None:
        if list(tmp_path.glob(f"*.{to}")):
            raise KeyboardInterrupt

    arguments: dict[str, Any] = {"to": to, "shard_bytes": "100KB", "workers": 1}
    with pytest.raises(KeyboardInterrupt):
        pack(OfChance(100), tmp_path, progress=stop, **arguments)
    assert pack(OfChance(100), tmp_path, **arguments).kept > 0
    found = READERS[to](tmp_path)
    assert [found[place]["label"] for place in range(100)] == list(range(100))
    (tmp_path / f"00001.{to}").unlink()
    again = pack(OfChance(100), tmp_path, **arguments)
    assert again.kept == again.shards - 1


@both
def test_a_dataset_that_draws_random_numbers_is_warned_of_once(tmp_path: Path, to: str) -> None:
    with pytest.warns(RuntimeWarning, match="AtRandom draws random numbers, and pack stores what it drew") as told:
        pack(AtRandom(60), tmp_path / "random", to=to, shard_bytes="1KB", workers=2)
    # Python 3.12 has a warning of its own for every fork.
    assert sum(issubclass(each.category, RuntimeWarning) for each in told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        pack(Images(60), tmp_path / "fixed", to=to, workers=2)


# -- other sources --------------------------------------------------------------------------------


@pytest.fixture
def folder_of_files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    for name, data in {
        "cat/001.jpg": b"\xff\xd8cat", "cat/001.json": b'{"a": 1}', "cat/002.jpg": b"", "dog/x.seg.png": b"png",
        "top.txt": "ü".encode(), "README": b"none", ".hidden": b"none", "__pycache__/x.pyc": b"none",
        "top.__KEY__": b"none",
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


FILES = [
    {"__key__": "cat/001", "jpg": b"\xff\xd8cat", "json": b'{"a": 1}'},
    {"__key__": "cat/002", "jpg": b""},
    {"__key__": "dog/x", "seg.png": b"png"},
    {"__key__": "top", "txt": "ü".encode()},
]


def test_a_folder_of_files_becomes_shards_and_one_kind_of_shard_another(tmp_path: Path, folder_of_files: Path) -> None:
    done = pack(folder_of_files, tmp_path / "tar", to="tar", workers=1)
    assert done.skipped == [".hidden", "README", "__pycache__/x.pyc", "top.__KEY__"]
    read = TarDataset(tmp_path / "tar", decode=False)
    assert [read[place] for place in range(4)] == FILES
    pack(folder_of_files, tmp_path / "arrow", workers=1)
    read = ArrowDataset(tmp_path / "arrow")
    assert [read[place] for place in range(4)] == FILES
    pack(tmp_path / "tar", tmp_path / "again", to="tar", shard_bytes=1, workers=1)
    read = TarDataset(tmp_path / "again", decode=False)
    assert len(read.shards) == 4 and [read[place] for place in range(4)] == FILES
    pack(f"{tmp_path}/again/*.tar", tmp_path / "fourth", workers=1)
    read = ArrowDataset(tmp_path / "fourth")
    assert [read[place] for place in range(4)] == FILES


def test_packed_tar_shards_become_arrow_with_their_samples(tmp_path: Path) -> None:
    pack(Images(20), tmp_path / "tar", to="tar", workers=1)
    pack(tmp_path / "tar", tmp_path / "arrow", workers=1)
    read = ArrowDataset(tmp_path / "arrow")
    assert all(is_same(read[place], Images(20)[place]) for place in range(20))


def test_parquet_keeps_its_columns_and_rows(tmp_path: Path) -> None:
    table = pa.table(
        {
            "number": pa.array([None if place % 7 == 0 else place for place in range(1000)], pa.int32()),
            "text": [f"row {place}" for place in range(1000)],
            "tokens": [list(range(place % 5)) for place in range(1000)],
            "when": pa.array(range(1000), pa.timestamp("ms")),
            "kind": pa.array(["a", "b"] * 500).dictionary_encode(),
        }
    )
    pa.parquet = pytest.importorskip("pyarrow.parquet")
    for part in range(2):
        pa.parquet.write_table(table.slice(500 * part, 500), tmp_path / f"{part}.parquet", row_group_size=120)
    pack(f"{tmp_path}/*.parquet", tmp_path / "arrow", shard_bytes="8KB", workers=2)
    rows, read = ParquetDataset(f"{tmp_path}/*.parquet"), ArrowDataset(tmp_path / "arrow")
    assert len(read.blocks) > 3 and len(read) == 1000
    assert all(is_same(read[place], rows[place]) for place in range(1000))
    with pa.memory_map(str(tmp_path / "arrow/00000.arrow")) as mapped:
        assert pa.ipc.open_file(mapped).schema.field("number").type == pa.int32()
    without_times = tmp_path / "plain.parquet"
    pa.parquet.write_table(table.drop_columns(["when"]), without_times)
    pack(without_times, tmp_path / "tar", to="tar", workers=2)
    rows, shards = ParquetDataset(without_times), TarDataset(tmp_path / "tar")
    assert all(is_same(shards[place], rows[place]) for place in range(1000))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter([1, 2])

    def __len__(self) -> int:
        return 2


def test_sources_that_cannot_be_are_refused(tmp_path: Path, folder_of_files: Path) -> None:
    for source, told in (
        (tmp_path / "nothing", "there is no .*nothing. SRC may be a dataset"),
        (Path(__file__), "test_packing.py cannot be packed. SRC may be a dataset"),
        (Stream(), "Stream is an IterableDataset: .* Pack a dataset that has __getitem__ and __len__"),
        (tmp_path / "nothing.tar", "there is no"),
        (tmp_path / ("x" * 300), "cannot be read: File name too long"),
        (tmp_path / f"{'x' * 300}.tar", "File name too long"),
        (iter([1]), "needs __getitem__ and __len__"),
        (Samples([]), "has no samples"),
    ):
        with pytest.raises((ConfigError, DataError), match=told):
            pack(source, tmp_path / "out", workers=1)
        assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="overlap"):
        pack(folder_of_files, folder_of_files / "out", workers=1)
    with pytest.raises(ConfigError, match="to='zip'"):
        pack(Images(1), tmp_path / "out", to="zip")
    with pytest.raises(ConfigError, match="workers=0"):
        pack(Images(1), tmp_path / "out", workers=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written to"):
        pack(Images(1), tmp_path / "file", workers=1)


def test_a_file_that_changes_while_it_is_packed_is_reported(tmp_path: Path, folder_of_files: Path) -> None:
    from penstock.data.pack.folders import FolderFiles

    files = FolderFiles(folder_of_files)
    (folder_of_files / "top.txt").write_text("longer than before")
    with pytest.raises(DataError, match=r"top.txt has 18 bytes; it had 2"):
        files[3]
    (folder_of_files / "top.txt").unlink()
    with pytest.raises(DataError, match="No such file"):
        files[3]


@pytest.mark.parametrize(("to", "read"), [("arrow", ArrowDataset), ("tar", TarDataset)])
def test_what_is_packed_in_part_does_not_pass_for_a_dataset(tmp_path: Path, to: str, read: Any) -> None:
    pack([{"n": n, "x": "y" * 1000} for n in range(40)], tmp_path / "packed", to=to, shard_bytes=10_000, workers=1)
    assert len(read(tmp_path / "packed")) == 40
    shard = sorted((tmp_path / "packed").glob(f"*.{to}"))[1]
    kept = shard.read_bytes()
    shard.unlink()
    with pytest.raises(DataError, match=f"lacks 1 of .* such as {shard.name}"):
        read(tmp_path / "packed")
    shard.write_bytes(kept)
    (tmp_path / "packed" / "penstock-pack.json").rename(tmp_path / "packed" / "penstock-pack.journal")
    with pytest.raises(DataError, match="only partly packed"):
        read(str(tmp_path / "packed"))


def test_rows_are_read_in_pieces_of_bounded_bytes(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    pq.write_table(pa.table({"x": [bytes([n]) * 500_000 for n in range(60)]}), tmp_path / "a.parquet")
    tables = ParquetTables([str(tmp_path / "a.parquet")])
    pieces = list(tables.batches(10, 50))
    assert sum(piece.num_rows for piece in pieces) == 40 and pieces[0][0][0].as_py() == bytes([10]) * 500_000
    assert max(piece.nbytes for piece in pieces) <= 9 << 20
