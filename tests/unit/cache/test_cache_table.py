"""The cache's table against a dictionary, through growth, removal and probing over the end."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest

from penstock.cache.keys import digest
from penstock.cache.store import table as table_module
from penstock.cache.store.region import H_ITEMS, H_TABLE, H_VALUE_BYTES, Region
from penstock.cache.store.table import COMING, GONE, HERE, Table


def add(table: Table, known: bytes, *, offset: int = 0, extent: int = 4096) -> int:
    return table.add(known, offset=offset, used_bytes=extent, stamp=1, mark=0, owner=0)


@pytest.mark.parametrize("seed", range(5))
def test_the_table_agrees_with_a_dictionary(region: Region, seed: int) -> None:
    table, chance = Table(region), random.Random(seed)
    model: dict[bytes, int] = {}
    for step in range(6000):
        known = digest(chance.randrange(3000))
        if known in model and chance.random() < 0.5:
            found = table.find(known)
            assert found is not None
            table.remove(*found)
            del model[known]
        elif known not in model:
            add(table, known, offset=4096 * step)
            model[known] = 4096 * step
    assert int(region.header[H_ITEMS]) == len(model)
    assert int(region.header[H_VALUE_BYTES]) == 4096 * len(model)
    assert len(table.live()) == len(model)
    for number in range(3000):
        found = table.find(digest(number))
        assert (None if found is None else found[1].offset) == model.get(digest(number))


def test_entries_that_begin_at_the_last_slot_continue_at_the_first(region: Region) -> None:
    table = Table(region)
    slots = 1 << (int(region.header[H_TABLE]) & 63)
    crowded = [struct.pack("<QQ", number, slots - 1) for number in range(1, 20)]
    for number, known in enumerate(crowded):
        add(table, known, offset=number)
    table._rebuild(int(region.header[H_TABLE]) & 63)
    for number, known in enumerate(crowded):
        found = table.find(known)
        assert found is not None and found[1].offset == number


def test_a_tag_changes_whenever_its_entry_does(region: Region) -> None:
    table, known = Table(region), digest("key")
    at = add(table, known)
    tags = [table.read(at).tag]
    table.arrive(at)
    tags.append(table.read(at).tag)
    table.remove(at, table.read(at))
    tags.append(table.read(at).tag)
    assert add(table, known) == at
    tags.append(table.read(at).tag)
    assert [tag & 3 for tag in tags] == [COMING, HERE, GONE, COMING] and len(set(tags)) == 4
    assert not table.is_still(at, tags[1]) and table.is_still(at, tags[3])


def test_a_reader_of_a_replaced_table_finds_no_entry_and_no_wrong_one(region: Region) -> None:
    table = Table(region)
    before = int(region.header[H_TABLE])
    at = add(table, digest(0))
    tag = table.read(at).tag
    for number in range(1, 3000):
        add(table, digest(number))
    assert int(region.header[H_TABLE]) != before
    assert not table.is_still(at, tag)
    assert np.count_nonzero(region.table_at(before)) == 0


def test_words_read_while_the_entry_changes_are_read_again(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    table, known = Table(region), digest("key")
    at = add(table, known, offset=0)
    table.arrive(at)
    entry = table_module._ENTRY

    class InTwoHalves:
        """Reads a first half, is held up while the entry changes, and reads the second."""

        def __init__(self) -> None:
            self.held_up = 0

        def unpack_from(self, buffer: memoryview, at: int) -> tuple[int, ...]:
            first = entry.unpack_from(buffer, at)
            if not self.held_up:
                self.held_up += 1
                monkeypatch.setattr(table_module, "_ENTRY", entry)
                table.remove(at, table.read(at))
                table.arrive(add(table, known, offset=8192))
                monkeypatch.setattr(table_module, "_ENTRY", self)
            return first[:5] + entry.unpack_from(buffer, at)[5:]

    halves = InTwoHalves()
    monkeypatch.setattr(table_module, "_ENTRY", halves)
    found = table.find(known)
    assert halves.held_up == 1
    assert found is not None and found[1].offset == 8192 and table.is_still(at, found[1].tag)
