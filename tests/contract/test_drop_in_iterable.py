"""Iterable datasets: a copy per worker, batches and their ends per worker, lengths that are estimates."""

from __future__ import annotations

import itertools
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import ChainDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from support.datasets.contract import (
    BeginsAgain,
    BreaksAtOnce,
    BreaksMidway,
    CountsEpochs,
    Endless,
    Megabytes,
    OddState,
    Sized,
    StuckStream,
    Unsharded,
    as_list,
)
from support.loaders import MakeLoader
from support.torch_oracle import TORCH, Event, assert_identical, assert_same_events, events


@pytest.mark.parametrize("sizes", [(0, 4, 20), (5, 5, 5), (1, 0, 0), (0, 0, 0), (2, 90, 40)], ids=str)
@pytest.mark.parametrize(
    "given",
    [{"batch_size": 7}, {"batch_size": 7, "drop_last": True}, {"batch_size": None}, {"batch_size": 2}],
    ids=str,
)
def test_each_worker_has_its_own_partial_and_dropped_batches(
    given: dict[str, Any], sizes: tuple[int, ...], penstock_maker: MakeLoader
) -> None:
    given = {"num_workers": 3, **given}
    assert_identical(list(penstock_maker(Sized(sizes), **given)), list(TORCH(Sized(sizes), **given)))


@pytest.mark.parametrize("prefetch_factor", [1, 3])
def test_the_depth_does_not_change_the_order(prefetch_factor: int, penstock_maker: MakeLoader) -> None:
    given: dict[str, Any] = {"num_workers": 3, "batch_size": 3, "prefetch_factor": prefetch_factor}
    assert_identical(list(penstock_maker(Sized((2, 9, 5)), **given)), list(TORCH(Sized((2, 9, 5)), **given)))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("batch_size", [None, 1, 3, 8, 9, 10, 50])
def test_a_stream_keeps_its_order(batch_size: int | None, num_workers: int, penstock_maker: MakeLoader) -> None:
    data = ChainDataset([Unsharded(5), Unsharded(4)])
    given: dict[str, Any] = {"batch_size": batch_size, "num_workers": num_workers}
    assert_identical(list(penstock_maker(data, **given)), list(TORCH(data, batch_size=batch_size)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_function_gets_samples_of_one_worker_at_a_time(num_workers: int, penstock_maker: MakeLoader) -> None:
    given: dict[str, Any] = {"batch_size": 3, "num_workers": num_workers, "collate_fn": as_list}
    assert_identical(list(penstock_maker(Sized((4, 8)), **given)), list(TORCH(Sized((4, 8)), **given)))


def test_out_of_order_a_slow_worker_delays_its_own_stream_only(any_maker: MakeLoader) -> None:
    if any_maker is TORCH and torch.__version__.startswith("2.6."):
        pytest.skip("the loader of torch 2.6 gives a slow worker more batches and waits for them")
    data = StuckStream()
    iterator = iter(any_maker(data, batch_size=1, num_workers=2, in_order=False, timeout=60))
    first = [int(next(iterator)) for _ in range(6)]
    assert first == list(range(100, 106))
    data.release.set()
    assert [int(batch) for batch in iterator] == list(range(6))


def test_out_of_order_delivers_every_sample_of_a_stream_once(any_maker: MakeLoader) -> None:
    batches = list(any_maker(Sized((6, 3)), batch_size=2, num_workers=2, in_order=False))
    assert sorted(torch.cat(batches).tolist()) == [0, 1, 2, 3, 4, 5, 1000, 1001, 1002]


def test_persistent_workers_iterate_their_own_copy_anew(any_maker: MakeLoader) -> None:
    data = CountsEpochs()
    loader = any_maker(data, batch_size=None, num_workers=1, persistent_workers=True)
    for epoch in (1, 2, 3):
        assert list(loader) == [f"epoch {epoch} number {number}" for number in range(4)]
    assert data.epochs == 0


def test_without_persistence_every_epoch_starts_from_the_users_copy(any_maker: MakeLoader) -> None:
    loader = any_maker(CountsEpochs(), batch_size=None, num_workers=1)
    for _ in range(2):
        assert list(loader) == [f"epoch 1 number {number}" for number in range(4)]


def test_persistent_workers_that_were_exhausted_all_take_part_in_the_next_epoch(penstock_maker: MakeLoader) -> None:
    given: dict[str, Any] = {"batch_size": 2, "num_workers": 3, "persistent_workers": True}
    ours, theirs = penstock_maker(Sized((1, 6, 3)), **given), TORCH(Sized((1, 6, 3)), **given)
    for _ in range(3):
        assert_identical(list(ours), list(theirs))


def test_an_endless_stream_can_be_left(any_maker: MakeLoader) -> None:
    iterator = iter(any_maker(Endless(), batch_size=4, num_workers=2))
    found = [next(iterator).tolist() for _ in range(6)]
    assert found == [list(range(i, i + 4)) for i in (0, 0, 4, 4, 8, 8)]


@pytest.mark.parametrize("given", [{"batch_size": 4}, {"batch_size": 5}, {"batch_size": None}], ids=str)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_stream_is_not_asked_again_after_its_end(
    given: dict[str, Any], num_workers: int, penstock_maker: MakeLoader
) -> None:
    given = {"num_workers": num_workers, "persistent_workers": True, **given}
    ours, theirs = penstock_maker(BeginsAgain(10), **given), TORCH(BeginsAgain(10), **given)
    for _ in range(2):
        # At most 20: the end of such a stream, if missed, never comes again.
        assert_identical(list(itertools.islice(ours, 20)), list(theirs))


def test_a_stream_far_shorter_than_its_batches_takes_the_room_that_it_needs(penstock_maker: MakeLoader) -> None:
    data, given = Megabytes(10), {"batch_size": 100_000, "num_workers": 1, "persistent_workers": True}
    loader = penstock_maker(data, **given)
    expected = list(TORCH(data, **given))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(2):
            assert_identical(list(loader), expected)
    assert loader.stats().peak_in_flight_bytes < 64 << 20


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["takes arguments", "raises", "cannot be pickled", "cannot be loaded"])
def test_a_stream_whose_state_cannot_be_taken_is_iterated_and_resumed_without_it(
    kind: str, num_workers: int, penstock_maker: MakeLoader
) -> None:
    given: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers}
    expected = list(TORCH(OddState(10, kind), **given))
    loader = penstock_maker(OddState(10, kind), **given)
    iterator = iter(loader)
    found = [next(iterator)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loader's state does not contain that of OddState")
        state = pickle.loads(pickle.dumps(loader.state_dict()))
    other = penstock_maker(OddState(10, kind), **given)
    other.load_state_dict(state)
    assert_identical(found + list(other), expected)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("data", [BreaksMidway(), BreaksAtOnce()], ids=["midway", "at once"])
def test_a_stream_that_breaks_gives_what_torch_gives(data: Any, num_workers: int, penstock_maker: MakeLoader) -> None:
    def course(make: MakeLoader) -> list[Event]:
        try:
            found = events(make(data, batch_size=2, num_workers=num_workers), at_most=6)
        except ValueError as error:
            return [Event(error=type(error), says=str(error))]
        return found[: 1 + next(place for place, event in enumerate(found) if event.error)]

    assert_same_events(course(penstock_maker), course(TORCH))


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (1, False), (2, False), (2, True)], ids=str)
def test_a_pipe_that_shuffles_is_seeded_anew_each_epoch_and_alike_in_all_workers(
    num_workers: int, persistent: bool, penstock_maker: MakeLoader
) -> None:
    def epochs(make: MakeLoader) -> list[list[int]]:
        pipe = IterableWrapper(list(range(40))).shuffle(buffer_size=20).sharding_filter()
        given: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": persistent}
        loader = make(pipe, shuffle=True, batch_size=None, **given)
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(list(loader))
        return found

    ours = epochs(penstock_maker)
    assert ours == epochs(TORCH)
    assert ours[0] == ours[1] != ours[2]
    assert sorted(ours[0]) == list(range(40))


# --- the length is an estimate ------------------------------------------------------------------------------


def course_of_warnings(make: MakeLoader, ask_length: bool, **given: Any) -> list[list[str]]:
    """The warnings that come with each batch."""
    loader = make(Unsharded(6), num_workers=2, **given)
    if ask_length:
        len(loader)
    iterator, found = iter(loader), []
    while True:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batch = next(iterator, None)
        if batch is None:
            return found
        texts = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
        found.append([text[text.index("was reported") :] for text in texts])


@pytest.mark.parametrize("ask_length", [False, True])
@pytest.mark.parametrize("batch_size", [None, 1, 4])
def test_a_stream_longer_than_its_declared_length_warns_as_in_torch(
    batch_size: int | None, ask_length: bool, penstock_maker: MakeLoader
) -> None:
    given: dict[str, Any] = {"ask_length": ask_length, "batch_size": batch_size}
    assert course_of_warnings(penstock_maker, **given) == course_of_warnings(TORCH, **given)


def test_every_batch_beyond_the_declared_length_warns() -> None:
    found = course_of_warnings(TORCH, True, batch_size=1)
    assert [len(texts) for texts in found] == [0] * 6 + [1] * 6, "what the test above compares with"
