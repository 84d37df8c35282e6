"""Models in plain torch for trying estimates: a transformer, a convolutional network, a U-Net.

In:  nothing.
Out: ``EXAMPLES``: name -> a model and its batches.
Runs in: command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from penstock.gpu.training import MakeBatch, MakeModel

_WORDS, _LENGTH = 32_000, 512


class Transformer(nn.Module):
    """A decoder-only transformer of GPT-2's size."""

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, width)
        self.places = nn.Embedding(_LENGTH, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, F.gelu, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.out = nn.Linear(width, _WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.out(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class _Residual(nn.Module):
    def __init__(self, given: int, out: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(given, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.past = nn.Identity() if given == out and stride == 1 else nn.Conv2d(given, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.inner(x) + self.past(x))


class Convolutions(nn.Module):
    """A network of 18 layers and 1,000 classes: residual blocks of two convolutions at four scales."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        self.inward = nn.Sequential(nn.Conv2d(3, widths[0], 7, 2, 3, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU())
        blocks: list[nn.Module] = []
        given = widths[0]
        for number, width in enumerate(widths):
            blocks += [_Residual(given, width, 1 if number == 0 else 2), _Residual(width, width, 1)]
            given = width
        self.blocks = nn.ModuleList(blocks)
        self.out = nn.Linear(given, 1000)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.inward(images), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.out(x.mean((2, 3))), labels)


class _Twice(nn.Sequential):
    def __init__(self, given: int, out: int) -> None:
        super().__init__(
            nn.Conv2d(given, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU(),
            nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """A U-Net with four scales and skip connections, which learns to reproduce its input."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        self.down = nn.ModuleList(_Twice(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.up = nn.ModuleList(_Twice(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.out = nn.Conv2d(widths[0], 3, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        kept, x = [], images
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for block, skip in zip(self.up, kept[-2::-1], strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2, mode="nearest"), skip], dim=1))
        return F.mse_loss(self.out(x), images)


@dataclass(frozen=True, kw_only=True)
class Example:
    """A model and the function that makes its batches."""

    what: str
    make_model: MakeModel
    make_batch: MakeBatch


def _text(n: int) -> torch.Tensor:
    return torch.randint(0, _WORDS, (n, _LENGTH))


def _labelled(n: int) -> tuple[Any, ...]:
    return torch.rand(n, 3, 224, 224), torch.randint(0, 1000, (n,))


def _pictures(n: int) -> torch.Tensor:
    return torch.rand(n, 3, 256, 256)


EXAMPLES = {
    "transformer": Example(
        what="a decoder of 12 layers, 768 wide, 512 tokens", make_model=Transformer, make_batch=_text
    ),
    "cnn": Example(
        what="residual convolutions, 18 layers, 224 × 224 pixels", make_model=Convolutions, make_batch=_labelled
    ),
    "unet": Example(what="a U-Net of four scales, 256 × 256 pixels", make_model=UNet, make_batch=_pictures),
}
