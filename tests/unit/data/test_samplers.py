"""Orders that stay near: every index once, the same for the same seed, and gone on with exactly."""

from __future__ import annotations

import io
import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import penstock
from penstock.data import BlockShuffleSampler, ParquetDataset, SequenceSampler, WindowDataset
from penstock.errors import ConfigError

LENGTHS = [5, 0, 7, 1, 12, 3]


def blocks_of(indices: list[int]) -> list[int]:
    """Which block each index is of."""
    return (np.searchsorted(np.cumsum(LENGTHS), indices, "right")).tolist()


def test_a_window_holds_whole_blocks_in_random_order_mixed() -> None:
    sampler = BlockShuffleSampler(LENGTHS, window=12, seed=1)
    order = list(sampler)
    assert sorted(order) == list(range(28)) and len(sampler) == 28
    for block in set(blocks := blocks_of(order)):
        places = [place for place, one in enumerate(blocks) if one == block]
        assert places[-1] - places[0] < 12, "nothing of a block comes outside of its window"
    assert order != sorted(order)
    alone = list(BlockShuffleSampler(LENGTHS, window=1, seed=1))
    assert len([block for block, _ in itertools.groupby(blocks_of(alone))]) == 5, "one block at a time"


def test_bytes_decide_how_many_blocks_are_mixed() -> None:
    mixed = list(BlockShuffleSampler([10] * 10, window="1kB", block_bytes=[100] * 10))
    apart = list(BlockShuffleSampler([10] * 10, window="1kB", block_bytes=[1000] * 10))
    assert [len(set(np.array(apart[n : n + 10]) // 10)) for n in range(0, 100, 10)] == [1] * 10
    assert len(set(np.array(mixed[:10]) // 10)) > 3
    with pytest.raises(ConfigError, match="2 sizes for 3 blocks"):
        BlockShuffleSampler([1, 2, 3], block_bytes=[1, 2])


def test_every_epoch_has_its_own_order_and_the_same_seed_the_same_ones() -> None:
    first, again = (BlockShuffleSampler(LENGTHS, window=12, seed=3) for _ in range(2))
    epochs = [list(first) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    again.set_epoch(2)
    assert list(again) == epochs[2]
    again.set_epoch(0)
    assert list(again) == epochs[0] and list(again) == epochs[1]
    assert list(BlockShuffleSampler(LENGTHS, window=12, seed=4)) != epochs[0]


def test_every_iteration_is_the_next_epoch_also_after_one_that_was_left() -> None:
    sampler = BlockShuffleSampler(LENGTHS, window=12)
    iterator = iter(sampler)
    assert [next(iterator) for _ in range(4)] == list(sampler.order(0))[:4]
    assert list(sampler) == list(sampler.order(1))
    sampler.set_epoch(0)
    assert list(sampler) == list(sampler.order(0))


def test_setting_the_next_epoch_does_not_change_where_this_one_is() -> None:
    sampler = BlockShuffleSampler(LENGTHS, window=12)
    iterator = iter(sampler)
    next(iterator)
    sampler.set_epoch(7)
    next(iterator)
    state = sampler.state_dict()
    assert (state["epoch"], state["position"]) == (0, 2)
    assert list(sampler) == list(sampler.order(7))


@pytest.mark.parametrize("at", [0, 1, 13, 27, 28])
def test_a_loaded_state_continues_at_the_next_index_and_with_the_following_epochs(at: int) -> None:
    sampler = BlockShuffleSampler(LENGTHS, window=12, seed=3)
    list(sampler)
    iterator = iter(sampler)
    given = [next(iterator) for _ in range(at)]
    state = sampler.state_dict()
    resumed = BlockShuffleSampler(LENGTHS, window=12, seed=3)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert given + list(resumed) == list(sampler.order(1))
    assert list(resumed) == list(sampler.order(2))


SAVED: dict[str, Any] = {"window": 12, "seed": 3, "num_replicas": 2, "rank": 0}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"seed": 4}, "seed was 3 and is now 4"),
        ({"window": 13}, "window was 12 and is now 13"),
        ({"num_replicas": 4}, "num_replicas was 2 and is now 4"),
        ({"shuffle": False}, "shuffle was True and is now False"),
        ({"drop_last": True}, "drop_last was False and is now True"),
        ({"blocks": [*LENGTHS, 2]}, "length was 28 and is now 30"),
        ({"blocks": LENGTHS[::-1]}, "where blocks begin"),
        ({"block_bytes": [1, 2, 3, 4, 5, 6]}, "the blocks' sizes"),
    ],
)
def test_a_state_of_another_order_is_refused_with_the_difference(other: dict[str, Any], said: str) -> None:
    state = BlockShuffleSampler(LENGTHS, **SAVED).state_dict()
    given = {"blocks": LENGTHS, **SAVED, **other}
    sampler = BlockShuffleSampler(given.pop("blocks"), **given)
    with pytest.raises(ConfigError, match=said):
        sampler.load_state_dict(state)
    assert sampler.epoch == 0 and len(list(sampler)) == len(sampler), "it is as it was"


def test_a_state_of_another_order_of_sequences_is_refused() -> None:
    state = SequenceSampler([4, 4], seed=1).state_dict()
    SequenceSampler([4, 4], seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="seed was 1 and is now 2, the dataset's length was 8 and is now 9"):
        SequenceSampler([4, 5], seed=2).load_state_dict(state)


def test_one_rank_may_save_the_state_of_all() -> None:
    first, second = (BlockShuffleSampler(LENGTHS, **{**SAVED, "rank": rank}) for rank in range(2))
    iterator = iter(first)
    given = [next(iterator) for _ in range(5)]
    second.load_state_dict(first.state_dict())
    assert list(second) == list(second.order(0))[5:] and given == list(first.order(0))[:5]


def test_states_are_read_by_torch_without_trust_and_old_ones_as_before() -> None:
    sampler = BlockShuffleSampler(LENGTHS, window=12, seed=np.int64(3))  # type: ignore[arg-type]
    written = io.BytesIO()
    torch.save(sampler.state_dict(), written)
    written.seek(0)
    sampler.load_state_dict(torch.load(written, weights_only=True))
    sampler.load_state_dict({"epoch": 2, "position": 6})
    assert list(sampler) == list(sampler.order(2))[6:]


def test_ranks_have_parts_of_nearly_the_same_length_that_are_neighbours() -> None:
    parts = [list(BlockShuffleSampler([10] * 9 + [5], window=20, rank=rank, num_replicas=4)) for rank in range(4)]
    assert sorted(itertools.chain(*parts)) == list(range(95))
    assert sorted(map(len, parts)) == [23, 24, 24, 24]
    assert all(len({index // 10 for index in part}) <= 4 for part in parts)
    even = [BlockShuffleSampler([10] * 9 + [5], rank=rank, num_replicas=4, drop_last=True) for rank in range(4)]
    assert [len(list(sampler)) for sampler in even] == [len(sampler) for sampler in even] == [23] * 4


def test_ranks_come_from_torchrun_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    sampler = SequenceSampler([4, 4], shuffle=False)
    assert (sampler.rank, sampler.num_replicas, list(sampler)) == (1, 2, [4, 5, 6, 7])
    with pytest.raises(ConfigError, match="rank=5 is not valid: with num_replicas=2"):
        SequenceSampler([4], rank=5)


def test_sequences_are_kept_together_and_in_order() -> None:
    sampler = SequenceSampler(LENGTHS, seed=2)
    order = list(sampler)
    runs = [list(run) for _, run in itertools.groupby(order, key=lambda index: blocks_of([index])[0])]
    assert len(runs) == 5 and all(run == list(range(run[0], run[0] + len(run))) for run in runs)
    assert sorted(order) == list(range(28)) and order != sorted(order) and list(sampler) != order
    assert list(SequenceSampler(LENGTHS, shuffle=False)) == list(range(28))


def test_nothing_at_all_is_an_empty_order() -> None:
    for sampler in (BlockShuffleSampler([]), SequenceSampler([0, 0]), BlockShuffleSampler([2], rank=2, num_replicas=3)):
        assert list(sampler) == [] or len(sampler) == len(list(sampler))
    assert list(BlockShuffleSampler([])) == []


@pytest.mark.parametrize("wrong", [[1, -1], [[1, 2]], object(), "abc", [2.7, 1.2]])
def test_what_has_no_blocks_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="blocks"):
        BlockShuffleSampler(wrong)


def test_a_dataset_without_blocks_is_refused_without_being_read() -> None:
    read: list[int] = []
    windows = WindowDataset([1, 2, 3, 4], 2, load=read.append)
    with pytest.raises(ConfigError, match=r"a WindowDataset has no blocks: .*ParquetDataset.*SequenceSampler"):
        BlockShuffleSampler(windows)
    with pytest.raises(ConfigError, match=r"a Numbers has no blocks"):
        BlockShuffleSampler(Numbers())
    with pytest.raises(ConfigError, match=r"a Numbers has no sequences: .*WindowDataset"):
        SequenceSampler(Numbers())
    with pytest.raises(ConfigError, match=r"a list has no blocks: .*lengths of blocks"):
        BlockShuffleSampler([{"text": "a"}, {"text": "b"}])
    assert read == []


def test_a_window_larger_than_what_the_dataset_keeps_is_warned_of_once(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"x": np.arange(80_000)}), tmp_path / "a.parquet", row_group_size=1000)
    dataset = ParquetDataset(tmp_path, keep="64KiB")
    with pytest.warns(RuntimeWarning, match=r"window=128 KiB .* keeps only keep=64\.0 KiB") as caught:
        sampler = BlockShuffleSampler(dataset, window="128KiB")
        assert len(list(sampler)) == len(list(sampler)) == 80_000
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BlockShuffleSampler(dataset, window="64KiB")
        BlockShuffleSampler(ParquetDataset(tmp_path, keep="1MB"), window="2MB")
        BlockShuffleSampler(ParquetDataset(tmp_path, mode="memory", keep="64KiB"), window="128KiB")


def test_ten_million_indices_are_ordered_as_they_are_needed() -> None:
    sampler = BlockShuffleSampler([1000] * 10_000, window=50_000)
    assert len(sampler) == 10_000_000
    assert len(set(itertools.islice(sampler, 100_000))) == 100_000


def loader(workers: int, batch_size: int = 4, **more: Any) -> penstock.DataLoader[Any]:
    sampler = BlockShuffleSampler(LENGTHS, window=12, seed=9)
    return penstock.DataLoader(Numbers(), batch_size=batch_size, sampler=sampler, num_workers=workers, **more)


class Numbers(Dataset):
    def __len__(self) -> int:
        return 28

    def __getitem__(self, index: int) -> int:
        return index


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("batch_size", "drop_last"), [(4, False), (5, False), (5, True)])
def test_a_loader_resumes_at_any_place_of_any_epoch(workers: int, batch_size: int, drop_last: bool) -> None:
    whole = loader(workers, batch_size, drop_last=drop_last)
    epochs = [batches(whole) for _ in range(3)]
    for epoch, done in [(0, 0), (0, 2), (1, 3), (1, len(epochs[1]))]:
        saved = loader(workers, batch_size, drop_last=drop_last)
        for _ in range(epoch):
            batches(saved)
        iterator = iter(saved)
        for _ in range(done):
            next(iterator)
        resumed = loader(workers, batch_size, drop_last=drop_last)
        resumed.load_state_dict(saved.state_dict())
        if done < len(epochs[epoch]):
            assert batches(resumed) == epochs[epoch][done:]
        assert batches(resumed) == epochs[epoch + 1], "with the last batch in hand, or then: the next epoch"
        del iterator


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_saved_at_the_end_of_an_epoch_continues_with_the_next(workers: int) -> None:
    whole = loader(workers)
    epochs = [batches(whole) for _ in range(3)]
    saved = loader(workers)
    batches(saved)
    resumed = loader(workers)
    resumed.load_state_dict(saved.state_dict())
    assert [batches(resumed) for _ in range(2)] == epochs[1:]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_left_and_what_was_set_do_not_reach_a_state(workers: int) -> None:
    saved = loader(workers)
    iterator = iter(saved)
    next(iterator)
    del iterator
    iterator = iter(saved)
    state = saved.state_dict()
    expected = batches(iterator)
    resumed = loader(workers)
    resumed.load_state_dict(state)
    assert len(expected) == 7 and batches(resumed) == expected
    iterator = iter(saved)
    next(iterator)
    saved.sampler.set_epoch(40)  # type: ignore[attr-defined]
    next(iterator)
    state = saved.state_dict()
    expected = batches(iterator)
    resumed = loader(workers)
    resumed.load_state_dict(state)
    assert batches(resumed) == expected
