"""Small models whose memory can be counted by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

KIB, MIB = 1 << 10, 1 << 20


class Chain(nn.Module):
    """Square layers, one after the other, a nonlinearity after each."""

    def __init__(self, width: int = 1024, layers: int = 4) -> None:
        super().__init__()
        parts = [nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(layers)]
        self.layers = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def vectors(n: int) -> torch.Tensor:
    """4 KiB each."""
    return torch.zeros(n, 1024)


class Attends(nn.Module):
    """One attention over a long sequence."""

    def __init__(self, length: int = 2048) -> None:
        super().__init__()
        self.inward = nn.Linear(256, 768)
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 64)).transpose(1, 2) for part in self.inward(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True).sum()


def sequences(n: int) -> torch.Tensor:
    return torch.zeros(n, 2048, 256)


class Pairs(nn.Module):
    """Every sample against every other, as contrastive losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(1024, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        return (x @ x.t()).logsumexp(dim=1).mean()
