"""Rows that are lent to the code that makes samples: the same batches, whatever that code does with them."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

import penstock
from penstock import row_memory
from penstock.arena import mapping
from penstock.arena.layout import BatchLayout, RowWriter
from penstock.arena.segment import HAS_MEMFD, Segment, create_segment
from penstock.arena.template import learn
from penstock.workers.child.loans import Loans
from penstock.workers.child.views import Views
from penstock.workers.protocol import Attach
from support.datasets import lent
from support.datasets.lent import Lent, LentStream, filled, is_lent, mapping_at
from support.same_batches import assert_same

pytestmark = pytest.mark.skipif(not HAS_MEMFD, reason="rows are lent where segments are memory files")

BATCH = 4


def without_loans(_: int) -> None:
    row_memory.lend_from(None)


def results(dataset: Any, **arguments: Any) -> list[Any]:
    """Batches and errors of two epochs."""
    found: list[Any] = []
    arguments = {"batch_size": BATCH, "num_workers": 2, "persistent_workers": True, **arguments}
    with penstock.DataLoader(dataset, **arguments) as loader:
        for _ in range(2):
            batches = iter(loader)
            while True:
                try:
                    found.append(next(batches))
                except StopIteration:
                    break
                except Exception as error:
                    found.append((type(error), str(error).splitlines()[-1]))
    return found


def assert_same_with_and_without(dataset: Any, **arguments: Any) -> None:
    want = results(dataset, worker_init_fn=without_loans, **arguments)
    assert len(want) == 16
    assert_same(results(dataset, **arguments), want, "with loans")


@pytest.mark.parametrize("sample", lent.GOOD + lent.BAD, ids=lambda sample: sample.__name__)
@pytest.mark.parametrize("kind", [Lent, LentStream], ids=["map", "stream"])
def test_batches_are_the_same_with_and_without_loans(kind: Any, sample: lent.Sample) -> None:
    if kind is LentStream and sample is lent.of_every_dtype:
        pytest.skip("a list has no leaf a")
    assert_same_with_and_without(kind(sample))


def failing(made: Lent, i: int) -> Any:
    sample = lent.in_order(made, i)
    if i % 10 == 7:
        raise ValueError(f"sample {i}")
    return sample


def failing_with_a_kept_error(made: Lent, i: int) -> Any:
    try:
        return failing(made, i)
    except ValueError as error:
        made.kept.append((error, error))  # its traceback holds the frame, and that holds the tensors
        raise


@pytest.mark.parametrize("sample", [failing, failing_with_a_kept_error, lent.needing_gradients])
def test_a_sample_that_fails_after_it_was_written_changes_no_other(sample: lent.Sample) -> None:
    class NoCheck(Lent):
        def check_kept(self) -> None: ...

    assert_same_with_and_without(NoCheck(sample))


@pytest.mark.parametrize("sample", [lent.in_order, lent.kept, lent.through_a_transform], ids=lambda s: s.__name__)
def test_batches_are_the_same_with_threads_in_workers(sample: lent.Sample) -> None:
    assert_same_with_and_without(Lent(sample), threads_per_worker=3)


def refuse(_: Any) -> Any:
    raise OSError(12, "Cannot allocate memory")


def without_moves(_: int) -> None:
    mapping.map_again = refuse


@pytest.mark.parametrize("kind", [Lent, LentStream], ids=["map", "stream"])
@pytest.mark.filterwarnings("ignore")
def test_a_worker_that_cannot_move_a_segment_costs_a_retry_and_no_batch(kind: Any) -> None:
    want = results(kind(lent.kept), worker_init_fn=without_loans)
    assert_same(results(kind(lent.kept), worker_init_fn=without_moves), want, "without moves")


def test_nothing_is_lent_where_the_kernel_refuses_to_move_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "map_again", refuse)
    row = LentRow()
    row.loans.open(7, row.layout, 0)
    assert not is_lent(penstock.empty(LENGTH))


def test_a_worker_killed_inside_a_lent_row_costs_a_retry_and_no_byte(tmp_path: Path) -> None:
    def killed_once(_: Lent, i: int) -> Any:
        a = filled(-5)
        if i == 13 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            assert is_lent(a)
            os.kill(os.getpid(), signal.SIGKILL)
        return {"a": a.fill_(i), "b": filled(-i)}

    want = results(Lent(lent.in_order), worker_init_fn=without_loans)
    assert_same(results(Lent(killed_once)), want, "after a crash")
    assert (tmp_path / "killed").exists()


def counted(made: Lent, i: int) -> Any:
    sample = made.source(made, i)  # type: ignore[attr-defined]
    values = sample.values() if type(sample) is dict else sample
    return {"lent": sum(is_lent(value) for value in values), "sample": sample}


def lent_leaves(
    sample: lent.Sample, wrap: Callable[[Any], Any] = lambda dataset: dataset, **arguments: Any
) -> list[int]:
    """How many leaves were lent of each sample of the second epoch's last half."""
    dataset = Lent(counted, 96)
    dataset.source = sample  # type: ignore[attr-defined]
    arguments = {"batch_size": BATCH, "num_workers": 1, **arguments}
    with penstock.DataLoader(wrap(dataset), **arguments) as loader:
        found = [row for batch in loader for row in batch["lent"].tolist()]
    return found[len(found) // 2 :]


@pytest.mark.parametrize("sample", lent.GOOD, ids=lambda sample: sample.__name__)
def test_samples_made_in_their_rows_stay_lent(sample: lent.Sample) -> None:
    assert set(lent_leaves(sample)) == {5 if sample is lent.of_every_dtype else 2}


@pytest.mark.parametrize("batch_size", [4, 16])
def test_rows_of_a_subset_are_lent(batch_size: int) -> None:
    assert set(lent_leaves(lent.in_order, lambda d: Subset(d, range(96)), batch_size=batch_size)) == {2}


def test_a_dataset_that_keeps_its_tensors_gets_ordinary_memory_before_long() -> None:
    assert set(lent_leaves(lent.kept)) == {0}


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": 0},
        {"backend": "thread"},
        {"threads_per_worker": 2, "batch_size": BATCH},
        {"collate_fn": torch.utils.data.default_convert},
    ],
    ids=["no workers", "workers are threads", "threads in workers", "own collate"],
)
def test_no_row_is_lent_where_a_process_does_not_make_one_sample_after_the_other(arguments: dict[str, Any]) -> None:
    dataset: Any = Lent(lambda _, i: {"lent": is_lent(filled(i)), "a": filled(i), "b": filled(i)})
    arguments = {"num_workers": 1, **arguments}
    for batch in penstock.DataLoader(dataset, **arguments):
        first = batch[0] if isinstance(batch, list) else batch
        assert not torch.as_tensor(first["lent"]).any()


def test_kept_tensors_hold_private_memory_and_no_segment() -> None:
    def kept_and_checked(made: Lent, i: int) -> Any:
        a = filled(i)
        made.kept.append((a, i))
        assert not any(is_lent(tensor) for tensor, _ in made.kept[:-1])
        return {"a": a, "b": filled(-i)}

    assert len(results(Lent(kept_and_checked))) == 16


def test_memory_outside_a_loader_is_ordinary() -> None:
    one, like = penstock.empty(5), penstock.empty_like(torch.zeros(3, 4, dtype=torch.int16).T)
    assert (one.shape, one.dtype) == ((5,), torch.float32) and not is_lent(one)
    assert (like.shape, like.dtype) == ((4, 3), torch.int16) and like.is_contiguous() and not is_lent(like)
    assert penstock.empty([], torch.bool).shape == ()
    assert penstock.empty(torch.Size([2, 3])).shape == (2, 3)


# -- one worker's loans, without a worker -------------------------------------------------

ROWS, LENGTH = 3, 100_003


class LentRow:
    """A segment for rows of two equal leaves, seen by the trainer and by one worker."""

    def __init__(self) -> None:
        sample = {"a": torch.zeros(LENGTH), "b": torch.zeros(LENGTH), "text": "t"}
        template = learn(sample)
        assert template is not None
        self.layout = BatchLayout(template, ROWS)
        self.trainer = create_segment(7, self.layout.total_bytes)
        fd = self.trainer.fd
        assert fd is not None
        self.views = Views(0, {})
        self.views.attach(Attach(7, self.layout.total_bytes, None), os.dup(fd))
        self.loans = Loans(self.views)
        self.loans.install()
        self.trainer.array()[:] = 1

    def write(self, row: int, sample: dict[str, Any]) -> None:
        values = self.layout.match(sample)
        self.loans.close(values)
        assert values is not None
        writer: RowWriter = self.views.writer(7, self.layout, range(row, row + 1))
        writer.write(row, [values], [[]])

    def rows(self, key: str) -> torch.Tensor:
        return self.layout.batch(self.trainer.array(), [["t"] * ROWS], ROWS)[key]

    @property
    def segment(self) -> Segment:
        return self.views._segments[7]


@pytest.fixture
def row() -> Iterator[LentRow]:
    yield LentRow()
    row_memory.lend_from(None)


def test_a_leaf_in_its_place_is_written_once(row: LentRow) -> None:
    row.loans.open(7, row.layout, 1)
    a = penstock.empty(LENGTH)
    a.fill_(3)
    assert (row.rows("a")[1] == 3).all()
    row.write(1, {"a": a, "b": torch.full((LENGTH,), 4.0), "text": "t"})
    address = row.segment.address
    del a
    row.loans.settle()
    assert row.segment.address == address
    assert (row.rows("a")[1] == 3).all() and (row.rows("b")[1] == 4).all()


def test_neighbouring_rows_on_the_same_page_are_seen_by_both_sides_after_a_move(row: LentRow) -> None:
    row.loans.open(7, row.layout, 1)
    a = penstock.empty(LENGTH).fill_(3)
    row.write(1, {"a": a, "b": a, "text": "t"})
    row.loans.settle()
    row.rows("a")[0].fill_(8)
    row.rows("a")[1].fill_(9)
    assert (a == 3).all()
    a.fill_(5)
    assert (row.rows("a")[1] == 9).all() and (row.rows("a")[0] == 8).all()
    row.write(2, {"a": torch.full((LENGTH,), 6.0), "b": a, "text": "t"})
    assert (row.rows("a")[2] == 6).all() and (row.rows("b")[2] == 5).all()


def test_a_kept_tensor_survives_a_write_of_the_same_row(row: LentRow) -> None:
    row.loans.open(7, row.layout, 0)
    mine = penstock.empty(LENGTH).fill_(2)
    row.write(0, {"a": torch.full((LENGTH,), 6.0), "b": torch.full((LENGTH,), 7.0), "text": "t"})
    assert (mine == 2).all() and (row.rows("a")[0] == 6).all()


def test_a_kept_tensor_survives_the_end_of_its_segment(row: LentRow) -> None:
    row.loans.open(7, row.layout, 0)
    mine = penstock.empty(LENGTH).fill_(2)
    row.loans.settle()
    row.trainer.empty()
    row.views.detach(7)
    assert (mine == 2).all()
    mine.fill_(3)


def test_the_old_address_is_unmapped_with_the_last_kept_tensor(row: LentRow) -> None:
    row.loans.open(7, row.layout, 0)
    mine = penstock.empty(LENGTH).fill_(2)
    address = mine.data_ptr()
    row.loans.settle()
    part = np.from_dlpack(mine)[5:9]
    del mine
    gc.collect()
    assert part.tolist() == [2] * 4
    assert mapping_at(address)
    del part
    assert not mapping_at(address)


def test_nothing_is_lent_between_samples(row: LentRow) -> None:
    assert not is_lent(penstock.empty(LENGTH))
    row.loans.open(7, row.layout, 0)
    assert is_lent(penstock.empty(LENGTH))
    row.loans.close(None)
    assert not is_lent(penstock.empty(LENGTH))
    row.loans.open(7, row.layout, 0)
    row.loans.settle()
    assert not is_lent(penstock.empty(LENGTH))


@pytest.mark.parametrize(("shape", "dtype"), [(LENGTH, torch.int32), ((1, LENGTH), torch.float32), (9, torch.float32)])
def test_another_shape_or_dtype_gets_ordinary_memory(row: LentRow, shape: Any, dtype: torch.dtype) -> None:
    row.loans.open(7, row.layout, 0)
    assert not is_lent(penstock.empty(shape, dtype))


def test_each_leaf_is_lent_once_at_a_time(row: LentRow) -> None:
    row.loans.open(7, row.layout, 0)
    taken = [penstock.empty(LENGTH) for _ in range(4)]
    assert [is_lent(t) for t in taken] == [True, True, False, False]
    assert taken[0].data_ptr() != taken[1].data_ptr()
    del taken[0]
    assert is_lent(penstock.empty(LENGTH))
