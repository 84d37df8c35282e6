"""The user's part of fetching: dataset, functions and arguments, which every worker of a pipeline gets.

In:  the loader's dataset, collate function and arguments.
Out: ``Setup``; ``SharedPickle``, which passes it to several workers at once.
Runs in: trainer and worker.
"""

from __future__ import annotations

import functools
import inspect
import io
import mmap
import multiprocessing.context
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any, Self

import torch
from torch.utils.data import IterableDataset, Subset
from torch.utils.data.graph_settings import apply_random_seed

from penstock.arena.segment import HAS_MEMFD
from penstock.arena.template import is_default_collate
from penstock.errors import ConfigError
from penstock.workers.fork_hygiene import keep_from_children

CHUNK_BYTES = 1 << 20
THREADS_CHUNK_BYTES = 16 << 20
"""The bytes of samples written per call where workers are threads. After every call a thread waits for the GIL, which
takes as long as copying some hundred kilobytes."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The user's part of fetching, which is the same for every worker of a pipeline."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    init_fn: Callable[[int], Any] | None
    """Runs in every worker process when it starts. Here, so that a method of the dataset is pickled with it."""
    auto_collation: bool
    """Whether samples are collated into batches; False for batch_size=None, where each index is one finished batch."""
    drop_last: bool
    batch_rows: int
    """The number of samples per batch of an iterable dataset."""
    hold_bytes: int
    """The most bytes of an iterable dataset's first batch that a worker holds before it asks for room for a whole
    batch. The dataset may have far fewer samples than a batch."""
    keeps_generators: bool
    """Whether generators are not seeded again for each batch (seeding="worker"), so that a replacement of a worker must
    take over the generators' states."""

    threads: int = 1
    """How many samples of a task each worker process fetches at a time, if it does not fetch them as one list."""

    chunk_bytes: int = CHUNK_BYTES
    """The bytes of samples that are written to their rows in one call; larger samples are written one by one."""

    @property
    def fetches_in_threads(self) -> bool:
        return self.threads > 1 and not self.is_iterable and self.auto_collation and is_read_by_index(self.dataset)

    @property
    def is_iterable(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    @functools.cached_property
    def fetches_whole_lists(self) -> bool:
        return fetches_whole_lists(self.dataset)

    @property
    def writes_rows(self) -> bool:
        return self.auto_collation and is_default_collate(self.collate_fn)


def reseed_pipes(dataset: Any, shared_seed: int) -> None:
    """Give all copies of a data pipe the same randomness, as torch does."""
    generator = torch.Generator()
    generator.manual_seed(shared_seed)
    apply_random_seed(dataset, generator)


def keeps_state(dataset: Any) -> bool:
    """Whether a dataset has a state that can be saved, as torchdata defines it: ``state_dict`` without arguments and
    ``load_state_dict`` with one argument. Other libraries use these names for methods of their own."""
    save, load = getattr(dataset, "state_dict", None), getattr(dataset, "load_state_dict", None)
    if not callable(save) or not callable(load):
        return False
    try:
        inspect.signature(save).bind()
        inspect.signature(load).bind(None)
    except TypeError:
        return False
    except ValueError:
        pass  # a function without a signature
    return True


def fetches_whole_lists(dataset: Any) -> bool:
    """Whether ``__getitems__`` is called with all indices of a batch at once."""
    return bool(getattr(dataset, "__getitems__", None)) and not can_split(dataset)


def is_read_by_index(dataset: Any) -> bool:
    """Whether samples can be requested one at a time. A plain ``Subset`` has ``__getitems__`` but only passes indices
    on."""
    if type(dataset) is Subset:
        return is_read_by_index(dataset.dataset)
    return not getattr(dataset, "__getitems__", None)


def check_threads_help(threads: int, *, num_workers: int, are_workers_threads: bool, is_iterable: bool) -> None:
    """Refuse ``threads_per_worker`` where it would have no effect."""
    if are_workers_threads:
        raise ConfigError(
            f"threads_per_worker={threads}: the workers are threads, and each fetches one sample at a time; use "
            f"num_workers={max(1, num_workers) * threads} instead"
        )
    if is_iterable:
        raise ConfigError(
            f"threads_per_worker={threads}: an iterable dataset gives one sample after the other, so threads cannot "
            "help; use more workers, threads inside the dataset, or a dataset with __getitem__"
        )


def can_split(dataset: Any) -> bool:
    """Whether rows of one batch may be fetched by several workers.

    The attribute ``splittable`` of a dataset decides. A dataset without the attribute gets whole batches if it has
    ``__getitems__``, or if it wraps a dataset with ``splittable = False``.
    """
    says = getattr(dataset, "splittable", None)
    if says is not None:
        return bool(says)
    if type(dataset) is Subset:
        return can_split(dataset.dataset)
    return not getattr(dataset, "__getitems__", None) and not _wraps_whole(dataset)


def _wraps_whole(dataset: Any) -> bool:
    """Whether a dataset wraps a dataset with ``splittable = False``, in its attribute ``dataset`` or ``datasets``."""
    several = getattr(dataset, "datasets", ())
    inner = [getattr(dataset, "dataset", None), *(several if isinstance(several, list | tuple) else ())]
    for each in inner:
        if each is not None and each is not dataset:
            says = getattr(each, "splittable", None)
            if _wraps_whole(each) if says is None else not says:
                return True
    return False


class SharedPickle:
    """An object that is pickled once for several processes. Where it is an argument of a process that is spawned, the
    process gets the object.

    A spawned process reads its arguments after its imports, from a pipe. Until then the trainer is stuck with arguments
    that are larger than the pipe, so that workers would start one after the other. These are read from a memory file,
    which is gone when all processes have read it and the trainer has closed it.
    """

    def __init__(self) -> None:
        # Without a buffer: a child that another thread forks meanwhile closes it, and must not write.
        self._file = os.fdopen(os.memfd_create("penstock-setup", os.MFD_CLOEXEC), "wb", buffering=0)
        keep_from_children(self._file)

    @classmethod
    def of(cls, thing: Any) -> Self | None:
        """None if ``thing`` cannot be pickled, or not for several processes."""
        if not HAS_MEMFD:
            return None
        shared = cls()
        try:
            shared._write(thing)
        except BaseException as problem:
            shared.close()
            if isinstance(problem, Exception):
                return None
            raise
        return shared

    def _write(self, thing: Any) -> None:
        # Writes to a file end early when they are larger than 2 GiB; those to a buffer do not.
        buffered = io.BufferedWriter(self._file)
        starting = multiprocessing.context.get_spawning_popen()
        multiprocessing.context.set_spawning_popen(_AnyProcess())  # type: ignore[arg-type]
        try:
            _PicklerForSeveral(buffered).dump(thing)
        finally:
            multiprocessing.context.set_spawning_popen(starting)
        buffered.detach()

    def __reduce__(self) -> Any:
        return _unpickled, (reduction.DupFd(self._file.fileno()),)

    def close(self) -> None:
        self._file.close()


class _PicklerForSeveral(reduction.ForkingPickler):
    """Refuses tensors: torch counts the processes that read their memory, and expects one for each pickle."""

    def reducer_override(self, thing: Any) -> Any:
        if issubclass(type(thing), torch.Tensor | torch.UntypedStorage | torch.TypedStorage):
            raise pickle.PicklingError("a pickle of a tensor is for one process")
        return NotImplemented


class _AnyProcess:
    """Stands for the process that is being started, which gets descriptors of its own: several cannot share them."""

    def duplicate_for_child(self, fd: int) -> int:
        raise pickle.PicklingError(f"descriptor {fd} is for one process")


def _unpickled(sent: Any) -> Any:
    fd = sent.detach()
    try:
        pickled = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    with pickled:
        return pickle.loads(pickled)
