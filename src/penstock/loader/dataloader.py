"""The DataLoader: torch's DataLoader with memory bounded in bytes.

In:  all arguments of torch.utils.data.DataLoader, and a memory budget.
Out: an iterable of batches.
Runs in: trainer.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, MapDataPipe, Sampler, default_collate, default_convert
from torch.utils.data.dataloader import _DatasetKind

from penstock.device.device_argument import parse_device
from penstock.errors import CacheError, ConfigError
from penstock.loader import checkpoint as state
from penstock.loader.epochs import counting_sampler, epoch_of, numbered_sampler, state_of
from penstock.loader.iterator import PipelineIterator
from penstock.loader.plain_iterator import PlainIterator
from penstock.loader.ranks import ranks_here
from penstock.loader.rules import LoaderRules, depth_ceiling
from penstock.loader.sources.inline_fetcher import InlineFetcher
from penstock.loader.stats import Counters, LoaderStats
from penstock.meter import headroom_bytes
from penstock.units import parse_size
from penstock.workers.setup import check_threads_help, keeps_state

if TYPE_CHECKING:
    from penstock.cache.cache import Cache
    from penstock.cache.stats import CacheStats
    from penstock.lab.auto_workers import FirstWorkers
    from penstock.settings.files import Source

_T_co = TypeVar("_T_co", covariant=True)


class DataLoader(TorchDataLoader[_T_co]):
    """A drop-in for :class:`torch.utils.data.DataLoader` whose memory is bounded in bytes.

    All of torch's arguments keep their meaning and order. ``num_workers`` takes one more value; the others are new:

    Args:
        num_workers: as in torch, or ``"auto"``: when the loader is created, a separate process reads samples for a
            second or two, and a plan made from the measurement gives the number, which the attribute then holds. A
            stream gets 1 worker, because a stream that ignores ``get_worker_info()`` would give all its samples once
            per worker. ``seeding="worker"`` and datasets that could not be read get one worker per core.
        memory: the most memory that batches in flight and the workers' private memory may take together: ``"8GB"``,
            bytes, a fraction of the available memory, or ``"auto"`` (half of the available memory, divided among the
            ranks of the node).
        autotune: whether workers and depth may change while training runs; ``num_workers="auto"`` sets it. It has no
            effect yet: only ``resize()`` changes workers and depth.
        device: where batches are delivered, such as ``"cuda"``. A separate stream copies at most two batches ahead,
            from page-locked memory.
        seeding: ``"batch"`` makes randomness depend on seed, epoch, rank and place in the epoch only, so that
            batches are the same for any number of workers; ``"worker"`` seeds each worker once and gives
            batches to workers in turn, as torch does.
        backend: ``"process"``, ``"thread"``, or None for the platform's best. Threads share Python's, numpy's and
            torch's global generators with each other and with the training loop, so threads do not seed these
            generators: if a dataset draws from them, its batches differ from the batches of processes, and from run to
            run.
        cache: a ``penstock.Cache``, or the size of a new cache. The cache keeps samples by index in memory that all
            processes of the node share. A dataset with ``keys(index)`` itself caches parts of its samples; the loader
            then gives the cache a forecast of the keys, for which it reads the sampler ahead.
        name: the loader's name in monitors.
        threads_per_worker: how many samples each worker process fetches at a time, for samples that wait for a network
            or a disk. It needs a dataset that several threads may read at once, and batches of at least as many
            samples. Batches stay the same: if a dataset draws from Python's, numpy's or torch's global generator, its
            samples are fetched one after the other, with a warning. The argument has no effect without workers, with
            ``batch_size=None`` and for datasets with ``__getitems__``; for streams and thread workers it is an error.
    """

    _rules = LoaderRules()
    _settings_keys: Mapping[str, str] = MappingProxyType({})
    """The name of each argument in the settings from which it came; advice uses these names."""

    def __init__(
        self,
        dataset: Dataset[_T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        memory: str | int | float = "auto",
        autotune: bool = False,
        device: str | int | torch.device | None = None,
        seeding: str = "batch",
        backend: str | None = None,
        cache: Cache | str | int | float | None = None,
        name: str | None = None,
        threads_per_worker: int = 1,
    ) -> None:
        if seeding not in ("batch", "worker"):
            raise ConfigError(f'seeding={seeding!r} is unknown; write "batch" or "worker"')
        if backend == "ray":
            raise ConfigError('backend="ray" is not available yet; write "process", "thread", or leave it out')
        if backend not in (None, "process", "thread"):
            raise ConfigError(f'backend={backend!r} is unknown; write "process", "thread", or leave it out')
        if not isinstance(autotune, bool):
            raise ConfigError(f"autotune={autotune!r} is neither True nor False")
        _check_count("threads_per_worker", threads_per_worker, least=1)
        is_auto = isinstance(num_workers, str)
        if is_auto:
            if num_workers != "auto":
                raise ConfigError(f'num_workers={num_workers!r} is neither a number nor "auto"')
            # A placeholder until all other arguments are checked.
            num_workers = 1
        self._memory = parse_size(memory)
        self._first_workers: FirstWorkers | None = None
        self._depth: int | None = None
        self._depth_ceiling = depth_ceiling(num_workers, prefetch_factor)
        self._counters = Counters()
        self._fetcher: InlineFetcher | None = None
        self._iterators: tuple[weakref.ref[PipelineIterator], ...] = ()
        """The iterators, oldest first. The tuple is replaced as a whole, so that other threads can read it at any
        time."""
        self._beginning = threading.RLock()
        """Threads begin iterations one at a time, so that ``iter()`` waits for what another thread starts."""
        self._begun: tuple[PipelineIterator, int | None] | None = None
        """What ``start()`` has begun, until ``iter()`` takes it over; and the number that its sampler has then."""
        self._latest: weakref.ref[PipelineIterator | PlainIterator] | None = None
        self._position: state.Position | None = None
        self._state: dict[str, Any] | None = None
        """A loaded state from which the next iteration continues."""
        self._device = parse_device(device)
        self.memory = memory
        self.autotune = autotune or is_auto
        self.device = device
        self.seeding = seeding
        self.backend = backend
        self.name = name
        self.threads_per_worker = threads_per_worker
        self.cache: Cache | None = None
        self._cache_inside: Cache | None = None
        """A cache that the dataset reads through by itself: the loader only shows the cache's figures."""
        uncached = dataset
        if cache is not None:
            # Imported here because caches need Linux.
            from penstock.loader.cache_attachment import attach

            self.cache, dataset = attach(cache, dataset)
        elif "penstock.cache.cache" in sys.modules:
            from penstock.loader.cache_attachment import cache_inside

            self._cache_inside = cache_inside(dataset)
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        if self._runs_threads and num_workers > 1 and isinstance(dataset, IterableDataset):
            raise ConfigError(
                f"{num_workers} threads would each read the whole iterable dataset, because get_worker_info() does not "
                'work in threads; use num_workers=1 or backend="process"'
            )
        if threads_per_worker > 1:
            check_threads_help(
                threads_per_worker,
                num_workers=num_workers,
                are_workers_threads=self._runs_threads,
                is_iterable=isinstance(dataset, IterableDataset),
            )
        if is_auto:
            self._plan_workers(uncached)

    @classmethod
    def from_settings(cls, dataset: Dataset[_T_co], source: Source, section: str = "train", **overrides: Any) -> Self:
        """A loader with the arguments of a settings file or mapping, which may use any team's names
        (``penstock.settings``).

        ``section``: ``"train"``, or ``"eval"``, ``"val"`` or ``"test"``, which inherit from "train" the values that
        they do not set. ``overrides``: arguments that replace the file's arguments.
        """
        from penstock.settings import load

        settings = load(source, section, overrides=overrides)
        loader = cls(dataset, **settings.loader_arguments())
        loader._settings_keys = {each.argument: each.key for each in settings.entries if each.is_argument}
        return loader

    def _plan_workers(self, dataset: Any) -> None:
        """Begin with the number of workers that a plan gives. ``dataset`` has no cache, because a plan must not fill a
        cache."""
        # Imported here because plans run loaders.
        from penstock.lab.auto_workers import LoaderRequest, first_workers

        is_own_collate = self.collate_fn not in (default_collate, default_convert)
        request = LoaderRequest(
            dataset=dataset,
            batch_size=self.batch_size,
            batch_sampler=self.batch_sampler,
            collate_fn=self.collate_fn if is_own_collate else None,
            memory_bytes=self.memory_bytes,
            binds_workers=self.seeding == "worker",
            has_threads=self._runs_threads,
        )
        self._first_workers = first_workers(request)
        self.resize(workers=self._first_workers.workers)

    def check_worker_number_rationality(self) -> None:
        # A plan may use more workers than cores, for samples that wait; torch would warn about a number that the user
        # did not choose.
        if self._first_workers is None or self.num_workers != self._first_workers.workers:
            super().check_worker_number_rationality()

    def start(self) -> None:
        """Begin the next iteration now, for instance before a model is built: workers start and fetch its first
        batches, and the next ``iter()`` takes it over.

        The base seed and the first indices are drawn now, and workers see no later change of the dataset. If a
        sampler's ``set_epoch()`` is given another number before ``iter()``, or a state is loaded, ``iter()`` begins
        anew. Does nothing without workers, and while an iteration is under way.
        """
        with self._beginning:
            latest = None if self._latest is None else self._latest()
            is_under_way = isinstance(latest, PipelineIterator) and not latest.is_exhausted
            if self.num_workers and self._begun is None and not is_under_way:
                self._begun = self._begin(), epoch_of(self._index_sampler)

    def __iter__(self) -> Any:
        with self._beginning:
            begun, self._begun = self._begun, None
            if begun is not None:
                iterator, sampler_epoch = begun
                if iterator.can_begin(self.num_workers) and sampler_epoch == epoch_of(self._index_sampler):
                    self._counters.begin_iteration()
                    return iterator
                if not self.persistent_workers:
                    iterator.close()
            return self._begin()

    def _begin(self) -> Any:
        # The number of workers that own batches cannot change while they run: another number needs a new iterator.
        kept = self._iterator
        # An iteration that Ctrl-C or an error cut short cannot go on and needs a new iterator too.
        if isinstance(kept, PipelineIterator) and (self._state is not None or not kept.can_begin(self.num_workers)):
            kept.close()
            self._iterator = None
        return super().__iter__()

    def _get_iterator(self) -> Any:
        plain = self.seeding == "worker" or self._dataset_kind == _DatasetKind.Iterable
        state = self._state
        fields = self.__dict__
        if self.num_workers == 0 and (plain or isinstance(self.dataset, MapDataPipe)):
            iterator: PipelineIterator | PlainIterator = PlainIterator(self, state)
        else:
            self.check_worker_number_rationality()
            iterator = PipelineIterator(self, state)
            fields["_iterators"] = (*[ref for ref in self._iterators if ref() is not None], weakref.ref(iterator))
        fields["_latest"] = weakref.ref(iterator)
        fields["_position"] = iterator.position
        return iterator

    def forget_state(self, state: dict[str, Any]) -> None:
        """Note that an iteration has begun to continue from the loaded ``state``."""
        if self._state is state:
            self._state = None

    def __setattr__(self, attr: str, value: Any) -> None:
        # While __init__ runs, an assignment only stores the value. Later, an assignment also applies the value.
        if attr in ("num_workers", "prefetch_factor") and "_iterator" in self.__dict__:
            self._turn_valve(attr, value)
        else:
            super().__setattr__(attr, value)

    def _turn_valve(self, attr: str, value: Any) -> None:
        if attr == "num_workers":
            self.resize(workers=value)
            return
        if value is not None:
            _check_count("prefetch_factor", value, least=0)
        self.__dict__["prefetch_factor"] = value
        self._depth_ceiling = depth_ceiling(self.num_workers, value)
        self._apply()

    def resize(self, workers: int | None = None, depth: int | None = None) -> None:
        """Change the number of workers, or the total number of batches ahead, now, even in the middle of an epoch. No
        batch is lost, repeated or reordered.

        New workers join when they have started; others leave when their tasks are done; with 0 workers the training
        thread fetches batches. For iterable datasets and seeding="worker" the number of workers changes when the next
        epoch begins.
        """
        if workers is not None:
            _check_count("workers", workers, least=0)
            self.__dict__["num_workers"] = workers
            if self._depth_ceiling is not None:
                self._depth_ceiling = depth_ceiling(workers, self.prefetch_factor)
            if workers and self.prefetch_factor is None:
                self.__dict__["prefetch_factor"] = 2
        if depth is not None:
            _check_count("depth", depth, least=1)
            self._depth = depth
        self._apply()

    def set_memory(self, memory: str | int | float) -> None:
        """Change the budget now. If it shrinks, batches ahead are dropped and fetched again later."""
        self._memory = parse_size(memory)
        self.memory = memory
        for iterator in self._live():
            iterator.set_memory(self.memory_bytes)

    def _apply(self) -> None:
        for iterator in self._live():
            iterator.resize(self)

    def state_dict(self, batches_ago: int = 0) -> dict[str, Any]:
        """The position of the latest iteration; a loader like this one continues from it after ``load_state_dict``.

        ``batches_ago``: return the state of this many batches earlier, for training loops that read ahead.
        """
        if self._state is not None:
            return self._state
        iterator = None if self._latest is None else self._latest()
        if iterator is not None:
            iterator.notice_end()
            self._position = iterator.position
        around = state.Around(
            dataset=self.dataset,
            generator=self.generator,
            persistent=self.persistent_workers and self.num_workers > 0,
            sampler_epoch=epoch_of(self._index_sampler),
            sampler=state_of(self._index_sampler),
        )
        if self._position is None:
            return state.nothing_begun(self._shape, around)
        return state.to_dict(self._position, self._shape, around, batches_ago=batches_ago)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next ``iter(loader)`` continue where ``state_dict`` was taken. A state taken with or after the last
        batch of an epoch begins the next epoch. A sampler's ``set_epoch()`` counts until the first ``next()``."""
        counts_epochs = counting_sampler(self._index_sampler) is not None
        saved = state.read(state_dict, self._shape, counts_epochs=counts_epochs)
        epoch = saved["next_sampler_epoch"] if saved["finished"] else saved["sampler_epoch"]
        if epoch is not None and (numbered := numbered_sampler(self._index_sampler)) is not None:
            numbered.set_epoch(epoch)
        if self._iterator is not None or self._begun is not None:
            self.close()
        if saved["dataset"][0] is not None and keeps_state(self.dataset):
            self.dataset.load_state_dict(saved["dataset"][0])  # type: ignore[attr-defined]
        self._state = state.next_epoch(saved) if saved["finished"] else saved
        self._latest = self._position = None

    @property
    def _shape(self) -> state.Shape:
        is_map = self._dataset_kind == _DatasetKind.Map
        bound = not is_map or self.seeding == "worker"
        return state.Shape(
            kind="map" if is_map else "iterable",
            dataset_length=state.length_of(self.dataset) if is_map else None,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            seeding=self.seeding,
            workers=self.num_workers if bound else None,
        )

    @property
    def _runs_threads(self) -> bool:
        return self.backend == "thread" or (self.backend is None and sys.platform == "win32")

    @property
    def memory_bytes(self) -> int:
        """The budget in bytes on this machine, now."""
        if self._memory.fixed_bytes is not None:
            return self._memory.fixed_bytes
        share = self._rules.auto_memory_share
        return max(1, self._memory.resolve(headroom_bytes(), auto_fraction=share) // ranks_here())

    def _cache_stats(self) -> CacheStats | None:
        cache = self.cache or self._cache_inside
        try:
            return None if cache is None else cache.stats()
        except CacheError:
            # The cache is closed.
            return None

    def _live(self) -> list[PipelineIterator]:
        """The iterators that still exist, oldest first."""
        return [iterator for ref in self._iterators if (iterator := ref()) is not None]

    def stats(self) -> LoaderStats:
        """The loader's gauges now."""
        engines = [iterator.engine for iterator in self._live() if iterator.engine is not None]
        gauges = [each for engine in engines if not (each := engine.gauges()).is_closed]
        memory_bytes = gauges[-1].memory_bytes if gauges else self.memory_bytes
        return self._counters.stats(
            gauges, workers=self.num_workers, memory_bytes=memory_bytes, cache=self._cache_stats()
        )

    def close(self) -> None:
        """Stop all workers and release all memory except batches that are still held. May be called twice."""
        with self._beginning:
            self._begun = None
        for iterator in self._live():
            iterator.close()
        self._iterator = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickles and copies are independent loaders: they contain no iterators, workers or other running parts."""
        running = dict.fromkeys(("_iterator", "_beginning", "_begun", "_latest", "_position", "_counters", "_fetcher"))
        return {**self.__dict__, **running, "_iterators": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _counters=Counters(), _beginning=threading.RLock())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_count(name: str, value: Any, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r} is not a whole number of at least {least}")
