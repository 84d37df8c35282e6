"""`ArrowDataset`: samples in place, the reader's own, in any process; files nobody should trust."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import re
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.data import ArrowDataset
from penstock.data.arrow.columns import BatchBuilder, Layout
from penstock.data.pack.packing import pack
from penstock.errors import ConfigError, DataError
from support.datasets.packed import Images, Samples, is_same

pa = pytest.importorskip("pyarrow")


def write(path: Path, samples: list[Any], *, rows: int = 10) -> None:
    """As ``pack`` does, in this process."""
    layout = Layout()
    for sample in samples:
        layout.learn(sample)
    builder = BatchBuilder(layout)
    with pa.ipc.new_file(path, layout.to_schema()) as writer:
        for first in range(0, len(samples), rows):
            for sample in samples[first : first + rows]:
                builder.add(sample)
            writer.write_batch(builder.finish())


def many(count: int) -> list[Any]:
    return [Images(count)[place] | {"tokens": torch.arange(place % 5), "none": None} for place in range(count)]


def test_it_is_indexed_like_a_list_and_has_blocks_for_samplers(tmp_path: Path) -> None:
    samples = many(25)
    write(tmp_path / "a.arrow", samples[:15])
    write(tmp_path / "b.arrow", samples[15:])
    dataset = ArrowDataset(tmp_path)
    assert len(dataset) == 25 and dataset.blocks.tolist() == [0, 10, 15, 25]
    assert len(dataset.block_bytes) == 3 and (dataset.block_bytes > 5 * 3 * 64 * 64).all()
    assert all(is_same(dataset[place], samples[place]) for place in range(-25, 25))
    assert is_same(dataset.__getitems__([24, 0, 11]), [samples[24], samples[0], samples[11]])
    assert is_same(dataset[np.int64(3)], samples[3]) and dataset.splittable
    for wrong in (25, -26):
        with pytest.raises(IndexError, match=f"sample {wrong} of 25"):
            dataset[wrong]
    with pytest.raises(TypeError):
        dataset["x"]  # type: ignore[call-overload]


def test_columns_and_a_transform_are_applied(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", many(5))
    assert ArrowDataset(tmp_path, columns=["name", "label"])[3] == {"label": 3, "name": "image 3"}
    assert ArrowDataset(tmp_path, transform=lambda sample: sample["label"])[3] == 3
    with pytest.raises(DataError, match="has no column nose; it has image, label, name"):
        ArrowDataset(tmp_path, columns=["nose"])
    with pytest.raises(ConfigError, match="is a single text"):
        ArrowDataset(tmp_path, columns="name")
    write(tmp_path / "b.arrow", [(1, 2)])
    with pytest.raises(ConfigError, match="are not dicts"):
        ArrowDataset(tmp_path, columns=["name"])


@pytest.mark.parametrize("side", [8, 600])
def test_writing_into_a_sample_changes_nothing_else(tmp_path: Path, side: int) -> None:
    samples = [
        {"t": torch.full((side, side), place, dtype=torch.float32), "v": [np.ones((side, side))]} for place in (1, 2)
    ]
    write(tmp_path / "a.arrow", samples)
    before = (tmp_path / "a.arrow").read_bytes()
    dataset = ArrowDataset(tmp_path)
    first = dataset[0]
    first["t"].mul_(3)
    first["v"][0][:] = 7
    assert is_same(dataset[0], samples[0]) and is_same(dataset[1], samples[1])
    assert (first["t"] == 3).all() and (first["v"][0] == 7).all()
    assert (tmp_path / "a.arrow").read_bytes() == before


def test_large_values_are_pages_of_the_file_and_hold_no_descriptor(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", [{"t": torch.zeros(1 << 20)} for _ in range(4)])
    dataset = ArrowDataset(tmp_path)
    held = [dataset[place]["t"] for place in (0, 1, 2, 3) * 50]
    assert not any(_target(link).startswith(str(tmp_path)) for link in Path("/proc/self/fd").iterdir())
    address = held[0].data_ptr()
    ranges = _private_mappings_of(tmp_path / "a.arrow")
    assert any(int(low, 16) <= address < int(high, 16) for low, high in ranges)
    assert held[0].untyped_storage().nbytes() == 4 << 20, "a sample that travels must not take its neighbours along"
    del held
    gc.collect()
    assert not _private_mappings_of(tmp_path / "a.arrow")


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def _private_mappings_of(path: Path) -> list[tuple[str, str]]:
    pattern = rf"^(\w+)-(\w+) rw-p .*{re.escape(str(path))}$"
    return re.findall(pattern, Path("/proc/self/maps").read_text(), re.MULTILINE)


def test_in_place_even_small_values_are_pages_of_the_file(tmp_path: Path) -> None:
    samples = many(20)
    write(tmp_path / "a.arrow", samples)
    before = (tmp_path / "a.arrow").read_bytes()
    dataset = ArrowDataset(tmp_path, in_place=True)
    assert all(is_same(dataset[place], sample) for place, sample in enumerate(samples))
    assert dataset[3]["image"].data_ptr() == dataset[3]["image"].data_ptr()
    ranges = _private_mappings_of(tmp_path / "a.arrow")
    for name in ("image", "tokens"):
        assert any(int(low, 16) <= dataset[3][name].data_ptr() < int(high, 16) for low, high in ranges)
    dataset[3]["image"].zero_()
    assert (tmp_path / "a.arrow").read_bytes() == before
    assert is_same(pickle.loads(pickle.dumps(dataset))[3], samples[3])


def test_workers_of_every_kind_can_read_it(tmp_path: Path) -> None:
    samples = many(30)
    write(tmp_path / "a.arrow", samples)
    dataset = ArrowDataset(tmp_path, columns=["label", "image"])
    assert is_same(pickle.loads(pickle.dumps(dataset))[7]["image"], samples[7]["image"])
    for method in ("fork", "spawn"):
        loader = penstock.DataLoader(dataset, batch_size=10, num_workers=1, multiprocessing_context=method)
        batches = list(loader)
        assert torch.equal(torch.cat([batch["label"] for batch in batches]), torch.arange(30))
        assert torch.equal(batches[2]["image"][9], samples[29]["image"])
        loader.close()
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda place: dataset[place % 30]["label"] == place % 30, range(300)))


def _epoch(folder: Path, answer: Any) -> None:
    torch.set_num_threads(1)
    dataset = ArrowDataset(folder)
    order = random.Random(0).sample(range(len(dataset)), len(dataset))
    total = sum(int(dataset[place]["image"][0, 0, 0]) for place in order[:20])
    gc.collect()
    before = _private_bytes()
    for place in order:
        sample = dataset[place]
        # Not torch's sum: that takes memory of its own.
        total += int(sample["image"].numpy().max()) + len(sample["name"])
    answer.send((_private_bytes() - before, total))


def _private_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(value) << 10 for value in re.findall(r"^Private_Dirty: +(\d+) kB", text, re.MULTILINE))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="no smaps_rollup")
@pytest.mark.parametrize("side", [64, 400])
def test_private_memory_stays_flat_over_an_epoch_of_random_reads(tmp_path: Path, side: int) -> None:
    count = (200 << 20) // (3 * side * side)
    sample = Images(1, side)[0]
    builder = BatchBuilder(_layout_of(sample))
    with pa.ipc.new_file(tmp_path / "a.arrow", _layout_of(sample).to_schema()) as writer:
        for _ in range(count):
            builder.add(sample)
            if builder.data_bytes > 8 << 20:
                writer.write_batch(builder.finish())
    with (tmp_path / "a.arrow").open() as file:
        # What is not on disk yet counts as dirty in whoever has mapped it.
        os.fsync(file.fileno())
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_epoch, args=(tmp_path, theirs))
    child.start()
    assert ours.poll(60)
    grown_bytes, _ = ours.recv()
    child.join()
    assert grown_bytes < 16 << 20


def _layout_of(sample: Any) -> Layout:
    layout = Layout()
    layout.learn(sample)
    return layout


# -- files by others ------------------------------------------------------------------------------

TABLE = {
    "number": [1, None, 3],
    "tokens": [[1, 2], [], [3]],
    "text": ["a", "ü", None],
    "nested": [{"a": [1]}, {"a": None}, None],
}


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("make", ["new_file", "new_stream"])
def test_files_of_other_programs_yield_a_dict_per_row(tmp_path: Path, make: str, compression: str | None) -> None:
    table = pa.table(TABLE)
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with getattr(pa.ipc, make)(tmp_path / "a.arrow", table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=2)
    dataset = ArrowDataset(tmp_path)
    assert len(dataset) == 3 and dataset.blocks.tolist() == [0, 2, 3]
    assert dataset[0]["tokens"].tolist() == [1, 2] and type(dataset[0]["tokens"]) is np.ndarray
    assert [dataset[place]["number"] for place in range(3)] == TABLE["number"]
    assert [dataset[place]["text"] for place in range(3)] == TABLE["text"]
    assert [dataset[place]["nested"] for place in range(3)] == TABLE["nested"]
    assert ArrowDataset(tmp_path, columns=["text"])[1] == {"text": "ü"}
    with pytest.raises(DataError, match="has no column x"):
        ArrowDataset(tmp_path, columns=["x"])


def test_files_of_hugging_face_datasets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"p{place}", "label": place} for place in range(50)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path))
    dataset = ArrowDataset(tmp_path)
    assert [dataset[place] for place in range(50)] == rows


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", many(3))
    for name, table in (("b", pa.table({"x": [1]})), ("c", pa.table({"x": ["text"]}))):
        with pa.ipc.new_file(tmp_path / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(DataError, match="only one of them is from penstock pack"):
        ArrowDataset(tmp_path)
    with pytest.raises(DataError, match=r"c\.arrow has the columns x: string; .*b\.arrow has x: int64"):
        ArrowDataset([tmp_path / "b.arrow", tmp_path / "c.arrow"])


def test_a_file_that_is_replaced_while_in_use_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", [{"t": torch.zeros(1 << 20)}] * 3)
    dataset = ArrowDataset(tmp_path)
    other = pickle.loads(pickle.dumps(dataset))
    write(tmp_path / "b", [{"t": torch.ones(1 << 20)}] * 3)
    (tmp_path / "b").replace(tmp_path / "a.arrow")
    for each in (dataset, other):
        with pytest.raises(DataError, match=r"a\.arrow has changed"):
            each[0]


def test_the_error_for_other_files_names_them(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    path = tmp_path / "a.arrow"
    with pytest.raises(DataError, match=r"names no \.arrow file"):
        ArrowDataset(tmp_path)
    write(path, many(20))
    whole = path.read_bytes()
    for data in (b"", b"ARROW1", b"x" * 5000, bytes(5000), whole[: len(whole) // 2], whole[:-3], whole[100:]):
        path.write_bytes(data)
        with pytest.raises(DataError, match=re.escape(str(path))):
            ArrowDataset(tmp_path)
    with pytest.raises(ConfigError, match="copy the file to this machine"):
        fsspec.filesystem("memory").pipe("/x/a.arrow", whole)
        ArrowDataset("memory://x/a.arrow")


def _fuzz(folder: Path, whole: bytes, seed: int, rounds: int, answer: Any) -> None:
    chance = random.Random(seed)
    path = folder / f"{seed}.arrow"
    told = 0
    for _ in range(rounds):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 1, 3, 10])):
            # Buffers are long, and what leads astray is in the words around them.
            at = chance.randrange(0, len(data) - 8)
            kind = chance.randrange(4)
            if kind == 0:
                data[at] = chance.randrange(256)
            elif kind == 1:
                at = at // 8 * 8
                data[at : at + 8] = chance.choice([0, 1, -1, 1 << 31, 1 << 40, 1 << 62, -(1 << 63)]).to_bytes(
                    8, "little", signed=True
                )
            elif kind == 2:
                at = at // 4 * 4
                data[at : at + 4] = chance.choice([0, -1, 1, 1 << 20, -(1 << 31)]).to_bytes(4, "little", signed=True)
            else:
                del data[at : at + chance.randrange(1, 64)]
                data = data or bytearray(16)
        path.write_bytes(data)
        try:
            dataset = ArrowDataset(path, in_place=chance.random() < 0.5)
            for place in range(min(len(dataset), 40)):
                sample = dataset[place]
                repr(sample)
                pickle.dumps(sample)
        except DataError as problem:
            assert str(path) in str(problem)
            told += 1
    answer.send(told)


@pytest.mark.parametrize("kind", ["packed", "file", "stream"])
def test_fuzzed_files_never_crash_the_process(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "whole"
    if kind == "packed":
        samples = [{"s": "text" * place, "b": b"x" * place, "t": torch.arange(place), "f": np.ones(3), "i": place,
                    "o": [place, None], "flag": True} for place in range(12)]  # fmt: skip
        write(path, [*samples, ("tuple", 1.5), {"i": None}], rows=5)
    else:
        table = pa.table({name: values * 5 for name, values in TABLE.items()})
        with getattr(pa.ipc, f"new_{kind}")(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    whole, told = path.read_bytes(), 0
    for seed in range(2):
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=_fuzz, args=(tmp_path, whole, seed, 300, theirs))
        child.start()
        theirs.close()
        try:
            told += ours.recv()
        except EOFError:
            child.join()
            pytest.fail(f"the process ended with {child.exitcode} over {tmp_path}/{seed}.arrow")
        child.join()
    assert told > 100


def test_offsets_outside_the_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write(path, [{"text": "some text", "number": place} for place in range(8)], rows=8)
    data = path.read_bytes()
    offsets = np.arange(0, 9 * 9, 9, dtype=np.int64).tobytes()
    at = data.index(offsets)
    for value in (1 << 40, -5, 1 << 62):
        path.write_bytes(data[: at + 24] + value.to_bytes(8, "little", signed=True) + data[at + 32 :])
        dataset = ArrowDataset(path)
        assert dataset[0]["text"] == "some text"
        for place in (2, 3):
            with pytest.raises(DataError, match=re.escape(f"record batch 0 of {path}")):
                dataset[place]


def test_inconsistent_forms_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write(path, [{"x": torch.zeros(4)}])
    with pa.memory_map(str(path)) as mapped:
        table = pa.ipc.open_file(mapped).read_all()
    good = table.schema.metadata[b"penstock.form"].decode()
    lies = [
        ("[4]", "[40]"),
        ("[4]", "[-4]"),
        ("<f4", "|O8"),
        ("x", "y"),
        ('"version":1', '"version":9'),
        ("dict", "set"),
    ]
    for bad in ["", "[]", "{}", *(good.replace(*lie, 1) for lie in lies)]:
        lying = table.replace_schema_metadata({"penstock.form": bad})
        with pa.ipc.new_file(path, lying.schema) as writer:
            writer.write_table(lying)
        with pytest.raises(DataError, match=re.escape(str(path))):
            ArrowDataset(path)


def test_samples_of_a_packed_dataset_can_be_packed_again(tmp_path: Path) -> None:
    samples = [{"x": torch.full((3,), place), "y": f"{place}"} for place in range(10)]
    pack(Samples(samples), tmp_path / "one", workers=1)
    pack(ArrowDataset(tmp_path / "one"), tmp_path / "two", workers=1)
    again = ArrowDataset(tmp_path / "two")
    assert all(is_same(again[place], sample) for place, sample in enumerate(samples))


def test_a_child_forked_while_a_thread_reads_is_not_stuck(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", many(20))
    dataset = ArrowDataset(tmp_path)
    file = dataset._file(0)
    child = multiprocessing.get_context("fork").Process(target=dataset.__getitem__, args=(13,))
    # As they are while another thread looks a record batch up.
    with file._lock, file._batches._lock:  # type: ignore[union-attr]
        child.start()
    child.join(20)
    code = child.exitcode
    child.kill()
    child.join()
    assert code == 0


def test_the_warning_for_a_compressed_file_has_its_size_and_a_remedy(tmp_path: Path) -> None:
    table = pa.table({"x": np.zeros(2_000_000)})
    for name, compression in (("a", "zstd"), ("b", None)):
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_file(tmp_path / f"{name}.arrow", table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=500_000)
    with pytest.warns(
        RuntimeWarning,
        match=r"a\.arrow is compressed .* data take 15\.3 MiB, and each worker holds up to 7\.63 MiB.*penstock pack",
    ):
        compressed = ArrowDataset(tmp_path / "a.arrow")
    assert compressed[1_999_999] == {"x": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ArrowDataset(tmp_path / "b.arrow")[0] == {"x": 0.0}


HOLDING = """
import sys
from penstock.data import ArrowDataset
from penstock.errors import DataError

dataset = ArrowDataset(sys.argv[1])
held = []
try:
    while True:
        held.append(dataset[len(held) % 4])
except DataError as error:
    said = str(error)
del held
print(said)
print(dataset[0]["x"].sum())
"""


def test_running_out_of_mappings_is_not_reported_as_a_damaged_file(tmp_path: Path) -> None:
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 300_000:
        pytest.skip(f"vm.max_map_count is {limit}")
    write(tmp_path / "a.arrow", [{"x": torch.ones(1 << 18) * place} for place in range(4)])
    command = [sys.executable, "-c", HOLDING, str(tmp_path / "a.arrow")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said, total = done.stdout.splitlines()
    assert "mappings" in said and f"allows {limit:,}" in said and "in_place=True" in said and "damaged" not in said
    assert total == "tensor(0.)"
