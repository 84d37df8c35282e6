"""What CUDA can do for the arena, and two calls torch does not offer.

In:  addresses of slots; the moment a slot was dropped.
Out: page-locked slots; marks that pass when all work queued on the devices by then is done.
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
"""CU_STREAM_CAPTURE_MODE_RELAXED: this thread's calls are no business of a graph another thread is capturing."""


def page_lock(address: int, size_bytes: int) -> str | None:
    """Page-lock a range; None if that worked, else what CUDA says."""
    runtime: Any = torch.cuda.cudart()
    with beside_captures():
        status = runtime.cudaHostRegister(address, size_bytes, _PORTABLE)
    return None if int(status) == 0 else str(runtime.cudaGetErrorString(status))


def page_unlock(address: int) -> None:
    runtime: Any = torch.cuda.cudart()
    with beside_captures():
        runtime.cudaHostUnregister(address)


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
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


def can_mark_everything() -> bool:
    """Whether the device can be asked when all that is queued now will be done, without waiting for it."""
    return torch.cuda.is_available() and _driver() is not None


class DeviceMark:
    """All work queued on every device in use, at the moment of making it."""

    def __init__(self, events: list[torch.cuda.Event]) -> None:
        self._events = events

    def passed(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()


def mark_everything() -> DeviceMark | None:
    """Mark the end of everything queued now, whichever stream it is on. None while a graph is being captured here."""
    if torch.cuda.is_current_stream_capturing():
        return None
    events = []
    for index in range(torch.cuda.device_count()):
        if not torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined]
            continue
        with torch.cuda.device(index):
            event = torch.cuda.Event()
            # Recording it makes it; the driver then records it again, for the context instead of one stream.
            event.record()
            _record_for_context(event)
            events.append(event)
    return DeviceMark(events)


def wait_for_everything() -> None:
    mark = mark_everything()
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
    """The CUDA driver's library, if it can record events for whole contexts (12.5 and later)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuCtxRecordEvent.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        driver.cuCtxGetCurrent.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    except (OSError, AttributeError):
        return None
    return driver
