"""The epochs of samplers: which samplers count epochs or keep a state, and which batches come in the next epoch.

In:  a loader's sampler or batch sampler.
Out: the inner sampler that counts epochs, takes their number, or keeps a state; the batches of the next epoch.
Runs in: trainer.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _InfiniteConstantSampler

from penstock.data.samplers import CountingSampler


def counting_sampler(sampler: Any) -> CountingSampler | None:
    """The sampler, or the sampler inside it, if its order depends on the number of the epoch alone; otherwise None."""
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    return inner if isinstance(inner, CountingSampler) else None


def numbered_sampler(sampler: Any) -> Any:
    """The sampler, or the sampler inside it, if it takes the number of the epoch from ``set_epoch``, as
    DistributedSampler does; otherwise None."""
    for candidate in (sampler, getattr(sampler, "sampler", None)):
        if callable(getattr(candidate, "set_epoch", None)) and isinstance(getattr(candidate, "epoch", None), int):
            return candidate
    return None


def epoch_of(sampler: Any) -> int | None:
    """The number of the epoch that the sampler gives next, if the sampler has such a number."""
    numbered = numbered_sampler(sampler)
    return None if numbered is None else numbered.epoch


def state_keeper(sampler: Any) -> Any:
    """The sampler, or the sampler inside it, if it has a state of its own. None if the number of the epoch is its whole
    state."""
    if counting_sampler(sampler) is not None:
        return None
    for candidate in (sampler, getattr(sampler, "sampler", None)):
        if hasattr(candidate, "state_dict") and hasattr(candidate, "load_state_dict"):
            return candidate
    return None


def state_of(sampler: Any) -> Any:
    """The state of a sampler, if it keeps a state."""
    keeper = state_keeper(sampler)
    return None if keeper is None else keeper.state_dict()


def is_unseen(sampler: Any) -> bool:
    """Whether the user cannot notice that the sampler is read ahead: it is torch's own, and the user gave it no
    generator."""
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    if type(inner) in (SequentialSampler, _InfiniteConstantSampler):
        return True
    return type(inner) is RandomSampler and inner.generator is None


def brought_to(sampler: Any, saved: Any, epoch_seen: int | None) -> tuple[Iterator[Any] | None, bool]:
    """Bring the sampler to ``saved``, its own state. Returns a new iterator if the sampler needs one: after a loaded
    state, or if the number of the epoch is not ``epoch_seen``, which its iterator was made with. Also returns whether a
    state was loaded."""
    keeper = state_keeper(sampler)
    by_state = keeper is not None and saved is not None
    if keeper is not None and by_state:
        keeper.load_state_dict(saved)
    # DistributedSampler decides the order when its iterator is made.
    return (iter(sampler) if by_state or epoch_of(sampler) != epoch_seen else None), by_state


def next_epoch_of(sampler: Any, epoch: int | None = None) -> Iterator[Any]:
    """The batches that a sampler will give in the epoch after this one, as far as they can be foreseen. ``epoch``: the
    number of this epoch, for a sampler that counts epochs."""
    if type(sampler) is BatchSampler:
        first = next(inner := next_epoch_of(sampler.sampler, epoch), None)
        if first is None:
            return iter(())
        indices = itertools.chain((first,), inner)
        return iter(BatchSampler(indices, sampler.batch_size, sampler.drop_last))  # type: ignore[arg-type]
    if type(sampler) is SequentialSampler:
        return iter(sampler)
    if type(sampler) is DistributedSampler:
        # This assumes that epochs count up. Without set_epoch() the same order comes again, and the result is wrong.
        following = copy.copy(sampler)
        following.epoch += 1
        return iter(following)
    return sampler.order(epoch + 1) if epoch is not None and isinstance(sampler, CountingSampler) else iter(())
