"""Copies of remote shards: fetched once, bounded, right after kills; shards on a real S3 server."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.data.sources import ReadStopped, open_source
from penstock.data.tar import local_copies as shard_copies
from penstock.data.tar.dataset import TarDataset
from penstock.data.tar.local_copies import ShardCopies
from penstock.errors import ConfigError, DataError
from support.tar_archives import write_texts

pytest.importorskip("fsspec")
FORK = multiprocessing.get_context("fork")


def remote(path: Path, size_bytes: int = 5000, fill: bytes = b"x") -> tuple[str, str]:
    """A file as if it were elsewhere: fsspec reads it."""
    path.write_bytes(fill * size_bytes)
    location = f"local://{path}"
    return location, open_source(location).version


def held_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_copy_is_fetched_once_and_reads_without_the_original(tmp_path: Path) -> None:
    location, version = remote(tmp_path / "a.tar")
    copies = ShardCopies(tmp_path / "copies", 10_000)
    first = copies.open(location, version)
    (tmp_path / "a.tar").unlink()
    again = copies.open(location, version)
    assert first.read(0, 9999) == again.read(0, 9999) == b"x" * 5000
    assert {path.suffix for path in (tmp_path / "copies").iterdir()} == {".tar", ".lock"}


def test_the_least_recently_used_copies_make_room_and_stay_readable_where_open(tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    copies = ShardCopies(folder, 12_000)
    shards = [remote(tmp_path / f"{number}.tar", 5000, b"%d" % number) for number in range(4)]
    opened = [copies.open(*shards[0]), copies.open(*shards[1])]
    copies.open(*shards[0])
    opened += [copies.open(*shards[2]), copies.open(*shards[3])]
    assert held_bytes(folder) <= 12_000
    assert [source.read(10, 3) for source in opened] == [b"000", b"111", b"222", b"333"]
    # 1 went for 2, being older than 0; 0 went for 3.
    names = {path.name for path in folder.glob("*.tar")}
    copies.open(*shards[2])
    copies.open(*shards[3])
    assert {path.name for path in folder.glob("*.tar")} == names and len(names) == 2


def test_a_shard_larger_than_the_limit_is_refused(tmp_path: Path) -> None:
    location, version = remote(tmp_path / "a.tar")
    with pytest.raises(ConfigError, match=r"4\.88 KiB.*raise copies="):
        ShardCopies(tmp_path / "copies", 4999).open(location, version)


def test_a_shard_that_changed_is_an_error(tmp_path: Path) -> None:
    location, version = remote(tmp_path / "a.tar")
    remote(tmp_path / "a.tar", 6000)
    with pytest.raises(DataError, match="changed after it was indexed"):
        ShardCopies(tmp_path / "copies", 10_000).open(location, version)
    assert not list((tmp_path / "copies").glob("*.part"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    location, version = remote(tmp_path / "a.tar")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        ShardCopies(tmp_path / "file" / "copies", 10_000).open(location, version)


class Gate:
    """A source that stops in the middle until it is let go; counts who fetches, in a file."""

    def __init__(self, source: Any, log: Path, gate: Path) -> None:
        self._source, self._log, self._gate = source, log, gate
        self.location, self.size_bytes, self.version = source.location, source.size_bytes, source.version

    def read(self, offset: int, length: int) -> bytes:
        with self._log.open("ab") as log:
            log.write(b"%d\n" % os.getpid())
        wait_until(self._gate.exists)
        return self._source.read(offset, length)

    def close(self) -> None:
        self._source.close()


def fetch(copies: ShardCopies, shard: tuple[str, str], log: Path, gate: Path, answer: Any) -> None:
    def opened(location: str) -> Any:
        return Gate(open_source(location), log, gate) if location.startswith("local://") else open_source(location)

    setattr(shard_copies, "open_source", opened)  # noqa: B010
    answer.send(copies.open(*shard).read(0, 10))


def start(*arguments: Any) -> tuple[Any, Any]:
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=fetch, args=(*arguments, theirs))
    process.start()
    theirs.close()
    return process, ours


def wait_until(is_true: Any) -> None:
    deadline_s = time.monotonic() + 120
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_only_one_of_many_processes_fetches(tmp_path: Path) -> None:
    copies, log, gate = ShardCopies(tmp_path / "copies", 10_000), tmp_path / "log", tmp_path / "gate"
    shard = remote(tmp_path / "a.tar")
    children = [start(copies, shard, log, gate) for _ in range(4)]
    wait_until(log.exists)
    gate.touch()
    assert [pipe.recv() for _, pipe in children] == [b"x" * 10] * 4
    for process, _ in children:
        process.join()
    assert len(log.read_text().split()) == 1


def test_if_the_fetching_process_is_killed_another_one_fetches(tmp_path: Path) -> None:
    copies, log, gate = ShardCopies(tmp_path / "copies", 5000), tmp_path / "log", tmp_path / "gate"
    shard = remote(tmp_path / "a.tar")
    first, _ = start(copies, shard, log, gate)
    wait_until(log.exists)
    second, pipe = start(copies, shard, log, gate)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    wait_until(lambda: len(log.read_text().split()) == 2)
    gate.touch()
    assert pipe.recv() == b"x" * 10
    second.join()
    # What the first had begun took all the room there is, and is gone.
    assert not list((tmp_path / "copies").glob("*.part"))


def test_what_a_killed_fetch_left_of_another_shard_is_deleted_for_room(tmp_path: Path) -> None:
    copies, log, gate = ShardCopies(tmp_path / "copies", 9000), tmp_path / "log", tmp_path / "gate"
    first, _ = start(copies, remote(tmp_path / "a.tar"), log, gate)
    wait_until(log.exists)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    assert copies.open(*remote(tmp_path / "b.tar", fill=b"b")).read(0, 2) == b"bb"
    assert held_bytes(tmp_path / "copies") == 5000


def test_a_process_without_room_waits_for_processes_that_fetch(tmp_path: Path) -> None:
    copies, log, gate = ShardCopies(tmp_path / "copies", 9000), tmp_path / "log", tmp_path / "gate"
    first, first_pipe = start(copies, remote(tmp_path / "a.tar", fill=b"a"), log, gate)
    wait_until(log.exists)
    second, second_pipe = start(copies, remote(tmp_path / "b.tar", fill=b"b"), log, gate)
    assert not second_pipe.poll(0.3) and len(log.read_text().split()) == 1
    gate.touch()
    assert (first_pipe.recv(), second_pipe.recv()) == (b"a" * 10, b"b" * 10)
    first.join()
    second.join()
    assert held_bytes(tmp_path / "copies") == 5000


def test_a_child_forked_during_a_fetch_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = shard_copies._try_lock(tmp_path / "a.lock")
    assert lock is not None
    child = FORK.Process(target=time.sleep, args=(600,))
    child.start()
    try:
        # It lives once its own start is over, which is when it has let go.
        wait_until(lambda: not any(_target(fd).endswith("a.lock") for fd in Path(f"/proc/{child.pid}/fd").iterdir()))
        lock.close()
        again = shard_copies._try_lock(tmp_path / "a.lock")
        assert again is not None
        again.close()
    finally:
        child.kill()
        child.join()


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Any:
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    import fsspec

    names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    _, port = running.get_host_and_port()
    for name, value in {**names, "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}"}.items():
        monkeypatch.setenv(name, value)
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True)
    filesystem.mkdir("shards")
    yield filesystem
    running.stop()


def test_shards_on_s3_read_as_local_ones_do(tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import DataLoader

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    for number in range(3):
        path = write_texts(tmp_path / f"{number}.tar", [f"{number}-{at}.txt" for at in range(30)])
        bucket.put(path, f"shards/{number}.tar")
    local = TarDataset(tmp_path)
    size = int(local.block_bytes[0])
    dataset = TarDataset("s3://shards/{0..2}.tar", copies=2 * size)
    assert [dataset[number] for number in range(90)] == [local[number] for number in range(90)]
    loader = DataLoader(dataset, batch_size=9, num_workers=2, multiprocessing_context="spawn")
    assert [text for batch in loader for text in batch["txt"]] == [local[number]["txt"] for number in range(90)]
    folder = tmp_path / "user-cache" / "penstock"
    assert 0 < held_bytes(folder / "shards") <= 2 * size and len(list((folder / "tar-indexes").iterdir())) == 3
    with pytest.raises(DataError):
        TarDataset("s3://shards/none.tar")


SLOW_STORE = """
import sys, threading
import fsspec
from fsspec.implementations.local import LocalFileSystem
from penstock.data import TarDataset

class Slow(LocalFileSystem):
    protocol = "slow"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("slow://")

    def unstrip_protocol(self, name):
        return f"slow://{name}"

    def cat_file(self, path, start=None, end=None, **more):
        print("asked", flush=True)
        threading.Event().wait(float(sys.argv[2]))
        return super().cat_file(path, start, end, **more)

fsspec.register_implementation("slow", Slow)
print(len(TarDataset(f"slow://{sys.argv[1]}")))
"""


def test_ctrl_c_does_not_wait_for_a_copy_and_an_incomplete_copy_is_not_used(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.tar", ["a.txt", "b.txt"])
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def read(wait_s: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SLOW_STORE, path, str(wait_s)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    stopped = read(600)
    assert stopped.stdout is not None and stopped.stdout.readline() == "asked\n"
    stopped.send_signal(signal.SIGINT)
    # The store would take ten minutes.
    _, errors = stopped.communicate(timeout=120)
    assert "KeyboardInterrupt" in errors and stopped.returncode != 0
    copies = tmp_path / "cache" / "penstock" / "shards"
    assert not list(copies.glob("*.tar"))
    out, errors = read(0).communicate(timeout=60)
    assert out == "asked\n2\n", errors
    assert not list(copies.glob("*.part")), "what was left is gone"


def test_an_unwanted_copy_stops_between_two_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_copies, "_PIECE_BYTES", 1000)
    location, version = remote(tmp_path / "a.tar")
    copies = ShardCopies(tmp_path / "copies", 10_000)
    asked = iter([True, True, False])
    with pytest.raises(ReadStopped):
        copies.open(location, version, lambda: next(asked))
    assert held_bytes(tmp_path / "copies") == 0
    assert copies.open(location, version).read(0, 9999) == b"x" * 5000
