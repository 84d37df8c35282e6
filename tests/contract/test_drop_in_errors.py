"""Errors: the user's own, with the worker's traceback, and the epoch goes on after them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from support.datasets.contract import BrokenSampler, Fails, NeedsTwo, Samples, broken_collate, plain
from support.loaders import MakeLoader, penstock_loader
from support.torch_oracle import TORCH, assert_same_events, event_of, events


class Unwieldy(Exception):
    def __init__(self, *, why: str = "") -> None:
        super().__init__(why)


@pytest.mark.parametrize(
    "error", [ValueError, TypeError, IndexError, OSError, RuntimeError, MemoryError, NotImplementedError]
)
def test_an_error_keeps_its_type_and_names_where_it_was_caught(error: type[Exception], any_maker: MakeLoader) -> None:
    loader = any_maker(Fails([0], error), batch_size=2, num_workers=1)
    with pytest.raises(error) as caught:
        next(iter(loader))
    assert type(caught.value) is error
    text = str(caught.value)
    assert text.startswith(f"Caught {error.__name__} in DataLoader worker process 0.\n")
    assert "Traceback" in text
    assert "datasets/contract.py" in text, "the worker's traceback is missing"
    assert "sample 0 is broken" in text


def test_without_workers_an_error_is_the_users_own(any_maker: MakeLoader) -> None:
    with pytest.raises(ValueError, match=r"^sample 0 is broken$"):
        next(iter(any_maker(Fails([0]), batch_size=2)))


def test_a_key_error_is_readable(any_maker: MakeLoader) -> None:
    with pytest.raises(KeyError) as caught:
        next(iter(any_maker(Fails([0], KeyError), num_workers=1)))
    assert "\\n" not in str(caught.value), "the traceback came as one line of escapes"
    assert str(caught.value).startswith("Caught KeyError in DataLoader worker process 0.\n")


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (NeedsTwo, ("one", "two")),
        (Unwieldy, ()),
        (UnicodeDecodeError, ("utf-8", b"\xff", 0, 1, "cannot start so")),
    ],
)
def test_an_error_that_cannot_be_rebuilt_becomes_a_runtime_error(
    error: type[Exception], arguments: tuple[Any, ...], any_maker: MakeLoader
) -> None:
    with pytest.raises(RuntimeError, match=f"Caught {error.__name__} in DataLoader worker process 0") as caught:
        next(iter(any_maker(Fails([0], error, arguments), num_workers=1)))
    assert type(caught.value) is RuntimeError


def test_an_error_of_a_type_that_cannot_travel_still_arrives(penstock_maker: MakeLoader) -> None:
    class Local(Exception):
        pass

    with pytest.raises(Exception, match="Local") as caught:
        next(iter(penstock_maker(Fails([0], Local), num_workers=1, timeout=60)))
    assert "sample 0 is broken" in str(caught.value)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("at", [[0], [5], [11], [0, 1], [3, 4, 5, 6, 7], list(range(12))], ids=str)
def test_the_epoch_goes_on_after_an_error(at: list[int], num_workers: int, penstock_maker: MakeLoader) -> None:
    given: dict[str, Any] = {"batch_size": 2, "num_workers": num_workers}
    assert_same_events(events(penstock_maker(Fails(at), **given)), events(TORCH(Fails(at), **given)))


def test_a_long_epoch_is_whole_however_many_errors_it_has(penstock_maker: MakeLoader) -> None:
    data = Fails(range(0, 100, 2), length=100)
    given: dict[str, Any] = {"batch_size": 1, "num_workers": 2}
    assert_same_events(events(penstock_maker(data, **given)), events(TORCH(data, **given)))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_the_first_of_several_bad_samples_in_a_batch_is_reported(num_workers: int, any_maker: MakeLoader) -> None:
    found = events(any_maker(Fails([1, 2, 5, 7]), batch_size=4, num_workers=num_workers))
    assert [event.says.rpartition(": ")[2] for event in found] == [
        "sample 1 is broken",
        "sample 5 is broken",
        "",
    ]


def test_the_next_epoch_is_whole_again(any_maker: MakeLoader) -> None:
    loader = any_maker(Fails([4]), batch_size=2, num_workers=2, persistent_workers=True)
    for _ in range(2):
        assert [event.error for event in events(loader)] == [None, None, ValueError, None, None, None]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_the_collate_function_is_reported_like_any_other(
    num_workers: int, penstock_maker: MakeLoader
) -> None:
    given: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers, "collate_fn": broken_collate}
    ours, theirs = events(penstock_maker(Samples(plain), **given)), events(TORCH(Samples(plain), **given))
    assert_same_events(ours, theirs)
    assert ours[0].says.endswith("cannot collate 4 samples")


def test_a_sample_that_raises_stop_iteration_is_an_error_where_torch_ends_the_epoch(penstock_maker: MakeLoader) -> None:
    given: dict[str, Any] = {"batch_size": 2, "num_workers": 2}
    ours = events(penstock_maker(Fails([4], StopIteration), **given))
    assert [event.error for event in ours] == [None, None, RuntimeError, *[None] * (len(ours) - 3)]
    assert ours[2].says.endswith("generator raised StopIteration")
    theirs = events(TORCH(Fails([4], StopIteration), **given))
    assert len(theirs) == 2 < len(ours) == len(Fails([4])) // 2
    # Without workers torch's behaviour stays: the exception is the user's own, and a loop takes it for its end.
    assert len(events(penstock_maker(Fails([4], StopIteration), batch_size=2))) == 2


def first_error(loader: Any) -> Exception:
    """The first error of an epoch; what comes after a sampler's error is undefined."""
    try:
        for _ in loader:
            pass
    except Exception as error:
        return error
    raise AssertionError("no error")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_the_sampler_is_the_users_own(num_workers: int, any_maker: MakeLoader) -> None:
    error = first_error(any_maker(range(8), sampler=BrokenSampler(), batch_size=2, num_workers=num_workers))
    assert type(error) is LookupError
    assert event_of(error).caught is None
    assert str(error) == "no index after 5"


def test_pinning_without_an_accelerator_warns_and_does_not_pin() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    if torch.__version__.startswith("2.6."):
        pytest.skip("torch 2.6 pins for the device it is given, whether it exists or not")

    def course(make: MakeLoader, num_workers: int) -> tuple[list[str], list[bool]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            given: dict[str, Any] = {"pin_memory": True, "pin_memory_device": "cuda", "num_workers": num_workers}
            batches = list(make(Samples(plain, 4), **given))
        # Other tests' garbage may be collected, and warn, meanwhile.
        said = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
        return said, [batch[0].is_pinned() for batch in batches]

    for num_workers in (0, 1):
        texts, pinned = course(penstock_loader, num_workers)
        assert (texts, pinned) == course(TORCH, num_workers)
        assert any("no accelerator is found" in text for text in texts)
