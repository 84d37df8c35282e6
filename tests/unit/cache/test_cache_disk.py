"""The store on disk: it survives runs, crashes and damage, and stays inside its limit."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.cache.cache import Cache
from penstock.cache.store.disk import taken_bytes
from penstock.cache.store.region import H_CHANGING, H_TABLE, MAGIC, PAGE_BYTES, R_WRITING, ROWS
from penstock.cache.store.table import COMING, E_OFFSET, E_OWNER, E_TAG, E_USED, HERE
from penstock.errors import CacheError, ConfigError
from support.caches import MIB

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sparse files, fcntl")


def make(folder: Path, *, limit: Any = 1 * MIB, disk_limit: Any = 64 * MIB, fingerprint: str = "") -> Cache:
    return Cache(limit, disk=folder, disk_limit=disk_limit, fingerprint=fingerprint)


def value_of(number: int) -> dict[str, Any]:
    return {"latents": torch.full((3000 + number % 50,), number), "text": f"prompt {number}"}


def is_right(found: dict[str, Any], number: int) -> bool:
    return torch.equal(found["latents"], value_of(number)["latents"]) and found["text"] == f"prompt {number}"


def test_values_stored_by_one_run_are_found_by_the_next(tmp_path: Path) -> None:
    with make(tmp_path / "disk") as cache:
        for number in range(100):
            assert is_right(cache.get_or_load(number, lambda number=number: value_of(number)), number)
        assert cache.stats().disk_items == 100
    with make(tmp_path / "disk") as cache:
        for number in range(100):
            assert is_right(cache.get_or_load(number, pytest.fail), number)
        stats = cache.stats()
        assert (stats.disk_hits, stats.hits, stats.misses, stats.disk_corrupt) == (100, 100, 0, 0)
        # Now it is in memory as well.
        assert is_right(cache.get(99), 99) and cache.stats().disk_hits == 100


def test_values_of_one_fingerprint_are_not_found_under_another_and_remain(tmp_path: Path) -> None:
    for fingerprint, value in (("one", 1), ("two", 2)):
        with make(tmp_path, fingerprint=fingerprint) as cache:
            assert cache.get("key") is None
            cache.put("key", value)
    with make(tmp_path, fingerprint="one") as cache:
        assert cache.get("key") == 1


def test_values_of_earlier_runs_are_evicted_before_values_that_this_run_uses(tmp_path: Path) -> None:
    def fill(cache: Cache) -> list[int]:
        return [number for number in range(200) if cache.put(number, value_of(number)) and cache.is_on_disk(number)]

    with make(tmp_path, disk_limit=2 * MIB, fingerprint="old") as cache:
        old = fill(cache)
        assert old == list(range(len(old))) and 20 < len(old) < 200
    with make(tmp_path, disk_limit=2 * MIB, fingerprint="new") as cache:
        assert len(fill(cache)) == len(old), "all of the old made room"
        stats = cache.stats()
        assert stats.disk_bytes <= stats.disk_limit_bytes == 2 * MIB
    assert taken_bytes(tmp_path) <= 2 * MIB + 64 * 1024


def test_values_that_this_run_has_not_requested_yet_are_not_leftovers(tmp_path: Path) -> None:
    kept = 0
    for run in range(3):
        with make(tmp_path, disk_limit=2 * MIB) as cache:
            order = [(run * 70 + place) % 200 for place in range(200)]
            for number in order:
                cache.get_or_load(number, lambda number=number: value_of(number), group="photographs")
            hits, kept = cache.stats().disk_hits, cache.stats().disk_items
            assert hits == (0 if run == 0 else kept), "what does not fit pushed out what did"
            assert 20 < kept < 200
    with make(tmp_path, disk_limit=2 * MIB) as cache:
        for number in range(200):
            cache.put_on_disk(number, value_of(number), group="drawings")
        assert sum(cache.is_on_disk(number, group="drawings") for number in range(200)) == kept
        assert not any(cache.is_on_disk(number) for number in range(200)), "of another group"


def test_values_that_cannot_be_read_without_code_stay_in_memory(tmp_path: Path) -> None:
    with make(tmp_path) as cache:
        with pytest.warns(RuntimeWarning, match="A builtins.set cannot be kept on disk"):
            cache.put("key", {1, 2})
        assert cache.get("key") == {1, 2} and not cache.is_on_disk("key")


def offset_of(folder: Path, text: bytes) -> int:
    return (folder / "cache.values").read_bytes().index(text)


def test_a_value_with_a_flipped_byte_is_a_miss_and_is_counted_and_removed(tmp_path: Path) -> None:
    with make(tmp_path) as cache:
        for number in range(10):
            cache.put(number, value_of(number))
    at = offset_of(tmp_path, b"prompt 3")
    for flipped in (at, at - 40, offset_of(tmp_path, torch.full((4,), 7).numpy().tobytes()) + 500):
        with (tmp_path / "cache.values").open("r+b") as file:
            file.seek(flipped)
            byte = file.read(1)[0]
            file.seek(flipped)
            file.write(bytes([byte ^ 4]))
    with make(tmp_path) as cache:
        for number in range(10):
            found = cache.get(number)
            assert found is None if number in (3, 7) else is_right(found, number)
        assert cache.stats().disk_corrupt == 2 and cache.stats().disk_items == 8
        assert is_right(cache.get_or_load(3, lambda: value_of(3)), 3)
    with make(tmp_path) as cache:
        assert is_right(cache.get(3), 3)


@pytest.mark.parametrize("seed", range(8))
def test_damaged_files_give_correct_values_or_none(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with make(tmp_path) as cache:
        for number in range(60):
            cache.put(number, value_of(number))
    for name in ("cache.index", "cache.values"):
        with (tmp_path / name).open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            for _ in range(chance.choice([1, 30])):
                file.seek(chance.randrange(size if name == "cache.values" else 200_000))
                file.write(chance.randbytes(chance.choice([1, 8, 5000])))
            if chance.random() < 0.5:
                file.truncate(chance.randrange(size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = make(tmp_path)
    with cache:
        for number in range(60):
            found = cache.get(number)
            assert found is None or is_right(found, number)
            assert is_right(cache.get_or_load(number, lambda number=number: value_of(number)), number)
        for number in range(60, 120):
            cache.put(number, value_of(number))
        assert all(is_right(cache.get(number), number) for number in range(60, 120))


@pytest.mark.parametrize("damage", ["magic", "table", "short", "rubbish"])
def test_an_unreadable_index_is_replaced_with_a_warning(tmp_path: Path, damage: str) -> None:
    with make(tmp_path) as cache:
        cache.put("key", 1)
    with (tmp_path / "cache.index").open("r+b") as file:
        if damage == "magic":
            file.write((MAGIC + 1).to_bytes(8, "little"))
        elif damage == "table":
            file.seek(8 * H_TABLE)
            file.write(((1 << 40) | 12).to_bytes(8, "little"))
        elif damage == "short":
            file.truncate(5000)
        else:
            file.write(np.random.default_rng(0).bytes(PAGE_BYTES))
    with pytest.warns(RuntimeWarning, match="starts again empty"), make(tmp_path) as cache:
        assert cache.get("key") is None and cache.put("key", 2)
    with make(tmp_path) as cache:
        assert cache.get("key") == 2


def test_a_cache_of_another_version_is_left_unchanged(tmp_path: Path) -> None:
    with make(tmp_path) as cache:
        cache.put("key", 2)
    with (tmp_path / "cache.index").open("r+b") as file:
        file.seek(7)
        file.write(b"9")
    before = (tmp_path / "cache.index").read_bytes()
    with pytest.raises(CacheError, match="another version"):
        make(tmp_path)
    assert (tmp_path / "cache.index").read_bytes() == before


def write_on(folder: Path, first: int) -> None:
    torch.set_num_threads(1)
    with make(folder, disk_limit=8 * MIB) as cache:
        chance = random.Random(first)
        while True:
            number = chance.randrange(400)
            found = cache.get_or_load(number, lambda number=number: value_of(number))
            if not is_right(found, number):
                os.write(2, b"WRONG\n")
                os._exit(3)


@pytest.mark.parametrize("kills", [10, pytest.param(50, marks=pytest.mark.soak)])
def test_a_cache_whose_writer_was_killed_opens_again_with_no_wrong_value(tmp_path: Path, kills: int) -> None:
    context, chance = multiprocessing.get_context("fork"), random.Random(5)
    for kill in range(kills):
        child = context.Process(target=write_on, args=(tmp_path, kill))
        child.start()
        time.sleep(chance.uniform(0.01, 0.25))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        with make(tmp_path, disk_limit=8 * MIB) as cache:
            for number in range(400):
                found = cache.get(number)
                assert found is None or is_right(found, number)
            assert cache.stats().disk_corrupt == 0, "a value that was not finished was found"
            assert cache.stats().disk_bytes <= 8 * MIB
    assert taken_bytes(tmp_path) <= 8 * MIB + 64 * 1024


def test_two_processes_share_a_cache_and_a_forked_one_continues_after_its_parent_closes_it(tmp_path: Path) -> None:
    with make(tmp_path) as cache:
        cache.put("here", 1)
        code = f"""
import sys
from unit.cache.test_cache_disk import make
from pathlib import Path
with make(Path({str(tmp_path)!r})) as cache:
    print(cache.get("here"))
    cache.put("there", 2)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout == "1\n", done.stderr
        assert cache.get("there") == 2


def test_a_full_disk_gives_a_warning_and_training_continues(tmp_path: Path) -> None:
    script = f"""
mkdir -p {tmp_path}/small && mount -t tmpfs -o size=3m none {tmp_path}/small || exit 77
{sys.executable} - <<'CODE'
import sys, warnings
from unit.cache.test_cache_disk import make, value_of, is_right
from pathlib import Path
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    with make(Path("{tmp_path}/small/disk"), disk_limit=64 << 20) as cache:
        for number in range(400):
            assert is_right(cache.get_or_load(number, lambda: value_of(number)), number)
        held = cache.stats().disk_items
        for number in range(held):
            assert is_right(cache.get(number), number)
print(held, len([w for w in seen if issubclass(w.category, RuntimeWarning)]), *[w.message for w in seen])
CODE
"""
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, env=dict(os.environ))
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no mounts here")
    assert done.returncode == 0, done.stderr
    held, warned, *text = done.stdout.split()
    assert 20 < int(held) < 200 and warned == "1", done.stdout
    assert "disk" in text


def test_a_folder_given_by_two_paths_is_one_cache(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    with make(tmp_path / "disk") as one, make(tmp_path / "link") as other:
        one.put("key", 1)
        assert other.get("key") == 1 and one._on_disk is other._on_disk


def test_a_value_from_disk_does_not_replace_a_newer_one(tmp_path: Path) -> None:
    with make(tmp_path) as cache:
        cache.put("key", 1)
        cache._memory.remove(cache.digest_of("key"))
        assert cache.get("key") == 1
        with pytest.warns(RuntimeWarning, match="set cannot be kept on disk"):
            cache.put("key", {2})
        assert cache.get("key") == {2}
        cache._memory.remove(cache.digest_of("key"))
        assert cache.get("key") is None


def test_a_smaller_limit_holds_from_the_next_opening_on(tmp_path: Path) -> None:
    with make(tmp_path) as cache:
        for number in range(100):
            cache.put(number, value_of(number))
    with make(tmp_path, disk_limit=1 * MIB) as cache:
        assert 0 < cache.stats().disk_bytes <= 1 * MIB
    assert taken_bytes(tmp_path) <= 1 * MIB + 64 * 1024


def test_an_entry_with_an_impossible_place_is_removed_before_its_place_is_used(tmp_path: Path) -> None:
    with make(tmp_path) as cache:
        for number in range(5):
            cache.put(number, value_of(number))
        region = cache._on_disk.region if cache._on_disk else None
        assert region is not None
        table = region.table()
        here = np.flatnonzero(table[:, E_TAG] & np.uint64(3) == HERE)
        table[here[0], E_OFFSET] = 12345
        table[here[1], E_OFFSET] = 1 << 60
        table[here[2], E_USED] = 1 << 37
        table[here[3], E_TAG] = np.uint64(4 * 999 | COMING)
        table[here[3], E_OFFSET] = (1 << 62) + 4096
        region.rows[int(table[here[3], E_OWNER]) % ROWS, R_WRITING] = 1
        region.header[H_CHANGING] = 1
    with make(tmp_path) as cache:
        found = [cache.get(number) for number in range(5)]
        assert all(value is None or is_right(value, number) for number, value in enumerate(found))
        assert sum(value is not None for value in found) == 1
        assert all(cache.put(number, value_of(number)) for number in range(5))
        assert all(is_right(cache.get(number), number) for number in range(5))


def test_folders_that_cannot_be_used_give_an_error_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot be used"):
        make(tmp_path / "file")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "cache.index").symlink_to("/etc/passwd")
    with pytest.raises(CacheError, match="cannot be used"):
        make(tmp_path / "linked")
    with pytest.raises(ConfigError):
        make(tmp_path, disk_limit="many")
    assert not list((tmp_path / "run" / "penstock").glob("*"))
