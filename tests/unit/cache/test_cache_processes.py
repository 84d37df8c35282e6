"""One cache, many processes: they join by name, share what they load, and may be killed at any moment."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from penstock.cache import registry
from penstock.cache.cache import Cache
from penstock.cache.store.locks import TooLong
from penstock.errors import CacheError, ConfigError
from support.caches import MIB
from support.ready_python import ReadyPython

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfd")


def make(name: str | None = None, limit_bytes: int = 8 * MIB, policy: str = "lru") -> Cache:
    return Cache(limit_bytes, policy, name)


def value_of(number: int) -> torch.Tensor:
    return torch.full((10_000 + number % 50,), number)


OTHER = """
import sys, torch
from penstock.cache.cache import Cache
cache = Cache(1 << 20, "lru", "shared")
print(int(cache.get("here")[0]), cache.stats().limit_bytes, flush=True)
cache.put("there", torch.full((5,), 8))
{rest}
"""


def test_an_unrelated_process_joins_by_name_and_its_values_stay(python: ReadyPython) -> None:
    with make("shared") as cache:
        cache.put("here", torch.full((5,), 7))
        done = python.run(OTHER.format(rest="cache.close()"))
        assert done.stdout.split() == ["7", str(8 * MIB)], done.stderr
        assert cache.get("there").tolist() == [8] * 5


def test_a_cache_lives_as_long_as_any_process_that_uses_it(python: ReadyPython) -> None:
    cache = make("shared")
    cache.put("here", torch.full((5,), 7))
    with python.start(OTHER.format(rest="sys.stdin.read()"), stdin=True) as other:
        assert other.stdout.readline().startswith("7")
        cache.close()
        with make("shared") as again:
            deadline = time.monotonic() + 10
            while (found := again.get("there")) is None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert found is not None and again.get("here").tolist() == [7] * 5
            other.kill()
            other.wait()


def test_a_cache_whose_processes_have_all_crashed_starts_empty(python: ReadyPython) -> None:
    code = OTHER.format(rest="").replace("print(", "cache.put('here', torch.ones(1)); print(")
    other = python.run(code + "\nimport os; os._exit(1)")
    assert other.returncode == 1, other.stderr
    assert registry.listed() == {"shared": []}
    assert registry.remove_stale() == ["shared"] and registry.listed() == {}


def test_files_of_a_process_that_crashed_while_it_created_a_cache_are_removed() -> None:
    for leftover in ("made.locks", "written.new", "written.locks"):
        (registry.folder() / leftover).touch()
    with Cache("2MiB", name="living") as living:
        assert sorted(path.name for path in registry.folder().iterdir()) == ["living.cache", "living.locks"]
        assert living.put("key", 1)
    with make("shared") as cache:
        assert cache.get("here") is None
        assert [member.pid for member in registry.listed()["shared"]] == [os.getpid()]


def test_files_of_crashed_processes_are_removed_when_the_next_cache_is_opened(python: ReadyPython) -> None:
    code = OTHER.format(rest="").replace("print(", "cache.put('here', torch.ones(1)); print(")
    python.run(code + "\nimport os; os._exit(1)")
    with make("another"):
        assert list(registry.listed()) == ["another"]


def test_threads_that_start_at_once_get_different_rows() -> None:
    with make() as cache:
        start, numbers = threading.Barrier(16), []

        def begin() -> None:
            start.wait()
            cache.put(threading.get_ident(), torch.full((20_000,), 7))
            numbers.append(cache._memory._readers.number())
            start.wait()

        threads = [threading.Thread(target=begin) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(numbers)) == 16 and cache.stats().items == 16


def test_a_cache_collected_while_another_is_opened_does_not_block_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = [make()]
    opening = registry.open_region

    def collect_and_open(*arguments: Any) -> Any:
        dropped.clear()
        return opening(*arguments)

    monkeypatch.setattr(registry, "open_region", collect_and_open)
    with make() as cache:
        assert cache.put("key", 1)
        assert list(registry.listed()) == [cache.name]


def test_a_closed_cache_releases_its_memory_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        cache = make()
        cache.put("key", torch.zeros(200_000))
        there = cache._memory.region
        mapped = weakref.ref(there)
        del there
        cache.close()
        assert mapped() is None
        with pytest.raises(CacheError, match="closed"):
            cache.get("key")
    finally:
        gc.enable()


def test_a_value_that_cannot_be_kept_still_replaces_the_one_before_it() -> None:
    with make() as cache:
        cache.put("key", 1)
        with pytest.warns(RuntimeWarning, match="cannot be cached"):
            assert not cache.put("key", lambda: 2)
        assert cache.get("key") is None


def test_a_runtime_folder_that_does_not_exist_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/4711")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with make() as cache:
        assert cache.put("key", 1) and registry.folder() == tmp_path / f"penstock-{os.getuid()}"


def as_of_another_container(path: Path) -> None:
    """The list as a process of another pid namespace of this boot wrote it: its pids mean nothing here."""
    boot, _, _ = registry.pid_namespace().partition(" ")
    members = [json.loads(line) for line in path.read_text().splitlines()]
    foreign = {"pid": 2**22 + 1, "started": "1", "namespace": f"{boot} pid:[1]"}
    path.write_text("".join(json.dumps(each | foreign) + "\n" for each in members))


def test_a_cache_of_another_container_that_shares_the_folder_is_not_forgotten(python: ReadyPython) -> None:
    with make("shared") as cache:
        cache.put("here", 1)
        path = registry.folder() / "shared.cache"
        as_of_another_container(path)
        with make("other"):
            assert registry.remove_stale() == [] and path.exists()
            assert [member.is_here for member in registry.listed()["shared"]] == [False]
        assert registry.visit("shared", locks=False) is None
        with python.start(JOINS, stdin=True) as other:
            assert other.stdout.readline() == "None\n", "memory of its own"
            assert [member.is_here for member in registry.listed()["shared"]] == [False, True]
            other.communicate()
        assert [member.is_here for member in registry.listed()["shared"]] == [False], "it left its own entry only"
        path.write_text(path.read_text().replace("pid:[1]", "").replace('"namespace": "', '"namespace": "before-'))
        assert registry.listed()["shared"] == [], "what ran before this boot has ended"


JOINS = """
import sys
from penstock.cache.cache import Cache
with Cache(1 << 20, "lru", "shared") as cache:
    print(cache.get("here"), flush=True)
    sys.stdin.read()
"""


def test_a_pickled_cache_is_the_same_cache() -> None:
    with make() as cache:
        cache.put("here", 1)
        other = pickle.loads(pickle.dumps(cache))
        assert other.get("here") == 1
        other.close()
        assert cache.get("here") == 1


def test_impossible_names_and_sizes_are_refused() -> None:
    with pytest.raises(CacheError, match="cannot be the name of a cache"):
        make("../up")
    with pytest.raises(ConfigError, match="too small"):
        make(limit_bytes=1000)
    with pytest.raises(ConfigError, match="is not one of auto, static, lru, next-use"):
        make(policy="best")
    (registry.folder()).chmod(0o777)
    with pytest.raises(CacheError, match=r"no other user can enter.*TMPDIR or XDG_RUNTIME_DIR"):
        make()
    (Path(os.environ["XDG_RUNTIME_DIR"]) / "penstock").chmod(0o700)


def test_a_miss_and_a_hit_leave_the_same_randomness_and_load_is_seeded_by_its_key() -> None:
    with make() as cache:
        drawn = []
        for _ in range(2):
            random.seed(1)
            torch.manual_seed(1)
            drawn.append(
                (cache.get_or_load("key", lambda: (torch.rand(2), random.random())), torch.rand(1), random.random())
            )
        (first, one, one_too), (second, other, other_too) = drawn
        assert torch.equal(first[0], second[0]) and first[1] == second[1]
        assert torch.equal(one, other) and one_too == other_too
        cache.clear()
        assert torch.equal(cache.get_or_load("key", lambda: torch.rand(2)), first[0])


def load_slowly(cache: Cache, loaded: Any) -> None:
    def load() -> int:
        with loaded.get_lock():
            loaded.value += 1
        time.sleep(0.3)
        return 5

    assert cache.get_or_load("key", load) == 5


def test_processes_that_miss_the_same_key_load_it_once() -> None:
    context = multiprocessing.get_context("fork")
    with make() as cache:
        loaded = context.Value("i", 0)
        children = [context.Process(target=load_slowly, args=(cache, loaded)) for _ in range(4)]
        for child in children:
            child.start()
        for child in children:
            child.join(20)
            assert child.exitcode == 0
        assert loaded.value == 1


def give_up(*_: object) -> NoReturn:
    os.write(2, b"a lock was not released in time\n")
    os._exit(4)


def hammer(cache: Cache, seed: int, keys: int) -> None:
    torch.set_num_threads(1)
    setattr(TooLong, "__init__", give_up)  # noqa: B010
    chance = random.Random(seed)
    while True:
        number = chance.randrange(keys)
        if chance.random() < 0.02:
            cache.resize(chance.choice([4 * MIB, 8 * MIB]))
        found = cache.get_or_load(number, lambda number=number: value_of(number))
        if not torch.equal(found, value_of(number)):
            os.write(2, b"WRONG\n")
            os._exit(3)


def test_values_that_are_replaced_all_the_time_are_never_confused() -> None:
    """Few keys, a third of them in the cache: an entry changes while it is read, some time."""
    context = multiprocessing.get_context("fork")
    with make(limit_bytes=1_800_000) as cache:
        children = [context.Process(target=hammer_calmly, args=(cache, seed), daemon=True) for seed in range(6)]
        for child in children:
            child.start()
        for child in children:
            child.join()
            assert child.exitcode == 0
        assert cache.stats().evictions > 1000


def hammer_calmly(cache: Cache, seed: int) -> None:
    torch.set_num_threads(1)
    chance = random.Random(seed)
    for _ in range(3000):
        number = chance.randrange(60)
        found = cache.get_or_load(number, lambda number=number: value_of(number))
        assert torch.equal(found, value_of(number))


@pytest.mark.parametrize("kills", [40, pytest.param(1200, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_processes_killed_at_random_leave_no_wrong_value_and_block_no_other_process(kills: int) -> None:
    context, chance = multiprocessing.get_context("fork"), random.Random(7)
    with make() as cache:
        children: list[Any] = []
        for _ in range(kills):
            while len(children) < 6:
                child = context.Process(target=hammer, args=(cache, chance.randrange(1 << 30), 300), daemon=True)
                child.start()
                children.append(child)
            time.sleep(chance.uniform(0.0, 0.03))
            victim = children.pop(chance.randrange(len(children)))
            victim.kill()
            victim.join()
            assert victim.exitcode == -signal.SIGKILL, f"a child ended by itself: {victim.exitcode}"
        for child in children:
            child.kill()
            child.join()
        print(f"{kills} kills, {cache.stats()}")
        for number in range(300):
            found = cache.get(number)
            assert found is None or torch.equal(found, value_of(number))
        assert cache.put("after", 1)
        stats = cache.stats()
        assert stats.bytes <= stats.limit_bytes


def make_there(queue: Any) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        make().close()
        make("shared").close()
    queue.put([str(each.message) for each in said])


def test_a_cache_without_a_name_created_in_a_child_process_warns_that_it_is_not_shared() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=make_there, args=(queue,))
    process.start()
    (said,) = queue.get(timeout=60)
    process.join()
    assert "Pass name= to share one" in said
