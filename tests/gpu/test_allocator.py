"""The model of torch's caching allocator beside the allocator itself."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from penstock.gpu.allocator.alloc_conf import AllocatorSettings
from penstock.gpu.allocator.caching_allocator import CachingAllocator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def _an_empty_allocator() -> Iterator[None]:
    """Some libraries never give back what they took (cuDNN: its dropout state): then only a new process is empty."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_reserved() == 0, "run this file in a process of its own, or first"
    yield


def _train() -> None:
    model = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(torch.rand(64, 512, 512, device="cuda")).float().mean()
        loss.backward()
        del loss
        optimizer.step()


@pytest.mark.parametrize("seed", range(4))
def test_the_allocators_model_reserves_what_the_allocator_reserves(seed: int) -> None:
    chance = random.Random(seed)
    ours = CachingAllocator(AllocatorSettings())
    real: list[tuple[torch.Tensor, Any]] = []
    for _ in range(3000):
        if real and chance.random() < 0.5:
            tensor, block = real.pop(chance.randrange(len(real)))
            ours.free(block)
            del tensor
        else:
            size = int(2 ** chance.uniform(5, 27))
            real.append((torch.empty(size, dtype=torch.uint8, device="cuda"), ours.allocate(size)))
        assert torch.cuda.memory_allocated() == ours.allocated_bytes
    # Between equal blocks the device's addresses decide, and these are its own affair.
    assert torch.cuda.max_memory_reserved() == pytest.approx(ours.peak_reserved_bytes, rel=0.02)


def test_a_real_training_replayed_reserves_what_it_reserved() -> None:
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=1_000_000)
    try:
        _train()
        snapshot: Any = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    ours, held = CachingAllocator(), {}
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            held[event["addr"]] = ours.allocate(event["size"])
        elif event["action"] == "free_completed" and event["addr"] in held:
            ours.free(held.pop(event["addr"]))
    assert ours.peak_allocated_bytes == torch.cuda.max_memory_allocated()
    assert ours.peak_reserved_bytes == torch.cuda.max_memory_reserved()
