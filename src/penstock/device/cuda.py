"""Page-locking and device-wide events, through CUDA calls that torch does not offer.

In:  addresses of segments.
Out: page-locked segments; marks that pass when all work that was queued on the devices by then is done.
Runs in: trainer.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import torch

_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device."""
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: with it, this thread's calls do not invalidate a graph that another thread
captures."""


def page_lock(address: int, size_bytes: int) -> str | None:
    """Page-lock a range. Returns None on success, otherwise CUDA's error message."""
    runtime: Any = torch.cuda.cudart()
    with ignoring_captures():
        status = runtime.cudaHostRegister(address, size_bytes, _PORTABLE)
    return None if int(status) == 0 else str(runtime.cudaGetErrorString(status))


def page_unlock(address: int) -> None:
    runtime: Any = torch.cuda.cudart()
    with ignoring_captures():
        runtime.cudaHostUnregister(address)


@contextlib.contextmanager
def ignoring_captures() -> Iterator[None]:
    """Let CUDA calls inside the block not disturb a graph that another thread is capturing."""
    driver = _driver()
    if driver is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def can_mark_all_work() -> bool:
    """Whether an event can be recorded behind all work queued now, without waiting for that work."""
    return torch.cuda.is_available() and _driver() is not None


class DeviceMark:
    """A mark behind all work that is queued on every device in use when the mark is made."""

    def __init__(self, events: list[torch.cuda.Event]) -> None:
        self._events = events

    def passed(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()


def mark_all_work() -> DeviceMark | None:
    """Mark the end of all work queued now, on every stream. Returns None while this thread captures a graph."""
    if torch.cuda.is_current_stream_capturing():
        return None
    events = []
    for index in range(torch.cuda.device_count()):
        if not torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined]
            continue
        with torch.cuda.device(index):
            event = torch.cuda.Event()
            # record() creates the event. The driver then records the event again, for the whole context instead of one
            # stream.
            event.record()
            _record_for_context(event)
            events.append(event)
    return DeviceMark(events)


def wait_for_all_work() -> None:
    mark = mark_all_work()
    if mark is not None:
        mark.wait()


def _record_for_context(event: torch.cuda.Event) -> None:
    driver = _driver()
    context = ctypes.c_void_p()
    if driver is None or driver.cuCtxGetCurrent(ctypes.byref(context)) != 0:
        torch.cuda.synchronize()
        return
    if driver.cuCtxRecordEvent(context, ctypes.c_void_p(event.cuda_event)) != 0:
        torch.cuda.synchronize()


@functools.cache
def _driver() -> Any:
    """The CUDA driver library, if it can record events for whole contexts (12.5 and later)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuCtxRecordEvent.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        driver.cuCtxGetCurrent.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    except (OSError, AttributeError):
        return None
    return driver
