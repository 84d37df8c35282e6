"""Predicted GPU memory beside the GPU's: small trainings and single kernels."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock import gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def _a_fresh_allocator() -> Iterator[None]:
    def clear() -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    clear()
    yield
    clear()


def train(make_model: Callable[[], nn.Module], make_batch: Callable[[int], Any], n: int, precision: str) -> None:
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    model = make_model().to("cuda").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(3):
        batch = make_batch(n).to("cuda")
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", kind or torch.bfloat16, enabled=kind is not None):
            loss = model(batch)
        loss.backward()
        del loss
        optimizer.step()


class Mean(nn.Module):
    """Any model, with a loss."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(x).float().mean()


class Attention(nn.Module):
    """Attention alone, with or without dropout, a mask, causality."""

    def __init__(self, dropout: float = 0.0, masked: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.inward = nn.Linear(512, 1536)
        self.dropout, self.masked, self.causal = dropout, masked, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (8, 64)).transpose(1, 2) for part in self.inward(x).chunk(3, dim=-1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril() if self.masked else None
        out = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, self.causal)
        return out.transpose(1, 2).flatten(2)


class Guess(nn.Module):
    """Cross entropy over many words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20_000, 512)
        self.out = nn.Linear(512, 20_000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.out(self.words(ids)).flatten(0, 1), ids.flatten())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(512, 512, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0]


def vectors(n: int) -> torch.Tensor:
    return torch.rand(n, 512, 512)


def words(n: int) -> torch.Tensor:
    return torch.randint(0, 20_000, (n, 512))


def pictures(n: int) -> torch.Tensor:
    return torch.rand(n, 3, 128, 128)


def convolutions() -> nn.Module:
    parts: list[nn.Module] = []
    for given, out in [(3, 64), (64, 64), (64, 128), (128, 128)]:
        parts += [nn.Conv2d(given, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
    return Mean(*parts)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], int, float]] = {
    "linear": (lambda: Mean(*[nn.Linear(512, 512) for _ in range(6)]), vectors, 64, 0.02),
    "dropout": (lambda: Mean(*[nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.1)) for _ in range(6)]), vectors, 64,
                0.02),
    "norms": (lambda: Mean(*[nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU()) for _ in range(6)]),
              vectors, 64, 0.02),
    "attention": (lambda: Mean(Attention(), Attention()), vectors, 64, 0.03),
    "attention with dropout": (lambda: Mean(Attention(0.1), Attention(0.1)), vectors, 64, 0.03),
    "causal attention": (lambda: Mean(Attention(causal=True)), vectors, 64, 0.03),
    "masked attention": (lambda: Mean(Attention(masked=True)), vectors, 64, 0.03),
    "encoder": (lambda: Mean(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)), vectors, 64, 0.03),
    "words": (Guess, words, 16, 0.02),
    "convolutions": (convolutions, pictures, 64, 0.03),
    "LSTM": (lambda: Mean(Recurrent()), vectors, 64, 0.08),
}  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_allocated_bytes_are_what_was_predicted(name: str, precision: str) -> None:
    make_model, make_batch, n, tolerance = CASES[name]
    estimate = gpu.estimate(make_model, make_batch, [n], precision=precision)[0]
    train(make_model, make_batch, n, precision)
    found = gpu.compare(estimate)
    assert abs(found.allocated_error) <= tolerance, str(found)


@pytest.mark.parametrize("name", ["linear", "dropout", "norms", "attention with dropout", "encoder", "words"])
def test_reserved_bytes_lie_in_the_range(name: str) -> None:
    make_model, make_batch, n, _ = CASES[name]
    estimate = gpu.estimate(make_model, make_batch, [n], precision="bf16")[0]
    train(make_model, make_batch, n, "bf16")
    low, high = estimate.reserved_range
    assert low <= torch.cuda.max_memory_reserved() <= high, str(gpu.compare(estimate))


def test_an_estimate_takes_nothing_of_the_gpu() -> None:
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    gpu.estimate(lambda: Mean(nn.Linear(512, 512)), vectors, [64, 128], precision="bf16")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
