"""A few real training steps on the GPU, and the peaks that torch's allocator reports for them.

In:  a ``TrainingSetup``, a batch size, and optionally a limit.
Out: ``RealSteps``: the peaks, and whether the memory was enough.
Runs in: trainer, command line, if there is a GPU. All memory is released afterwards, even if memory ran out.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from penstock.errors import ConfigError, PenstockError
from penstock.gpu.training import TrainingSetup

STEPS = 3
"""The number of steps. The first has no optimizer state yet, the second reaches most of the peaks, and the third
repeats the second."""

_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")
"""Words in errors of cuBLAS, cuDNN and the driver; these errors do not have torch's own class for missing memory."""


@dataclass(frozen=True, kw_only=True)
class RealSteps:
    """The memory and the time that real steps with one batch size took."""

    batch_size: int
    fits: bool
    """Whether memory was enough; if not, the figures are the peaks up to the moment when memory ran out."""
    allocated_bytes: int
    """The peak of allocated bytes, without the bytes that the process had allocated before."""
    reserved_bytes: int
    """The peak of reserved bytes, without the bytes that the process had reserved before."""
    step_s: float | None = None
    """The time of the last step; None if the last step was not reached."""


Measure = Callable[[TrainingSetup, int, int | None], RealSteps]
"""A function with three arguments: the training, a batch size, and the bytes that torch may reserve (None for no
limit)."""


def measure(setup: TrainingSetup, batch_size: int, limit_bytes: int | None = None) -> RealSteps:
    """Run steps on the current device. Raises ConfigError if the steps fail for another reason than missing memory."""
    release_unused()
    held_bytes = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    step_s: float | None = None
    with _limited(None if limit_bytes is None else held_bytes + limit_bytes):
        try:
            step_s = train(setup, batch_size, "cuda")
        except Exception as error:
            # The frames of the traceback would keep their tensors alive.
            traceback.clear_frames(error.__traceback__)
            if not is_out_of_memory(error):
                raise _explained(batch_size, error) from None
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        release_unused()
    return RealSteps(
        batch_size=batch_size,
        fits=step_s is not None,
        allocated_bytes=peaks[0] - torch.cuda.memory_allocated(),
        reserved_bytes=peaks[1] - held_bytes,
        step_s=step_s,
    )


def train(setup: TrainingSetup, batch_size: int, device: str, steps: int = STEPS) -> float:
    """Train as a user's loop does, and return the time of the last step."""
    model = setup.model(device)
    optimizer = setup.optimizer_of(model)
    scaler = torch.amp.GradScaler(device) if setup.needs_scaler else None
    step_s = 0.0
    for _ in range(steps):
        batch = setup.moved(setup.make_batch(batch_size), device)
        _finish_queued_work(device)
        began_s = time.perf_counter()
        setup.run_step(model, batch, optimizer, scaler, device)
        _finish_queued_work(device)
        step_s = time.perf_counter() - began_s
    return step_s


def release_unused() -> None:
    """Return all memory that torch keeps but does not use to the device."""
    gc.collect()
    torch.cuda.synchronize()
    # The workspaces of cuBLAS come from torch's allocator and would keep whole segments reserved.
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error means that the memory of the device ran out."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def allowed_bytes() -> int:
    """The bytes that torch may still reserve on the current device, within torch's own limit and the memory that other
    programs left free."""
    release_unused()
    free, total = torch.cuda.mem_get_info()
    share = _fraction()
    return free if share is None else min(free, int(share * total) - torch.cuda.memory_reserved())


def _finish_queued_work(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _fraction() -> float | None:
    """The value that was given to ``torch.cuda.set_per_process_memory_fraction``; None if this version of torch cannot
    return it."""
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return None if read is None else read()


@contextlib.contextmanager
def _limited(limit_bytes: int | None) -> Iterator[None]:
    """Let torch reserve no more than ``limit_bytes``. If torch's present limit cannot be read, it could not be
    restored, so it stays unchanged."""
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
