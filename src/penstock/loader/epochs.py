"""The epochs of samplers: which of them count epochs or keep a state, and which batches come in the next one.

In:  a loader's sampler or batch sampler.
Out: the sampler in it that counts epochs, is told them, or keeps a state; the batches of the next epoch.
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
    """The sampler, or the one inside it, if its order depends on the number of the epoch alone."""
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    return inner if isinstance(inner, CountingSampler) else None


def numbered_sampler(sampler: Any) -> Any:
    """The sampler, or the one inside it, that takes the number of its epoch from ``set_epoch``, as DistributedSampler
    does; None without one."""
    for candidate in (sampler, getattr(sampler, "sampler", None)):
        if callable(getattr(candidate, "set_epoch", None)) and isinstance(getattr(candidate, "epoch", None), int):
            return candidate
    return None


def epoch_of(sampler: Any) -> int | None:
    """Number of the epoch that the sampler gives next, if it has one."""
    numbered = numbered_sampler(sampler)
    return None if numbered is None else numbered.epoch


def state_keeper(sampler: Any) -> Any:
    """The sampler, or the one inside it, with a state of its own; None for one that the number of its epoch
    describes."""
    if counting_sampler(sampler) is not None:
        return None
    for candidate in (sampler, getattr(sampler, "sampler", None)):
        if hasattr(candidate, "state_dict") and hasattr(candidate, "load_state_dict"):
            return candidate
    return None


def state_of(sampler: Any) -> Any:
    """The state of a sampler that keeps one."""
    keeper = state_keeper(sampler)
    return None if keeper is None else keeper.state_dict()


def is_unseen(sampler: Any) -> bool:
    """Whether the user cannot notice that it is read ahead: it is torch's, and has no generator of the user's."""
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    if type(inner) in (SequentialSampler, _InfiniteConstantSampler):
        return True
    return type(inner) is RandomSampler and inner.generator is None


def brought_to(sampler: Any, saved: Any, epoch_seen: int | None) -> tuple[Iterator[Any] | None, bool]:
    """A new iterator of the sampler, if it needs one after ``saved``, its own state, or another number of the epoch
    than was seen when it made its iterator; and whether it now is where it was saved."""
    keeper = state_keeper(sampler)
    by_state = keeper is not None and saved is not None
    if keeper is not None and by_state:
        keeper.load_state_dict(saved)
    # DistributedSampler decides on the order when its iterator is made.
    return (iter(sampler) if by_state or epoch_of(sampler) != epoch_seen else None), by_state


def next_epoch_of(sampler: Any, epoch: int | None = None) -> Iterator[Any]:
    """The batches that a sampler will give in the epoch after this one, as far as they can be foreseen. ``epoch``: the
    number of this epoch, for a sampler that counts."""
    if type(sampler) is BatchSampler:
        first = next(inner := next_epoch_of(sampler.sampler, epoch), None)
        if first is None:
            return iter(())
        indices = itertools.chain((first,), inner)
        return iter(BatchSampler(indices, sampler.batch_size, sampler.drop_last))  # type: ignore[arg-type]
    if type(sampler) is SequentialSampler:
        return iter(sampler)
    if type(sampler) is DistributedSampler:
        # Without set_epoch() the same order comes again, which this gets wrong; otherwise epochs count up.
        following = copy.copy(sampler)
        following.epoch += 1
        return iter(following)
    return sampler.order(epoch + 1) if epoch is not None and isinstance(sampler, CountingSampler) else iter(())
