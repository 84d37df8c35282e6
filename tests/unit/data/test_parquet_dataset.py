"""Parquet rows: what was written is what is read, in every mode, by whoever asks."""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

import penstock
from penstock.data import BlockShuffleSampler, LowMemDataset, ParquetDataset
from penstock.data.parquet import row_groups
from penstock.errors import ConfigError, DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

MODES = ["mapped", "ultra", "memory"]


def _reads_missing_fixed_lists() -> bool:
    """Whether this pyarrow reads back a missing list of fixed size, as it writes it; older ones refuse."""
    written = io.BytesIO()
    pq.write_table(pa.table({"x": pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2))}), written)
    try:
        pq.read_table(written)
    except pa.ArrowInvalid:
        return False
    return True


READS_MISSING_FIXED_LISTS = _reads_missing_fixed_lists()


def table(rows: int, first: int = 0) -> Any:
    numbers = range(first, first + rows)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "text": [f"text {n} é漢" for n in numbers],
            "maybe": [None if n % 3 == 0 else n / 2 for n in numbers],
            "vector": pa.array([[float(n), n + 0.5] for n in numbers], pa.list_(pa.float32())),
            "nested": [{"a": n, "b": [f"x{n}"] * (n % 3)} for n in numbers],
            "raw": [bytes([n % 256]) * (n % 5) for n in numbers],
        }
    )


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"vector": row["vector"].tolist()}


def write(path: Path, rows: int, first: int = 0, group: int = 7, **more: Any) -> Path:
    pq.write_table(table(rows, first), path, row_group_size=group, **more)
    return path


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_what_was_written_one_by_one_and_many_at_once(tmp_path: Path, mode: str) -> None:
    write(tmp_path / "b.parquet", 30)
    write(tmp_path / "c.parquet", 20, first=30)
    dataset = ParquetDataset(tmp_path, mode=mode)
    expected = table(50).to_pylist()
    assert len(dataset) == 50
    assert [plain(dataset[i]) for i in range(50)] == expected
    asked = [49, 0, 29, 30, 7, 7, -1, 13]
    assert [plain(row) for row in dataset.__getitems__(asked)] == [expected[i] for i in asked]
    assert dataset.__getitems__([]) == []
    for wrong in (50, -51):
        with pytest.raises(IndexError, match="of 50"):
            dataset[wrong]
        with pytest.raises(IndexError):
            dataset.__getitems__([0, wrong])


@pytest.mark.parametrize("mode", MODES)
def test_lists_of_numbers_are_arrays_of_the_readers_own(tmp_path: Path, mode: str) -> None:
    third = None if READS_MISSING_FIXED_LISTS else [7, 8]
    numbers = pa.table(
        {
            "list": pa.array([[1, 2], None, [], [3, None]], pa.list_(pa.int32())),
            "large": pa.array([[1.0], [2.0], [], None], pa.large_list(pa.float64())),
            "fixed": pa.array([[1, 2], [3, 4], third, [5, 6]], pa.list_(pa.float32(), 2)),
        }
    )
    pq.write_table(numbers, tmp_path / "a.parquet")
    dataset = ParquetDataset(tmp_path / "a.parquet", mode=mode)
    for rows in ([dataset[i] for i in range(4)], dataset.__getitems__(range(4))):
        assert rows[0]["list"].dtype == np.int32 and rows[0]["list"].tolist() == [1, 2]
        assert rows[1]["list"] is None and rows[2]["list"].tolist() == [] and rows[3]["list"] == [3, None]
        assert [None if r["large"] is None else r["large"].tolist() for r in rows] == [[1.0], [2.0], [], None]
        assert [None if r["fixed"] is None else r["fixed"].tolist() for r in rows] == [[1, 2], [3, 4], third, [5, 6]]
        rows[0]["list"][:] = 9
    assert dataset[0]["list"].tolist() == [1, 2]


@pytest.mark.parametrize("mode", MODES)
def test_numbers_and_texts_of_every_width_are_plain_values(tmp_path: Path, mode: str) -> None:
    kinds = [np.dtype(f"{sign}{width}") for sign in "iu" for width in (1, 2, 4, 8)]
    limits = {kind.name: [np.iinfo(kind).min, np.iinfo(kind).max, 0, 1] * 5 for kind in kinds}
    wide = pa.table(
        {name: pa.array(values, getattr(pa, name)()) for name, values in limits.items()}
        | {
            "float32": pa.array([0.1, float("inf"), -0.0, 1e-45] * 5, pa.float32()),
            "float64": pa.array([0.1, float("-inf"), -0.0, 5e-324] * 5),
            "large_text": pa.array(["", "é漢", "x", "yz"] * 5, pa.large_string()),
            "large_bytes": pa.array([b"", b"\xff", b"x", b"yz"] * 5, pa.large_binary()),
            "no_text": [""] * 20,
        }
    )
    pq.write_table(wide, tmp_path / "a.parquet", row_group_size=10)
    dataset = ParquetDataset(tmp_path / "a.parquet", mode=mode)
    expected = wide.to_pylist()
    asked = np.random.default_rng(0).permutation(20).tolist()
    for rows in ([dataset[place] for place in asked], dataset.__getitems__(asked)):
        assert rows == [expected[place] for place in asked]
        assert {type(value) for row in rows for value in row.values()} == {int, float, str, bytes}


@pytest.mark.parametrize("kind", ["i1", "u1", "i8", "u8"])
def test_row_numbers_may_be_integers_of_any_width(tmp_path: Path, kind: str) -> None:
    dataset = ParquetDataset(write(tmp_path / "a.parquet", 300, group=100), columns=["id"])
    asked = [120, 0, 101, 120] + ([-1, -128] if kind[0] == "i" else [])
    rows = dataset.__getitems__(np.array(asked, kind))  # type: ignore[arg-type]
    assert [row["id"] for row in rows] == [number % 300 for number in asked]
    assert rows[0] is not rows[3], "each is the caller's own"
    with pytest.raises(IndexError, match="of 300"):
        dataset[1 << 70]


@pytest.mark.parametrize("mode", MODES)
def test_dictionaries_and_other_types_survive_in_every_mode(tmp_path: Path, mode: str) -> None:
    import datetime
    import decimal

    odd = pa.table(
        {
            "category": pa.array(["a", "b", "a", None]).dictionary_encode(),
            "categories": pa.array([["a"], ["b", "a"], [], None], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
            "when": pa.array([datetime.datetime(2026, 1, n + 1) for n in range(4)], pa.timestamp("us")),
            "exact": pa.array([decimal.Decimal("1.25")] * 4, pa.decimal128(10, 2)),
            "pairs": pa.array([[("k", 1)], [], None, [("a", 2), ("b", 3)]], pa.map_(pa.string(), pa.int64())),
        }
    )
    pq.write_table(odd, tmp_path / "a.parquet", row_group_size=3)
    dataset = ParquetDataset(tmp_path / "a.parquet", mode=mode)
    assert dataset.__getitems__(range(4)) == odd.to_pylist()
    assert [dataset[n] for n in range(4)] == odd.to_pylist()


def test_only_the_columns_asked_for_are_given_in_the_order_asked_for(tmp_path: Path) -> None:
    dataset = ParquetDataset(write(tmp_path / "a.parquet", 10), columns=["text", "id"])
    assert list(dataset[3].items()) == [("text", "text 3 é漢"), ("id", 3)]
    assert list(dataset.__getitems__([4])[0]) == ["text", "id"]
    assert int(dataset.block_bytes.sum()) < int(ParquetDataset(tmp_path / "a.parquet").block_bytes.sum())


def test_columns_in_another_order_are_the_same_columns(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 5)
    pq.write_table(table(5, 5).select(["text", "id", "raw", "maybe", "nested", "vector"]), tmp_path / "b.parquet")
    dataset = ParquetDataset(tmp_path)
    assert [row["id"] for row in dataset.__getitems__(range(10))] == list(range(10))
    assert list(dataset[7]) == list(dataset[2])


def test_transform_gets_each_row(tmp_path: Path) -> None:
    dataset = ParquetDataset(write(tmp_path / "a.parquet", 10), transform=lambda row: row["id"] * 2)
    assert dataset[4] == 8 and dataset.__getitems__([1, 9]) == [2, 18]


def test_repeated_texts_take_no_more_memory_than_they_are_stored_with(tmp_path: Path) -> None:
    text = "x" * 20_000
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"t": ["short"] * 20_000 + [text] * 30_000, "n": range(50_000)}), path)
    code = f"""
import pathlib, re
from penstock.data import ParquetDataset
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) >> 10
def grown(mode):
    # Not ru_maxrss, which begins with the size of the process that started this one.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    dataset = ParquetDataset({str(path)!r}, mode=mode)
    for n in (45_000, 5, 49_999):
        row = dataset[n]
        assert row["n"] == n and len(row["t"]) == (5 if n < 20_000 else 20_000)
    return peak() - before
grown("mapped")  # what pyarrow sets up once
print(*map(grown, {MODES}))
"""
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert max(map(int, printed.split())) < 120, f"{printed} MiB for three rows of 20 kB; all rows take 600 MiB"


def test_repeated_values_are_kept_as_a_dictionary(tmp_path: Path) -> None:
    text = "x" * 1000
    pq.write_table(pa.table({"t": [text] * 4999 + ["y"]}), tmp_path / "a.parquet", row_group_size=1000)
    dataset = ParquetDataset(tmp_path / "a.parquet", keep="200kB")
    for index in range(0, 5000, 100):
        assert dataset[index]["t"] == text
    assert dataset[4999]["t"] == "y"
    kept = dataset._groups._kept  # type: ignore[union-attr]
    assert len(kept) == 5 and sum(batch.nbytes for batch in kept.values()) < 200_000


def test_no_more_than_keep_is_kept_and_a_kept_group_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.parquet", 700, group=100)
    dataset = ParquetDataset(tmp_path / "a.parquet", keep="40kB")
    reads: list[int] = []
    dataset[0]
    read = dataset._files.read_pieces
    monkeypatch.setattr(
        dataset._files, "read_pieces", lambda group, *more, **named: reads.append(group) or read(group, *more, **named)
    )
    dataset._groups._kept.clear()  # type: ignore[union-attr]
    dataset._groups._kept_bytes = 0  # type: ignore[union-attr]
    dataset.__getitems__(list(range(700)))
    assert sorted(reads) == list(range(7))
    kept = dataset._groups._kept  # type: ignore[union-attr]
    assert 0 < sum(batch.nbytes for batch in kept.values()) <= 40_000
    dataset.__getitems__([650, 699])
    assert len(reads) == 7
    ultra = ParquetDataset(tmp_path / "a.parquet", mode="ultra")
    ultra.__getitems__([1, 2, 3])
    assert not ultra._groups._kept  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", MODES)
def test_a_pickled_dataset_reads_the_same_and_carries_no_rows(tmp_path: Path, mode: str) -> None:
    dataset = ParquetDataset(write(tmp_path / "a.parquet", 500, group=50), columns=["id"], mode=mode)
    dataset.__getitems__(range(500))
    pickled = pickle.dumps(dataset)
    assert pickle.loads(pickled).__getitems__([7, 499]) == [{"id": 7}, {"id": 499}]
    if mode != "memory":
        assert len(pickled) < 50_000


@pytest.mark.parametrize(
    ("make", "context", "mode"),
    [
        (torch.utils.data.DataLoader, "fork", "mapped"),
        (torch.utils.data.DataLoader, "spawn", "memory"),
        (penstock.DataLoader, "fork", "ultra"),
        (penstock.DataLoader, "spawn", "mapped"),
        (penstock.DataLoader, "forkserver", "memory"),
    ],
)
def test_loaders_read_it_through_workers(tmp_path: Path, mode: str, context: str, make: Callable[..., Any]) -> None:
    dataset = ParquetDataset(write(tmp_path / "a.parquet", 60), columns=["id", "text"], mode=mode)
    dataset[0]
    workers = 2 if context == "fork" else 1
    loader = make(dataset, batch_size=16, num_workers=workers, multiprocessing_context=context)
    batches = list(loader)
    assert torch.equal(torch.cat([batch["id"] for batch in batches]), torch.arange(60))
    assert batches[0]["text"][3] == "text 3 é漢"


def test_threads_read_it_at_once(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    dataset = ParquetDataset(write(tmp_path / "a.parquet", 2000, group=50), columns=["id"], keep="2kB")
    orders = [np.random.default_rng(n).permutation(2000)[:300].tolist() for n in range(8)]
    with ThreadPoolExecutor(8) as threads:
        for asked, rows in zip(orders, threads.map(dataset.__getitems__, orders), strict=True):
            assert [row["id"] for row in rows] == asked


def test_ranks_share_the_rows(tmp_path: Path) -> None:
    dataset = ParquetDataset(write(tmp_path / "a.parquet", 60), columns=["id"])
    seen = []
    for rank in range(3):
        sampler = DistributedSampler(dataset, num_replicas=3, rank=rank, shuffle=True, seed=2)
        for batch in penstock.DataLoader(dataset, batch_size=5, sampler=sampler):
            seen += batch["id"].tolist()
    assert sorted(seen) == list(range(60))
    seen = []
    for rank in range(3):
        sampler = BlockShuffleSampler(dataset, num_replicas=3, rank=rank)
        for batch in penstock.DataLoader(dataset, batch_size=5, sampler=sampler):
            seen += batch["id"].tolist()
    assert sorted(seen) == list(range(60)) != seen


# -- files that are not what they should be -----------------------------------------------------------------


def test_a_path_without_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no .*nothing\.parquet"):
        ParquetDataset(tmp_path / "nothing.parquet")
    with pytest.raises(DataError, match=r"names no \.parquet"):
        ParquetDataset(tmp_path)
    with pytest.raises(DataError, match="names no"):
        ParquetDataset(str(tmp_path / "*.parquet"))
    with pytest.raises(ConfigError, match="mode='fast'"):
        ParquetDataset(write(tmp_path / "a.parquet", 3), mode="fast")
    for wrong in ("id", []):
        with pytest.raises(ConfigError, match="columns="):
            ParquetDataset(tmp_path / "a.parquet", columns=wrong)


def test_empty_damaged_and_cut_files_are_named(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.parquet", 100).read_bytes()
    length = int.from_bytes(whole[-8:-4], "little") + 8
    cases = {
        "empty": (b"", "empty"),
        "text": (b"hello, this is no parquet at all", "no Parquet file"),
        "cut": (whole[: len(whole) // 2], "cut short"),
        "long-footer": (whole[:-8] + b"\xff\xff\xff\x7f" + b"PAR1", "says its footer has"),
        "damaged-footer": (whole[:-length] + b"\xff" * 32 + whole[32 - length :], "footer of .* cannot be read"),
        "encrypted": (whole[:-4] + b"PARE", "encrypted"),
    }
    for name, (content, message) in cases.items():
        path = tmp_path / f"{name}.parquet"
        path.write_bytes(content)
        with pytest.raises(DataError, match=message) as raised:
            ParquetDataset(path)
        assert str(path) in str(raised.value)


@pytest.mark.parametrize("claimed", [1 << 62, (1 << 63) - 1])
def test_a_footer_that_claims_more_rows_than_there_can_be_is_an_error(tmp_path: Path, claimed: int) -> None:
    def varint(number: int) -> bytes:
        number, digits = 2 * number, []
        while number > 127:
            digits.append(number & 127 | 128)
            number >>= 7
        return bytes([*digits, number])

    pq.write_table(pa.table({"n": range(77_777)}), tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    length = int.from_bytes(whole[-8:-4], "little")
    footer = whole[-8 - length : -8].replace(varint(77_777), varint(claimed))
    (tmp_path / "a.parquet").write_bytes(whole[: -8 - length] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(DataError, match=r"footer of .*a\.parquet cannot be read: row group 0 claims"):
        ParquetDataset(tmp_path / "a.parquet")


def test_damage_among_the_rows_names_file_and_group(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 1000, group=500, compression="zstd")
    data = bytearray(path.read_bytes())
    data[100:2000] = bytes(1900)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"row group 0 of .*a\.parquet cannot be read"):
        ParquetDataset(path)[0]


def test_footers_beyond_the_limit_are_parsed_again_and_read_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        write(tmp_path / f"{name}.parquet", 100, group=10)
    expected = ParquetDataset(tmp_path, columns=["id"]).__getitems__(range(300))
    footer_bytes = (tmp_path / "a.parquet").read_bytes()[-8:-4]
    monkeypatch.setattr(row_groups, "_PARSED_BYTES", int.from_bytes(footer_bytes, "little") + 8)
    limited = ParquetDataset(tmp_path, columns=["id"])
    assert list(limited._files._parsed) == [0]
    assert limited.__getitems__(range(300)) == expected
    assert [limited[row] for row in (250, 150, 50)] == [expected[row] for row in (250, 150, 50)]
    sent = pickle.loads(pickle.dumps(limited))
    assert not sent._files._parsed
    assert sent.__getitems__(range(300)) == expected


def test_a_file_that_was_changed_is_not_read_by_its_old_footer(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 100)
    dataset = ParquetDataset(path)
    write(path, 90, first=1000)
    with pytest.raises(DataError, match=r"a\.parquet has changed"):
        dataset[3]


def test_columns_that_do_not_fit_are_named_with_their_file(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 10)
    with pytest.raises(DataError, match=r"a\.parquet has no column nope; it has id, text"):
        ParquetDataset(tmp_path, columns=["nope"])
    pq.write_table(table(5).drop(["raw"]).append_column("more", [list(range(5))]), tmp_path / "b.parquet")
    with pytest.raises(
        DataError, match=r"b\.parquet does not fit .*a\.parquet: no column raw; an additional column more"
    ):
        ParquetDataset(tmp_path)
    pq.write_table(table(5).set_column(0, "id", pa.array(["a"] * 5)), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="id is string, not int64"):
        ParquetDataset(tmp_path)
    assert len(ParquetDataset(tmp_path, columns=["text"])) == 15
    pq.write_table(pa.table([[1], [2]], names=["x", "x"]), tmp_path / "twice.parquet")
    with pytest.raises(DataError, match="several columns of the same name: x"):
        ParquetDataset(tmp_path / "twice.parquet")


def test_files_without_rows_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0)
    assert len(ParquetDataset(tmp_path / "a.parquet")) == 0
    write(tmp_path / "b.parquet", 4)
    write(tmp_path / "c.parquet", 0)
    write(tmp_path / "d.parquet", 4, first=4)
    for mode in MODES:
        dataset = ParquetDataset(tmp_path, columns=["id"], mode=mode)
        assert [row["id"] for row in dataset.__getitems__(range(8))] == list(range(8))


# -- pairs of texts -----------------------------------------------------------------------------------------


def test_pairs_are_cut_and_get_their_end_mark(tmp_path: Path) -> None:
    pairs = pa.table({"prompt": ["abcdef", "x"], "response": ["ghijkl", ""], "more": [1, 2]})
    pq.write_table(pairs, tmp_path / "a.parquet")
    modes: list[dict[str, Any]] = [{"ultra_low_mem": True}, {"keep_in_memory": True}, {}]
    for more in modes:
        dataset = LowMemDataset(parquet_file=str(tmp_path / "a.parquet"), tokenizer_dir=None, max_seq_len=4, **more)
        assert dataset[0] == ("abcd[EOS]", "ghij[EOS]")
        assert dataset.__getitems__([1]) == [("x[EOS]", "[EOS]")]
        assert pickle.loads(pickle.dumps(dataset))[1] == ("x[EOS]", "[EOS]")
    dataset = LowMemDataset(tmp_path / "a.parquet", max_seq_len=4)
    batch = next(iter(penstock.DataLoader(dataset, batch_size=2, num_workers=1)))
    assert batch == [("abcd[EOS]", "x[EOS]"), ("ghij[EOS]", "[EOS]")]
    with pytest.raises(ConfigError, match="tokenizer_dir="):
        dataset.collate_fn([("a", "b")])
    with pytest.raises(ConfigError, match="pass only one of them"):
        LowMemDataset(tmp_path / "a.parquet", ultra_low_mem=True, keep_in_memory=True)


def test_a_missing_text_is_an_error_that_shows_the_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", None], "response": ["b", "c"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="prompt is not a text in this row"):
        LowMemDataset(tmp_path / "a.parquet")[1]


def test_a_tokenizer_that_cannot_be_loaded_is_an_error_of_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"prompt": ["ab", "c"], "response": ["d", "efg"]}), tmp_path / "a.parquet")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="'nodir' is neither a folder"):
        LowMemDataset(tmp_path / "a.parquet", "nodir")
    LowMemDataset(tmp_path / "a.parquet", "google-t5/t5-base")
    (tmp_path / "tokens").mkdir()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install transformers"):
        LowMemDataset(tmp_path / "a.parquet", tmp_path / "tokens")
    monkeypatch.undo()
    (tmp_path / "modules" / "transformers").mkdir(parents=True)
    (tmp_path / "modules" / "transformers" / "__init__.py").write_text(TOKENIZER)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    dataset = LowMemDataset(tmp_path / "a.parquet", tmp_path / "tokens", end="")
    batch = dataset.collate_fn([dataset[0], dataset[1]])
    assert batch["input_ids"].tolist() == [[97, 98], [99, 0]]
    assert batch["labels"].tolist() == [[100, -100, -100], [101, 102, 103]]
    del sys.modules["transformers"]


TOKENIZER = """
import torch
class AutoTokenizer:
    @classmethod
    def from_pretrained(cls, folder):
        return cls()
    def __call__(self, texts, padding, return_tensors, return_token_type_ids):
        longest = max(map(len, texts))
        rows = [[*map(ord, text)] + [0] * (longest - len(text)) for text in texts]
        ids = torch.tensor(rows)
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What is asked of the file system ``counted://``: from which byte to which."""
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.local import LocalFileSystem

    requests: list[tuple[int, int]] = []

    class Counted(LocalFileSystem):
        protocol = "counted"
        cachable = False

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return path.removeprefix("counted://")

        def unstrip_protocol(self, name: str) -> str:
            return f"counted://{name}"

        def cat_file(self, path: str, start: Any = None, end: Any = None, **more: Any) -> Any:
            requests.append((start, end))
            return super().cat_file(path, start, end, **more)

    fsspec.register_implementation("counted", Counted, clobber=True)
    return requests


def write_wide(path: Path) -> Any:
    chance = np.random.default_rng(0)
    made = pa.table({f"column-{number}": chance.random(50_000) for number in range(8)})
    pq.write_table(made, path, row_group_size=25_000)
    return made


@pytest.mark.parametrize("mode", ["mapped", "ultra"])
def test_a_remote_group_takes_a_request_for_columns_side_by_side(
    tmp_path: Path, asked: list[tuple[int, int]], mode: str
) -> None:
    made = write_wide(tmp_path / "a.parquet")
    dataset = ParquetDataset(f"counted://{tmp_path}/a.parquet", mode=mode)
    asked.clear()
    assert dataset[30_000] == {name: made[name][30_000].as_py() for name in made.column_names}
    assert len(asked) == 1, "1.6 MB of columns without a hole"
    some = ParquetDataset(f"counted://{tmp_path}/a.parquet", ["column-6", "column-1", "column-0"], mode=mode)
    asked.clear()
    assert some[3] == {name: made[name][3].as_py() for name in ("column-6", "column-1", "column-0")}
    assert len(asked) == 2, "two neighbours, and one further on"
    assert sum(end - start for start, end in asked) < 4 * 8 * 25_000, "what lies between is not read"


def test_a_remote_group_too_large_to_hold_is_read_in_pieces(
    tmp_path: Path, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_groups, "_PREFETCHED_BYTES", 1 << 20)
    monkeypatch.setattr(row_groups, "_LEAST_BUFFER_BYTES", 1 << 16)
    made = write_wide(tmp_path / "a.parquet")
    dataset = ParquetDataset(f"counted://{tmp_path}/a.parquet")
    asked.clear()
    assert dataset[30_000] == {name: made[name][30_000].as_py() for name in made.column_names}
    assert max(end - start for start, end in asked) <= (1 << 20) // 8 < 8 * 25_000
    assert len(asked) <= 8 * 3


def test_a_copy_of_a_low_mem_dataset_uses_its_own_settings(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["long text"], "response": ["answer"]}), tmp_path / "a.parquet")
    dataset = LowMemDataset(tmp_path / "a.parquet", end="")
    short = copy.copy(dataset)
    short.max_seq_len = 4
    assert short[0] == short.__getitems__([0])[0] == ("long", "answ")
    assert dataset[0] == ("long text", "answer")


@pytest.mark.parametrize("mode", MODES)
def test_tensors_of_one_shape_keep_it(tmp_path: Path, mode: str) -> None:
    numbers = np.arange(60, dtype=np.float32).reshape(10, 2, 3)
    made = pa.FixedShapeTensorArray.from_numpy_ndarray(numbers)
    turned = pa.fixed_shape_tensor(pa.float32(), [2, 3], permutation=[1, 0])
    first = None if READS_MISSING_FIXED_LISTS else [0.0] * 6
    columns = {
        "x": made,
        "turned": pa.ExtensionArray.from_storage(turned, made.storage),
        "truth": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.bool_(), [2, 1]), pa.array([[True, False]] * 10, pa.list_(pa.bool_(), 2))
        ),
        "maybe": pa.ExtensionArray.from_storage(
            made.type, pa.array([first, *[[1.0] * 6] * 9], pa.list_(pa.float32(), 6))
        ),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=4)
    dataset = ParquetDataset(tmp_path, mode=mode)
    for rows in ([dataset[place] for place in range(10)], dataset.__getitems__(range(10))):
        for place, row in enumerate(rows):
            assert row["x"].dtype == np.float32 and np.array_equal(row["x"], numbers[place])
            assert np.array_equal(row["turned"], numbers[place].T) and row["x"].flags.writeable
            assert row["truth"].tolist() == [[True], [False]]
        assert rows[1]["maybe"].shape == (2, 3)
        assert rows[0]["maybe"] is None if first is None else not rows[0]["maybe"].any()


@pytest.mark.parametrize("wrong", ["lots", "50%", "150%", 0.5, 1.5, "auto", 0])
def test_an_error_about_keep_does_not_suggest_shares(tmp_path: Path, wrong: object) -> None:
    path = write(tmp_path / "a.parquet", 3)
    with pytest.raises(ConfigError, match=r"^keep=") as refused:
        ParquetDataset(path, keep=wrong)
    offered = str(refused.value).partition("; write ")[2]
    assert "512MiB" in offered and "50%" not in offered and "fraction" not in offered and "auto" not in offered
