"""A few real training steps on the GPU, and what torch's allocator says of them.

In:  a training, a batch size, perhaps a limit.
Out: ``Measured``: peaks, or that it did not fit.
Runs in: trainer, command line, where there is a GPU. All memory is given back afterwards, also after running out of it.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from penstock.errors import ConfigError, PenstockError
from penstock.gpu import checkpoints
from penstock.gpu.optimizers import maker_of
from penstock.gpu.trace.training import TYPES, Training, call, loss_of

STEPS = 3
"""The first has no optimizer state yet, the second sets most of the peaks, the third settles."""

_FULL = ("out of memory", "ALLOC_FAILED")
"""What cuBLAS, cuDNN and the driver say in errors that are not torch's own."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What real steps with one batch size took."""

    batch_size: int
    fits: bool
    """False: memory ran out; the figures are those up to there."""
    allocated_bytes: int
    reserved_bytes: int
    """Peaks, without what the process held before."""
    step_s: float | None = None
    """Time of the last step; None if it was not reached."""


Measure = Callable[[Training, int, int | None], Measured]
"""Training, batch size, what torch may reserve (None: what there is)."""


def measure(training: Training, batch_size: int, limit_bytes: int | None = None) -> Measured:
    """Steps on the current device. ``ConfigError`` if they fail for another reason than memory."""
    give_back()
    held_bytes = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    step_s: float | None = None
    with _limited(None if limit_bytes is None else held_bytes + limit_bytes):
        try:
            step_s = train(training, batch_size, "cuda")
        except Exception as error:
            # Frames that are kept alive keep their tensors.
            traceback.clear_frames(error.__traceback__)
            if not is_full(error):
                raise _explained(batch_size, error) from None
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        give_back()
    return Measured(
        batch_size=batch_size,
        fits=step_s is not None,
        allocated_bytes=peaks[0] - torch.cuda.memory_allocated(),
        reserved_bytes=peaks[1] - held_bytes,
        step_s=step_s,
    )


def train(training: Training, batch_size: int, device: str, steps: int = STEPS) -> float:
    """As a user would; the time of the last step."""
    model = _model(training, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = maker_of(training.optimizer)(trained) if trained else None
    scaler = torch.amp.GradScaler(device) if training.precision == "fp16" and training.step is None else None
    took_s = 0.0
    for _ in range(steps):
        batch = _batch(training, batch_size, device)
        _settle(device)
        began_s = time.perf_counter()
        _step(training, model, batch, optimizer, scaler, device)
        _settle(device)
        took_s = time.perf_counter() - began_s
    return took_s


def give_back() -> None:
    """Everything torch keeps on the device without needing it."""
    gc.collect()
    torch.cuda.synchronize()
    # They come from torch's allocator and would keep whole segments.
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    torch.cuda.empty_cache()


def is_full(error: BaseException) -> bool:
    """Whether memory of the device ran out."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _FULL)


def allowed_bytes() -> int:
    """What torch may still reserve on the current device, by its own limit and by what others have left."""
    give_back()
    free, total = torch.cuda.mem_get_info()
    share = _fraction()
    return free if share is None else min(free, int(share * total) - torch.cuda.memory_reserved())


def _model(training: Training, device: str) -> torch.nn.Module:
    model = training.make_model()
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"make_model() returned {type(model).__name__}, not a torch.nn.Module")
    model = model.to(device=device, dtype=training.kind_of_weights).train()
    if training.checkpointing:
        checkpoints.switch_on(model)
    return model


def _batch(training: Training, batch_size: int, device: str) -> Any:
    kind = training.kind_of_weights

    def moved(part: Any) -> Any:
        if not isinstance(part, torch.Tensor):
            return part
        return part.to(device, kind if part.is_floating_point() else None)

    return tree_map(moved, training.make_batch(batch_size))


def _step(
    training: Training,
    model: torch.nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    scaler: torch.amp.GradScaler | None,
    device: str,
) -> None:
    if training.step is not None:
        assert optimizer is not None
        training.step(model, batch, optimizer)
        return
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    kind = TYPES.get(training.precision)
    for _ in range(training.accumulation):
        with torch.autocast(device, kind) if kind is not None else contextlib.nullcontext():
            loss = loss_of(call(model, batch))
        if scaler is not None:
            loss = scaler.scale(loss)
        if training.accumulation > 1:
            loss = loss / training.accumulation
        if loss.requires_grad:
            loss.backward()
        del loss
    if optimizer is None:
        return
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _fraction() -> float | None:
    """What ``torch.cuda.set_per_process_memory_fraction`` was given; None where torch does not tell."""
    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return None if ask is None else ask()


@contextlib.contextmanager
def _limited(limit_bytes: int | None) -> Iterator[None]:
    """torch reserves no more than this; where its own limit cannot be read, and so not put back, it stays."""
    before = _fraction()
    if limit_bytes is None or before is None:
        yield
        return
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(max(0.0, min(before, limit_bytes / total)))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before)


def _explained(batch_size: int, error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    text = str(error).strip().splitlines()
    return ConfigError(
        f"real steps at batch size {batch_size} failed: {type(error).__name__}: {text[0] if text else 'no message'}"
    )
