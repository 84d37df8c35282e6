"""The models of the cases: from transformers and torchvision, and a few in plain torch.

In:  nothing.
Out: functions that build a model, and functions that make a batch for it.
Runs in: children.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from penstock.gpu.examples import UNet


def _torchvision() -> Any:
    """torchvision. If it was built for CUDA and torch was not, its missing operators are defined first.

    transformers imports it too, so this runs before any model is built.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importlib.import_module("torchvision")
    except ImportError:
        return None


_vision = _torchvision()


def _text() -> Any:
    return importlib.import_module("transformers")


def t5() -> nn.Module:
    """T5-base."""
    text = _text()
    return text.T5ForConditionalGeneration(
        text.T5Config(
            d_model=768, d_ff=3072, num_layers=12, num_decoder_layers=12, num_heads=12, d_kv=64,
            decoder_start_token_id=0, use_cache=False,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    """GPT-2, the small one."""
    text = _text()
    return text.GPT2LMHeadModel(text.GPT2Config(use_cache=False))


def bert() -> nn.Module:
    """BERT-base, predicting masked words, with its default dropout."""
    text = _text()
    return text.BertForMaskedLM(text.BertConfig())


def llama() -> nn.Module:
    """A decoder like Llama, 16 layers, grouped queries."""
    text = _text()
    return text.LlamaForCausalLM(
        text.LlamaConfig(
            hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16,
            num_key_value_heads=4, vocab_size=32000, use_cache=False,
        )
    )  # fmt: skip


class Classified(nn.Module):
    """An image model with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(images), labels)


def resnet() -> nn.Module:
    """ResNet-50."""
    return Classified(_vision.models.resnet50())


def unet() -> nn.Module:
    """Four scales, 64 to 512 channels."""
    return UNet()


def vit() -> nn.Module:
    """ViT-B/16."""
    return Classified(_vision.models.vit_b_16())


class Lstm(nn.Module):
    """Two layers over a sequence, with dropout between them, predicting the next of 10,000 words."""

    def __init__(self, words: int = 10_000, width: int = 1024) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.out = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        guesses = self.out(self.layers(self.words(ids))[0])
        return F.cross_entropy(guesses[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Encoder(nn.Module):
    """torch's own transformer encoder, 12 layers of BERT's size."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.1, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def t5_batch(n: int, length: int = 512) -> dict[str, Any]:
    return {"input_ids": _words(n, length, 32_000), "labels": _words(n, length, 32_000)}


def text_batch(n: int, length: int = 512, words: int = 30_000) -> dict[str, Any]:
    ids = _words(n, length, words)
    return {"input_ids": ids, "labels": ids}


def masked_batch(n: int, length: int = 256) -> dict[str, Any]:
    return {**text_batch(n, length), "attention_mask": torch.ones(n, length, dtype=torch.long)}


def long_batch(n: int) -> dict[str, Any]:
    return text_batch(n, 1024)


def image_batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(n, 3, 224, 224), torch.randint(0, 1000, (n,))


def picture_batch(n: int) -> torch.Tensor:
    return torch.rand(n, 3, 256, 256)


def ids_batch(n: int) -> torch.Tensor:
    return _words(n, 256, 10_000)


def vectors_batch(n: int) -> torch.Tensor:
    return torch.rand(n, 256, 768)


def _words(n: int, length: int, words: int) -> torch.Tensor:
    return torch.randint(1, words, (n, length))
