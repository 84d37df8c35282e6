"""Data in a store that speaks S3's protocol, through real sockets, also when the store is killed in mid-epoch."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for package in ("moto", "boto3", "s3fs"):
    # Not imported: every process that is forked from this one would copy their pages.
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)

OUTAGE_S = 2.5

SERVER = """
import sys
from pathlib import Path
import boto3
from moto.server import ThreadedMotoServer

folder, port = Path(sys.argv[1]), int(sys.argv[2])
# Filled behind another door: who reaches the store finds everything in it.
back = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
back.start()
client = boto3.client("s3", endpoint_url="http://%s:%d" % back.get_host_and_port(), region_name="us-east-1",
                      aws_access_key_id="key", aws_secret_access_key="secret")
client.create_bucket(Bucket="bucket")
for file in sorted(folder.rglob("*")):
    if file.is_file():
        client.put_object(Bucket="bucket", Key=str(file.relative_to(folder)), Body=file.read_bytes())
front = ThreadedMotoServer("127.0.0.1", port, verbose=False)
front.start()
print(front.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""

READER = """
import sys, time
import penstock
from penstock.data import ParquetDataset, TarDataset
from penstock.data.sources import locate, open_source

def say(*words):
    print(*words, flush=True)

def wait():
    assert sys.stdin.readline() == "go\\n"

{body}
say("end")
"""

EPOCH = """
def plain(batch):
    return batch

if __name__ == "__main__":
    dataset = {dataset}
    loader = penstock.DataLoader(dataset, batch_size=10, num_workers={workers}, collate_fn=plain, shuffle={shuffle},
                                 generator=__import__("torch").Generator().manual_seed(3), **{more})
    say("length", len(dataset))
    for number, batch in enumerate(loader):
        say("batch", *({word} for sample in batch))
        if number == 2:
            say("third")
            wait()
    loader.close()
"""


class Store:
    """A server process; what it holds is in a folder, so that it can be started again with the same objects."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self.port = 0

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(self._folder), str(self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def write_parquet(folder: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    for file in range(3):
        numbers = np.arange(100 * file, 100 * file + 100)
        table = arrow.table({"number": numbers, "text": [f"row {number}" for number in numbers]})
        parquet.write_table(table, folder / f"part-{file}.parquet", row_group_size=10)


def write_shards(folder: Path) -> None:
    folder.mkdir()
    for shard in range(20):
        with tarfile.open(folder / f"shard-{shard:03d}.tar", "w") as archive:
            for sample in range(10):
                for name, body in (("txt", f"sample {shard}.{sample}"), ("cls", str(shard * 10 + sample))):
                    member = tarfile.TarInfo(f"{shard:03d}{sample:03d}.{name}")
                    member.size = len(body)
                    archive.addfile(member, BytesIO(body.encode()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the store holds."""
    made = tmp_path_factory.mktemp("bucket")
    write_parquet(made / "rows")
    write_shards(made / "shards")
    (made / "plain").mkdir()
    (made / "plain" / "a.bin").write_bytes(bytes(range(256)) * 1000)
    (made / "plain" / "empty.bin").write_bytes(b"")
    (made / "plain" / "_unfinished.bin").write_bytes(b"x")
    (made / "plain" / "notes.txt").write_bytes(b"x")
    return made


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[Store]:
    store = Store(folder)
    store.start()
    try:
        yield store
    finally:
        store.kill()


@pytest.fixture
def store(started: Store) -> Store:
    """The store, up."""
    if started._process is None:
        started.start()
    return started


@pytest.fixture
def read(store: Store, tmp_path: Path) -> Iterator[Callable[[str], Reading]]:
    """Runs code that reads from the store, in a process of its own whose fsspec knows where the store is."""
    readings: list[Reading] = []

    def start(body: str) -> Reading:
        script = tmp_path / f"reader_{len(readings)}.py"
        script.write_text(READER.replace("{body}", body))
        here = {
            "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{store.port}",
            "FSSPEC_S3_KEY": "key",
            "FSSPEC_S3_SECRET": "secret",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        readings.append(Reading(script, {**os.environ, **here}))
        return readings[-1]

    yield start
    for reading in readings:
        reading.end()


class Reading:
    """A process that reads, and says what it has read."""

    def __init__(self, script: Path, environment: dict[str, str]) -> None:
        self._errors = script.with_suffix(".errors").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def lines(self, until: str) -> list[list[str]]:
        """The lines it says before it says ``until``, in words."""
        assert self._process.stdout is not None
        said: list[list[str]] = []
        for line in self._process.stdout:
            if line == f"{until}\n":
                return said
            said.append(line.split())
        self._errors.seek(0)
        raise AssertionError(f"it ended before {until!r}, after {said[-3:]}:\n{self._errors.read()[-3000:]}")

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def end(self) -> None:
        self._process.kill()
        self._process.wait(10)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            stream.close()


def outlast_an_outage(store: Store, reading: Reading) -> None:
    """Kill the store, let the reading go on, start the store again."""
    store.kill()
    reading.go()
    time.sleep(OUTAGE_S)
    assert not reading.ended, "it had everything already: nothing was asked of the store while it was away"
    store.start()


def epoch_of(dataset: str, word: str, *, workers: int = 2, shuffle: bool = False, **more: Any) -> str:
    body = EPOCH
    for name, value in {"dataset": dataset, "word": word, "workers": workers, "shuffle": shuffle, "more": more}.items():
        body = body.replace("{" + name + "}", str(value))
    return body


def test_files_are_listed_sized_and_read_by_place(read: Callable[[str], Reading], folder: Path) -> None:
    body = """
say("glob", *locate("s3://bucket/rows/part-*.parquet", suffixes=(".parquet",)))
say("folder", *locate("s3://bucket/plain", suffixes=(".bin",)))
say("file", *locate("s3://bucket/plain/notes.txt", suffixes=(".bin",)))
source = open_source("s3://bucket/plain/a.bin")
say("size", source.size_bytes, source.location)
say("middle", source.read(1000, 300).hex())
say("end", source.read(255_990, 300).hex())
say("beyond", source.read(256_000, 1).hex() or "nothing")
say("empty", open_source("s3://bucket/plain/empty.bin").read(0, 10).hex() or "nothing")
say("same", source.version == open_source("s3://bucket/plain/a.bin").version)
"""
    lines = {words[0]: words[1:] for words in read(body).lines("end")}
    whole = (folder / "plain" / "a.bin").read_bytes()
    assert lines == {
        "glob": [f"s3://bucket/rows/part-{number}.parquet" for number in range(3)],
        "folder": ["s3://bucket/plain/a.bin", "s3://bucket/plain/empty.bin"],
        "file": ["s3://bucket/plain/notes.txt"],
        "size": ["256000", "s3://bucket/plain/a.bin"],
        "middle": [whole[1000:1300].hex()],
        "end": [whole[255_990:].hex()],
        "beyond": ["nothing"],
        "empty": ["nothing"],
        "same": ["True"],
    }


def test_what_is_not_in_the_store_is_an_error_at_once(read: Callable[[str], Reading]) -> None:
    body = """
for make in (
    lambda: open_source("s3://bucket/nothing.bin"),
    lambda: open_source("s3://other-bucket/a.bin"),
    lambda: locate("s3://bucket/plain/*.nothing", suffixes=(".nothing",)),
    lambda: locate("s3://bucket/nowhere", suffixes=(".bin",)),
):
    began = time.monotonic()
    try:
        make()
    except penstock.DataError as error:
        say("error", "nothing" in str(error) or "bucket" in str(error), time.monotonic() - began < 10)
"""
    assert read(body).lines("end") == [["error", "True", "True"]] * 4


def test_a_read_waits_for_a_store_that_comes_back(read: Callable[[str], Reading], store: Store, folder: Path) -> None:
    body = """
source = open_source("s3://bucket/plain/a.bin")
say("opened")
wait()
say(source.read(5, 100).hex())
"""
    reading = read(body)
    reading.lines("opened")
    outlast_an_outage(store, reading)
    assert reading.lines("end") == [[(folder / "plain" / "a.bin").read_bytes()[5:105].hex()]]


ROWS = """ParquetDataset("s3://bucket/rows/*.parquet", mode="ultra")"""
# Room for a few shards only: copies of all of them, made for the index, would last for the epoch.
SHARDS = """TarDataset("s3://bucket/shards/shard-*.tar", copies="100kB")"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("dataset", "word", "length"),
    [(ROWS, 'sample["number"]', 300), (SHARDS, 'sample["cls"]', 200)],
    ids=["parquet", "tar"],
)
def test_an_epoch_continues_after_the_store_was_killed(
    dataset: str, word: str, length: int, method: str, read: Callable[[str], Reading], store: Store
) -> None:
    reading = read(epoch_of(dataset, word, multiprocessing_context=method))
    before = reading.lines("third")
    assert before[0] == ["length", str(length)]
    outlast_an_outage(store, reading)
    batches = [words[1:] for words in [*before[1:], *reading.lines("end")]]
    assert [word for batch in batches for word in batch] == [str(number) for number in range(length)]


def test_a_shuffled_epoch_is_that_of_the_same_files_on_this_machine(
    read: Callable[[str], Reading], store: Store, folder: Path
) -> None:
    remote = read(epoch_of(ROWS, 'sample["number"]', shuffle=True))
    here = ROWS.replace("s3://bucket", str(folder))
    local = read(epoch_of(here, 'sample["number"]', shuffle=True, workers=0))
    local.go()
    expected = [*local.lines("third"), *local.lines("end")]
    before = remote.lines("third")
    outlast_an_outage(store, remote)
    assert [*before, *remote.lines("end")] == expected
