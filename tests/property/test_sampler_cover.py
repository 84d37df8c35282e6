"""Whatever the blocks, the window, the ranks and the epoch: each index once over all ranks."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data import BlockShuffleSampler, SequenceSampler

LENGTHS = st.lists(st.integers(0, 40), max_size=30)


@settings(max_examples=300)
@given(lengths=LENGTHS, ranks=st.integers(1, 9), seed=st.integers(0, 2**31), epoch=st.integers(0, 5), data=st.data())
def test_ranks_cover_exactly_and_states_go_on_exactly(
    lengths: list[int], ranks: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    total = sum(lengths)
    window = data.draw(st.integers(1, 200))
    kinds = [
        lambda **more: BlockShuffleSampler(lengths, window, seed=seed, num_replicas=ranks, **more),
        lambda **more: SequenceSampler(lengths, seed=seed, num_replicas=ranks, **more),
    ]
    for made in kinds:
        samplers = [made(rank=rank) for rank in range(ranks)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        parts = [list(sampler) for sampler in samplers]
        assert sorted(itertools.chain(*parts)) == list(range(total))
        assert [len(sampler) for sampler in samplers] == [len(part) for part in parts]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        rank = data.draw(st.integers(0, ranks - 1))
        at = data.draw(st.integers(0, len(parts[rank])))
        resumed = made(rank=rank)
        resumed.load_state_dict({"epoch": epoch, "position": at})
        assert list(resumed) == parts[rank][at:]
        dropped = [list(made(rank=rank, drop_last=True)) for rank in range(ranks)]
        assert {len(part) for part in dropped} == {total // ranks}
        assert len(set(itertools.chain(*dropped))) == total // ranks * ranks
