"""The cache under real ranks and workers: hit rates, memory as the kernel counts it, shrinking while it is used."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset

import penstock

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfd, /proc"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

MIB = 1 << 20


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    yield
    assert not list((tmp_path / "run" / "penstock").glob("*")), "a cache's file was left behind"


def cache_bytes(pids: list[int]) -> int:
    """What caches take in these processes, shared pages counted once."""
    found, is_ours = 0, False
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if "-" in line.split(" ", 1)[0]:
                is_ours = "memfd:penstock-cache" in line
            elif is_ours and line.startswith("Pss:"):
                found += int(line.split()[1]) * 1024
    return found


RANK = """
import json, os, sys, time, warnings
from pathlib import Path
import torch
import penstock
warnings.simplefilter("ignore")
rank, fraction, kind, folder = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
COUNT, SAMPLE = 1600, 40_000

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return COUNT
    def __getitem__(self, index):
        return torch.full((SAMPLE // 4,), index, dtype=torch.int32)

class OwnCache(Samples):
    '''The scenario's own design: a least-recently-used dictionary in every worker, all of them the cache's size.'''
    def __init__(self, limit):
        self.limit, self.kept, self.hits, self.asked = limit // (4 * 2), {}, 0, 0
    def __getitem__(self, index):
        self.asked += 1
        if index in self.kept:
            self.hits += 1
            self.kept[index] = self.kept.pop(index)
        else:
            self.kept[index] = super().__getitem__(index)
            while len(self.kept) * SAMPLE > self.limit:
                del self.kept[next(iter(self.kept))]
        return torch.tensor([index, self.hits, self.asked, os.getpid()])

class Shard(torch.utils.data.Sampler):
    '''This rank's half of every epoch's order.'''
    def __init__(self):
        self.epoch = 0
    def __iter__(self):
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order[rank::2].tolist())
    def __len__(self):
        return COUNT // 2

def meet(what):
    (folder / f"{what}-{rank}").touch()
    while not (folder / f"{what}-{1 - rank}").exists():
        time.sleep(0.005)

limit = int(fraction * COUNT * 40_960) + 150_000
sampler = Shard()
if kind == "own":
    loader = penstock.DataLoader(OwnCache(limit), batch_size=8, num_workers=4, sampler=sampler, persistent_workers=True)
    last = {}
    for sampler.epoch in range(4):
        before = dict(last)
        for batch in loader:
            for index, hits, asked, pid in batch.tolist():
                last[pid] = max(last.get(pid, (0, 0)), (hits, asked), key=lambda found: found[1])
        rate = [sum(last[pid][word] - before.get(pid, (0, 0))[word] for pid in last) for word in (0, 1)]
    loader.close()
    print(json.dumps({"hit_rate": rate[0] / rate[1]}), flush=True)
    sys.exit()
cache = penstock.Cache(limit, "static", "shared")
wrapped = cache.wrap(Samples())
loader = penstock.DataLoader(wrapped, batch_size=8, num_workers=4, sampler=sampler, persistent_workers=True)
rates = []
for sampler.epoch in range(3):
    meet(f"begin{sampler.epoch}")
    before = cache.stats()
    meet(f"counted{sampler.epoch}")
    for batch in loader:
        pass
    meet(f"end{sampler.epoch}")
    after = cache.stats()
    hits, misses = after.hits - before.hits, after.misses - before.misses
    rates.append(hits / (hits + misses))
print(json.dumps({"hit_rate": rates[-1], "fraction": after.items / COUNT, "limit": limit}), flush=True)
sys.stdin.readline()
loader.close()
cache.close()
"""


def two_ranks(fraction: float, kind: str, folder: Path) -> tuple[list[dict[str, Any]], int]:
    """What both say, and what the cache takes in the memory of both and their workers."""
    folder.mkdir()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(fraction), kind, str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = []
    for rank in ranks:
        assert rank.stdout is not None
        said.append(json.loads(rank.stdout.readline()))
    pids = [rank.pid for rank in ranks]
    pids += [child.pid for pid in pids if psutil.pid_exists(pid) for child in _children(pid)]
    taken = cache_bytes(pids) if kind == "shared" else 0
    for rank in ranks:
        rank.communicate("go\n", timeout=60)
        assert rank.returncode == 0
    return said, taken


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.mark.parametrize(
    "fraction", [pytest.param(0.2, marks=pytest.mark.soak), 0.5, pytest.param(0.8, marks=pytest.mark.soak)]
)
def test_four_workers_of_two_ranks_hit_as_often_as_the_cache_is_large_and_take_its_limit(
    fraction: float, tmp_path: Path
) -> None:
    said, taken = two_ranks(fraction, "shared", tmp_path / "shared")
    limit = said[0]["limit"]
    assert abs(said[0]["fraction"] - fraction) < 0.005
    for rank in said:
        assert abs(rank["hit_rate"] - rank["fraction"]) <= 0.01, said
    assert 0.9 * limit < taken <= 1.02 * limit, f"{taken} of {limit}"
    own, _ = two_ranks(fraction, "own", tmp_path / "own")
    print(
        f"cache of {fraction} of the data: {said[0]['hit_rate']:.3f} hits, {taken / limit:.1%} of its limit in PSS; "
        f"the same bytes as an LRU in every worker: {own[0]['hit_rate']:.3f}, {own[1]['hit_rate']:.3f}"
    )
    assert all(rank["hit_rate"] < said[0]["hit_rate"] - 0.1 for rank in own)


class Large(Dataset):
    """Samples of 4 MB, 20 ms each where asked for."""

    def __init__(self, count: int, sample_bytes: int = 4 * MIB, sample_s: float = 0.0) -> None:
        self.count, self.sample_bytes, self.sample_s = count, sample_bytes, sample_s

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sample_s)
        return torch.full((self.sample_bytes,), index % 251, dtype=torch.uint8)


@pytest.mark.soak
def test_shrinking_from_2_gb_to_200_mb_releases_memory_at_once_and_changes_no_batch() -> None:
    with penstock.Cache("2GB", "static") as cache:
        loader = penstock.DataLoader(cache.wrap(Large(460)), batch_size=4, num_workers=2, persistent_workers=True)
        for _ in loader:
            pass
        tree = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
        before = cache_bytes(tree)
        assert before > 1.8e9
        came, after, took_s = [], 0, 0.0
        for number, batch in enumerate(loader):
            came += batch[:, 0].tolist()
            if number == 30:
                began = time.process_time()
                cache.resize("200MB")
                took_s = time.process_time() - began
                after = cache_bytes(tree)
        print(f"{before / 1e6:.0f} MB to {after / 1e6:.0f} MB in {took_s:.2f} s of processor time")
        assert took_s < 1.0 and after <= 1.02 * 200e6
        assert came == [index % 251 for index in range(460)]
        loader.close()


@pytest.mark.soak
def test_a_second_epoch_with_half_the_data_cached_takes_half_the_loads() -> None:
    with penstock.Cache(int(0.5 * 400 * 40_960) + 150_000, "static") as cache:
        dataset = cache.wrap(Large(400, sample_bytes=40_000, sample_s=0.02))
        loader = penstock.DataLoader(dataset, batch_size=8, num_workers=2, shuffle=True, persistent_workers=True)
        for _ in loader:
            pass
        share = cache.stats().items / 400
        assert 0.48 < share < 0.52
        spent = []
        for _ in range(5):
            began = time.monotonic()
            for _ in loader:
                pass
            spent.append(time.monotonic() - began)
        ideal = (1 - share) * 400 * 0.02 / 2
        print(f"epochs after the first {[round(each, 3) for each in spent]} s, ideal {ideal:.2f} s")
        assert statistics.median(spent) <= 1.1 * ideal
        loader.close()
