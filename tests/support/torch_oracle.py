"""Compares what two loaders do with the same data, torch's own being the one that is right.

In:  loaders, or what they delivered.
Out: `Event`s, one per `next()`, and an assertion that names the place where two of them differ.
Runs in: test processes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.utils.data._utils

TORCH: Any = torch.utils.data.DataLoader

# torch waits this long for each worker when an unfinished iterator is dropped, and often in vain: not tested here.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.3

WORKER_ERROR = re.compile(r"Caught (\w+) in DataLoader worker process (\d+)\.\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """What one `next()` gave: a batch, or an error."""

    batch: Any = None
    error: type[BaseException] | None = None
    """The exact type of what was raised."""
    says: str = ""
    """The last line of the error: what the dataset said, without the traceback that carried it."""
    caught: str | None = None
    """The type that was caught in a worker, as the message has it; None where no worker was involved."""


def events(loader: Iterable[Any], *, at_most: int = 10_000) -> list[Event]:
    """Every batch and every error of one epoch: iteration goes on after an error."""
    found: list[Event] = []
    iterator = iter(loader)
    while len(found) < at_most:
        try:
            found.append(Event(batch=next(iterator)))
        except StopIteration:
            return found
        except Exception as error:
            found.append(event_of(error))
    return found


def event_of(error: Exception) -> Event:
    text = str(error)
    caught = WORKER_ERROR.search(text)
    lines = [line for line in text.splitlines() if line.strip()]
    return Event(error=type(error), says=lines[-1] if lines else "", caught=caught.group(1) if caught else None)


def assert_same_events(ours: list[Event], theirs: list[Event]) -> None:
    """The same batches and the same errors, in the same places."""
    assert len(ours) == len(theirs), f"{len(ours)} events instead of {len(theirs)}: {ours} / {theirs}"
    for place, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if their.error is None:
            assert our.error is None, f"event {place} is {our}, not a batch"
            assert_identical(our.batch, their.batch, f"batch {place}")
        else:
            assert our.error is not None, f"event {place} is a batch, not {their}"
            assert our == their, f"event {place}"


def assert_identical(ours: Any, theirs: Any, where: str = "value") -> None:
    """Equal in type, container type, dtype, shape, layout and every bit."""
    assert type(ours) is type(theirs), f"{where}: {type(ours)} instead of {type(theirs)}"
    if isinstance(theirs, torch.Tensor):
        _assert_same_tensor(ours, theirs, where)
    elif isinstance(theirs, np.ndarray):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        if theirs.dtype == object:
            for place, (our, their) in enumerate(zip(ours.flat, theirs.flat, strict=True)):
                assert_identical(our, their, f"{where}.flat[{place}]")
        else:
            assert ours.tobytes() == theirs.tobytes(), f"{where}: {ours} instead of {theirs}"
    elif isinstance(theirs, Mapping):
        assert list(ours) == list(theirs), f"{where}: keys {list(ours)} instead of {list(theirs)}"
        for key in theirs:
            assert_identical(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), f"{where}: {len(ours)} items instead of {len(theirs)}"
        for place, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert_identical(our, their, f"{where}[{place}]")
    elif dataclasses.is_dataclass(theirs) or getattr(type(theirs), "__compare_fields__", False):
        assert_identical(vars(ours), vars(theirs), f"{where}.__dict__")
    elif isinstance(theirs, (float, np.floating)) and np.isnan(theirs):
        assert np.isnan(ours), f"{where}: {ours} instead of nan"
    else:
        assert ours == theirs, f"{where}: {ours!r} instead of {theirs!r}"


def _assert_same_tensor(ours: torch.Tensor, theirs: torch.Tensor, where: str) -> None:
    assert ours.layout == theirs.layout, f"{where}: {ours.layout} instead of {theirs.layout}"
    assert ours.dtype == theirs.dtype, f"{where}: {ours.dtype} instead of {theirs.dtype}"
    assert ours.is_nested == theirs.is_nested, where
    assert ours.requires_grad == theirs.requires_grad, where
    if theirs.is_nested:
        assert_identical(list(ours.unbind()), list(theirs.unbind()), where)
        return
    assert ours.shape == theirs.shape, f"{where}: {ours.shape} instead of {theirs.shape}"
    if theirs.layout == torch.sparse_coo:
        assert ours.is_coalesced() == theirs.is_coalesced(), where
        _assert_same_tensor(ours._indices(), theirs._indices(), f"{where} indices")
        _assert_same_tensor(ours._values(), theirs._values(), f"{where} values")
    elif theirs.layout == torch.sparse_csr:
        _assert_same_tensor(ours.crow_indices(), theirs.crow_indices(), f"{where} rows")
        _assert_same_tensor(ours.col_indices(), theirs.col_indices(), f"{where} columns")
        _assert_same_tensor(ours.values(), theirs.values(), f"{where} values")
    else:
        assert bits(ours) == bits(theirs), f"{where}: {ours} instead of {theirs}"


def bits(tensor: torch.Tensor) -> bytes:
    """The elements as bytes, in order: equality that NaN and signed zero cannot fool."""
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    flat = tensor.detach().contiguous().resolve_conj().resolve_neg().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
