"""Calls a function once the last view of an object is gone.

In:  an object and a function.
Out: the call, in the thread that drops the last view. The interpreter's exit never makes the call.
Runs in: any process, any thread.

``weakref.finalize`` is no alternative: at exit Python walks all finalizers without a lock, and prints an error if
another thread maps one more batch meanwhile. The kernel releases everything that still exists at exit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_waiting: dict[int, weakref.ref[Any]] = {}


def when_gone(thing: Any, call: Callable[..., object], *arguments: Any) -> None:
    # This is a default argument because at exit the interpreter clears a module's names before its functions.
    def gone(reference: weakref.ref[Any], waiting: dict[int, weakref.ref[Any]] = _waiting) -> None:
        del waiting[id(reference)]
        call(*arguments)

    reference = weakref.ref(thing, gone)
    _waiting[id(reference)] = reference
