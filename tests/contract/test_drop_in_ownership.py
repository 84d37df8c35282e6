"""A batch belongs to the user for as long as anything refers to it, whatever the loader does meanwhile."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import pickle
import random
import threading
from typing import Any

import psutil
import pytest
import torch
import torch.multiprocessing
from torch.utils.data import Dataset

from support.datasets.contract import Samples
from support.loaders import MAKERS, MakeLoader

KIB = 1 << 10


def large(i: int) -> dict[str, Any]:
    """64 KiB of tensor, and company."""
    return {"x": torch.full((64, 256), float(i)), "y": torch.full((3,), i), "name": f"sample {i}"}


LARGE = Samples(large, 96)
BATCH = 8


def expected(place: int) -> dict[str, Any]:
    indices = range(place * BATCH, (place + 1) * BATCH)
    return {
        "x": torch.stack([torch.full((64, 256), float(i)) for i in indices]),
        "y": torch.stack([torch.full((3,), i) for i in indices]),
        "name": [f"sample {i}" for i in indices],
    }


def assert_intact(batch: dict[str, Any], place: int) -> None:
    right = expected(place)
    assert torch.equal(batch["x"], right["x"])
    assert torch.equal(batch["y"], right["y"])
    assert batch["name"] == right["name"]


@pytest.fixture(params=[0, 2], ids=["no workers", "2 workers"])
def loader(request: pytest.FixtureRequest, any_maker: MakeLoader) -> Any:
    return any_maker(LARGE, batch_size=BATCH, num_workers=request.param)


def test_all_batches_of_an_epoch_can_be_kept(loader: Any) -> None:
    batches = list(loader)
    assert len(batches) == 12
    for place, batch in enumerate(batches):
        assert_intact(batch, place)


@pytest.mark.parametrize("seeding", ["batch", "worker"])
def test_all_batches_can_be_kept_in_a_budget_that_holds_few_of_them(seeding: str) -> None:
    loader = MAKERS[seeding](LARGE, batch_size=BATCH, num_workers=2, memory=96 << 20)
    for place, batch in enumerate(list(loader)):
        assert_intact(batch, place)


@pytest.mark.parametrize("seeding", ["batch", "worker"])
def test_all_batches_can_be_kept_where_few_files_may_be_open(seeding: str) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    loader = MAKERS[seeding](Samples(large, 300), batch_size=1, num_workers=1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 60, hard))
    try:
        batches = list(loader)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [int(batch["y"][0, 0]) for batch in batches] == list(range(300))
    assert [float(batch["x"][0, 0, 0]) for batch in batches] == list(range(300))


@pytest.mark.parametrize("seed", range(3))
def test_batches_kept_and_dropped_in_any_pattern_stay_intact(seed: int, any_maker: MakeLoader) -> None:
    pattern = random.Random(seed)
    kept: dict[int, dict[str, Any]] = {}
    loader = any_maker(LARGE, batch_size=BATCH, num_workers=2, persistent_workers=True)
    for _ in range(2):
        kept.clear()
        for place, batch in enumerate(loader):
            kept[place] = batch
            del batch
            for old in pattern.sample(sorted(kept), pattern.randrange(len(kept) + 1)):
                assert_intact(kept.pop(old), old)
        for place, batch in kept.items():
            assert_intact(batch, place)


def test_a_view_keeps_its_memory_after_the_batch_is_dropped(loader: Any) -> None:
    rows, arrays, storages = [], [], []
    for batch in loader:
        rows.append(batch["x"][3, 10:20])
        arrays.append(batch["x"][5].numpy())
        storages.append(batch["y"].untyped_storage())
        del batch
    gc.collect()
    for place in range(12):
        assert (rows[place] == place * BATCH + 3).all()
        assert (arrays[place] == place * BATCH + 5).all()
        numbers = torch.tensor([], dtype=torch.int64).set_(storages[place])[: 3 * BATCH]  # type: ignore[call-overload]
        assert numbers.tolist() == expected(place)["y"].flatten().tolist()


def test_changing_a_batch_in_place_changes_nothing_else(loader: Any) -> None:
    for _ in range(2):
        kept = []
        for place, batch in enumerate(loader):
            assert_intact(batch, place)
            batch["x"].fill_(-1)
            batch["y"].add_(1_000_000)
            batch["name"].append("more")
            batch["z"] = batch["x"].mul_(2)
            kept.append(batch)
        for place, batch in enumerate(kept):
            assert (batch["x"] == -2).all()
            assert (batch["y"] - 1_000_000).tolist() == expected(place)["y"].tolist()


def test_the_tensors_of_a_batch_are_ordinary_ones(loader: Any) -> None:
    batch = next(iter(loader))
    x = batch["x"]
    assert type(x) is torch.Tensor
    assert x.is_contiguous()
    assert x.storage_offset() == 0
    assert x.is_leaf
    assert not x.requires_grad
    x.requires_grad_().mul(2).sum().backward()
    assert (x.grad == 2).all()
    y = batch["y"]
    y.resize_(2, 2)
    assert y.flatten().tolist() == expected(0)["y"].flatten().tolist()[:4]
    assert torch.from_numpy(batch["x"].detach().numpy()).data_ptr() == batch["x"].data_ptr()


def test_a_batch_can_be_moved_to_shared_memory(loader: Any) -> None:
    iterator = iter(loader)
    shared = next(iterator)["y"].share_memory_()
    assert len(list(iterator)) == 11
    assert shared.is_shared()
    assert shared.tolist() == expected(0)["y"].tolist()


def test_saving_or_copying_a_batch_takes_its_own_bytes_and_no_more(loader: Any) -> None:
    iterator = iter(loader)
    batch = next(iterator)
    size = batch["x"].nbytes + batch["y"].nbytes
    file = io.BytesIO()
    torch.save(batch, file)
    assert file.tell() < size + 64 * KIB
    pickled = pickle.dumps(batch)
    assert len(pickled) < size + 64 * KIB
    deep = copy.deepcopy(batch)
    del batch
    list(iterator)
    file.seek(0)
    for twin in (torch.load(file, weights_only=True), pickle.loads(pickled), deep):
        assert_intact(twin, 0)
    assert deep["x"].untyped_storage().nbytes() <= size + 64 * KIB


def test_autograd_keeps_the_batch_it_needs(loader: Any) -> None:
    weight = torch.ones(256, requires_grad=True)
    losses = []
    for batch in loader:
        losses.append((batch["x"] * weight).mean())
        del batch
    gc.collect()
    torch.stack(losses).sum().backward()
    mean = sum(float(expected(place)["x"].mean()) for place in range(12)) / 256
    assert torch.allclose(weight.grad, torch.full((256,), mean))  # type: ignore[arg-type]


def add_up(inbox: Any, outbox: Any) -> None:
    torch.set_num_threads(1)  # a forked process cannot use the threads that its parent had
    while (batch := inbox.get()) is not None:
        outbox.put((float(batch["x"].double().sum()), batch["y"].tolist(), batch["name"]))


@pytest.mark.parametrize("module", [multiprocessing, torch.multiprocessing], ids=["plain", "torch"])
def test_a_batch_can_be_sent_to_another_process(module: Any, loader: Any) -> None:
    context = module.get_context("fork")
    inbox, outbox = context.Queue(), context.Queue()
    reader = context.Process(target=add_up, args=(inbox, outbox), daemon=True)
    reader.start()
    for place, batch in enumerate(loader):
        inbox.put(batch)
        total, y, name = outbox.get(timeout=60)
        right = expected(place)
        assert (total, y, name) == (float(right["x"].double().sum()), right["y"].tolist(), right["name"])
    inbox.put(None)
    reader.join(60)
    assert reader.exitcode == 0


def test_a_batch_outlives_its_iterator_and_its_loader(any_maker: MakeLoader) -> None:
    for persistent in (False, True):
        loader = any_maker(LARGE, batch_size=BATCH, num_workers=2, persistent_workers=persistent)
        iterator = iter(loader)
        batches = [next(iterator) for _ in range(3)]
        del iterator, loader
        gc.collect()
        for place, batch in enumerate(batches):
            assert_intact(batch, place)


def test_batches_can_be_taken_and_dropped_in_other_threads(loader: Any) -> None:
    iterator, lock, failures = iter(loader), threading.Lock(), []
    found: list[int] = []

    def consume() -> None:
        try:
            while True:
                with lock:
                    batch = next(iterator, None)
                    if batch is None:
                        return
                    place = int(batch["y"][0, 0]) // BATCH
                    found.append(place)
                assert_intact(batch, place)
                del batch
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=consume) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    assert found == list(range(12))


def look_later(batch: dict[str, Any], go: Any, outbox: Any) -> None:
    torch.set_num_threads(1)
    go.wait(60)
    outbox.put((float(batch["x"].double().sum()), batch["y"].tolist(), batch["name"]))


@pytest.mark.parametrize("ending", ["goes on", "closes"])
def test_a_forked_child_keeps_its_batch_whatever_the_trainer_does_next(ending: str, any_maker: MakeLoader) -> None:
    context = multiprocessing.get_context("fork")
    go, outbox = context.Event(), context.SimpleQueue()
    loader = any_maker(LARGE, batch_size=BATCH, num_workers=2)
    iterator = iter(loader)
    readers = []
    for place in range(2):
        batch = next(iterator)
        readers.append(context.Process(target=look_later, args=(batch, go, outbox), daemon=True))
        readers[-1].start()
        assert_intact(batch, place)
        del batch
    if ending == "goes on":
        for _ in iterator:
            pass
    # Free segments are emptied now, not only reused.
    del iterator, loader
    gc.collect()
    go.set()
    for reader in readers:
        reader.join(60)
    assert [reader.exitcode for reader in readers] == [0, 0]
    found = sorted((outbox.get() for _ in readers), key=lambda each: each[2])
    right = [expected(place) for place in range(2)]
    assert found == [(float(each["x"].double().sum()), each["y"].tolist(), each["name"]) for each in right]


class BesideABatch(Dataset[Any]):
    """Samples made with a batch that the dataset keeps, such as a bank of negatives. A worker has the batch that was
    there when it started."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self.kept, self.go = kept, multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        self.go.wait(60)
        return float(self.kept["x"].double().sum()), self.kept["y"]


@pytest.mark.parametrize("ending", ["goes on", "closes"])
def test_a_batch_that_a_dataset_keeps_stays_what_it_was_in_its_workers(ending: str, any_maker: MakeLoader) -> None:
    loader = any_maker(LARGE, batch_size=BATCH, num_workers=2)
    iterator = iter(loader)
    dataset = BesideABatch(next(iterator))
    beside = iter(any_maker(dataset, num_workers=1))
    dataset.kept = next(iterator)
    if ending == "goes on":
        for _ in iterator:
            pass
    del iterator, loader
    gc.collect()
    dataset.go.set()
    right = expected(0)
    for total, y in beside:
        assert (float(total), y[0].tolist()) == (float(right["x"].double().sum()), right["y"].tolist())
