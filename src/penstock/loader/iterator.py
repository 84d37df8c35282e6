"""The iterator of a DataLoader: it draws indices, takes batches from the engine and keeps its position.

In:  a DataLoader; its sampler's indices, drawn in the training thread only.
Out: batches.
Runs in: trainer.

As in torch, indices for the first batches are drawn when the iterator is made, or, without workers, when the first
batch is requested. An iterator that continues from a state always waits for the first ``next()``: frameworks set the
sampler's epoch in between.

The iterator is based on torch's own base iterator, so that the base seed, the sampler, warnings and pinning are
torch's. It keeps no reference to its loader, because dropping the loader must stop the workers at once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data._utils import pin_memory as torch_pinning
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
)

from penstock.device import cuda
from penstock.device.copy_stream import move
from penstock.device.page_locks import PageLocks
from penstock.errors import WorkerError
from penstock.loader.checkpoint import Generators, Position, Waypoint, next_epoch, resume_of
from penstock.loader.device_prefetch import AheadOnDevice
from penstock.loader.engine.batch import Batch, SamplerFailure
from penstock.loader.engine.engine import Engine
from penstock.loader.engine.pump import TimedOut
from penstock.loader.epochs import brought_to, counting_sampler, epoch_of, is_unseen, next_epoch_of, state_keeper
from penstock.loader.sources.engine_builder import build_engine
from penstock.loader.sources.inline_source import DrawnBatch, InlineSource, fetcher_of
from penstock.loader.stats import Counters
from penstock.workers.protocol import Resume
from penstock.workers.rng import batch_seed

if TYPE_CHECKING:
    from penstock.cache.cache import Cache
    from penstock.loader.cache_forecast import CacheForecast, ForecastClaim
    from penstock.loader.dataloader import DataLoader
    from penstock.loader.engine.worker_set import WorkerNow

_DRAWN_AHEAD = 16
"""The least number of batches of indices that are drawn ahead, if the user cannot notice how far the sampler was
read."""


class PipelineIterator(_BaseDataLoaderIter):
    """Iterates with any number of workers, including 0, and can change the number of workers while it runs."""

    def __init__(self, loader: DataLoader[Any], state: dict[str, Any] | None = None) -> None:
        kept, before = Generators.begin(loader.generator, state)
        super().__init__(loader)
        if self._num_workers == 0 and self._timeout != 0:
            raise AssertionError("timeout needs num_workers > 0: without workers there is nothing to wait for")
        self._generator = loader.generator
        self._counters = loader._counters
        self._loader = weakref.ref(loader)
        self._keeper = state_keeper(self._index_sampler)
        self._cache_forecast = self._forecast_for(loader.cache)
        self._epoch = 0
        self._draws_seed = True
        if state is not None:
            self._take_over(state)
        self._most_ahead = loader.prefetch_factor or 2
        self._device = loader._device
        self._copies_ahead = self._device is not None and self._device.type == "cuda"
        self._locks_pages = self._copies_ahead or (self._pin_memory and cuda.can_mark_all_work())
        self._ahead: AheadOnDevice | None = None
        is_map = self._dataset_kind != _DatasetKind.Iterable
        self._bound = not is_map or loader.seeding == "worker"
        self._finishes_drawn = self._bound and self._persistent_workers
        """Whether the workers finish all drawn batches before they begin another epoch, as in torch: their generators
        go on from there."""
        self._seeds_batches = not loader._runs_threads and not self._bound
        self._fetcher = fetcher_of(loader, self._dataset)
        self._lists_indices = is_map and self._fetcher.lists_indices
        self._awaits_workers = False
        """Whether the next batch must come from workers that are not started yet."""
        self._finalizer: Callable[[], Any] | None = None
        self.engine = self._build_engine(loader, resume_of(state)) if self._num_workers else None
        self._source: Any = self.engine or InlineSource(self._fetcher, self._counters)
        """The engine; without workers, the InlineSource that takes its place."""
        self._end_with(self.engine)
        self._begin_epoch(before, state)
        if state is not None:
            kept.restore_global()
        if self.engine is not None:
            self.engine.start()

    def _build_engine(self, loader: DataLoader[Any], resume: dict[int, Resume]) -> Engine:
        return build_engine(
            loader,
            dataset=self._dataset,
            base_seed=int(self._base_seed),
            shared_seed=_as_int(self._shared_seed),
            place=(self._world_size, self._rank),
            fetcher=self._fetcher,
            resume=resume,
            page_locks=PageLocks() if self._locks_pages else None,
        )

    def _end_with(self, engine: Engine | None) -> None:
        """Close ``engine`` with this iterator, and withdraw the forecast."""
        claim = self._cache_forecast and self._cache_forecast.claim
        if engine is not None or claim is not None:
            self._finalizer = weakref.finalize(self, _end, engine, self._counters, claim)

    def _start_workers(self) -> None:
        """Continue with an engine, whose workers fetch from the next batch on."""
        self._awaits_workers = False
        if (loader := self._loader()) is None:
            return
        engine = self._build_engine(loader, {})
        for drawn in self._source.waiting:
            engine.offer(drawn.for_engine(self._seed_of))
        engine.start()
        self._end_with(engine)
        self._num_workers = loader.num_workers
        self.engine = self._source = engine
        if self._ahead is not None:
            self._ahead.follow(engine)

    def _forecast_for(self, cache: Cache | None) -> CacheForecast | None:
        """The forecast for the cache. None for a sampler with a state of its own, which must not be read ahead."""
        if cache is None or self._keeper is not None:
            return None
        from penstock.loader.cache_forecast import CacheForecast

        return CacheForecast.of(cache, self._dataset, batched=self._auto_collation)

    # -- epochs -----------------------------------------------------------------------------

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        before = Generators(loader.generator)
        super()._reset(loader, first_iter)
        self._epoch += 1
        self._draws_seed = False
        if self._ahead is not None:
            self._ahead.restart()
        assert self.engine is not None
        self.engine.begin_epoch(_as_int(self._shared_seed), finish_offered=self._finishes_drawn)
        self._begin_epoch(before, None)

    def _take_over(self, state: dict[str, Any]) -> None:
        """Take over the seeds and the sampler of the iterator whose state was saved."""
        if not state["draws_seed"]:
            # torch's base class has just drawn a base seed; the saved iterator had not drawn it at this point.
            Generators(self._generator, state["generators"][0]).restore()
            self._sampler_iter = iter(self._index_sampler)  # type: ignore[arg-type]
        if state["base_seed"] is not None:
            self._base_seed = state["base_seed"]
        self._epoch = state["epoch"]
        self._draws_seed = state["draws_seed"]

    def _begin_epoch(self, before: Generators, state: dict[str, Any] | None) -> None:
        self._sampler_done = False
        self._sampler_failure: SamplerFailure | None = None
        self._exhausted = False
        self._drawn = 0
        self._seed_of = None
        if self._seeds_batches:
            self._seed_of = functools.partial(batch_seed, int(self._base_seed), self._rank, self._epoch)
        if self.engine is None:
            self._source.seed_of = self._seed_of
        self.position = Position(
            base_seed=int(self._base_seed), epoch=self._epoch, generators=before, draws_seed=self._draws_seed
        )
        if (loader := self._loader()) is not None:
            loader._position = self.position
        self._at = Waypoint(batches=0, turn=0, sampler=self._sampler_state(), resume={})
        if state is not None:
            self._at = Waypoint(
                batches=state["batches"], turn=state["turn"], sampler=state["sampler"][0], resume=resume_of(state)
            )
        self._num_yielded = self._at.batches
        self.position.waypoints.append(self._at)
        self._counters.begin_iteration()
        self._resumed = state
        """The state from which the first ``next()`` continues; None afterwards."""
        self._came_from: dict[str, Any] | None = None
        """The state from which this iteration continued; None after the first batch."""
        self._after_seed = None if state is None else Generators(None)
        self.position.sampler_epoch = epoch_of(self._index_sampler)
        if state is None:
            self._begin_forecast()
            self._draw_ahead(self._wanted_ahead())

    def _begin_forecast(self) -> None:
        if self._cache_forecast is not None:
            counts = counting_sampler(self._index_sampler) is not None
            following = next_epoch_of(self._index_sampler, self.position.sampler_epoch if counts else None)
            self._sampler_iter = self._cache_forecast.begin(self._sampler_iter, following, self._at.turn)

    def _continue(self, state: dict[str, Any]) -> None:
        """Bring the sampler to the position in ``state``."""
        self._resumed, self._came_from = None, state
        loader = self._loader()
        if loader is not None:
            loader.forget_state(state)
        assert self._after_seed is not None
        kept = Generators(None)
        self._after_seed.restore_global()
        self._drawn = self._at.turn
        anew, by_state = brought_to(self._index_sampler, self._at.sampler, self.position.sampler_epoch)
        self._sampler_iter = anew or self._sampler_iter
        self.position.sampler_epoch = epoch_of(self._index_sampler)
        if not by_state and self._dataset_kind != _DatasetKind.Iterable:
            for _ in range(self._at.turn):
                next(self._sampler_iter, None)
        self._begin_forecast()
        # Draw as far as the saved iterator had drawn: a sampler may draw from the generators batch by batch.
        self._draw_ahead(max(1, state["drawn"] - self._at.turn, self._wanted_ahead()))
        kept.go_on(state)
        if self._sampler_done and not self._source.undelivered:
            self._begin_next(state)

    def _begin_next(self, state: dict[str, Any]) -> None:
        """Begin the next epoch, because nothing is left of the epoch in which ``state`` was taken."""
        loader = self._loader()
        if loader is not None and state["batches"]:
            self.close()
            PipelineIterator.__init__(self, loader, next_epoch(state))
            if self._resumed is not None:
                self._continue(self._resumed)

    def notice_end(self) -> None:
        """Find out whether the sampler is at its end, once as many batches are delivered as its length says."""
        try:
            most = len(self._index_sampler)  # type: ignore[arg-type]
        except TypeError:
            return
        if self._dataset_kind != _DatasetKind.Iterable and self._num_yielded >= most and not self._exhausted:
            self._draw_ahead(1)
            self._note_end()

    def _note_end(self) -> None:
        self.position.finished |= self._sampler_done and not self._source.undelivered and not self._ahead

    def _sampler_state(self) -> Any:
        return None if self._keeper is None else self._keeper.state_dict()

    # -- indices ----------------------------------------------------------------------------

    def _wanted_ahead(self) -> int:
        """How many batches of indices should be drawn ahead of delivery."""
        if self.engine is not None and self._num_workers:
            as_torch = self._most_ahead * self._num_workers
            return max(_DRAWN_AHEAD, as_torch, 2 * self.engine.depth) if self._reads_unseen else as_torch
        # The end of a sampler with a state must be noticed while the sampler still has its state of this epoch.
        return 0 if self._keeper is None else 1

    @functools.cached_property
    def _reads_unseen(self) -> bool:
        """Whether the user cannot notice how far the sampler was read."""
        return is_unseen(self._index_sampler) and not self._finishes_drawn

    def _draw_wanted(self) -> None:
        self._draw_ahead(self._wanted_ahead())

    def _draw_ahead(self, count: int) -> None:
        """Draw until ``count`` batches of indices are drawn but not delivered, or the sampler ends."""
        on_device = len(self._ahead) if self._ahead is not None and self._finishes_drawn else 0
        while not self._sampler_done and self._source.undelivered + on_device < count:
            self._draw()

    def _draw(self) -> None:
        """Draw one more batch of indices, in the training thread: samplers may use the global generators."""
        indices: Any = None
        failure: SamplerFailure | None = None
        if not self._drawn and self._cache_forecast is None:
            # This happens before the first index is drawn, because that draw begins the sampler's epoch.
            self.position.sampler_epoch = epoch_of(self._index_sampler)
        try:
            indices = self._next_index()
        except StopIteration:
            self._sampler_done = True
            return
        except Exception as error:
            failure = self._sampler_failure = SamplerFailure(error)
            self._sampler_done = True
        rows = 1
        if self._auto_collation and failure is None:
            if self._lists_indices and not isinstance(indices, list):
                indices = list(indices)
            rows = len(indices)
        position = 0 if self._cache_forecast is None else self._cache_forecast.position(self._drawn)
        drawn = DrawnBatch(
            self._drawn, indices, rows, position, failure and weakref.ref(failure), self._sampler_state()
        )
        self._source.offer(drawn if self.engine is None else drawn.for_engine(self._seed_of))
        self._drawn += 1
        self.position.drawn = self._drawn

    # -- batches ----------------------------------------------------------------------------

    def __next__(self) -> Any:
        # torch's own __next__ takes as much time as a small batch, and only profilers and iterable datasets need it.
        profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        if profiled or self._dataset_kind == _DatasetKind.Iterable:
            return super().__next__()
        data = self._next_data()
        self._num_yielded += 1
        return data

    def _next_data(self) -> Any:
        if self._exhausted:
            raise StopIteration
        if self._resumed is not None:
            self._continue(self._resumed)
        try:
            return self._next_of_epoch()
        except StopIteration:
            if self._came_from is None or not self.position.finished:
                raise
            # The end of a stream is known in the workers only.
            self._begin_next(self._came_from)
            if self._exhausted:
                raise
            return self._next_of_epoch()

    def _next_of_epoch(self) -> Any:
        if self._copies_ahead:
            return self._next_on_device()
        found = self._wait_for_next()
        self._note(found)
        data = self._source.deliver(found)
        self._counters.note_batch(found.samples)
        if self._pin_memory:
            data = torch_pinning.pin_memory(data, self._pin_memory_device)
        return data if self._device is None else move(data, self._device)

    def _next_on_device(self) -> Any:
        if self._ahead is None:
            # This comes after the workers were forked, because they must not inherit a CUDA context.
            assert self._device is not None
            self._ahead = AheadOnDevice(self._source, self._device)
        sent = self._ahead.next(self._wait_for_next)
        self._note(sent.batch)
        self._counters.device_ahead_bytes = self._ahead.device_bytes
        data = self._ahead.hand_out(sent)
        self._counters.note_batch(sent.batch.samples)
        return data

    def _wait_for_next(self) -> Batch | DrawnBatch:
        """Wait for the next batch. Ends the epoch if there is no further batch."""
        if self._awaits_workers:
            self._start_workers()
        self._draw_ahead(1)
        try:
            found = self._source.next_batch(self._timeout, self._draw_wanted)
        except TimedOut as late:
            raise WorkerError(f"DataLoader timed out after {self._timeout} seconds\n{late}".strip()) from None
        if found is None:
            self._end_epoch()
            raise StopIteration
        return found

    def _note(self, batch: Batch | DrawnBatch) -> None:
        """Count the batch as delivered, even if it raises an exception."""
        self._came_from = None
        resume = self._at.resume
        if self._bound and batch.worker_id is not None:
            before = resume.get(batch.worker_id, Resume(0, None))
            resume = {**resume, batch.worker_id: Resume(before.batches + 1, batch.memo)}
        self._at = Waypoint(
            batches=self._at.batches + 1, turn=batch.number + 1, sampler=batch.sampler_state, resume=resume
        )
        self.position.waypoints.append(self._at)
        if (wanted := self._wanted_ahead()) > 0:
            self._draw_ahead(wanted)
        if self._cache_forecast is not None:
            # Without workers the batch is not fetched yet.
            self._cache_forecast.advance(batch.number + batch.ready)
        self._note_end()

    def _end_epoch(self) -> None:
        self._exhausted = self.position.finished = True
        self._counters.end_iteration()
        if self._cache_forecast is not None:
            self._cache_forecast.claim.end()
        if self._persistent_workers and self.engine is not None:
            self.engine.end_epoch()
        else:
            self.close()

    # -- valves -----------------------------------------------------------------------------

    def resize(self, loader: DataLoader[Any]) -> None:
        """Apply the loader's settings now. Workers that own batches change only when the next epoch begins. If the
        iterator has no workers, its first workers start with the next batch, in the training thread."""
        engine, workers = self.engine, loader.num_workers
        if engine is None:
            self._awaits_workers = workers > 0
            return
        engine.set_depth(loader._depth, loader._depth_ceiling)
        if self._bound or engine.is_closed or workers == self._num_workers:
            return
        self._num_workers = workers
        engine.set_workers(workers)

    def is_outgrown(self, workers: int) -> bool:
        """Whether this iterator cannot change its number of workers to ``workers``."""
        return self._bound and workers != self._num_workers

    def can_begin(self, workers: int) -> bool:
        """Whether another epoch can begin, with ``workers`` workers."""
        return self.engine is not None and self.engine.can_go_on and not self.is_outgrown(workers)

    @property
    def is_exhausted(self) -> bool:
        """Whether ``next()`` has ended the epoch, or the iterator is closed."""
        return self._exhausted

    def workers_now(self) -> list[WorkerNow]:
        """The current work of every worker."""
        return [] if self.engine is None else self.engine.workers_now()

    def set_memory(self, memory_bytes: int) -> None:
        if self.engine is not None:
            self.engine.set_memory(memory_bytes)

    def close(self) -> None:
        """Stop the workers now."""
        self._exhausted = True
        if self._ahead is not None:
            self._ahead.close()
            self._counters.device_ahead_bytes = 0
        if self._finalizer is not None:
            self._finalizer()


def _end(engine: Engine | None, counters: Counters, claim: ForecastClaim | None) -> None:
    if engine is not None:
        engine.close()
    counters.device_ahead_bytes = 0
    if claim is not None:
        claim.end()


def _as_int(seed: Any) -> int | None:
    return None if seed is None else int(seed)
