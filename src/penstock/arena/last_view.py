"""Something to do once the last view of an object is gone.

In:  an object and a call.
Out: the call, made in whichever thread lets go last; never because the interpreter leaves.
Runs in: any process, any thread.

Not ``weakref.finalize``: at exit Python goes through all of those without a lock and fails, aloud, where another
thread maps one more batch meanwhile. What is left at exit, the kernel takes back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_waiting: dict[int, weakref.ref[Any]] = {}


def when_gone(thing: Any, call: Callable[..., object], *arguments: Any) -> None:
    # Bound here: while the interpreter leaves, a module's names go before its functions do.
    def gone(reference: weakref.ref[Any], waiting: dict[int, weakref.ref[Any]] = _waiting) -> None:
        del waiting[id(reference)]
        call(*arguments)

    reference = weakref.ref(thing, gone)
    _waiting[id(reference)] = reference
