"""An epoch is left and gone on with anywhere, by any number of workers: what follows is what would have followed.

The habits of torchdata's StatefulDataLoader are here too, in our own words: each test says which one it holds.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler

import penstock
from penstock.loader.engine.integrity import EngineClosed
from support.datasets.faulty import Failing, Noisy, Ragged, StatefulSampler, Stream, listed, plain
from support.faults import processes
from support.faults.leaks import no_leaks  # noqa: F401  (a fixture for every test here)

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

ROWS, BATCHES = 4, 24


def make(order: str, workers: int, **more: Any) -> penstock.DataLoader[Any]:
    """A loader as a new process would make it: nothing of an earlier one is in it but what the state brings."""
    dataset = more.pop("dataset", None) or Noisy(ROWS * BATCHES)
    by: dict[str, Any] = {
        "in order": {"batch_size": ROWS},
        "shuffled": {"batch_size": ROWS, "shuffle": True},
        "shuffled by a generator": {
            "batch_size": ROWS,
            "shuffle": True,
            "generator": torch.Generator().manual_seed(random.randrange(1000)),
        },
        "stateful sampler": {"batch_size": ROWS, "sampler": StatefulSampler(len(dataset), 3)},
        "stateful batch sampler": {"batch_sampler": StatefulBatches(StatefulSampler(len(dataset), 3), ROWS)},
    }[order]
    return penstock.DataLoader(dataset, num_workers=workers, **by, **more)


class StatefulBatches(BatchSampler):
    def __init__(self, sampler: StatefulSampler, rows: int) -> None:
        super().__init__(sampler, rows, False)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.sampler.state_dict()}  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state["inner"])  # type: ignore[attr-defined]


ORDERS = ["in order", "shuffled", "shuffled by a generator", "stateful sampler", "stateful batch sampler"]


def saved(loader: penstock.DataLoader[Any], **more: Any) -> Any:
    """The state as a checkpoint file would give it back."""
    return pickle.loads(pickle.dumps(loader.state_dict(**more)))


def disturb() -> None:
    """Another process, another time: the generators are elsewhere."""
    seed = random.SystemRandom().randrange(1 << 31)
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("order", ORDERS)
def test_resuming_at_every_batch_with_another_number_of_workers_gives_the_same_epoch(order: str) -> None:
    """One epoch of as many loaders as it has batches, and a whole one by the last of them."""
    torch.manual_seed(11)
    random.seed(11)
    first = make(order, 2)
    expected = [plain(batch) for batch in first]
    torch.manual_seed(11)
    random.seed(11)
    came = []
    loader = make(order, 1)
    for number in range(BATCHES):
        iterator = iter(loader)
        came.append(plain(next(iterator)))
        state = saved(loader)
        loader.close()
        disturb()
        loader = make(order, [3, 0, 1, 4, 2][number % 5])
        loader.load_state_dict(state)
    assert len(list(loader)) == BATCHES
    loader.close()
    assert came == expected


@pytest.mark.parametrize("order", ["shuffled", "stateful sampler"])
def test_resuming_after_any_batch_gives_the_rest_of_the_epoch(order: str) -> None:
    torch.manual_seed(12)
    loader = make(order, 2)
    expected, states = [], []
    for batch in loader:
        expected.append(plain(batch))
        states.append(saved(loader))
    following = [plain(batch) for batch in loader]
    for number, state in enumerate(states):
        disturb()
        other = make(order, number % 4)
        other.load_state_dict(state)
        assert [plain(batch) for batch in other] == (expected[number + 1 :] or following)
        other.close()


@pytest.mark.parametrize("order", ["shuffled", "stateful sampler"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_epochs_after_a_resumed_one_are_the_same_too(order: str, workers: int) -> None:
    torch.manual_seed(13)
    random.seed(13)
    loader = make(order, workers)
    iterator = iter(loader)
    for _ in range(7):
        next(iterator)
    state = saved(loader)
    generators = random.getstate(), torch.get_rng_state()
    expected = [[plain(b) for b in iterator], [plain(b) for b in loader], [plain(b) for b in loader]]
    loader.close()
    disturb()
    # The user's own generators are the user's to save, as in any training.
    random.setstate(generators[0])
    torch.set_rng_state(generators[1])
    other = make(order, 3 - workers)
    other.load_state_dict(state)
    assert [[plain(b) for b in other], [plain(b) for b in other], [plain(b) for b in other]] == expected
    other.close()


@pytest.mark.parametrize("kind", [Noisy, Ragged])
def test_a_state_saved_while_workers_are_killed_resumes_exactly(kind: type[Noisy]) -> None:
    """Workers are killed and resized all along, and the state is taken in between."""
    dataset = kind(ROWS * BATCHES, values=1000)
    chance = random.Random(14)
    torch.manual_seed(14)
    expected = [plain(b) for b in make("shuffled", 0, dataset=dataset, collate_fn=listed)]
    torch.manual_seed(14)
    loader = make("shuffled", 2, dataset=dataset, collate_fn=listed)
    came: list[Any] = []
    while len(came) < BATCHES:
        iterator = iter(loader)
        for _ in range(3):
            came.append(plain(next(iterator)))
            if living := processes.workers():
                processes.kill(chance.choice(living))
        state = saved(loader)
        loader.close()
        loader = make("shuffled", chance.randrange(1, 4), dataset=dataset, collate_fn=listed)
        loader.load_state_dict(state)
    loader.close()
    assert came == expected


@pytest.mark.parametrize("ago", [0, 1, 2, 5])
def test_a_state_of_some_batches_ago_resumes_there(ago: int) -> None:
    torch.manual_seed(15)
    loader = make("shuffled", 2)
    iterator = iter(loader)
    came = [plain(next(iterator)) for _ in range(9)]
    state = saved(loader, batches_ago=ago)
    rest = [plain(b) for b in iterator]
    other = make("shuffled", 3)
    other.load_state_dict(state)
    assert [plain(b) for b in other] == (came + rest)[9 - ago :]
    loader.close()
    other.close()


def test_a_state_is_small_and_does_not_grow() -> None:
    loader = make("shuffled", 2, dataset=Noisy(40_000))
    sizes = []
    for number, _ in enumerate(loader):
        if number in (1, 5000):
            sizes.append(len(pickle.dumps(loader.state_dict())))
        if number == 5000:
            break
    loader.close()
    assert max(sizes) < 32 << 10
    assert abs(sizes[1] - sizes[0]) < 100


def test_a_state_of_another_dataset_or_batch_size_is_a_clear_error() -> None:
    loader = make("in order", 0)
    next(iter(loader))
    state = saved(loader)
    with pytest.raises(penstock.ConfigError, match=r"dataset length 96.*97"):
        make("in order", 0, dataset=Noisy(97)).load_state_dict(state)
    with pytest.raises(penstock.ConfigError, match=r"batch size 4.*8"):
        penstock.DataLoader(Noisy(96), batch_size=8).load_state_dict(state)
    with pytest.raises(penstock.ConfigError, match="version"):
        loader.load_state_dict({**state, "version": 99})
    with pytest.raises(penstock.ConfigError, match="not a state"):
        loader.load_state_dict({})


# -- what comes after the resumed epoch ---------------------------------------------------------------


@pytest.mark.parametrize("order", ["in order", "shuffled", "stateful sampler"])
@pytest.mark.parametrize(("workers", "seeding"), [(0, "batch"), (2, "batch"), (0, "worker"), (2, "worker")])
def test_a_script_that_seeds_itself_again_goes_on_as_if_it_had_not_been_interrupted(
    order: str, workers: int, seeding: str
) -> None:
    """It would begin its orders, and its own random numbers, again."""

    def begun() -> penstock.DataLoader[Any]:
        torch.manual_seed(22)
        random.seed(22)
        np.random.seed(22)
        return make(order, workers, seeding=seeding)

    loader = begun()
    list(loader)
    iterator = iter(loader)
    for _ in range(7):
        next(iterator)
        torch.rand(3)  # as a model with dropout
    state = saved(loader)

    def rest(iterator: Any, loader: Any) -> list[Any]:
        came = [
            ([plain(b) for b in each], torch.rand(2).tolist(), random.random()) for each in (iterator, *[loader] * 2)
        ]
        loader.close()
        return came

    expected = rest(iterator, loader)
    again = begun()
    again.load_state_dict(state)
    assert rest(iter(again), again) == expected


def test_a_script_with_another_seed_keeps_its_own_generators() -> None:
    torch.manual_seed(23)
    loader = make("shuffled", 0)
    iterator = iter(loader)
    first = plain(next(iterator))
    state = saved(loader)
    rest = [plain(b) for b in iterator]
    torch.manual_seed(24)
    drawn = torch.rand(2).tolist()
    torch.manual_seed(24)
    other = make("shuffled", 0)
    other.load_state_dict(state)
    assert [plain(b) for b in other] == rest
    assert torch.rand(2).tolist() == drawn
    assert sorted(row[0] for batch in [first, *rest] for row in batch) == list(range(ROWS * BATCHES))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("moment", ["never", "before iter", "after iter"])
def test_the_epoch_that_a_sampler_is_told_before_the_first_batch_counts(moment: str, workers: int) -> None:
    """Lightning makes the iterator first. Without being told, the sampler has the epoch of the state."""

    def made(**more: Any) -> tuple[penstock.DataLoader[Any], DistributedSampler[Any]]:
        sampler = DistributedSampler(list(range(ROWS * BATCHES)), num_replicas=2, rank=1)  # type: ignore[arg-type]
        return penstock.DataLoader(Noisy(ROWS * BATCHES), ROWS, sampler=sampler, num_workers=workers), sampler

    torch.manual_seed(25)
    loader, sampler = made()
    sampler.set_epoch(3)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = saved(loader)
    expected = [plain(b) for b in iterator]
    loader.close()
    other, sampler = made()
    other.load_state_dict(state)
    if moment == "before iter":
        sampler.set_epoch(3)
    iterator = iter(other)
    if moment == "after iter":
        sampler.set_epoch(3)
    found = [plain(b) for b in iterator]
    other.close()
    assert found == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_that_was_never_asked_leaves_the_state_to_the_next_one(workers: int) -> None:
    loader = make("shuffled", workers)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = saved(loader)
    expected = [plain(b) for b in iterator]
    other = make("shuffled", workers)
    other.load_state_dict(state)
    iter(other)
    assert pickle.dumps(other.state_dict()) == pickle.dumps(state)
    assert [plain(b) for b in other] == expected
    assert len(list(other)) == BATCHES
    other.close()


def test_an_iteration_that_is_closed_before_its_first_batch_begins_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make("shuffled", 2)
    next(iter(loader))
    loader.load_state_dict(saved(loader))
    iterator = iter(loader)
    engine = iterator.engine

    def close(*_: Any) -> None:
        loader.close()
        raise EngineClosed

    monkeypatch.setattr(engine, "next_batch", close)
    assert list(iterator) == []
    assert iterator.engine is engine


# -- streams and torch's own seeding: the number of workers stays ------------------------------------


class CountingStream(Stream):
    """Keeps its own place, and can be put there."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.at = 0
        self._resumes = False

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        step, first = (1, 0) if info is None else (info.num_workers, info.id)
        if not self._resumes:
            self.at = 0
        self._resumes = False
        while self.at * step + first < self.length:
            self.at += 1
            yield self.sample((self.at - 1) * step + first)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self._resumes = state["at"], True


@pytest.mark.parametrize("kind", [Stream, CountingStream])
def test_a_stream_resumes_at_every_batch(kind: Any) -> None:
    """After the last one, with the next epoch."""
    expected = [plain(b) for b in penstock.DataLoader(kind(46), batch_size=4, num_workers=3)]
    for number in range(len(expected)):
        loader = penstock.DataLoader(kind(46), batch_size=4, num_workers=3)
        iterator = iter(loader)
        came = [plain(next(iterator)) for _ in range(number + 1)]
        state = saved(loader)
        loader.close()
        other = penstock.DataLoader(kind(46), batch_size=4, num_workers=3)
        other.load_state_dict(state)
        rest = [plain(b) for b in other]
        other.close()
        assert rest == (expected[number + 1 :] or expected)
        assert came == expected[: number + 1]


@pytest.mark.parametrize("kind", [Stream, CountingStream])
def test_a_stream_in_a_thread_resumes(kind: Any) -> None:
    def made() -> penstock.DataLoader[Any]:
        return penstock.DataLoader(kind(46), batch_size=4, num_workers=1, backend="thread")

    loader = made()
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = saved(loader)
    expected = [plain(b) for b in iterator]
    other = made()
    other.load_state_dict(state)
    assert [plain(b) for b in other] == expected
    loader.close()
    other.close()


def test_torchs_own_seeding_resumes_at_every_third_batch() -> None:
    more: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "seeding": "worker", "shuffle": True}
    torch.manual_seed(16)
    first = penstock.DataLoader(Noisy(64), **more)
    expected = [plain(b) for _ in range(2) for b in first]
    for number in range(0, 16, 3):
        torch.manual_seed(16)
        loader = penstock.DataLoader(Noisy(64), **more)
        iterator = iter(loader)
        came = [plain(next(iterator)) for _ in range(number + 1)]
        state = saved(loader)
        loader.close()
        disturb()
        other = penstock.DataLoader(Noisy(64), **more)
        other.load_state_dict(state)
        came += [plain(b) for b in other]
        other.close()
        assert came == expected[: 32 if number == 15 else 16]


# -- StatefulDataLoader's habits ----------------------------------------------------------------------

each_workers = pytest.mark.parametrize("workers", [0, 2])


@each_workers
def test_a_state_can_be_taken_before_the_first_iteration(workers: int) -> None:
    torch.manual_seed(17)
    loader = make("shuffled", workers)
    state = saved(loader)
    expected = [plain(b) for b in loader]
    disturb()
    other = make("shuffled", workers)
    other.load_state_dict(state)
    assert [plain(b) for b in other] == expected
    loader.close()
    other.close()


@each_workers
def test_a_state_taken_right_after_loading_one_is_the_loaded_one(workers: int) -> None:
    loader = make("shuffled", workers)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = saved(loader)
    loader.close()
    other = make("shuffled", workers)
    other.load_state_dict(copy.deepcopy(state))
    again = saved(other)
    third = make("shuffled", workers)
    third.load_state_dict(again)
    assert [plain(b) for b in third] == [plain(b) for b in other]
    other.close()
    third.close()


@each_workers
def test_taking_states_does_not_disturb_the_iteration(workers: int) -> None:
    torch.manual_seed(18)
    expected = [plain(b) for b in make("shuffled", workers)]
    torch.manual_seed(18)
    loader = make("shuffled", workers)
    came = []
    for batch in loader:
        loader.state_dict()
        came.append(plain(batch))
        loader.state_dict()
    loader.close()
    assert came == expected


@each_workers
def test_a_state_taken_at_the_end_begins_the_next_epoch(workers: int) -> None:
    loader = make("in order", workers)
    assert len(list(loader)) == BATCHES
    state = saved(loader)
    loader.close()
    other = make("in order", workers)
    other.load_state_dict(state)
    assert len(list(other)) == BATCHES
    assert len(list(other)) == BATCHES
    other.close()


def without_length(rows: list[list[int]]) -> Any:
    """A batch sampler whose end shows only when it is asked."""
    return type("Batches", (), {"__iter__": lambda _: iter(rows)})()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "map without length", "worker", "stream", "stream with a state"])
def test_a_state_taken_with_the_last_batch_in_hand_continues_with_the_next_epoch(kind: str, workers: int) -> None:
    """A training that counts its batches goes on to the next epoch itself: an empty one would count as trained."""

    def made() -> penstock.DataLoader[Any]:
        if kind == "map without length":
            batches = without_length([[4 * n, 4 * n + 1] for n in range(6)])
            return penstock.DataLoader(Noisy(24), batch_sampler=batches, num_workers=workers)
        if kind.startswith("stream"):
            stream = CountingStream(22) if kind == "stream with a state" else Stream(22)
            return penstock.DataLoader(stream, batch_size=4, num_workers=workers)
        seeding = "worker" if kind == "worker" else "batch"
        return penstock.DataLoader(Noisy(22), batch_size=4, shuffle=True, num_workers=workers, seeding=seeding)

    torch.manual_seed(21)
    random.seed(21)
    loader = made()
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)
    state = saved(loader)
    assert list(iterator) == []
    expected = [[plain(b) for b in loader] for _ in range(2)]
    loader.close()
    torch.manual_seed(21)  # as a script does that begins again
    random.seed(21)
    other = made()
    other.load_state_dict(state)
    found = [[plain(b) for b in other] for _ in range(2)]
    other.close()
    assert found == expected


@each_workers
def test_only_the_next_iteration_resumes_from_the_state(workers: int) -> None:
    loader = make("in order", workers)
    iterator = iter(loader)
    for _ in range(10):
        next(iterator)
    loader.load_state_dict(saved(loader))
    assert len(list(loader)) == BATCHES - 10
    assert len(list(loader)) == BATCHES
    loader.close()


@each_workers
def test_a_second_epoch_can_be_left_and_resumed(workers: int) -> None:
    torch.manual_seed(19)
    loader = make("shuffled", workers)
    list(loader)
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)
    state = saved(loader)
    expected = [plain(b) for b in iterator]
    loader.close()
    disturb()
    other = make("shuffled", workers)
    other.load_state_dict(state)
    assert [plain(b) for b in other] == expected
    other.close()


def test_persistent_workers_resume_in_a_later_epoch_too() -> None:
    torch.manual_seed(20)
    loader = make("shuffled", 2, persistent_workers=True)
    for _ in range(2):
        list(loader)
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)
    state = saved(loader)
    expected = [plain(b) for b in iterator]
    loader.close()
    disturb()
    other = make("shuffled", 3, persistent_workers=True)
    other.load_state_dict(state)
    assert [plain(b) for b in other] == expected
    other.close()


@each_workers
def test_two_loaders_over_the_same_dataset_keep_their_own_positions(workers: int) -> None:
    dataset = Noisy(ROWS * BATCHES)
    one, other = make("in order", workers, dataset=dataset), make("in order", workers, dataset=dataset)
    next(iter(one))
    iterator = iter(other)
    for _ in range(5):
        next(iterator)
    one.load_state_dict(saved(one))
    other.load_state_dict(saved(other))
    assert (len(list(one)), len(list(other))) == (BATCHES - 1, BATCHES - 5)
    one.close()
    other.close()


@each_workers
def test_a_state_taken_after_an_error_resumes_after_it(workers: int) -> None:
    loader = make("in order", workers, dataset=Failing(ROWS * BATCHES, at=9))
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    with pytest.raises(ValueError, match="sample 9 is broken"):
        next(iterator)
    state = saved(loader)
    loader.close()
    other = make("in order", workers, dataset=Failing(ROWS * BATCHES, at=9))
    other.load_state_dict(state)
    assert plain(next(iter(other)))[0][0] == 12.0
    other.close()


@each_workers
def test_the_dictionary_of_a_state_is_a_copy_and_not_a_view(workers: int) -> None:
    loader = make("stateful sampler", workers)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    before = pickle.dumps(state)
    for _ in range(5):
        next(iterator)
    assert pickle.dumps(state) == before
    loader.close()


@each_workers
@pytest.mark.parametrize("cut", [1, 11, 23])
def test_a_plain_sampler_is_read_past_the_delivered_batches(workers: int, cut: int) -> None:
    order = list(reversed(range(ROWS * BATCHES)))
    loader = penstock.DataLoader(Noisy(len(order)), batch_size=ROWS, sampler=order, num_workers=workers)
    iterator = iter(loader)
    for _ in itertools.repeat(None, cut):
        next(iterator)
    state = saved(loader)
    loader.close()
    other = penstock.DataLoader(Noisy(len(order)), batch_size=ROWS, sampler=order, num_workers=workers)
    other.load_state_dict(state)
    assert [plain(b)[0][0] for b in other] == [float(order[ROWS * n]) for n in range(cut, BATCHES)]
    other.close()


@pytest.mark.parametrize("seeding", ["batch", "worker"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_checkpoint_with_a_state_loads_with_weights_only(tmp_path: Path, seeding: str, workers: int) -> None:
    def made() -> penstock.DataLoader[Any]:
        torch.manual_seed(3)
        data = list(range(40))
        return penstock.DataLoader(data, batch_size=4, shuffle=True, num_workers=workers, seeding=seeding)  # type: ignore[arg-type]

    loader = made()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    torch.save({"loader": loader.state_dict()}, tmp_path / "checkpoint.pt")
    expected = [batch.tolist() for batch in iterator]
    resumed = made()
    resumed.load_state_dict(torch.load(tmp_path / "checkpoint.pt")["loader"])
    assert [batch.tolist() for batch in resumed] == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["stream", "stream with a state", "shuffled", "stateful sampler", "worker"])
def test_a_state_travels_through_a_distributed_checkpoint(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded into the structure of a state that was taken before the first batch."""
    # Where there is a GPU, the writer opens it for good, which would count as left behind.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    def made() -> penstock.DataLoader[Any]:
        if kind.startswith("stream"):
            stream = CountingStream(40) if kind == "stream with a state" else Stream(40)
            return penstock.DataLoader(stream, batch_size=4, num_workers=2)
        if kind == "worker":
            return make("shuffled", 2, seeding="worker")
        return make(kind, 2)

    loader = made()
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    save({"loader": loader}, checkpoint_id=tmp_path)
    expected = [plain(b) for b in iterator]
    other = made()
    load({"loader": other}, checkpoint_id=tmp_path)
    assert [plain(b) for b in other] == expected
    loader.close()
    other.close()


def of_version_1(state: dict[str, Any]) -> dict[str, Any]:
    """The state as the first version wrote it."""
    kept = ("shape", "base_seed", "epoch", "batches", "turn", "draws_seed", "finished")
    return {
        **{name: state[name] for name in kept},
        "version": 1,
        "sampler": state["sampler"][0],
        "drained": state["finished"],
        "resume": {worker: (batches, memo) for worker, batches, memo in state["resume"]},
        "generators": state["generators"][0],
        "dataset": state["dataset"][0],
    }


@pytest.mark.parametrize("kind", ["shuffled", "stateful sampler", "counting sampler", "stream"])
def test_a_state_of_the_first_version_is_continued(kind: str) -> None:
    def made() -> penstock.DataLoader[Any]:
        if kind == "stream":
            return penstock.DataLoader(CountingStream(40), batch_size=4, num_workers=2)
        if kind == "counting sampler":
            sampler = penstock.data.BlockShuffleSampler([8] * 12, window=3)
            return penstock.DataLoader(Noisy(ROWS * BATCHES), ROWS, sampler=sampler, num_workers=2)
        return make(kind, 2)

    loader = made()
    if kind == "counting sampler":
        list(loader)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = of_version_1(saved(loader))
    if kind == "counting sampler":
        state["sampler"] = {"epoch": 1}
    expected = [plain(b) for b in iterator]
    other = made()
    other.load_state_dict(state)
    assert [plain(b) for b in other] == expected
    assert len(list(other)) == len(expected) + 5
    other.load_state_dict(of_version_1(saved(loader)))  # of an epoch's end
    assert len(list(other)) == len(expected) + 5
    loader.close()
    other.close()
