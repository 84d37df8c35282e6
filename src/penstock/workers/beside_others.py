"""Whether this thread fetches a sample beside other threads of its process, with which it shares the global generators.

In:  a worker's threads, which say so.
Out: the answer, for code that would seed the generators.
Runs in: worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from penstock.workers.kept_generators import the_watch


class GeneratorUsed(BaseException):
    """A global random generator was used beside other samples: those not given out yet are fetched again, one after the
    other. Not an Exception, because a dataset may catch those."""


class _Here(threading.local):
    beside_others = False


_here = _Here()


def note_beside_others() -> None:
    """From now on this thread fetches samples beside others."""
    _here.beside_others = True


def is_beside_others() -> bool:
    return _here.beside_others


def load_unseeded(load: Callable[[], Any]) -> Any:
    """What ``load`` gives if no thread uses a generator meanwhile, and so under any seed. Raises GeneratorUsed
    otherwise."""
    value = load()
    if the_watch().used():
        raise GeneratorUsed
    return value
